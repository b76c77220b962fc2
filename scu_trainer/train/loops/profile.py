"""Profile a few optimizer steps with the PyTorch profiler, and time their parts; writes to the run's logs/profile/."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities
from transformers import Trainer

from scu_trainer.figures import count_text
from scu_trainer.run_files import write_json
from scu_trainer.train.loop import Loop, run_folder
from scu_trainer.train.loss.rows.model_loss import ReplacedFunction
from scu_trainer.train.step.costs import wait_for
from scu_trainer.train.step.recovery.snapshot import replaced

logger = logging.getLogger("scu_trainer")

WARMUP_STEPS = 2
"""Steps before the recorded ones: one without the profiler, and one in which it starts up."""

OPERATORS = 30
PARTS = ("data", "forward", "backward", "optimizer")


class PartTimes:
    """Wall times of the parts of a trainer's steps, from ``start`` to ``stop``. On a GPU each part waits for the
    device, but only in timed steps. ``other``, the remaining time, is the host: loops, callbacks, logs."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.is_running, self._timers = False, contextlib.ExitStack()

    def start(self) -> None:
        self.is_running, self._started_s = True, self._now()
        accelerator, compute_loss = self.trainer.accelerator, self.trainer.compute_loss
        timed = ReplacedFunction(compute_loss, self._timed("forward", compute_loss))
        self._timers.enter_context(replaced(self.trainer, "compute_loss", timed))
        self._timers.enter_context(replaced(accelerator, "backward", self._timed("backward", accelerator.backward)))

    def stop(self) -> None:
        if self.is_running:
            self.is_running, self.total_s = False, self._now() - self._started_s
            self._timers.close()

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.timing("data"):
                found = next(batches, self)
            if found is self:
                return
            yield found

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        if not self.is_running:
            yield
            return
        started_s = self._now()
        yield
        self.seconds[part] += self._now() - started_s

    def figures(self, steps: int) -> dict[str, Any]:
        """Return ``seconds_per_step`` and, for each part, ``seconds`` per step and ``share``; shares add up to 1."""
        seconds = {**self.seconds, "other": max(0.0, self.total_s - sum(self.seconds.values()))}
        total = sum(seconds.values())
        parts = {name: {"seconds": value / steps, "share": value / total} for name, value in seconds.items()}
        return {"steps": steps, "seconds_per_step": total / steps, "parts": parts}

    def _timed(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            with self.timing(part):
                return function(*given, **named)

        return timed

    def _now(self) -> float:
        wait_for(self.trainer.args.device)
        return time.perf_counter()


class Profile(Loop):
    """Records ``steps`` optimizer steps from the third of a ``train`` call on, in the main process.

    ``logs/profile/trace.json`` is a Chrome trace (chrome://tracing, ui.perfetto.dev), ``top_operators.txt`` a table of
    the operators that took the most time, and ``bottlenecks.json`` the time per part of these steps: data, forward,
    backward, optimizer, other.
    """

    name = "profile"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._parts: Optional[PartTimes] = None
        self._part_figures: Optional[dict[str, Any]] = None
        self._profile: Optional[profile] = None
        self._written = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        left = state.max_steps - state.global_step - WARMUP_STEPS
        self.end()
        if not state.is_world_process_zero:
            return
        if left < 1:
            logger.warning(
                "profile_steps: the run has no step after the %d warm-up steps; raise max_steps", WARMUP_STEPS
            )
            return
        if left < self.steps:
            follow = count_text(left, "step")
            logger.warning("profile_steps is %d, but only %s after the warm-up: profiling those", self.steps, follow)
        self._folder, self._written, self._steps_ended = run_folder(self.trainer) / "logs" / "profile", False, 0
        plan = schedule(wait=WARMUP_STEPS - 1, warmup=1, active=min(self.steps, left), repeat=1)
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        self._profile = profile(activities=sorted(wanted, key=str), schedule=plan, on_trace_ready=self._write)
        self._profile.start()
        self._parts, self._part_figures = PartTimes(self.trainer), None

    def batches(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        return batches if self._profile is None else self._parts.batches(batches)

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if self._profile is not None:
            self._optimizer_timer = self._parts.timing("optimizer")
            self._optimizer_timer.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        if self._profile is not None:
            self._optimizer_timer.__exit__(None, None, None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._profile is not None:
            self._steps_ended += 1
            self._profile.step()
            if self._steps_ended == WARMUP_STEPS:
                self._parts.start()
            if self._written:
                self.end()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self._profile is not None:
            self.end()
            if not self._written:
                logger.warning("profile_steps: training ended before the profiler's warm-up was over")

    def end(self) -> None:
        """Stop recording and write what was recorded. A training that raised an error calls nothing else."""
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
            self._parts.stop()

    def _write(self, finished: profile) -> None:
        if self._written:
            return
        self._written = True
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._parts.is_running:
            self._parts.stop()
            self._part_figures = self._parts.figures(self._steps_ended - WARMUP_STEPS)
            write_json(self._folder / "bottlenecks.json", self._part_figures)
        finished.export_chrome_trace(str(self._folder / "trace.json"))
        on_gpu = ProfilerActivity.CUDA in finished.activities
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = finished.key_averages().table(sort_by=by, row_limit=OPERATORS)
        (self._folder / "top_operators.txt").write_text(table + "\n", encoding="utf-8")
        logger.info("profile of %d steps: %s", self._steps_ended - WARMUP_STEPS, self._folder)

    def figures(self) -> dict[str, Any]:
        return {} if self._part_figures is None else {self.name: self._part_figures}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        found = figures.get(self.name)
        if found is None:
            return []
        largest_first = sorted(found["parts"].items(), key=lambda part: -part[1]["seconds"])
        parts = ", ".join(f"{name} {part['share']:.0%}" for name, part in largest_first)
        return [("time of a step", f"{1000 * found['seconds_per_step']:,.0f} ms under the profiler: {parts}")]
