"""English that a colleague would not say, in the pages and in the package: `make lint`, or give the files to look at.

Harper (https://writewithharper.com) checks grammar, spelling and sentence length, phrases.yaml holds what reads as
translated, words.txt the terms that we accept. Messages and docstrings of the package are checked for phrases only.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from harper import Linter

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]
PHRASES = yaml.safe_load((HERE / "phrases.yaml").read_text())
OFF = (HERE / "off.txt").read_text().split()


def linter(grammar: bool) -> Linter:
    """One that knows our words and phrases; ``grammar``: and checks with Harper's own rules, except those in off.txt."""
    made, pack = Linter(), io.BytesIO()
    with zipfile.ZipFile(pack, "w") as archive:
        archive.writestr(
            "manifest.json", json.dumps(dict.fromkeys(("author", "version", "description", "license"), "-"))
        )
        for number, phrase in enumerate(PHRASES):
            lines = {"message": "Reads as translated.", "description": "-", "kind": "Style", "becomes": phrase["write"]}
            rule = [f"expr main {phrase['find']}", *(f'let {name} "{text}"' for name, text in lines.items())]
            archive.writestr(f"Phrase{number}.weir", "\n".join(rule))
    ours = made.get_default_lint_config()
    made.set_lint_config({name: grammar and on and name not in OFF for name, on in ours.items()})
    made.import_words((HERE / "words.txt").read_text().split())
    assert made.load_weirpack(pack.getvalue()) is None
    return made


def strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of more than three words below ``node``; what an f-string fills in is `x`."""
    for child in ast.iter_child_nodes(node):
        parts = child.values if isinstance(child, ast.JoinedStr) else [child]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in parts)
        if isinstance(child, ast.JoinedStr) or isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield from [(child.lineno, text)] * (text.count(" ") > 2)
        else:
            yield from strings(child)


def findings(made: Linter, text: str, name: str = "", line: int = 1) -> Iterator[str]:
    for lint in made.lint(text):
        hints = ", ".join(one.replacement_text for one in lint.suggestions[:3])
        where = f"{name}:{line + text.count(chr(10), 0, lint.span.start)}"
        yield f"{where}: {' '.join(lint.problem_text.split())[:80]!r} {lint.message} {f'Write: {hints}' if hints else ''}"


def main(names: list[str]) -> list[str]:
    pages = [path for path in PAGES if not names or str(path.relative_to(ROOT)) in names]
    code = [
        path
        for path in sorted((ROOT / "scu_trainer").rglob("*.py"))
        if not names or str(path.relative_to(ROOT)) in names
    ]
    strict, loose = linter(grammar=True), linter(grammar=False)
    found = [one for path in pages for one in findings(strict, path.read_text(), str(path.relative_to(ROOT)))]
    for path in code:
        for line, text in strings(ast.parse(path.read_text())):
            found += findings(loose, text, str(path.relative_to(ROOT)), line)
    return found


if __name__ == "__main__":
    found = main(sys.argv[1:])
    print("\n".join([*found, f"{len(found)} findings"]))
    sys.exit(bool(found))
