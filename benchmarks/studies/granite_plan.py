"""What recipes/granite.yaml takes of the cards that people have, by ``scu-trainer plan``: from shapes, without weights.

python benchmarks/studies/granite_plan.py
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.granite import granite_h_1b
from scu_trainer.cli import main as cli
from scu_trainer.run_files import readable

CARDS = ("RTX 4090", "A100 40GB", "RTX 3080", "T4")
RECIPE = Path(__file__).parents[2] / "recipes" / "granite.yaml"


def planned(model: Path, card: str) -> dict:
    """The report of ``plan`` for one card."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main(["plan", "--config", str(RECIPE), "--model_name_or_path", str(model), "--gpu", card, "--json"])
    return json.loads(output.getvalue())


def line(report: dict) -> str:
    """A row of the table in docs/granite.md."""
    settings, fits = report["recommended"], next((one for one in report["choices"] if one["fits"]), None)
    if fits is None:
        return f"| {report['machine']} | nothing fits | | |"
    changes = " ".join(f"`--{name} {str(value).lower()}`" for name, value in settings.items()) or "nothing"
    rows = f"{fits['rows_per_chunk']} x {fits['tokens_per_row']}"
    return f"| {report['machine']} | {changes} | {rows} | {readable(fits['peak_bytes'])} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        granite_h_1b().save_pretrained(folder)
        print("| card | to change | tokens at once | predicted peak |\n|---|---|---|---|")
        for card in CARDS:
            print(line(planned(Path(folder), card)), flush=True)


if __name__ == "__main__":
    main()
