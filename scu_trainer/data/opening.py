"""Open files of the user, and turn every failure to read them into one DataError."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from scu_trainer.errors import DataError
from scu_trainer.run_files import NOT_FETCHED, is_not_fetched


def shown_name(path: Path) -> str:
    """Return the name of a file for messages, even if its bytes are not UTF-8."""
    return os.fsencode(path.name).decode(errors="replace")


@contextlib.contextmanager
def open_data_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its name ends in .gz. Raises DataError if it cannot be read."""
    try:
        # O_NONBLOCK, because opening a pipe without a writer, or reading a device, might never return.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"{path} is a pipe or a device; write its content to a file first")
            if is_not_fetched(path):
                raise DataError(f"{path} {NOT_FETCHED}")
            with gzip.open(file) if path.name.lower().endswith(".gz") else contextlib.nullcontext(file) as content:
                yield content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}; check the file, its permissions and its suffix") from error
