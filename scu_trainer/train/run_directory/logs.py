"""Where log records go. The console shows the run's own lines and errors; logs/train.log gets all records of libraries
and all warnings, including those from before the run directory existed."""

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
    """Drops repeated messages of bitsandbytes, which logs at every 8-bit layer in every forward that it rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._seen_messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("bitsandbytes"):
            return True
        seen, text = self._seen_messages, record.getMessage()
        is_new = text not in seen
        seen.add(text)
        return is_new


class RedactingFormatter(logging.Formatter):
    """Removes secrets from the whole line, including tracebacks and arguments."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _LogFile(logging.FileHandler):
    """On a full disk, lines wait in the buffer for room; a traceback for each would hide the run's own output."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            print(f"{self.baseFilename} lacks its last lines: {error.strerror}", file=sys.stderr)


class RunLog:
    """The log records of one run, kept in memory until there is a directory for them."""

    def __init__(self, console: logging.Handler) -> None:
        self.console = console
        self._buffer = logging.handlers.MemoryHandler(KEPT_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._buffer.addFilter(_OncePerRun())
        self._handlers: list[logging.Handler] = [self._buffer]

    def open(self, output_dir: Path) -> None:
        """Write records to ``output_dir``/logs/train.log from now on, beginning with those kept in memory."""
        folder = output_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        file = _LogFile(folder / "train.log")
        file.setFormatter(RedactingFormatter(FORMAT))
        self._buffer.setTarget(file)
        self._buffer.flush()
        # Flush after every record, so that a killed run leaves its latest records.
        self._buffer.flushLevel = logging.NOTSET
        self._handlers.append(file)

    def show(self, level: int) -> None:
        """Show records of this project and of transformers from ``level`` on. Without it: warnings of this project."""
        self.console.setLevel(level)
        logging.getLogger("scu_trainer").setLevel(min(level, logging.INFO))
        logging.getLogger("transformers").addHandler(self.console)

    def close(self) -> None:
        for handler in self._handlers:
            handler.close()


@contextlib.contextmanager
def run_log() -> Iterator[RunLog]:
    """Capture the records of this project and of the libraries; afterwards their loggers are restored."""
    with without_collector(freeze=True):
        _import_logging_libraries()
    remember_environment()
    ours = logging.getLogger("scu_trainer")
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(RedactingFormatter("%(levelname)s: %(message)s"))
    console.setLevel(logging.WARNING)
    log = RunLog(console)
    loggers = [ours, *map(logging.getLogger, LIBRARIES)]
    before = [(logger, list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    shown_by = warnings.showwarning
    logging.captureWarnings(True)
    were_captured = warnings.showwarning is shown_by
    last_resort_before, logging.lastResort = logging.lastResort, _redacting_last_resort()
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
        logging.lastResort = last_resort_before
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        log.close()


def _redacting_last_resort() -> logging.Handler:
    """Return the handler for warnings of libraries outside of LIBRARIES when logging is not configured."""
    handler = logging.StreamHandler()  # stderr
    handler.setLevel(logging.WARNING)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    return handler


def _import_logging_libraries() -> None:
    """Import libraries that add console handlers at import, so that they cannot do it after we removed them."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.get_logger("transformers")
    if not torch.cuda.is_available():
        # otherwise DeepSpeed, if installed, prints to the console that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Turn off the bars of loading and saving, which last an instant and break the lines of the console."""
    from transformers.utils import logging as transformers_logging

    active = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if active:
            transformers_logging.enable_progress_bar()
