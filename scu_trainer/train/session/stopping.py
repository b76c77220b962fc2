"""SIGTERM, Ctrl-C, and a closed terminal or pipe: the step is finished, a checkpoint is written, and the run ends with
exit code 3. A second signal ends it at once.

A handler only records the signal. Between two steps the training loop checks it, saves and ends by the stock Trainer's
own means. Ranks receive signals at different moments, so after every step they exchange one number in host memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from scu_trainer.errors import RUN_AGAIN
from scu_trainer.stop_signals import HANGUP, outlives_terminal, stop_signals_to
from scu_trainer.train.resuming import is_at_epoch_end

logger = logging.getLogger("scu_trainer")

LAUNCHERS_ECHO_S = 5.0
"""Ignore a second signal within this time: a launcher passes Ctrl-C on to ranks that the terminal has sent it to."""


def _write(line: str) -> None:
    """Write a line to file descriptor 2, below a progress bar: a signal may interrupt sys.stderr or the bar while it
    writes, and neither can be entered a second time then."""
    after_bar = "\n" if os.isatty(2) else ""
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"{after_bar}{line}\n".encode())


class StopRequest:
    """Whether the user or the system wants this run to end. ``name``: of the signal, once there is one.

    is_training: there is a step to finish; otherwise a signal ends the run at once.
    grace_period_s: time from the first signal to the end of the process, whatever it is doing; None: no limit.
    is_launched: a launcher started this process and may pass its signals on.
    say: prints a line for the user.
    """

    def __init__(
        self,
        grace_period_s: Optional[float] = None,
        is_launched: bool = False,
        say: Callable[[str], None] = _write,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name: Optional[str] = None
        self._grace_period_s, self._is_launched = grace_period_s, is_launched
        self._say, self._clock = say, clock
        self._first_s = 0.0
        self._deadline: Optional[threading.Timer] = None
        self._pid = os.getpid()
        self.is_training = False
        self.on_deadline: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle signals inside, and restore the handlers afterwards. Python allows that only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        try:
            with stop_signals_to(self.receive, self.closed):
                yield self
        finally:
            self.cancel_deadline()

    def receive(self, number: int, frame: Optional[FrameType] = None) -> None:
        """Handle a signal. Raises KeyboardInterrupt for a second request, and if there is no step to finish."""
        if os.getpid() != self._pid:  # a child process that has not set its own handlers yet
            return
        now_s = self._clock()
        if self.name is None and not self.is_training:
            raise KeyboardInterrupt(signal.Signals(number).name)
        if self.name is None:
            self.name, self._first_s = signal.Signals(number).name, now_s
            self._start_deadline(number)
            self._say(
                f"{self.name}: the run finishes this step, writes a checkpoint and ends; a second one ends it now"
            )
        elif number != HANGUP and not (self._is_launched and now_s - self._first_s < LAUNCHERS_ECHO_S):
            raise KeyboardInterrupt(f"second signal, {signal.Signals(number).name}")

    def closed(self) -> None:
        """Handle a closed terminal or pipe. After training the run continues, because the rest is short."""
        ends = self.is_training and not outlives_terminal()
        consequence = "ends after this step, with a checkpoint" if ends else "continues"
        logger.warning("the terminal or pipe that showed this run was closed; the run %s", consequence)
        if ends and self.name is None:
            self.name = "a closed terminal or pipe"

    def cancel_deadline(self) -> None:
        """Cancel the deadline, because the run is about to end."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_deadline(self, number: int) -> None:
        if self._grace_period_s is None:
            return
        self._deadline = threading.Timer(self._grace_period_s, self._end_now, [number])
        self._deadline.daemon = True
        self._deadline.start()

    def _end_now(self, number: int) -> None:
        """End the process: the main thread may be inside a step that takes longer than the remaining time."""
        self._say(f"the grace period of {self._grace_period_s:g} s is over; {RUN_AGAIN}")
        self.on_deadline()
        end_children()
        os._exit(128 + number)


def end_children() -> None:
    """Kill all child processes. Loader workers would notice only seconds later that their parent is gone."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


class StopCallback(TrainerCallback):
    """Ends training with a checkpoint after the step in which a stop was requested. ``stopped_at``: that step."""

    def __init__(self, request: StopRequest, world_size: int) -> None:
        self.request = request
        self.stopped_at: Optional[int] = None
        self.on_stop: Callable[[], None] = lambda: None
        self._world_size = world_size
        self._group: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._group = _host_group() if self._world_size > 1 else None
        self.request.is_training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.request.is_training = False
        self.request.cancel_deadline()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_stop_requested():
            self.stopped_at = state.global_step
            self.on_stop()
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop for a signal that came during the evaluation, because the stock loop saves after it."""
        self.on_step_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop what is due at the end of an epoch, because the stock loop ends a stopped epoch as if it were complete.
        The checkpoint is already written, and the resumed run evaluates, logs and saves at the epoch's real end."""
        if self.stopped_at is not None:
            control.should_evaluate = control.should_save = False
            control.should_log = control.should_log and is_at_epoch_end(state)

    def _is_stop_requested(self) -> bool:
        wanted = self.request.name is not None
        if self._group is None:
            return wanted
        flag = torch.tensor([int(wanted)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())


def _host_group() -> Any:
    """Return a group of all ranks over host memory: it waits for no device, and works after the launcher has died."""
    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
