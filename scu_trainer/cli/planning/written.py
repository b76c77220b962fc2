"""Writes a plan as a configuration file for ``--config``, with a reason next to each value."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scu_trainer.cli.names.written import yaml_entry
from scu_trainer.cli.parsing import require_new_file
from scu_trainer.cli.planning.screen import in_words
from scu_trainer.errors import SettingsError, StorageError
from scu_trainer.run_files import format_bytes

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


def check_output_path(path: Path) -> None:
    """Raise SettingsError if ``path`` exists, has no folder, or is not named like YAML."""
    require_new_file(path, "--output")
    if path.suffix not in (".yaml", ".yml"):
        raise SettingsError(f"--output {path}: a configuration with comments is YAML; give a name that ends in .yaml")


def write(path: Path, entries: Mapping[str, Any], report: Mapping[str, Any], precision: tuple[str, str]) -> None:
    """Write the configuration. ``entries``: what was typed for the job, by name. ``report``: the report of the plan,
    with settings that fit. ``precision``: (mixed_precision that the job gets on this machine, reason)."""
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
