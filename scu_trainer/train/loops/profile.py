"""A few optimizer steps under the PyTorch profiler, written to the run's logs/profile/."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Optional

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from scu_trainer.train.loop import Loop

logger = logging.getLogger("scu_trainer")

WARMUP_STEPS = 2
"""Steps before the recorded ones: one that runs without the profiler, one in which it starts up."""

TRACE_FILE = "trace.json"
TABLE_FILE = "top_operators.txt"
OPERATORS = 30


class Profile(Loop):
    """Records ``steps`` optimizer steps, from the third of a ``train`` call on, in the process that leads.

    ``logs/profile/trace.json`` is a Chrome trace (chrome://tracing, ui.perfetto.dev), ``top_operators.txt`` a table of
    the operators that took most time.
    """

    name = "profile"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._profile: Optional[profile] = None
        self._written = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        left = state.max_steps - state.global_step - WARMUP_STEPS
        self.close()
        if not state.is_world_process_zero:
            return
        if left < 1:
            logger.warning(
                "profile_steps: the run has no step after the %d of the warm-up; raise max_steps", WARMUP_STEPS
            )
            return
        if left < self.steps:
            logger.warning("profile_steps is %d, and only %d steps follow the warm-up: these", self.steps, left)
        self._folder, self._written, self._ended = Path(args.output_dir) / "logs" / "profile", False, 0
        plan = schedule(wait=WARMUP_STEPS - 1, warmup=1, active=min(self.steps, left), repeat=1)
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        self._profile = profile(activities=sorted(wanted, key=str), schedule=plan, on_trace_ready=self._write)
        self._profile.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._profile is not None:
            self._ended += 1
            self._profile.step()
            if self._written:
                self.close()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self._profile is not None:
            self.close()
            if not self._written:
                logger.warning("profile_steps: training ended before the profiler's warm-up was over")

    def end(self) -> None:
        """Also for a training that raised, which has no last event."""
        self.close()

    def close(self) -> None:
        """Stop recording; what was recorded is written."""
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def _write(self, finished: profile) -> None:
        if self._written:
            return
        self._written = True
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / TRACE_FILE))
        on_gpu = ProfilerActivity.CUDA in finished.activities
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = finished.key_averages().table(sort_by=by, row_limit=OPERATORS)
        (self._folder / TABLE_FILE).write_text(table + "\n", encoding="utf-8")
        logger.info("profile of %d steps: %s", self._ended - WARMUP_STEPS, self._folder)
