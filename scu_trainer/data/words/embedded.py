"""Texts with a category from the Python installation: sections of its documentation, with their titles.

The category is the topic of the language reference, or the module or package of the standard library. The extraction is
deterministic for a given Python. A section that occurs in several places is used only once, in the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from scu_trainer.data.embedded import docstrings_of, embedded_identity, python_docs, stdlib_modules
from scu_trainer.data.records import Record
from scu_trainer.data.sources import Source
from scu_trainer.data.store import build_once, open_arrow, write_arrow
from scu_trainer.errors import DataError
from scu_trainer.settings.words import EMBEDDED_WORD_DATASET

SECTIONS_VERSION = "1"  # raise it when the text below changes
FEWEST_WORDS = 8  # shorter sections are little more than their title

_UNDERLINE = re.compile(r"^(?P<title>\S.*)\n([*=~^\"-])\2{2,}[ ]*$", re.MULTILINE)


def embedded_sections(cache_dir: Path, text_column: str, category_column: str | None) -> Source:
    """Return the source of all sections. Its first read extracts them and caches them in ``cache_dir``."""
    identity = [*embedded_identity(EMBEDDED_WORD_DATASET), SECTIONS_VERSION]

    def read() -> Iterator[Record]:
        folder = build_once(cache_dir / "embedded" / "-".join(identity[1:]), _extract)
        for row in open_arrow(folder / "sections.arrow"):
            category = {category_column: row["category"]} if category_column else {}
            yield Record(row["name"], {text_column: row["text"], **category})

    return Source(EMBEDDED_WORD_DATASET, identity, read)


def _extract(folder: Path) -> None:
    import pyarrow

    schema = pyarrow.schema({name: pyarrow.string() for name in ("name", "category", "text")})
    rows = list(_without_repeats(chain(_reference_sections(), _library_sections())))
    if not rows:
        raise DataError(f"this Python has no text for {EMBEDDED_WORD_DATASET!r}; give a file or a Hub id")
    write_arrow(folder / "sections.arrow", schema, [pyarrow.RecordBatch.from_pylist(rows, schema=schema)])


def _without_repeats(sections: Iterator[tuple[str, str]]) -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    numbers: dict[str, int] = {}
    for category, text in sections:
        if len(text.split()) < FEWEST_WORDS or text in seen:
            continue
        seen.add(text)
        numbers[category] = numbers.get(category, 0) + 1
        yield {"name": f"{category} section {numbers[category]}", "category": category, "text": text}


def _reference_sections() -> Iterator[tuple[str, str]]:
    for topic, text in python_docs():
        for section in sections_of(text):
            yield topic, section


def _library_sections() -> Iterator[tuple[str, str]]:
    for path, source in stdlib_modules():
        category = path.split("/")[0].removesuffix(".py")
        for text in docstrings_of(source):
            for section in sections_of(text):
                yield category, section


def sections_of(text: str) -> Iterator[str]:
    """Yield the sections of ``text``, each from one underlined title to the next, without the underlines."""
    starts = [match.start() for match in _UNDERLINE.finditer(text)]
    for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
        section = _UNDERLINE.sub(r"\g<title>", text[start:end]).strip()
        if section:
            yield section
