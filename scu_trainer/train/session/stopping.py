"""SIGTERM, Ctrl-C, and a terminal or pipe that was closed: the step is finished, a checkpoint is written, the run ends
with exit code 3. A second signal: now.

A handler only takes note. Between two steps the training loop looks, saves and ends by the stock Trainer's own means.
Ranks get their signals at different moments, so after every step they tell each other: one number, in host memory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional, TextIO

import psutil
from transformers import TrainerCallback

logger = logging.getLogger("scu_trainer")

HANGUP = getattr(signal, "SIGHUP", None)
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if HANGUP is None else [HANGUP]))
CLOSED = "a closed terminal or pipe"
LAUNCHERS_ECHO_S = 5.0
"""A launcher that gets Ctrl-C passes it on to ranks that got it from the terminal already; that is no second wish."""


class StopRequest:
    """Whether somebody wants this run to end. ``name``: the signal's, once there is one.

    is_training: there is a step to finish; before and after a signal ends the run at once.
    grace_period_s: time from the first signal to the end of the process, whatever is going on; None: no limit.
    is_launched: a launcher started this process and may pass on what it gets. say: what the user reads.
    """

    def __init__(
        self,
        grace_period_s: Optional[float] = None,
        is_launched: bool = False,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name: Optional[str] = None
        self._grace_period_s, self._is_launched = grace_period_s, is_launched
        self._say, self._clock = say, clock
        self._first_s = 0.0
        self._deadline: Optional[threading.Timer] = None
        self._pid = os.getpid()
        self._outlives = False
        self.is_training = False
        self.on_deadline: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Signals are ours inside, and as before afterwards. Python lets only the main thread listen."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # nohup lets a run outlive its terminal by ignoring SIGHUP.
        self._outlives = HANGUP is None or signal.getsignal(HANGUP) == signal.SIG_IGN
        heard = [number for number in SIGNALS if number != HANGUP or not self._outlives]
        before = {number: signal.signal(number, self.receive) for number in heard}
        try:
            with contextlib.redirect_stdout(Output(sys.stdout, self.closed)):
                with contextlib.redirect_stderr(Output(sys.stderr, self.closed)):
                    yield self
        finally:
            self.calm()
            for number, handler in before.items():
                signal.signal(number, handler)

    def receive(self, number: int, frame: Optional[FrameType] = None) -> None:
        """The handler. Raises KeyboardInterrupt at a second wish, and where there is no step to finish."""
        if os.getpid() != self._pid:  # a child that has not yet set its own
            return
        now_s = self._clock()
        if self.name is None and not self.is_training:
            raise KeyboardInterrupt(signal.Signals(number).name)
        if self.name is None:
            self.name, self._first_s = signal.Signals(number).name, now_s
            self._start_deadline(number)
            self._say(f"{self.name}: the run finishes this step, writes a checkpoint and ends; press again to end now")
        elif number != HANGUP and not (self._is_launched and now_s - self._first_s < LAUNCHERS_ECHO_S):
            raise KeyboardInterrupt(f"second signal, {signal.Signals(number).name}")

    def closed(self) -> None:
        """Output has nowhere to go any more. Once training is over the rest is short: it goes on."""
        ends = not self._outlives and self.is_training
        what = "ends after this step, with a checkpoint" if ends else "continues"
        logger.warning("the terminal or pipe that showed this run was closed; the run %s", what)
        if ends and self.name is None:
            self.name = CLOSED

    def calm(self) -> None:
        """The end is near by itself: no deadline any more."""
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
        """The main thread may be inside a step that takes longer than is left: nothing but the process can end it."""
        self._say(
            f"the grace period of {self._grace_period_s:g} s is over; the newest checkpoint is the last one written"
        )
        self.on_deadline()
        end_children()
        os._exit(128 + number)


class Output:
    """``stream``; once its reader has gone, ``closed`` is called and what is written is dropped. What a full disk does
    not take is dropped as well: the log file of the run waits for room."""

    def __init__(self, stream: TextIO, closed: Callable[[], None]) -> None:
        self._stream, self._closed = stream, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unless_closed(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, act: Callable[[], object]) -> None:
        try:
            act()
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            is_closed = error.errno in (errno.EPIPE, errno.EIO)
        if is_closed:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # for what writes there by other ways, too
            os.close(nowhere)
            self._closed()


def end_children() -> None:
    """Loader workers would notice only seconds later that nobody waits for them."""
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
        self.request.calm()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._agreed():
            self.stopped_at = state.global_step
            self.on_stop()
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The signal came while held-out data were scored: the stock loop saves after that."""
        self.on_step_end(args, state, control)

    def _agreed(self) -> bool:
        wanted = self.request.name is not None
        if self._group is None:
            return wanted
        import torch

        flag = torch.tensor([int(wanted)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag.item())


def _host_group() -> Any:
    """All ranks, over host memory: an exchange there waits for no device, and needs no launcher that is alive."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
