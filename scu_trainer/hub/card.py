"""The model card of a run, README.md next to its weights. It states only what the files of the run say.

``card_of`` renders it, and ``write_card`` writes it to a run directory, unless there is a card that was edited.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import StorageError
from scu_trainer.figures import before_and_after, best_evaluation
from scu_trainer.hub import card_training
from scu_trainer.hub.facts import IMAGES, RunFacts, read_facts
from scu_trainer.hub.local_paths import is_local, public_name
from scu_trainer.run_files import write_text
from scu_trainer.secrets import redact
from scu_trainer.settings import EMBEDDED_DATASETS
from scu_trainer.settings.mixture import dataset_names
from scu_trainer.settings.tasks import TEXT

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

CARD = "README.md"
MARK = "<!-- written by scu-trainer {digest}: a card that was edited is kept -->"
_MARK = re.compile(r"<!-- written by scu-trainer (\w+): .* -->\n?")
_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_APPENDED = re.compile(r"\n### Framework versions\n.*", re.DOTALL)
"""The section that peft appends to any existing card when it saves."""

TASKS = {
    TEXT: "causal language model",
    IMAGES: "image classifier",
    "word-generation": "language model over words (CADENCE, a GRU)",
    "sensor-classification": "classifier of sensor recordings (TRIDENT)",
}
SAMPLE_CHARACTERS = 600
TUNING = {"lora": "LoRA", "qlora": "QLoRA"}


def card_of(facts: RunFacts, name: str, license: Optional[str] = None, base_id: Optional[str] = None) -> str:
    """Return the whole README.md. ``name`` is the Hub id or folder that the code in it loads, ``license`` the one that
    was given or found, and ``base_id`` the id of the base on the Hub, for files that name a local folder. Raises
    StorageError if a file of the run was damaged."""
    try:
        body = redact(body_text(facts, name, license or "not stated", base_id or facts.base_id))
        header = _header(facts, name, license, base_id or facts.base_id).to_yaml()
        return f"---\n{redact(header)}\n---\n\n{body}\n\n{MARK.format(digest=_digest(body))}\n"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"training_config.json, scu_metrics.json or samples.json in {facts.run or facts.weights}, or a merge.json "
            f"made from it, holds what no run writes ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


def write_card(run: Path) -> bool:
    """Write the README.md of a finished run; False if an edited one is kept. Raises StorageError."""
    path = run / CARD
    if not is_replaceable_card(path):
        return False
    facts = read_facts(run, run)
    write_text(path, card_of(facts, str(run), base_license(facts.base)))
    return True


def is_replaceable_card(path: Path) -> bool:
    """Return whether a card may be replaced: it is unchanged since we wrote it, an empty template, or missing."""
    if not path.is_file():
        return True
    body = _APPENDED.sub("", _HEADER.sub("", path.read_text(errors="replace")))
    mark = _MARK.search(body)
    if mark is None:
        return _is_empty_template(body)
    return mark[1] == _digest(_MARK.sub("", body))


def _digest(body: str) -> str:
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]


def _is_empty_template(body: str) -> bool:
    """Return whether ``body`` is the unfilled template of huggingface_hub, which peft saves with every adapter."""
    from huggingface_hub import ModelCard, ModelCardData

    return body.split() == ModelCard.from_template(ModelCardData()).text.split()


# -- the header that the Hub reads -------------------------------------------------------------------------------------


def _header(facts: RunFacts, name: str, license: Optional[str], base_id: Optional[str]) -> ModelCardData:
    from huggingface_hub import ModelCardData

    results = [] if facts.merge else _eval_results(facts)  # the results of a merged model were measured on its adapter
    fields: dict[str, Any] = {
        "base_model": base_id,
        "base_model_relation": None if base_id is None else ("adapter" if facts.is_adapter else "finetune"),
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": facts.task if facts.task in (TEXT, IMAGES) else None,
        "license": license,
        "tags": _tags(facts),
        "datasets": _datasets(facts),
    }
    if results:
        fields |= {"model_name": name.rpartition("/")[2], "eval_results": results}
    return ModelCardData(**{key: value for key, value in fields.items() if value is not None})


def _tags(facts: RunFacts) -> list[str]:
    tuning = facts.settings.get("tuning")
    return ["scu-trainer", *([tuning] if tuning in ("lora", "qlora") else []), *(["merged"] if facts.merge else [])]


def _datasets(facts: RunFacts) -> Optional[list[str]]:
    """Return the dataset ids on the Hub; embedded datasets and local files cannot be linked."""
    names = dataset_names(facts.settings.get("dataset"))
    return [name for name in names if "/" in name and not is_local(name, facts.weights)] or None


def _eval_results(facts: RunFacts) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    found = []
    for key, kind, what in (
        ("held_out_bpt_after", "bits_per_token", f"bits per {facts.metrics.get('unit', 'token')}, held out"),
        ("held_out_accuracy_after", "accuracy", "accuracy, held out"),
    ):
        measured = facts.metrics.get(key)
        if measured and measured["value"] is not None:
            found.append(
                EvalResult(
                    task_type=facts.task,
                    dataset_type=held_out_name(facts),
                    dataset_name=held_out_name(facts),
                    dataset_split=None if facts.settings.get("eval_dataset") else "held out by the run",
                    metric_type=kind,
                    metric_name=what,
                    metric_value=round(measured["value"], 4),
                )
            )
    return found


# -- licence -----------------------------------------------------------------------------------------------------------


def base_license(base: Optional[str]) -> Optional[str]:
    """Return the license in the card of ``base``, a folder or a Hub id that is in the cache; never uses the network.
    None if the card is missing, cannot be read, or states no license."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    if not base:
        return None
    local = Path(base).expanduser() / CARD
    try:
        found = local if local.is_file() else None if is_local(base) else try_to_load_from_cache(base, CARD)
        if not isinstance(found, (str, Path)):
            return None
        license = ModelCard.load(found, ignore_metadata_errors=True).data.license
    # A broken card or name of the base must not keep a finished run from getting its card.
    except (YAMLError, ValueError):
        return None
    return ", ".join(map(str, license)) if isinstance(license, list) else license


# -- the text ----------------------------------------------------------------------------------------------------------


def body_text(facts: RunFacts, name: str, license: str, base_id: Optional[str]) -> str:
    """Return the sections. Those without figures in the files of the run are left out or say so."""
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
