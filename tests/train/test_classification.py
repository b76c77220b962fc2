"""Scores of classifiers: hand-computed figures, batches that do not fit, intervals, and what a person reads."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch

from scu_trainer.cli.evaluation.screen import as_text
from scu_trainer.train.evaluation.classification import (
    class_metrics,
    class_scores,
    preprocess_class_logits,
    score_samples,
)
from scu_trainer.train.evaluation.scoring import DocumentScores, bootstrap_accuracy, bootstrap_accuracy_difference
from scu_trainer.train.session.summary import best_held_out, held_out_figures, print_table


class Fixed(torch.nn.Module):
    """Says the class that its input names, with odds of 3 to 1 against each of the two others."""

    def __init__(self, fits: int = 10**6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.fits, self.seen = fits, []

    def forward(self, inputs):
        self.seen.append(len(inputs))
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"logits": math.log(3) * torch.nn.functional.one_hot(inputs, 3).float()}


ROWS = [{"inputs": n % 3, "labels": n % 3 if n % 5 else (n + 1) % 3} for n in range(20)]


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def test_nats_and_hits_by_hand():
    logits = torch.tensor([[math.log(3), 0.0, 0.0], [0.0, 0.0, math.log(2)]])
    found = class_scores(logits, torch.tensor([0, 1]))
    assert found.tolist() == [pytest.approx([math.log(5 / 3), 1.0]), pytest.approx([math.log(4), 0.0])]
    assert torch.equal(preprocess_class_logits((logits, "more"), torch.tensor([0, 1])), found)


def test_metrics_are_the_share_of_hits_and_bits_per_label():
    prediction = type("Prediction", (), {"predictions": numpy.array([[math.log(2), 1], [3 * math.log(2), 0]])})
    assert class_metrics(prediction) == {"accuracy": 0.5, "bpt": pytest.approx(2.0)}


@pytest.mark.parametrize("fits", [10**6, 3, 1])
def test_every_row_is_scored_once_also_in_pieces(fits):
    model = Fixed(fits).train()
    scores = score_samples(model, ROWS, collate, rows_at_once=8)
    assert scores.correct.tolist() == [float(bool(n % 5)) for n in range(20)]
    assert scores.nats == pytest.approx([math.log(5 / 3) if n % 5 else math.log(5) for n in range(20)])
    assert scores.accuracy == 0.8 and scores.tokens.tolist() == [1] * 20
    assert sum(size for size in model.seen if size <= fits) == 20 and model.training


def test_intervals_and_differences():
    first = DocumentScores(numpy.ones(50), numpy.ones(50, dtype=int), numpy.zeros(50))
    second = DocumentScores(numpy.ones(50), numpy.ones(50, dtype=int), (numpy.arange(50) < 40).astype(float))
    interval = bootstrap_accuracy(second)
    assert interval.value == 0.8 and 0.6 < interval.low < 0.8 < interval.high < 0.95
    assert bootstrap_accuracy_difference(first, second) == interval
    figures = held_out_figures(first, second)
    assert figures["held_out_accuracy_after"] == asdict(interval)
    assert figures["held_out_accuracy_change"]["value"] == 0.8


def test_the_best_step_is_the_most_accurate():
    log = [{"step": 1, "eval_bpt": 0.2, "eval_accuracy": 0.9}, {"step": 2, "eval_bpt": 0.3, "eval_accuracy": 0.95}]
    assert best_held_out(log) == {"step": 2, "bpt": 0.3, "accuracy": 0.95}
    assert best_held_out([{"step": 3, "eval_bpt": 4.0}, {"step": 4, "eval_bpt": 3.0}]) == {"step": 4, "bpt": 3.0}


def table_shown(folder: Path, width: int, **changes) -> str:
    from rich.console import Console

    before = DocumentScores(numpy.full(10, 2.3), numpy.ones(10, dtype=int), numpy.arange(10) == 0)
    after = DocumentScores(numpy.full(10, 0.1), numpy.ones(10, dtype=int), numpy.arange(10) != 0)
    best = {"step": 3, "bpt": 0.2, "accuracy": 1.0}
    own = {
        "item": "image",
        "unit": "label",
        "has_base": False,
        "has_new_tokens": False,
        "best_held_out": best,
        **changes,
    }
    console = Console(record=True, width=width)
    print_table(console, {**own, **held_out_figures(before, after)}, folder, "trained 3 steps")
    return console.export_text()


def test_a_narrow_screen_cuts_no_figure(tmp_path):
    shown = table_shown(tmp_path, 40)
    assert "\u2026" not in shown and all(figure in shown for figure in ("10.0%", "90.0%", "3.318", "0.144", "-3.174"))


def test_the_table_speaks_of_accuracy(tmp_path):
    shown = table_shown(tmp_path, 100)
    accuracy = next(line for line in shown.splitlines() if "held-out accuracy" in line)
    assert accuracy.index("10.0%") < accuracy.index("90.0%") < accuracy.index("+80.0")
    for words in ("bits per label", "100.0% at step 3", "10 images"):
        assert words in shown
    assert "--against base" not in shown
    assert "eval x --against base\n" in table_shown(Path("x"), 100, has_base=True)
    told = table_shown(Path("x"), 100, has_base=True, has_new_tokens=True)
    assert "eval x\n" in told and "chat x --against base\n" in told, "eval compares models of the same tokens alone"
    assert "scu-trainer report ./-x\n" in table_shown(Path("-x"), 100)


def test_an_evaluation_for_a_person():
    interval = {"value": 0.9, "low": 0.85, "high": 0.95, "confidence": 0.95}
    model = {"name": "runs/a", "word": None, "bpt": interval, "accuracy": interval}
    report = {
        **{"documents": 10, "item": "image", "unit": "label", "dataset": "digits", "mixed_precision": "no"},
        **{"model": model, "against": [{**model, "name": "runs/b", "difference": {**interval, "verdict": "higher"}}]},
        **{"windows": None, "tasks": None, "notes": []},
    }
    shown = as_text(report)
    assert "held out: 10 images of digits" in shown and "accuracy" in shown and "perplexity" not in shown
    minus = next(line for line in shown.splitlines() if line.startswith("runs/b") and "+" in line)
    assert minus.split()[1] == "+0.9000" and minus.endswith("higher: better")
