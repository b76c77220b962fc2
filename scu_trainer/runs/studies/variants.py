"""Train variants, each in fresh processes, and read from their run directories what they cost and which loops acted."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.run_files import read_object, read_rows
from scu_trainer.runs.launch import ROOT, command, environment
from scu_trainer.runs.studies.variant_table import BY_NAME, LOOPS, Variant

LONGEST_S = 900.0
PACKAGES = {"qlora": "bitsandbytes", "deepspeed": "deepspeed"}
LAST_WORDS = 1500
"""Number of characters of the output of a failed process that are shown."""

SWITCHES = {
    "regularization": ("--scu", "false"),
    "memory": ("--memory_control", "false"),
    "curriculum": ("--curriculum", "none"),
}


@dataclass(frozen=True)
class VariantPlan:
    """What every variant trains: ``model`` for a few steps with all loops on, or the job of the file ``config``."""

    model: Optional[Path]
    scratch: Path
    steps: int = 8
    rows_per_step: int = 4
    config: Optional[Path] = None
    extra: tuple[str, ...] = ()

    def flags(self, processes: int) -> list[str]:
        short = {"max_steps": self.steps, "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
        values = short if self.config is not None else {**self._small_job(processes), **short}
        words = [] if self.config is None else ["--config", str(self.config.absolute())]
        return words + [word for name, value in values.items() for word in (f"--{name}", str(value))] + [*self.extra]

    def _small_job(self, processes: int) -> dict[str, Any]:
        return {
            "model_name_or_path": self.model,
            "dataset": "python_docs",
            "dataset_size": 40,
            "validation_split_percentage": 40,
            "max_eval_documents": 4,
            "block_size": 128,
            "packing": "false",
            "per_device_train_batch_size": max(1, self.rows_per_step // processes),
            "learning_rate": 2e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "seed": 0,
            # A target so low that lambda acts within these few steps, and a cap so low that every window is split.
            "scu_target_s": 0.001,
            "token_cap": 256 // processes,
            "curriculum": "token_budget",
            "mixed_precision": "no",
        }


@dataclass(frozen=True)
class VariantResult:
    """The result of one variant. ``status``: ran, failed (``message``: the end of its output), or missing (``message``:
    what the machine lacks).

    ``peak_bytes``: the peak of the first process during a step, minus what it held before the model was loaded.
    ``total_bytes``: the whole peak. ``bpt``: held-out bits per token before and after; None if nothing was held out.
    ``loops``: acts, idle, off, or refused. ``parts``: the predicted peak by part, in bytes; {} without a prediction.
    """

    name: str
    status: str
    message: str = ""
    peak_bytes: Optional[int] = None
    total_bytes: Optional[int] = None
    step_s: Optional[float] = None
    bpt: Optional[tuple[float, float]] = None
    loops: dict[str, str] = field(default_factory=dict)
    device: str = ""
    parts: dict[str, int] = field(default_factory=dict)


def missing(variant: Variant, has_gpu: bool) -> Optional[str]:
    """Return what this machine lacks for ``variant`` and what to do, in one line; None if it can run."""
    if "gpu" in variant.needs and not has_gpu:
        return f"needs a GPU; there it checks: {variant.gpu_check}"
    for extra, package in PACKAGES.items():
        if extra in variant.needs and importlib.util.find_spec(package) is None:
            return f"needs {package}: pip install 'scu-trainer[{extra}]'"
    return None


# -- one variant -------------------------------------------------------------------------------------------------------


def run(variant: Variant, plan: VariantPlan, has_gpu: bool) -> VariantResult:
    """Train ``variant`` with all loops that it supports, then check that it refuses the others."""
    lacks = missing(variant, has_gpu)
    if lacks is not None:
        return VariantResult(variant.name, "missing", lacks)
    off = [word for loop in variant.refused for word in SWITCHES[loop]]
    outcome = _train_and_measure(variant, plan, off, has_gpu)
    if outcome.status != "ran":
        return outcome
    for loop, words in variant.refused.items():
        allowed = [word for other in variant.refused if other != loop for word in SWITCHES[other]]
        outcome = _check_refused(variant, plan, loop, words, allowed, has_gpu, outcome)
    return outcome


def _train_and_measure(variant: Variant, plan: VariantPlan, off: Sequence[str], has_gpu: bool) -> VariantResult:
    folder = plan.scratch / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    code, words = _run_command(variant, plan, [*off, "--output_dir", str(folder)], has_gpu)
    if code != 0:
        return VariantResult(variant.name, "failed", f"exit code {code}: {words}")
    metrics = read_object(folder / "scu_metrics.json")
    costs = metrics["costs"]
    highest, before = costs["peak_bytes"], costs["before_model_bytes"]
    return VariantResult(
        variant.name,
        "ran",
        peak_bytes=None if highest is None or before is None else highest - before,
        total_bytes=highest,
        step_s=costs["seconds_per_step"],
        bpt=_bits_before_and_after(metrics),
        loops=loops_of(folder, metrics),
        device=costs["device"],
        parts=(metrics["memory_estimate"] or {}).get("predicted_parts") or {},
    )


def _bits_before_and_after(metrics: dict[str, Any]) -> Optional[tuple[float, float]]:
    if not metrics["held_out_documents"]:
        return None
    return tuple(metrics[f"held_out_bpt_{when}"]["value"] for when in ("before", "after"))


def _check_refused(
    variant, plan: VariantPlan, loop: str, words: str, allowed, has_gpu: bool, outcome: VariantResult
) -> VariantResult:
    folder = plan.scratch / f"{variant.name}-refused"
    code, said = _run_command(variant, plan, [*allowed, "--output_dir", str(folder)], has_gpu)
    if code == 0 or words not in " ".join(said.split()):
        return replace(
            outcome, status="failed", message=f"{loop} should be refused ({words!r}), exit code {code}: {said}"
        )
    return replace(outcome, loops={**outcome.loops, loop: "refused"})


def _run_command(variant: Variant, plan: VariantPlan, flags: Sequence[str], has_gpu: bool) -> tuple[int, str]:
    """Run the command to its end. Returns its exit code and the end of its output."""
    # Our files are found from any directory; paths that the user typed are relative to the current one.
    places = [str(ROOT / word) if word.startswith("ds_configs/") else word for word in variant.flags]
    own = [word.replace("{scratch}", str(plan.scratch)) for word in places]
    flags = [*plan.flags(variant.processes), *own, *flags, *([] if has_gpu else ["--use_cpu", "true"])]
    words = command(variant.launcher, flags, variant.processes, has_gpu)
    log = plan.scratch / f"{variant.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            env=environment(variant.processes, has_gpu),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            pass  # the exit code of the process, which is killed now, reports it
        finally:
            _kill_tree(process)
    return process.returncode, log.read_text(errors="replace")[-LAST_WORDS:].strip()


def _kill_tree(process: subprocess.Popen) -> None:
    """Kill the process and all that it started, also after Ctrl-C: ranks must not outlive the process that waits for
    them. Killing the session would not suffice, because torchrun starts each rank in its own."""
    import psutil

    try:
        launcher = psutil.Process(process.pid)
        tree = [*launcher.children(recursive=True), launcher]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


# -- reading -----------------------------------------------------------------------------------------------------------


def loops_of(folder: Path, metrics: dict[str, Any]) -> dict[str, str]:
    """Return which loops acted in a run: whether they decayed weights, split a window, or planned an epoch."""
    memory = metrics.get("memory")
    evidence = {
        "regularization": _any_row(folder / "scu_history.json", lambda row: row["lambda"] and row["s"]),
        "memory": None if memory is None else memory["chunks"] > memory["windows"],
        "curriculum": _any_row(folder / "curriculum.json", lambda row: row["curriculum"] != "none" and row["seen"]),
    }
    return {loop: {True: "acts", False: "idle", None: "off"}[evidence[loop]] for loop in LOOPS}


def _any_row(history: Path, in_row: Callable[[dict[str, Any]], Any]) -> Optional[bool]:
    return any(map(in_row, read_rows(history))) if history.is_file() else None


# -- judging -----------------------------------------------------------------------------------------------------------


def find_violations(outcomes: Sequence[VariantResult], loops_are_on: bool = True) -> list[str]:
    """Return what went wrong: a variant failed, a loss did not fall, a peak is above its bound, or a loop was idle.

    ``loops_are_on``: whether the job turned all loops on, which the user's own job need not do.
    """
    by_name = {outcome.name: outcome for outcome in outcomes}
    found = []
    for outcome in outcomes:
        if outcome.status == "failed":
            found.append(f"{outcome.name} failed: {outcome.message}")
        if outcome.status != "ran":
            continue
        if outcome.bpt is not None and not outcome.bpt[1] < outcome.bpt[0]:
            found.append("{}: held-out bits per token went from {:.3f} to {:.3f}".format(outcome.name, *outcome.bpt))
        loops = outcome.loops.items() if loops_are_on else ()
        found += [f"{outcome.name}: {loop} is {state}" for loop, state in loops if state not in ("acts", "refused")]
        found += _exceeded(outcome, by_name)
    return found


def _exceeded(outcome: VariantResult, by_name: dict[str, VariantResult]) -> Iterator[str]:
    variant = BY_NAME[outcome.name]
    if variant.peak_at_most is None or (variant.measured_on == "gpu" and outcome.device.startswith("cpu")):
        return
    other, share = by_name.get(variant.peak_at_most[0]), variant.peak_at_most[1]
    if other is None or not other.peak_bytes or outcome.peak_bytes is None:
        return
    found = outcome.peak_bytes / other.peak_bytes
    if found > share:
        yield f"{outcome.name}: peak memory is {found:.2f} of {other.name}'s, it should be at most {share:g}"
