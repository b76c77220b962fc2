"""Pages of the site that lie elsewhere in the repository, or are made from the code. A hook of mkdocs (mkdocs.yml)."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}
API = ("SCUTrainer", "with_loops", "wrap", "Loop")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {page: linked_from_docs((ROOT / source).read_text(), source) for page, source in ELSEWHERE.items()}
    for page, text in {**pages, "api.md": api(), "reference.md": reference()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Scripts and notebooks of the repository are no pages: their links become their names. Links that are called after
    their file, as one reads them in a checkout, are called after the page."""
    markdown = re.sub(r"\[([^\]]*)\]\(\.\./\.\./examples/[^)]*\)", r"`\1`", markdown)
    return re.sub(r"\[(?:docs/)?([\w/-]+)\.md\]\(", lambda found: f"[{found[1].replace('_', ' ')}](", markdown)


def linked_from_docs(text: str, source: str) -> str:
    """Links of a page of the repository as of a page in docs/; those to files that are no pages become their names."""

    def link(found: re.Match) -> str:
        words, target = found.groups()
        if target.startswith(("http", "#")):
            return found[0]
        path = (ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        pages = {there: page for page, there in ELSEWHERE.items()}
        if path in pages or path.startswith("docs/"):
            return f"[{words}]({pages.get(path, path.removeprefix('docs/'))})"
        return words

    return re.sub(r"(?<!\!)\[([^\]]*)\]\(([^)\s]+)\)", link, text).replace("](docs/images/", "](images/")


def api() -> str:
    head = "# API\n\nAll of these are imported from `scu_trainer`.\n\n"
    return head + "".join(f"::: scu_trainer.{_home(name)}.{name}\n\n" for name in API)


def _home(name: str) -> str:
    from scu_trainer import HOMES

    return HOMES[name]


def reference() -> str:
    """Every field of the settings: of a configuration file, and as a flag."""
    lines = [
        "# Every field",
        "",
        "In a configuration file and as flags (`--field value`), beside all of `transformers.TrainingArguments`.",
    ]
    for kind in _kinds():
        lines += ["", f"## {kind.__name__}", "", *_summary(kind), ""]
        lines += ["| field | default | what it does |", "| --- | --- | --- |"]
        lines += [_row(field) for field in _fields(kind)]
    return "\n".join(lines) + "\n"


def _kinds() -> list[type]:
    """All that have fields with help, wherever in the settings they are."""
    from scu_trainer import settings

    found = {}
    for item in pkgutil.iter_modules(settings.__path__):
        module = importlib.import_module(f"{settings.__name__}.{item.name}")
        own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
        has_help = [kind for kind in own if dataclasses.is_dataclass(kind) and _fields(kind)]
        found |= {kind.__name__: kind for kind in has_help}
    return [found[name] for name in sorted(found)]


def _fields(kind: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(kind) if field.metadata.get("help")]


def _summary(kind: type) -> list[str]:
    text = (kind.__doc__ or "").strip().split("\n\n")[0]
    return [] if text.startswith(f"{kind.__name__}(") else [" ".join(text.split())]


def _row(field: dataclasses.Field) -> str:
    has_factory = field.default_factory is not dataclasses.MISSING
    default = field.default_factory() if has_factory else field.default
    told = "none" if default is None or default is dataclasses.MISSING else f"`{default}`"
    text = field.metadata["help"].replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
    return f"| `{field.name}` | {told} | {' '.join(text.split())} |"
