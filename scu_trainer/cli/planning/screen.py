"""Output of a plan: as JSON, as text of 80 columns, and as a configuration file."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scu_trainer.cli.main import figures_table, plain_console
from scu_trainer.cli.names.translation import without
from scu_trainer.cli.names.written import yaml_entry
from scu_trainer.cli.parsing import require_new_file
from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.hardware.recommend import CHANGES
from scu_trainer.run_files import format_bytes
from scu_trainer.settings.base import as_typed

if TYPE_CHECKING:
    from rich.table import Table

    from scu_trainer.train.memory_estimate.plan import Planned
    from scu_trainer.train.memory_estimate.shapes import Step

COLUMNS = 80

PART_NAMES = {
    "regularization": "start of the weights",
    "averages": "averages of weights",
    "exchange": "between processes",
    "optimizer": "optimizer's state",
    "overhead": "lost to the allocator",
    "libraries": "libraries",
}

REASONS = {
    "tuning": "only adapters have gradients and optimizer states",
    "load_in_8bit": "frozen weights in 8 bits",
    "dtype": "frozen weights in half precision take half the memory",
    "mixed_precision": "the device computes in half precision, and activations take half the memory",
    "checkpoint_every_layer": "activations are computed again instead of kept",
    "optim": "its states take about a byte per weight",
    "block_size": "shorter rows take less memory, and have less context",
    "deepspeed": "the optimizer's states are kept in main memory",
    "token_cap": "rows go through the model in parts of at most this many tokens",
    "memory_limit_gb": "what --limit allows; on a CPU plus what the process holds without a model",
    "dataloader_num_workers": "rows are prepared for each batch while the GPU trains",
}
"""Why a setting is recommended, for the comment next to it."""


def as_dict(planned: Planned, asked: Planned, device: str) -> dict[str, Any]:
    """Return a choice as JSON values. ``relative_time``: the time of a step relative to that of the requested job."""
    return {
        "settings": planned.choice.settings(asked.choice),
        "fits": planned.fits,
        "peak_bytes": planned.estimate.peak_bytes,
        **micro_batch(planned.step),
        "relative_time": round(planned.choice.time(device) / asked.choice.time(device), 2),
        "changes": CHANGES[planned.choice.change(asked.choice)],
    }


def micro_batch(step: Step) -> dict[str, int]:
    return {"rows_per_chunk": step.rows, "tokens_per_row": step.length, "chunks_per_step": step.micro_batches}


# -- text --------------------------------------------------------------------------------------------------------------


def screen(report: dict[str, Any], words: Sequence[str]) -> str:
    """Return the report as text. ``words``: the words that were typed for the job."""
    parts = [
        _headline(report),
        _parts_table(report["predicted"]),
        *(f"  not counted: {text}" for text in report["not_counted"]),
    ]
    return rendered(*parts, "", _choices_table(report), *_advice(report, words))


def rendered(*parts: Any) -> str:
    """Render ``parts`` with rich as text of 80 columns. A command stays on one line, so that it can be copied."""
    console = plain_console(file=io.StringIO(), width=COLUMNS, color_system=None)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str) and part.startswith("scu-trainer "))
    return console.file.getvalue().rstrip("\n")


def _headline(report: dict[str, Any]) -> str:
    asked = report["predicted"]
    shrunk = report["choices"][0]
    is_smaller = shrunk["rows_per_chunk"] < asked["rows_per_chunk"]
    verdict = "fits" if shrunk["fits"] and not is_smaller else "does not fit"
    smaller = (
        f" Micro-batches of {in_words(shrunk)} fit: {format_bytes(shrunk['peak_bytes'])}."
        if shrunk["fits"] and is_smaller
        else ""
    )
    return (
        f"As asked: {format_bytes(asked['peak_bytes'])} at the peak, in micro-batches of {in_words(asked)}. That "
        f"{verdict}.{smaller}\nLimit: {format_bytes(report['limit_bytes'])} of {report['machine']}, with "
        f"{report['margin']:.0%} kept free because predictions are not exact."
    )


def in_words(planned: dict[str, Any]) -> str:
    rows, length = planned["rows_per_chunk"], planned["tokens_per_row"]
    return f"{rows} x {length} tokens" if length > 1 else f"{rows} rows"


def _parts_table(asked: dict[str, Any]):
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    largest = max(asked["parts"].values())
    for part, size in asked["parts"].items():
        if size >= 0.001 * asked["peak_bytes"]:
            bar = ProgressBar(total=largest, completed=size, width=30)
            table.add_row(f"  {PART_NAMES.get(part, part)}", format_bytes(size), bar)
    return table


def _choices_table(report: dict[str, Any]) -> Table:
    titles = ("settings", "peak", "micro-batch", "fits", "time", "changes")
    rows = [
        [
            ", ".join(f"{name}: {as_typed(value)}" for name, value in choice["settings"].items()) or "as asked",
            format_bytes(choice["peak_bytes"]),
            in_words(choice).removesuffix(" tokens"),
            "yes" if choice["fits"] else "no",
            f"{choice['relative_time']:.2f} x",
            choice["changes"],
        ]
        for choice in report["choices"]
    ]
    return figures_table(titles, rows, left=["settings", "changes"], framed=False, overflow="fold")


def _advice(report: dict[str, Any], words: Sequence[str]) -> list[str]:
    settings = report["recommended"]
    if settings is None:
        return ["\nNone of these fits. Take a smaller model, device_map, or a machine with more memory."]
    if not settings:
        return ["\nNothing has to be changed.", *_micro_batch_note(report)]
    flags = [word for name, value in settings.items() for word in (f"--{name}", as_typed(value))]
    command = shlex.join(["scu-trainer", "train", *without(words, settings), *flags])
    introduction = "The fastest that fits and changes the result least:"
    if settings.keys() == {"memory_limit_gb"}:
        introduction = "Nothing has to be changed; this keeps the run within the limit:"
    return [f"\n{introduction}", command, *_micro_batch_note(report)]


def _micro_batch_note(report: dict[str, Any]) -> list[str]:
    best = next(choice for choice in report["choices"] if choice["fits"])
    if best["rows_per_chunk"] >= report["predicted"]["rows_per_chunk"]:
        return []
    return [f"Memory control makes micro-batches of about {in_words(best)}; the optimizer sees the same rows per step."]


# -- as a configuration file -------------------------------------------------------------------------------------------


def check_output_path(path: Path) -> None:
    """Raise SettingsError if ``path`` exists, has no folder, or is not named like YAML."""
    require_new_file(path, "--output")
    if path.suffix not in (".yaml", ".yml"):
        raise SettingsError(f"--output {path}: a configuration with comments is YAML; give a name that ends in .yaml")


def write(path: Path, entries: Mapping[str, Any], report: Mapping[str, Any], precision: tuple[str, str]) -> None:
    """Write a configuration file for ``--config``, with a reason next to each value. ``entries``: what was typed for
    the job, by name. ``report``: the report of the plan, with settings that fit. ``precision``: (mixed_precision that
    the job gets on this machine, reason)."""
    asked, changed = report["predicted"], report["recommended"]
    best = next(choice for choice in report["choices"] if choice["fits"])
    head = [
        f"For {report['machine']}; it may use {format_bytes(report['limit_bytes'])} of memory.",
        f"Read it with: {shlex.join(['scu-trainer', 'train', '--config', str(path)])}",
        f"As asked it would take {format_bytes(asked['peak_bytes'])} in micro-batches of {in_words(asked)}.",
    ]
    if best["peak_bytes"] != asked["peak_bytes"]:
        head.append(f"So it takes {format_bytes(best['peak_bytes'])} in micro-batches of {in_words(best)}.")
    kept = {name: value for name, value in entries.items() if name not in changed}
    lines = [f"# {line}" for line in head]
    lines += [yaml_entry(name, value, "as asked") for name, value in kept.items()]
    lines += [yaml_entry(name, value, REASONS.get(name, "fits")) for name, value in changed.items()]
    if not {"mixed_precision", "bf16", "fp16"} & {*kept, *changed}:
        lines.append(yaml_entry("mixed_precision", *precision))
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; give another --output") from error
