"""Write the pages and notebooks of the tutorials from the scripts with cells: python examples/write_tutorials.py

The scripts are in jupytext's percent format: `# %% [markdown]` begins text in comments, `# %%` begins code. Each
becomes docs/tutorials/NAME.md and examples/notebooks/NAME.ipynb. first_run.ipynb has the main job and the first
tutorial.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent
TUTORIALS = {  # name: the extras of the package that it needs
    "first_finetune": "",
    "trl_dpo": "benchmarks",
    "memory_limit": "",
    "vision": "images",
    "curriculum": "",
    "retain": "",
    "resume": "",
}
INSTALL = """\
REPOSITORY = 'https://github.com/OWNER/scu-trainer'  # where you found this notebook
!git clone -q --depth 1 $REPOSITORY scu-trainer
%pip install -q './scu-trainer{}'
import sys; sys.argv[1:] = []  # the arguments of the notebook process are not flags of scu-trainer"""
Cells = list[tuple[str, str]]


def cells(name: str) -> Cells:
    """Return ("markdown" or "code", text) of each cell. The first one is the docstring."""
    text = (HERE / f"{name}.py").read_text(encoding="utf-8")
    _, about, rest = text.split('"""', 2)
    title, _, more = about.partition(": python examples/")
    first = "# " + title + "\n\n" + more.partition("\n")[2].strip()
    found = [("markdown", first.strip())]
    for part in re.split(r"^# %%", rest, flags=re.MULTILINE):
        mark, _, body = part.partition("\n")
        if mark.strip() == "[markdown]":
            found.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        elif body.strip():
            found.append(("code", body.strip()))
    return found


def page(name: str) -> str:
    blocks = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells(name)]
    usage = (HERE / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].splitlines()[0].partition(": ")[2]
    source = f"To run it in a checkout, after `make deps` and `source .venv/bin/activate`, type `{usage}`.\n"
    source += f"This page is [examples/{name}.py](../../examples/{name}.py), which a test runs. It is a notebook too,\n"
    source += f"[examples/notebooks/{name}.ipynb](../../examples/notebooks/{name}.ipynb)."
    return "\n\n".join([blocks[0], source, *blocks[1:]]) + "\n"


def notebook(parts: Cells, extras: str = "") -> str:
    wanted = ",".join(filter(None, ("report", extras)))
    first, *rest = parts
    made = [cell(*numbered) for numbered in enumerate([first, ("code", INSTALL.format(f"[{wanted}]")), *rest])]
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def cell(number: int, part: tuple[str, str]) -> dict:
    kind, text = part
    own = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True), **own}


def first_run() -> Cells:
    title, *rest = cells("first_finetune")
    return [
        ("markdown", "# scu-trainer: a first run\n\nIt runs on a GPU if the runtime has one, otherwise on its CPU."),
        ("markdown", "A small model learns docstrings while S is held at its target. Data and model are made here."),
        ("code", "!scu-trainer train --config scu_lora"),
        ("code", "!scu-trainer report runs/scu_lora"),
        ("markdown", title[1].replace("# ", "## ", 1)),
        *[(kind, text.replace("## ", "### ", 1) if kind == "markdown" else text) for kind, text in rest],
    ]


def written() -> dict[Path, str]:
    """Return the path and text of each file."""
    notebooks = {f"{name}.ipynb": notebook(cells(name), extras) for name, extras in TUTORIALS.items()}
    notebooks["first_run.ipynb"] = notebook(first_run())
    files = {HERE / "notebooks" / name: text for name, text in notebooks.items()}
    return files | {ROOT / "docs" / "tutorials" / f"{name}.md": page(name) for name in TUTORIALS}


if __name__ == "__main__":
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")
    print("written: " + ", ".join(str(path.relative_to(ROOT)) for path in written()))
