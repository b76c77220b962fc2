"""Writes the table of docs/optimizers.md from the code that acts: python docs/write_optimizers.py"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Optional

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from scu_trainer.hardware.optimizer_bytes import FLOAT32_BYTES, optimizer_memory_of, uncounted_state
from scu_trainer.hardware.optimizers import OPTIMIZERS, OptimizerNeeds
from scu_trainer.train.job.optimizer_checks import NOT_ACCEPTED, argument_names_of
from scu_trainer.train.step.recovery.optimizer_state import FROM_THE_FIRST_GRADIENT, ONE_BY_ONE

PAGE = Path(__file__).parent / "optimizers.md"
sys.path.insert(0, str(PAGE.parent))
from write_tables import markdown, written  # noqa: E402 - a script beside this one

HEADS = ("`optim`", "runs on", "package", "state", "out of memory in its step", "state made ahead", "`optim_args`")
MUON_STEP = "scu_trainer.train.step.muon"


def table() -> str:
    names = [one.value for one in OptimizerNames]
    rows = [_row(name, OPTIMIZERS.get(name, OptimizerNeeds()), _step_module(name), _options(name)) for name in names]
    rows.append(_row("muon", OptimizerNeeds(), MUON_STEP, "")[1:])
    rows[-1] = ("`use_muon: true`", *rows[-1])
    return markdown(HEADS, rows)


def _row(name: str, needs: OptimizerNeeds, module: Optional[str], options: str) -> tuple[str, ...]:
    devices = "any" if needs.devices is None else ", ".join(sorted(needs.devices))
    packages = ", ".join(needs.packages) or "-"
    recovery, ahead = _guarded(name, needs, module)
    return f"`{name}`", devices, packages, _state(name), recovery, ahead, options or "-"


def _options(name: str) -> str:
    return ", ".join(f"`{option}`" for option in argument_names_of(name) if option not in NOT_ACCEPTED)


def _state(name: str) -> str:
    """Bytes per float32 weight."""
    if "paged" in name:
        return "moves"
    needs = optimizer_memory_of(name)
    if uncounted_state(name) or "lomo" in name:
        return "by its rank" if "galore" in name or "apollo" in name else "not known"
    count = needs.copies * FLOAT32_BYTES + needs.bytes_per_weight
    if "momentum" in argument_names_of(name):
        return f"{count:g} ({count + FLOAT32_BYTES:g} with momentum)"
    return f"{count:g} ({2 * count:g} outside of matrices)" if name == "muon" else f"{count:g}"


def _guarded(name: str, needs: OptimizerNeeds, module: Optional[str]) -> tuple[str, str]:
    if needs.in_backward:
        return "memory control is refused: it updates in backward", "no"
    if module is None:
        return "not tried here", "not tried here"
    if name == "adamw_torch_fused":
        return "allocates nothing", "yes"
    if module in FROM_THE_FIRST_GRADIENT or name == "sgd":
        return "nothing lost", "from the first gradient"
    if module not in ONE_BY_ONE:
        return "ends the run", "no"
    was_run = needs.devices is None or "cpu" in needs.devices
    return ("nothing lost", "yes") if was_run else ("nothing lost, not tried on a GPU yet", "yes")


def _step_module(name: str) -> Optional[str]:
    """Where its step() is; None if its package is not here."""
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(folder, use_cpu=True, optim=name, optim_target_modules="all-linear")
        try:
            made, _ = Trainer.get_optimizer_cls_and_kwargs(training, nn.Sequential(nn.Linear(2, 2)))
        except (ImportError, ValueError, RuntimeError):
            return None
    return made.step.__module__


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), {"optimizers": table()}))


if __name__ == "__main__":
    main()
