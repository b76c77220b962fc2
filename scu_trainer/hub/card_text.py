"""The text of a model card, section by section. A section without figures in the run's files is left out or says so."""

from __future__ import annotations

import json
import re
from typing import Optional

from scu_trainer.figures import before_and_after, best_evaluation
from scu_trainer.hub import card_training
from scu_trainer.hub.facts import IMAGES, RunFacts
from scu_trainer.hub.local_paths import is_local, public_name
from scu_trainer.settings import EMBEDDED_DATASETS
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.settings.tasks import TEXT

TASKS = {
    TEXT: "causal language model",
    IMAGES: "image classifier",
    "word-generation": "language model over words (CADENCE, a GRU)",
    "sensor-classification": "classifier of sensor recordings (TRIDENT)",
}
SAMPLE_CHARACTERS = 600
TUNING = {"lora": "LoRA", "qlora": "QLoRA"}


def body(facts: RunFacts, name: str, license: str, base_id: Optional[str]) -> str:
    sections = [
        f"# {name.rstrip('/').rpartition('/')[2]}\n\n{_summary(facts, base_id)}",
        _usage(facts, name, base_id),
        _results(facts),
        _samples(facts),
        card_training.data(facts, dataset_name(facts)),
        card_training.training(facts),
        card_training.controllers(facts),
        card_training.machine(facts),
        card_training.again(facts),
        f"## Licence\n\n{_license(facts, license)}",
        _limits(facts),
    ]
    return "\n\n".join(section for section in sections if section)


def dataset_name(facts: RunFacts) -> str:
    """Return the dataset's name for publication; a path on this machine is shortened to its last part."""
    name = facts.settings.get("dataset") or facts.settings.get("image_dataset") or "not stated"
    return " + ".join(map(public_name, dataset_names(name)))


def held_out_name(facts: RunFacts) -> str:
    """Return the published name of the dataset that was scored."""
    own = facts.settings.get("eval_dataset")
    return public_name(own) if own else dataset_name(facts)


# -- sections ----------------------------------------------------------------------------------------------------------


def _summary(facts: RunFacts, base_id: Optional[str]) -> str:
    tuning, kind = facts.settings.get("tuning"), TASKS.get(facts.task, facts.task)
    if facts.merge:
        form = f"{kind}, its {TUNING.get(tuning, 'LoRA')} adapter merged into the weights. Trained with scu-trainer."
    elif facts.is_adapter:
        form = f"{TUNING.get(tuning, 'LoRA')} adapter ({kind}), trained with scu-trainer."
    else:
        form = f"{kind}, all weights trained with scu-trainer."
    lines = [form[0].upper() + form[1:], f"- base: {_base(facts, base_id)}"]
    if facts.step is not None:
        lines.append(f"- weights of step {facts.step}, a checkpoint of the run")
    if facts.merge:
        lines.append(
            f"- merged into {facts.merge['dtype']}: logits on {facts.merge['rows']:,} rows of "
            f"{facts.merge['checked_on']} differ from the adapter's by {facts.merge['difference']:.1e} of the largest, "
            f"and {facts.merge['tolerance']:g} is allowed"
        )
    return "\n".join([lines[0], "", *lines[1:]])


def _base(facts: RunFacts, base_id: Optional[str]) -> str:
    if base_id:
        return f"[{base_id}](https://huggingface.co/{base_id})"
    if facts.is_embedded_base:
        steps = facts.settings.get("embedded_base_steps")
        return (
            f"the embedded base of scu-trainer: a small Granite hybrid, trained for {steps} steps on Python's "
            "documentation on the machine that uses it, and not on the Hub"
        )
    if facts.base:
        return f"{public_name(facts.base)}, a folder that is not on the Hub"
    return f"none: {facts.settings.get('architecture', 'the model')} started from random weights"


def _usage(facts: RunFacts, name: str, base_id: Optional[str]) -> str:
    code = loading(facts, name)
    if code is None:
        return "## Use\n\nThis adapter needs a base with other classes; `scu-trainer merge` makes a model of both."
    notes = ["The base is not on the Hub, and is needed too."] if facts.is_adapter and not base_id else []
    if facts.is_adapter and facts.settings.get("tuning") == "qlora":
        bits = 8 if facts.settings.get("load_in_8bit") else 4
        notes.append(
            f"It was trained and measured over a base in {bits} bits, but this code loads the base in full precision: "
            f"give a `quantization_config` with `load_in_{bits}bit=True` for the model that was measured."
        )
    return "\n\n".join(["## Use", f"```python\n{code}\n```", *notes])


def _results(facts: RunFacts) -> str:
    metrics = facts.metrics
    if not metrics.get("held_out_documents"):
        reason = "nothing was held out" if metrics else "these weights were not scored"
        return f"## Results\n\nNot measured: {reason}."
    unit, item = metrics.get("unit", "token"), metrics.get("item", "document")
    rows = [f"| {' | '.join(row)} |" for row in before_and_after(metrics)]
    level = metrics["held_out_bpt_after"].get("confidence", 0.95)
    source = "a dataset used only for scoring" if facts.settings.get("eval_dataset") else "held out from training"
    lines = [
        "## Results",
        "",
        f"On {metrics['held_out_documents']:,} {item}s of {held_out_name(facts)}, {source}"
        f" ({metrics['held_out_tokens']:,} {unit}s), with {level:.0%} bootstrap intervals over {item}s:",
        "",
        "| | before | after | change |",
        "|---|---|---|---|",
        *rows,
    ]
    if facts.merge:
        lines += ["", "Measured on the adapter, before it was merged."]
    best = best_evaluation(metrics)
    if best is not None:
        lines += ["", f"Best evaluation during training: {best}."]
    return "\n".join(lines)


def _samples(facts: RunFacts) -> str:
    """Return the section with the answers after training that the run recorded; "" if there are none."""
    if not facts.samples:
        return ""
    parts = ["## Samples\n\nHeld-out prompts, greedy answers after training, and the answers in the data (reference):"]
    for sample in facts.samples:
        parts += [f"{title}:\n\n{_block(sample.get(title.lower(), ''))}" for title in ("Prompt", "Answer", "Reference")]
    return "\n\n".join(parts)


def _block(text: str) -> str:
    """Return ``text`` as a code block, which shows any Markdown in it unchanged."""
    if not text.strip():
        return "(blank)"
    text = text if len(text) <= SAMPLE_CHARACTERS else f"... {text[-SAMPLE_CHARACTERS:]}"
    fence = "`" * (1 + max([2, *(len(run) for run in re.findall("`+", text))]))
    return f"{fence}text\n{text}\n{fence}"


def _license(facts: RunFacts, license: str) -> str:
    if license == "not stated" and not facts.base:
        return "Not stated: none was given."
    if license == "not stated":
        return "Not stated: none was given, and the base model's files state none. Ask its publisher."
    return license


def _limits(facts: RunFacts) -> str:
    names = dataset_names(facts.settings.get("dataset"))
    dataset = "the same dataset" if not facts.settings.get("eval_dataset") else "the held-out dataset"
    lines = [
        f"- Measured only on {dataset} ({held_out_name(facts)}): what the model does on other data was not measured."
        if facts.metrics.get("held_out_documents")
        else "- Its quality was not measured.",
        "- No benchmark was run, and its output was not checked for errors, bias or harm.",
        f"- One run with seed {facts.description['seed']}: how much another seed changes was not measured."
        if "seed" in facts.description
        else "- Nothing is known about its training: there are no run files with it.",
    ]
    if names and {*names} <= {*EMBEDDED_DATASETS}:
        lines.append("- A small model on a small dataset that comes with Python: an example, not a tool.")
    if any(is_local(name, facts.weights) for name in dataset_names(facts.settings.get("dataset"))):
        lines.append("- The data are on the machine that trained it, and are not published here.")
    return "\n".join(["## Limits", "", *lines])


# -- code that runs when it is copied ----------------------------------------------------------------------------------


def loading(facts: RunFacts, name: str) -> Optional[str]:
    """Return lines of Python that load the model ``name``; the first two load the weights. None for an adapter of other
    tasks than text, because its base was changed before training."""
    if facts.is_adapter and facts.task != TEXT:
        return None
    name = json.dumps(name, ensure_ascii=False)  # the escapes of JSON are valid in Python too
    lines = _weights(facts, name)
    if facts.task in (TEXT, "word-generation"):
        lines += ["", "from transformers import AutoTokenizer", f"tokenizer = AutoTokenizer.from_pretrained({name})"]
    elif facts.task == IMAGES:
        lines += ["", "from transformers import AutoImageProcessor"]
        lines += [f"processor = AutoImageProcessor.from_pretrained({name})"]
    return "\n".join(lines)


def _weights(facts: RunFacts, name: str) -> list[str]:
    if facts.is_adapter:
        kind = "AutoPeftModelForCausalLM"
        return [f"from peft import {kind}", f"model = {kind}.from_pretrained({name})"]
    kind = _auto_class(facts)
    code = ", trust_remote_code=True" if facts.config.get("auto_map") else ""
    return [f"from transformers import {kind}", f"model = {kind}.from_pretrained({name}{code})"]


def _auto_class(facts: RunFacts) -> str:
    """Return the Auto class that a model with its own code names, or else that of its task."""
    own = [name for name in facts.config.get("auto_map", {}) if name.startswith("AutoModel")]
    if own:
        return "AutoModelForCausalLM" if "AutoModelForCausalLM" in own else own[0]
    return "AutoModelForImageClassification" if facts.task == IMAGES else "AutoModelForCausalLM"
