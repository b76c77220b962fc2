"""The sections of a model card on how the model was made: data, training, controllers, machine."""

from __future__ import annotations

from typing import Any

from scu_trainer.hub.facts import RunFacts
from scu_trainer.run_files import format_bytes

HYPERPARAMETERS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "block_size",
    "mixed_precision",
    "seed",
    "data_seed",
)
ADAPTER = ("lora_r", "lora_alpha", "lora_dropout")


def data(facts: RunFacts, name: str) -> str:
    statistics = facts.description.get("data")
    if not statistics:
        return ""
    lines = ["## Data", "", f"- dataset: {name}", *_counts(statistics)]
    lines += [
        f"- source {source['name']}: {source['row_share']:.1%} of the training rows, "
        f"{source['token_share']:.1%} of the learned tokens"
        for source in (() if _is_uncounted(statistics) else statistics.get("sources") or ())
    ]
    dropped = statistics.get("rows_dropped") or statistics.get("dropped") or {}
    lines += [f"- left out: {count:,} ({reason})" for reason, count in sorted(dropped.items())]
    if not (dropped or _is_uncounted(statistics)):
        lines.append("- left out: none")
    if statistics.get("heldout_duplicates"):
        lines.append(f"- held out, but also word for word in the training data: {statistics['heldout_duplicates']:,}")
    return "\n".join([*lines, f"- fingerprint: {statistics.get('fingerprint')}"])


def _is_uncounted(statistics: dict[str, Any]) -> bool:
    """Return whether a stream has no counts, because only the loader's workers counted, or training has not ended."""
    return bool(statistics.get("streaming")) and not statistics["blocks"]


def _counts(statistics: dict[str, Any]) -> list[str]:
    if _is_uncounted(statistics):
        return [f"- documents: a stream, whose rows were not counted; {statistics['eval_documents']:,} held out"]
    if "rows_read" in statistics:
        stream_note = ["- a stream: the counts below are of its last pass, as far as it was read"]
        return [
            *(stream_note if statistics.get("streaming") else ()),
            f"- documents: {statistics['rows_read']:,} read, {statistics['documents']:,} for training, "
            f"{statistics['eval_documents']:,} held out",
            f"- training: {statistics['train_tokens']:,} tokens in {statistics['blocks']:,} rows, of which "
            f"{statistics['supervised_tokens']:,} are learned",
        ]
    counts = f"{statistics['read']:,} read, {statistics['train']:,} for training, {statistics['eval']:,} held out"
    return [f"- {statistics.get('item', 'sample')}s: {counts}"]


def training(facts: RunFacts) -> str:
    settings = facts.settings
    if not settings:
        return ""
    names = [*HYPERPARAMETERS, *(ADAPTER if facts.adapter else ())]
    rows = [f"| {name} | {settings[name]} |" for name in names if settings.get(name) is not None]
    steps = facts.metrics.get("steps")
    note = [] if steps is None else [_pace(facts.metrics, steps)]
    return "\n".join(["## Training", "", *note, *([""] if note else []), "| setting | value |", "|---|---|", *rows])


def _pace(metrics: dict[str, Any], steps: int) -> str:
    """Return a sentence on the number and duration of steps; for a resumed run, only its last start was timed."""
    timed = metrics.get("steps_of_this_start", steps)
    if timed == steps:
        return f"{steps:,} optimizer steps in {metrics['train_s']:,.0f} s."
    return f"{steps:,} optimizer steps; {timed:,} of them, since the last resume, took {metrics['train_s']:,.0f} s."


def controllers(facts: RunFacts) -> str:
    lines = _regularization(facts)
    for part, part_lines in (("memory", _memory), ("curriculum", _curriculum), ("bad_numbers", _nonfinite)):
        lines += part_lines(facts.metrics[part]) if facts.metrics.get(part) else []
    return "\n".join(["## Controllers", "", *lines]) if lines else ""


def _regularization(facts: RunFacts) -> list[str]:
    found = facts.metrics.get("regularization")
    if not found:
        return ["- regularization: off"] if facts.metrics else []
    target, end = found.get("target_s"), found.get("final_s")
    against = f"S {end:.4f} at the end" if end is not None else "S was not measured"
    if not found.get("steers", True):
        return _measured(found, against)
    against += f" against a target of {target:.4g}" if target is not None else ""
    law = f"law {found['law']}, sigma {facts.control.get('sigma')}"
    lines = [f"- regularization ({law}): {against}, {found['verdict']}"]
    if found.get("settling_step") is not None:
        overshoot = found.get("overshoot")
        over = "" if overshoot is None else f", overshoot {max(0.0, overshoot):.1%}"
        lines.append(f"- tracking: settled at step {found['settling_step']}, bias {found['bias']:+.1%}{over}")
    if found.get("final_lambda") is not None:
        lines.append(f"- lambda at the end: {found['final_lambda']:.4g}")
    if found.get("overhead_fraction") is not None:
        lines.append(f"- cost of this loop: {found['overhead_fraction']:.2%} of the training time")
    return lines


def _measured(found: dict[str, Any], against: str) -> list[str]:
    cost = found.get("overhead_fraction")
    note = f"{against}, {found['verdict']}" if found.get("final_s") is not None else "S was not measured"
    return [
        f"- regularization: none; {note}",
        *([] if cost is None else [f"- cost of measuring S: {cost:.2%} of the training time"]),
    ]


def _memory(found: dict[str, Any]) -> list[str]:
    return [
        f"- memory: {found['chunks']:,} micro-batches in {found['windows']:,} steps, {found['changes']:,} changes of "
        f"their size, recovered from running out of memory {found['out_of_memory']:,} times"
    ]


def _curriculum(found: dict[str, Any]) -> list[str]:
    return [
        f"- curriculum: {found['curriculum']}; of {found['samples']:,} rows {found['never_seen']:,} never seen, "
        f"{found['quarantined']:,} quarantined, {found['suspects']:,} suspect; {found['rows']:,} seen in all"
    ]


def _nonfinite(found: dict[str, Any]) -> list[str]:
    spikes = (found.get("spikes") or {}).get("skipped_steps", 0)
    lines = [f"- steps skipped because the loss was not finite: {found['skipped_steps'] - spikes:,}"]
    return [*lines, f"- steps undone because the loss spiked: {spikes:,}"] if spikes else lines


def machine(facts: RunFacts) -> str:
    costs, versions = facts.metrics.get("costs", {}), facts.description.get("versions", {})
    lines = []
    if costs:
        count = facts.description.get("world_size", 1)
        lines.append(f"- device: {costs.get('device')}, {count} process{'es' if count > 1 else ''}")
    lines += _hardware(facts.description.get("hardware") or {})
    if costs.get("seconds_per_step") is not None:
        lines.append(f"- {costs['seconds_per_step']:.3f} s per optimizer step")
    if costs.get("peak_bytes"):
        lines.append(f"- peak memory of the process: {format_bytes(costs['peak_bytes'])}")
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines += [f"- {known}"] if known else []
    if facts.description.get("git_commit"):
        lines.append(f"- commit {facts.description['git_commit']}")
    return "\n".join(["## Hardware and versions", "", *lines]) if lines else ""


def _hardware(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    gpus = [f"{gpu['name']} ({format_bytes(gpu['total_bytes'])})" for gpu in found.get("gpus", [])]
    return [
        f"- processor: {found['cpu']}, {found['cores']:g} cores, {format_bytes(found['ram_bytes'])} of main memory",
        f"- GPUs: {', '.join(gpus) or 'none'}",
    ]


def again(facts: RunFacts) -> str:
    if not facts.settings or facts.step is not None:
        return ""
    return (
        "## Train it again\n\n```\nscu-trainer train --config training_config.json --output_dir runs/again\n```\n\n"
        "with the training_config.json that is next to this card. A name that starts with `[local]/` was a path on "
        "the machine that trained it; put your own there."
    )
