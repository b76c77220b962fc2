"""Writes first_run.ipynb beside it, out of the examples: python examples/write_notebook.py [PLACE]"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAME = "first_run.ipynb"


def cells() -> list[tuple[str, str]]:
    return [
        ("markdown", "# scu-trainer: a first run\n\nOn a GPU if the runtime has one, else on its CPU."),
        ("code", "REPOSITORY = 'https://github.com/OWNER/scu-trainer'  # where you found this notebook\n"
                 "!git clone -q --depth 1 $REPOSITORY scu-trainer\n%pip install -q './scu-trainer[report]'"),
        ("markdown", "The main job: a small model learns docstrings while S is held. Its data and base are made here."),
        ("code", "!scu-trainer train --config scu_lora"),
        ("code", "!scu-trainer report runs/scu_lora"),
        ("markdown", "Rows of your own: a file in Alpaca's format, and what was learned of it."),
        ("code", "%%writefile first_finetune.py\n" + example("first_finetune")),
        ("code", "!python first_finetune.py"),
        ("code", "%%writefile talk.py\n" + example("talk")),
        ("code", "!python talk.py runs/animals 'What does the duck say?'"),
    ]  # fmt: skip


def example(name: str) -> str:
    return (HERE / f"{name}.py").read_text(encoding="utf-8").rstrip()


def cell(number: int, kind: str, text: str) -> dict:
    own = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True), **own}


def notebook() -> str:
    made = [cell(number, kind, text) for number, (kind, text) in enumerate(cells())]
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if sys.argv[1:] else HERE / NAME).write_text(notebook(), encoding="utf-8")
