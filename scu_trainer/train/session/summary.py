"""The results of a run, as scu_metrics.json and as a table."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from rich.box import SQUARE
from rich.console import Console
from rich.table import Table

from scu_trainer.figures import before_and_after, best_evaluation, held_out_size
from scu_trainer.safe_paths import safe_argument
from scu_trainer.train.evaluation.by_source import scores_by_source
from scu_trainer.train.evaluation.scoring import (
    DocumentScores,
    bootstrap_accuracy,
    bootstrap_accuracy_difference,
    bootstrap_bpt,
    bootstrap_difference,
    bootstrap_exact,
)


def held_out_figures(before: Optional[DocumentScores], after: Optional[DocumentScores]) -> dict[str, Any]:
    """Return bits per token before and after with 95 % bootstrap intervals over documents, and their paired difference;
    for classifiers (bits per label, over samples) also the accuracy."""
    if before is None or after is None:
        return {"held_out_documents": 0}
    accuracy = {}
    if after.correct is not None:
        accuracy = {
            "held_out_accuracy_before": bootstrap_accuracy(before).over(before),
            "held_out_accuracy_after": bootstrap_accuracy(after).over(after),
            "held_out_accuracy_change": bootstrap_accuracy_difference(before, after).over(before),
        }
    return {
        **accuracy,
        **_report_figures(before.reports, after.reports),
        "held_out_documents": len(before.tokens),
        "held_out_tokens": int(before.tokens.sum()),
        "held_out_bpt_before": bootstrap_bpt(before).over(before),
        "held_out_bpt_after": bootstrap_bpt(after).over(after),
        "held_out_bpt_change": bootstrap_difference(before, after).over(before),
    }


def _report_figures(before: Optional[DocumentScores], after: Optional[DocumentScores]) -> dict[str, Any]:
    """Return bits per word and the share of exact texts, for texts that are written in addition to classes."""
    if before is None or after is None:
        return {}
    found = {}
    for when, scores in (("before", before), ("after", after)):
        found[f"held_out_report_bpt_{when}"] = bootstrap_bpt(scores).over(scores)
        found[f"held_out_report_exact_{when}"] = bootstrap_exact(scores).over(scores)
    return found


def held_out_by_source(
    before: Optional[DocumentScores], after: Optional[DocumentScores], data: Any
) -> dict[str, dict[str, Any]]:
    """Return documents, tokens and bits per token before and after for each source of a mixture, by name, or {}."""
    if before is None or after is None or not getattr(data, "sources", ()):
        return {}
    first, second = scores_by_source(before, data), scores_by_source(after, data)
    found = {
        name: {
            "documents": len(first[name].tokens),
            "tokens": int(first[name].tokens.sum()),
            "bpt_before": bootstrap_bpt(first[name]).over(first[name]),
            "bpt_after": bootstrap_bpt(second[name]).over(second[name]),
        }
        for name in first
    }
    return {"held_out_sources": found}


def best_held_out(log_history: list[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """Return the best evaluation of the run with its step: the highest accuracy, then the lowest bits per token."""
    evaluations = [entry for entry in log_history if math.isfinite(entry.get("eval_bpt", math.nan))]
    if not evaluations:
        return None
    best = min(evaluations, key=lambda entry: (-entry.get("eval_accuracy", 0.0), entry["eval_bpt"]))
    accuracy = {"accuracy": best["eval_accuracy"]} if "eval_accuracy" in best else {}
    return {"step": best["step"], "bpt": best["eval_bpt"], **accuracy}


def print_table(
    console: Console,
    figures: dict[str, Any],
    output_dir: Path,
    trained: str,
    of_loops: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the final table: results, where the files are, and the next commands. ``of_loops``: (name, value) pairs."""
    _print_changes(console, figures, trained)
    table = Table(show_header=False, pad_edge=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    best = _best_line(figures) if figures["held_out_documents"] else []
    off = [] if "regularization" in figures else [("SCU", "off")]
    for name, value in [*best, ("held out", held_out_size(figures)), *off, *of_loops]:
        table.add_row(name, value)
    table.add_row("files", str(output_dir))
    console.print(table)
    is_scored = figures["has_base"] and not figures["has_new_tokens"]  # eval compares only models with the same tokens
    against = " --against base" if is_scored else ""
    folder = shlex.quote(safe_argument(output_dir))
    console.print(f"next: scu-trainer eval {folder}{against}", soft_wrap=True)
    if figures["has_base"]:  # the model generates text
        console.print(f"      scu-trainer chat {folder} --against base", soft_wrap=True)
    console.print(f"      scu-trainer report {folder}", soft_wrap=True)
    if (output_dir / "logs" / "tensorboard").is_dir():
        console.print(f"      tensorboard --logdir {folder}/logs/tensorboard", soft_wrap=True)


def _print_changes(console: Console, figures: dict[str, Any], trained: str) -> None:
    rows = before_and_after(figures)
    if not rows:
        console.print(trained, soft_wrap=True)
        return
    table = Table(title=trained, title_justify="left", pad_edge=False, box=SQUARE)
    for name in ("", "before", "after", "change (95 % interval)"):
        table.add_column(name, overflow="fold")  # a number that is cut off on a narrow screen would be wrong
    for row in rows:
        table.add_row(*row.short)
    console.print(table)


def _best_line(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line if an evaluation during training was better than the result at the end."""
    best, accuracy = figures.get("best_held_out"), figures.get("held_out_accuracy_after")
    is_better = bool(best) and (
        best["accuracy"] > accuracy["value"] + 1e-9
        if accuracy
        else best["bpt"] < figures["held_out_bpt_after"]["value"] - 1e-4
    )
    return [("best during training", str(best_evaluation(figures)))] if is_better else []
