"""Text data sets from the Python installation, so that everything can be tried without a network or a file.

The extraction is deterministic for a given Python: sorted paths, no installed packages, no tests, no build data.
"""

from __future__ import annotations

import ast
import platform
import sysconfig
import tokenize
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from scu_trainer.data.records import Record
from scu_trainer.data.store import build_once, open_arrow, write_arrow
from scu_trainer.errors import DataError

EXTRACTION_VERSION = 1  # raise it when the text below changes: it is part of every fingerprint
SMALLEST_DOCUMENT = 200  # characters; shorter modules are little more than an import
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)


def embedded_identity(name: str) -> list[str]:
    """Return everything that the text of an embedded source depends on."""
    return ["embedded", name, platform.python_version(), str(EXTRACTION_VERSION)]


def read_embedded(name: str, cache_dir: Path, text_column: str) -> Iterator[Record]:
    """Yield the records of one embedded source. The first call extracts and caches its text."""
    folder = build_once(cache_dir / "embedded" / "-".join(embedded_identity(name)[1:]), lambda new: _extract(name, new))
    for row in open_arrow(folder / "text.arrow"):
        yield Record(row["name"], {text_column: row["text"]})


def _extract(name: str, folder: Path) -> None:
    import pyarrow

    schema = pyarrow.schema({"name": pyarrow.string(), "text": pyarrow.string()})
    rows = [{"name": name, "text": text} for name, text in EXTRACTORS[name]()]
    if not rows:
        raise DataError(f"this Python has no text for {name!r} (its source files are missing); give a file or a Hub id")
    write_arrow(folder / "text.arrow", schema, [pyarrow.RecordBatch.from_pylist(rows, schema=schema)])


def python_docs() -> Iterator[tuple[str, str]]:
    """Yield name and text of each topic of the language reference that ``help()`` shows."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        return
    for topic in sorted(topics):
        yield topic, topics[topic].strip() + "\n"


def stdlib_source() -> Iterator[tuple[str, str]]:
    """Yield name and text of each source file of the standard library."""
    for name, source in stdlib_modules():
        if len(source) >= SMALLEST_DOCUMENT:
            yield name, source


def stdlib_docstrings() -> Iterator[tuple[str, str]]:
    """Yield name and docstrings of each module of the standard library, with those of its classes and functions."""
    for name, source in stdlib_modules():
        text = "\n\n".join(docstrings_of(source)) + "\n"
        if len(text) >= SMALLEST_DOCUMENT:
            yield name, text


EXTRACTORS = {"python_docs": python_docs, "stdlib_docstrings": stdlib_docstrings, "stdlib_source": stdlib_source}


def stdlib_modules() -> Iterator[tuple[str, str]]:
    """Yield path and source of each module of the standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            with tokenize.open(path) as file:  # uses the encoding that the file declares
                yield relative.as_posix(), file.read()


def docstrings_of(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, each after its name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in _statements(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text:
            heading = "" if isinstance(node, ast.Module) else f"{node.name}\n"
            yield heading + text


def _statements(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements in the order of ``ast.walk``, without expressions, which define no classes or functions."""
    queue = deque([module])
    while queue:
        yield (node := queue.popleft())
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            queue.extend(getattr(node, field, ()))
