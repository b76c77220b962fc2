"""What a person sees during a run: a line per log, and a progress bar below if the terminal can draw one."""

from __future__ import annotations

import time
from typing import Any, Optional

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from scu_trainer.figures import NATS_PER_BIT, clock_text
from scu_trainer.train.loop import Loop

OF_SOURCE = "eval_bpt_"


class ConsoleCallback(Loop):
    """Prints step, loss, S, lambda, learning rate and the remaining time, only in the main process.

    The first step of a training always gets a line, whatever ``logging_steps`` is; it is printed, but not logged. unit:
    what bits are counted per. ``disable_tqdm`` of the arguments turns off the bar.
    """

    def __init__(self, console: Optional[Console] = None, unit: str = "token") -> None:
        self.console, self._unit = console or Console(highlight=False, markup=False), unit
        self._bar: Optional[Progress] = None
        self._task: Any = None
        self._started_s = 0.0
        self._first_step = 0
        self._first_rate = 0.0
        self._losses: list[torch.Tensor] = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Also allow a trainer without loops: the stock Trainer trains the embedded base."""

    def on_train_begin(self, args, state, control, **kwargs):
        self._started_s, self._first_step = time.monotonic(), state.global_step
        self._losses.clear()
        if state.is_world_process_zero and self.console.is_terminal and not args.disable_tqdm:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("train", total=state.max_steps, completed=state.global_step, note="")
            self._bar.start()

    def on_step_begin(self, args, state, control, **kwargs):
        self._is_first = state.global_step == self._first_step

    def on_loss(self, loss: torch.Tensor, num_items: Any) -> None:
        if self._is_first:
            self._losses.append(loss)

    def on_step_taken_back(self) -> None:
        self._losses.clear()  # the loss of a step without rows is 0, which says nothing

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._losses:  # read it now, as the stock Trainer does: when the step ends, the schedule has advanced
            self._first_rate = self.trainer._get_learning_rate()

    def on_step_end(self, args, state, control, **kwargs):
        if self._losses:
            self._print_first_step(state, control)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=state.global_step, total=state.max_steps, note=f"left {self._left(state)}"
            )

    def _print_first_step(self, state, control) -> None:
        """Print the loss of the first step, the mean over ranks as the stock Trainer logs it. Every rank calls this."""
        loss = torch.stack([loss.float() for loss in self._losses]).sum()
        self._losses.clear()
        if control.should_log:  # this step prints a line anyway
            return
        loss = self.trainer.accelerator.gather(loss.reshape(1)).mean().item()
        if state.is_world_process_zero:
            took_s = time.monotonic() - self._started_s
            line = self._line(state, {"loss": loss, "learning_rate": self._first_rate})
            self._print(f"{line} (the first step took {took_s:.1f} s)")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "eval_accuracy" in logs:
            accuracy = f"{logs['eval_accuracy']:.1%} right, "
            self._print(f"step {_progress(state)}  held-out {accuracy}{logs['eval_bpt']:.3f} bits per {self._unit}")
        elif "eval_bpt" in logs:
            self._print(
                f"step {_progress(state)}  held-out {logs['eval_bpt']:.3f} bits per {self._unit}{_by_source(logs)}"
            )
        elif "loss" in logs:
            self._print(self._line(state, logs))

    def _line(self, state, logs: dict[str, float]) -> str:
        parts = [f"step {_progress(state)}", f"loss {logs['loss'] / NATS_PER_BIT:.3f} bits per {self._unit}"]
        if "scu/s_ema" in logs:
            parts += _regularization_parts(logs) if "scu/lambda" in logs else [f"S {logs['scu/s_ema']:.4f}"]
        parts.append(f"rate {logs['learning_rate']:.2e}")
        parts.append(f"left {self._left(state)}")
        return "  ".join(parts)

    def _left(self, state) -> str:
        return clock_text(seconds_left(state, self._first_step, self._started_s))

    def _print(self, text: str) -> None:
        (self._bar.console if self._bar is not None else self.console).print(text, soft_wrap=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def seconds_left(state, first_step: int, started_s: float) -> Optional[float]:
    """Return the time for the remaining steps at the mean pace since ``first_step``, which began at ``started_s`` of
    ``time.monotonic``; None before a step is done."""
    done, remaining = state.global_step - first_step, state.max_steps - state.global_step
    return (time.monotonic() - started_s) / done * remaining if done > 0 else None


def _regularization_parts(logs: dict[str, float]) -> list[str]:
    target = logs.get("scu/s_target")
    goal = " (free)" if target is None else f" of {target:.4g}"
    return [f"S {logs['scu/s_ema']:.4f}{goal}", f"lambda {logs['scu/lambda']:.3g}"]


def _by_source(logs: dict[str, float]) -> str:
    """Return the metric of each source of a mixture, in parentheses."""
    found = [f"{key.removeprefix(OF_SOURCE)} {value:.3f}" for key, value in logs.items() if key.startswith(OF_SOURCE)]
    return f" ({', '.join(found)})" if found else ""


def _progress(state) -> str:
    return f"{state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
