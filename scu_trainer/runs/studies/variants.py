"""Runs paths for real, each in fresh processes, and reads from their run directories what they cost and what acted."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.run_files import read_json, read_rows
from scu_trainer.runs.launch import ROOT, command, environment
from scu_trainer.runs.studies.variant_table import BY_NAME, LOOPS, Variant

LONGEST_S = 900.0
PACKAGES = {"qlora": "bitsandbytes", "deepspeed": "deepspeed"}
LAST_WORDS = 1500
"""Characters of a failed process's output that are shown."""

SWITCHES = {
    "regularization": ("--scu", "false"),
    "memory": ("--memory_control", "false"),
    "curriculum": ("--curriculum", "none"),
}


@dataclass(frozen=True)
class VariantPlan:
    """What every variant trains: ``model`` for few steps with all loops on, or the job of a file ``config``."""

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
            # So low that lambda acts within these few steps; a cap so low that every window is cut.
            "scu_target_s": 0.001,
            "token_cap": 256 // processes,
            "curriculum": "token_budget",
            "mixed_precision": "no",
        }


@dataclass(frozen=True)
class Outcome:
    """What became of one variant. ``status``: ran, failed (``message``: its last words), or missing (what to do).

    ``peak_bytes``: the most that the first process held during a step, above what it held before there was a model.
    ``total_bytes``: with that. ``bpt``: held-out bits per token before and after, None where nothing was held out.
    ``loops``: acts, idle, off, or refused. ``parts``: bytes of the predicted peak by what takes them, {} without one.
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
    """What this machine lacks for ``variant``, and what to do, in one line. None where it can run."""
    if "gpu" in variant.needs and not has_gpu:
        return f"needs a GPU; there it checks: {variant.gpu_check}"
    for extra, package in PACKAGES.items():
        if extra in variant.needs and importlib.util.find_spec(package) is None:
            return f"needs {package}: pip install 'scu-trainer[{extra}]'"
    return None


# -- one variant -------------------------------------------------------------------------------------------------------


def run(variant: Variant, plan: VariantPlan, has_gpu: bool) -> Outcome:
    """Train ``variant`` with all loops that it allows, then make sure that it refuses the others."""
    lacks = missing(variant, has_gpu)
    if lacks is not None:
        return Outcome(variant.name, "missing", lacks)
    off = [word for loop in variant.refused for word in SWITCHES[loop]]
    outcome = _measured(variant, plan, off, has_gpu)
    if outcome.status != "ran":
        return outcome
    for loop, words in variant.refused.items():
        allowed = [word for other in variant.refused if other != loop for word in SWITCHES[other]]
        outcome = _refuses(variant, plan, loop, words, allowed, has_gpu, outcome)
    return outcome


def _measured(variant: Variant, plan: VariantPlan, off: Sequence[str], has_gpu: bool) -> Outcome:
    folder = plan.scratch / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    code, words = _started(variant, plan, [*off, "--output_dir", str(folder)], has_gpu)
    if code != 0:
        return Outcome(variant.name, "failed", f"exit code {code}: {words}")
    metrics = read_json(folder / "scu_metrics.json")
    costs = metrics["costs"]
    highest, before = costs["peak_bytes"], costs["before_model_bytes"]
    return Outcome(
        variant.name,
        "ran",
        peak_bytes=None if highest is None or before is None else highest - before,
        total_bytes=highest,
        step_s=costs["seconds_per_step"],
        bpt=_held_out(metrics),
        loops=loops_of(folder, metrics),
        device=costs["device"],
        parts=(metrics["memory_estimate"] or {}).get("predicted_parts") or {},
    )


def _held_out(metrics: dict[str, Any]) -> Optional[tuple[float, float]]:
    if not metrics["held_out_documents"]:
        return None
    return tuple(metrics[f"held_out_bpt_{when}"]["value"] for when in ("before", "after"))


def _refuses(variant, plan: VariantPlan, loop: str, words: str, allowed, has_gpu: bool, outcome: Outcome) -> Outcome:
    folder = plan.scratch / f"{variant.name}-refused"
    code, said = _started(variant, plan, [*allowed, "--output_dir", str(folder)], has_gpu)
    if code == 0 or words not in " ".join(said.split()):
        return replace(
            outcome, status="failed", message=f"{loop} should be refused ({words!r}), exit code {code}: {said}"
        )
    return replace(outcome, loops={**outcome.loops, loop: "refused"})


def _started(variant: Variant, plan: VariantPlan, flags: Sequence[str], has_gpu: bool) -> tuple[int, str]:
    """Run the command to its end. Exit code and last words."""
    # Our own files wherever one stands; what a person typed is found from where they are.
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
            pass  # reported by the exit code of the process that is killed now
        finally:
            _end(process)
    return process.returncode, log.read_text(errors="replace")[-LAST_WORDS:].strip()


def _end(process: subprocess.Popen) -> None:
    """It and all that it started, also after Ctrl-C here: ranks must not outlive the one who waits for them, and
    torchrun gives each a session of its own."""
    import psutil

    try:
        launcher = psutil.Process(process.pid)
        tree = [*launcher.children(recursive=True), launcher]
    except psutil.NoSuchProcess:
        tree = []
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


# -- reading -----------------------------------------------------------------------------------------------------------


def loops_of(folder: Path, metrics: dict[str, Any]) -> dict[str, str]:
    """Which loops acted in a run: decayed weights, cut a window, planned an epoch."""
    memory = metrics.get("memory")
    evidence = {
        "regularization": _acted(folder / "scu_history.json", lambda row: row["lambda"] and row["s"]),
        "memory": None if memory is None else memory["chunks"] > memory["windows"],
        "curriculum": _acted(folder / "curriculum.json", lambda row: row["curriculum"] != "none" and row["seen"]),
    }
    return {loop: {True: "acts", False: "idle", None: "off"}[evidence[loop]] for loop in LOOPS}


def _acted(history: Path, in_row: Callable[[dict[str, Any]], Any]) -> Optional[bool]:
    return any(map(in_row, read_rows(history))) if history.is_file() else None


# -- judging -----------------------------------------------------------------------------------------------------------


def broken_promises(outcomes: Sequence[Outcome], loops_are_on: bool = True) -> list[str]:
    """What does not hold: a variant that failed, a loss that did not fall, a peak above its bound, an idle loop.

    ``loops_are_on``: whether the job turned all of them on; a job of one's own need not.
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


def _exceeded(outcome: Outcome, by_name: dict[str, Outcome]) -> Iterator[str]:
    variant = BY_NAME[outcome.name]
    if variant.peak_at_most is None or (variant.measured_on == "gpu" and outcome.device.startswith("cpu")):
        return
    other, share = by_name.get(variant.peak_at_most[0]), variant.peak_at_most[1]
    if other is None or not other.peak_bytes or outcome.peak_bytes is None:
        return
    found = outcome.peak_bytes / other.peak_bytes
    if found > share:
        yield f"{outcome.name}: peak memory is {found:.2f} of {other.name}'s, it should be at most {share:g}"
