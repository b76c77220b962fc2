"""What a person sees while a run goes on: a line per log, and a bar below them where the terminal can draw one."""

from __future__ import annotations

import time
from typing import Any, Optional

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from scu_trainer.figures import NATS_PER_BIT
from scu_trainer.train.loop import Loop

OF_SOURCE = "eval_bpt_"


class ConsoleCallback(Loop):
    """Prints step, loss, S, lambda, learning rate and the time that is left; only in the process that leads.

    The first step of a training has a line of its own, whatever ``logging_steps`` says; nothing is logged for it.
    ``unit``: what bits are counted per. ``disable_tqdm`` of the arguments leaves out the bar.
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
        """A trainer without loops will do as well: the embedded base is trained by the stock one."""

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
        self._losses.clear()  # 0, of rows that were all set aside, is not their loss

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._losses:  # now, as the stock Trainer does: when the step ends, the schedule is at the next one
            self._first_rate = self.trainer._get_learning_rate()

    def on_step_end(self, args, state, control, **kwargs):
        if self._losses:
            self._say_first(state, control)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=state.global_step, total=state.max_steps, note=f"left {self._left(state)}"
            )

    def _say_first(self, state, control) -> None:
        """Every rank comes here: the loss is the mean over ranks, as the stock Trainer logs it."""
        loss = torch.stack([loss.float() for loss in self._losses]).sum()
        self._losses.clear()
        if control.should_log:  # the step has a line anyway
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
            right = f"{logs['eval_accuracy']:.1%} right, "
            self._print(f"step {_of(state)}  held-out {right}{logs['eval_bpt']:.3f} bits per {self._unit}")
        elif "eval_bpt" in logs:
            self._print(f"step {_of(state)}  held-out {logs['eval_bpt']:.3f} bits per {self._unit}{_sources(logs)}")
        elif "loss" in logs:
            self._print(self._line(state, logs))

    def _line(self, state, logs: dict[str, float]) -> str:
        parts = [f"step {_of(state)}", f"loss {logs['loss'] / NATS_PER_BIT:.3f} bits per {self._unit}"]
        if "scu/s_ema" in logs:
            parts += _steered(logs) if "scu/lambda" in logs else [f"S {logs['scu/s_ema']:.4f}"]
        parts.append(f"rate {logs['learning_rate']:.2e}")
        parts.append(f"left {self._left(state)}")
        return "  ".join(parts)

    def _left(self, state) -> str:
        return _clock(seconds_left(state, self._first_step, self._started_s))

    def _print(self, text: str) -> None:
        (self._bar.console if self._bar is not None else self.console).print(text, soft_wrap=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def seconds_left(state, first_step: int, started_s: float) -> Optional[float]:
    """Remaining steps at the mean pace since ``first_step``, which began at ``started_s`` of ``time.monotonic``; None
    before a step is done."""
    done, remaining = state.global_step - first_step, state.max_steps - state.global_step
    return (time.monotonic() - started_s) / done * remaining if done > 0 else None


def _steered(logs: dict[str, float]) -> list[str]:
    target = logs.get("scu/s_target")
    goal = " (free)" if target is None else f" of {target:.4g}"
    return [f"S {logs['scu/s_ema']:.4f}{goal}", f"lambda {logs['scu/lambda']:.3g}"]


def _sources(logs: dict[str, float]) -> str:
    """Of a mixture, the figure of each source."""
    found = [f"{key.removeprefix(OF_SOURCE)} {value:.3f}" for key, value in logs.items() if key.startswith(OF_SOURCE)]
    return f" ({', '.join(found)})" if found else ""


def _of(state) -> str:
    return f"{state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"


def _clock(seconds: Optional[float]) -> str:
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
