"""Finds English that a colleague would not say: `make lint`, or `python tests/english/check.py FILE ...`.

Harper (https://writewithharper.com, in this process, without network) checks the grammar of the pages. rules.yaml lists
the rules that are off, and phrases that read as translated. The messages of the package, and the docstrings that the
reference shows, are checked for those phrases.
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

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "tests" / "english" / "rules.yaml").read_text())
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]
MODULES = sorted((ROOT / "scu_trainer").rglob("*.py"))
SHOWN = ("trainer.py", "loop.py", "wrap.py")
"""Modules whose docstrings are pages of the reference."""
MANIFEST = json.dumps(dict.fromkeys(("author", "version", "description", "license"), "-"))


def linter(grammar: bool) -> Linter:
    """One with our phrases, and with Harper's own rules if ``grammar``. Raises ValueError for a broken pattern."""
    made, pack = Linter(), io.BytesIO()
    with zipfile.ZipFile(pack, "w") as archive:
        archive.writestr("manifest.json", MANIFEST)
        for number, phrase in enumerate(RULES["phrases"]):
            hint = f'let message "Reads as translated."\nlet description "-"\nlet becomes "{phrase["write"]}"'
            archive.writestr(f"Phrase{number}.weir", f'expr main {phrase["find"]}\n{hint}\nlet kind "Style"\n')
    rules = made.get_default_lint_config()
    made.set_lint_config({name: grammar and on and name not in RULES["left_out"] for name, on in rules.items()})
    made.load_weirpack(pack.getvalue())
    return made


def strings(node: ast.AST, docstrings: bool) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of four words or more below ``node``; `x` stands for what an f-string fills in."""
    for child in ast.iter_child_nodes(node):
        parts = child.values if isinstance(child, ast.JoinedStr) else [child]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in parts)
        if not isinstance(child, (ast.JoinedStr, ast.Constant)):
            yield from strings(child, docstrings)
        elif text.count(" ") > 2 and (docstrings or not isinstance(node, ast.Expr)):
            yield child.lineno, text


def findings(path: Path, checker: Linter) -> list[str]:
    """One line for each: file, line, text, what to write."""
    parts = (
        [(1, path.read_text())]
        if path.suffix == ".md"
        else list(strings(ast.parse(path.read_text()), path.name in SHOWN))
    )
    text, lines = "\n\n".join(part for _, part in parts), []
    for line, part in parts:
        lines += [line + offset for offset in range(part.count("\n") + 1)] + [line]
    found = []
    for lint in checker.lint(text):
        line = lines[text.count("\n", 0, lint.span.start)]
        write = "; ".join(suggestion.replacement_text for suggestion in lint.suggestions[:3])
        quoted = " ".join(lint.problem_text.split())[:80]
        found.append(f"{path.relative_to(ROOT)}:{line}: {quoted!r} {lint.message}{f' Write: {write}' if write else ''}")
    return found


def main(names: list[str]) -> list[str]:
    found = []
    for paths, grammar in ((PAGES, True), (MODULES, False)):
        checker = linter(grammar)
        chosen = [path for path in paths if not names or str(path.relative_to(ROOT)) in names]
        found += [one for path in chosen for one in findings(path, checker)]
    return found


if __name__ == "__main__":
    found = main(sys.argv[1:])
    print("\n".join([*found, f"{len(found)} findings"]))
    sys.exit(bool(found))
