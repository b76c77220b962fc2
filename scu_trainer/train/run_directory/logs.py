"""Who says what, where. The console belongs to the run: our lines and errors. Everything that libraries say, and every
warning, goes to logs/train.log, also what was said before the run directory existed."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from scu_trainer.imports import without_collector
from scu_trainer.secrets import redact, remember_environment

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LIBRARIES = (
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "bitsandbytes",
    "torch",
    "torchao",
    "DeepSpeed",
    "huggingface_hub",
    "py.warnings",
)
KEPT_RECORDS = 10_000


class _OncePerRun(logging.Filter):
    """bitsandbytes says of each 8-bit layer at each forward that it rounds the input; once is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("bitsandbytes"):
            return True
        said, text = self._said, record.getMessage()
        is_new = text not in said
        said.add(text)
        return is_new


class RedactingFormatter(logging.Formatter):
    """The whole line without secrets, tracebacks and arguments included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _LogFile(logging.FileHandler):
    """Lines that a full disk does not take wait for room; a traceback for each would bury the run's own words."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            print(f"{self.baseFilename} lacks its last lines: {error.strerror}", file=sys.stderr)


class RunLog:
    """Records of one run: kept in memory until there is a directory for them."""

    def __init__(self) -> None:
        self._buffer = logging.handlers.MemoryHandler(KEPT_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._buffer.addFilter(_OncePerRun())
        self._handlers: list[logging.Handler] = [self._buffer]
        self.console: logging.Handler = logging.NullHandler()

    def open(self, output_dir: Path) -> None:
        """From here on records go to ``output_dir``/logs/train.log; the kept ones first."""
        folder = output_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        file = _LogFile(folder / "train.log")
        file.setFormatter(RedactingFormatter(FORMAT))
        self._buffer.setTarget(file)
        self._buffer.flush()
        # Every record at once: a killed run must not take its last words with it.
        self._buffer.flushLevel = logging.NOTSET
        self._handlers.append(file)

    def show(self, level: int) -> None:
        """On the console, of this project and of transformers; by default warnings of this project."""
        self.console.setLevel(level)
        logging.getLogger("scu_trainer").setLevel(min(level, logging.INFO))
        logging.getLogger("transformers").addHandler(self.console)

    def close(self) -> None:
        for handler in self._handlers:
            handler.close()


@contextlib.contextmanager
def run_log() -> Iterator[RunLog]:
    """Catch the records of this project and of the libraries; afterwards their loggers are as before."""
    with without_collector(freeze=True):
        _import_talkative_libraries()
    remember_environment()
    log = RunLog()
    ours = logging.getLogger("scu_trainer")
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(RedactingFormatter("%(levelname)s: %(message)s"))
    console.setLevel(logging.WARNING)
    log.console = console
    loggers = [ours, *map(logging.getLogger, LIBRARIES)]
    before = [(logger, list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    shown_by = warnings.showwarning
    logging.captureWarnings(True)
    were_captured = warnings.showwarning is shown_by
    of_strangers, logging.lastResort = logging.lastResort, _redacting_last_resort()
    for logger in loggers:
        logger.handlers = [log._buffer]
        logger.propagate = False
    ours.addHandler(console)
    ours.setLevel(logging.INFO)
    try:
        with _no_progress_bars():
            yield log
    finally:
        logging.captureWarnings(were_captured)
        logging.lastResort = of_strangers
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        log.close()


def _redacting_last_resort() -> logging.Handler:
    """Where warnings of libraries that are not among LIBRARIES go when nobody has set up logging."""
    handler = logging.StreamHandler()  # stderr
    handler.setLevel(logging.WARNING)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    return handler


def _import_talkative_libraries() -> None:
    """Loggers that are set up at import would put their console handlers back after we took them away."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.get_logger("transformers")
    if not torch.cuda.is_available():
        # DeepSpeed, where it is installed, otherwise writes to the console that it looked for a GPU in vain.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The bars of loading and saving are over in a blink and tear the lines of the console apart."""
    from transformers.utils import logging as transformers_logging

    active = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if active:
            transformers_logging.enable_progress_bar()
