"""What curriculum.json and suspects.jsonl say of a run, against counts made by hand."""

from __future__ import annotations

import json

import datasets
import numpy
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from scu_trainer.control.difficulty import Difficulty
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.curriculum import seen_losses
from scu_trainer.train.curriculum.suspects import MOST_SUSPECTS, PREVIEW_TOKENS, write_suspects
from tests.tiny import Examples, UnevenRows, bert, images, labelled, vit
from tests.train.curricula import curriculum_run

DATA = UnevenRows(21)
LENGTHS = numpy.array([len(DATA[row]["input_ids"]) for row in range(21)])
METHODS = ["none", "token_budget", "acmds", "infobatch", "token_budget+noise_guard+infobatch"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: (curriculum_run(folder / name, name, data=DATA, num_train_epochs=4), folder / name) for name in METHODS
    }


def padded(plan) -> int:
    return sum(len(ids) * int(LENGTHS[ids].max()) for ids in plan.batches)


@pytest.mark.parametrize("name", METHODS)
def test_every_epoch_has_a_row_with_its_counts(runs, name):
    trainer, folder = runs[name]
    rows = read_rows(folder / "curriculum.json")
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["step"] == trainer.state.global_step == sum(row["steps"] for row in rows)
    for row, plan in zip(rows, trainer.plans.values(), strict=True):
        order = plan.batches.order
        assert row["complete"] and row["curriculum"] == name
        assert row["rows"] == row["seen"] == order.size
        assert row["real_tokens"] == LENGTHS[order].sum()
        assert row["padded_tokens"] == padded(plan)
        assert row["cut_tokens"] == row["repeated"] == row["quarantined"] == row["unseen"] == 0
        assert sum(row["skipped"].values()) == 21 - order.size
        assert row["skipped"] == {reason: len(ids) for reason, ids in plan.skipped.items()}
        if plan.weights is None:
            assert row["weights"] is None
        else:
            used = plan.weights[order]
            assert row["weights"] == pytest.approx({"min": used.min(), "max": used.max(), "mean": used.mean()})
    scores = trainer.difficulty.scores
    quantiles = {f"p{share}": numpy.percentile(scores, share) for share in (0, 10, 25, 50, 75, 90, 100)}
    assert rows[-1]["difficulty"] == pytest.approx(quantiles, rel=1e-6)
    figures = trainer.curriculum.figures()["curriculum"]
    assert {key: figures[key] for key in ("rows", "real_tokens", "padded_tokens", "uniform_rows", "never_seen")} == {
        **{key: sum(row[key] for row in rows) for key in ("rows", "real_tokens", "padded_tokens")},
        "uniform_rows": 4 * 21,
        "never_seen": 0,
    }


def test_equal_tokens_are_padded_less(runs):
    by_name = {name: sum(row["padded_tokens"] for row in read_rows(runs[name][1] / "curriculum.json")) for name in runs}
    assert by_name["token_budget"] < 0.95 * by_name["none"]


@pytest.mark.parametrize("name", ["none", "token_budget+noise_guard+infobatch"])
def test_losses_booked_within_an_epoch_are_those_booked_at_its_end(runs, tmp_path, monkeypatch, name):
    monkeypatch.setattr(seen_losses, "PENDING_BATCHES", 1)
    monkeypatch.setattr(seen_losses, "MOST_ROWS", 1)
    early = curriculum_run(tmp_path, name, data=DATA, num_train_epochs=4)
    trainer, folder = runs[name]
    assert read_rows(tmp_path / "curriculum.json") == read_rows(folder / "curriculum.json")
    for array, other in zip(early.difficulty.arrays().values(), trainer.difficulty.arrays().values(), strict=True):
        numpy.testing.assert_array_equal(array, other)


def test_memory_chunks_change_no_count(runs, tmp_path):
    curriculum_run(tmp_path, "none", data=DATA, num_train_epochs=4, memory=MemorySettings(token_cap=16))
    counted = ("rows", "real_tokens", "padded_tokens", "seen", "step")
    found, expected = (
        [[row[key] for key in counted] for row in read_rows(folder / "curriculum.json")]
        for folder in (tmp_path, runs["none"][1])
    )
    assert found == expected


def test_inputs_without_a_length_count_rows(tmp_path):
    curriculum_run(tmp_path, "none", model=vit(), data=images(9), remove_unused_columns=False, num_train_epochs=1)
    (row,) = read_rows(tmp_path / "curriculum.json")
    assert row["rows"] == row["real_tokens"] == row["padded_tokens"] == 9


@pytest.mark.parametrize("memory", [None, MemorySettings(max_batch_size=1)], ids=["whole", "chunks"])
def test_the_accuracy_of_training_is_that_of_its_own_forwards(tmp_path, memory):
    model, data = vit(), images(9)
    with torch.no_grad():
        logits = [model.eval()(data[row]["pixel_values"][None]).logits[0] for row in range(9)]
    right = sum(int(found.argmax()) == int(data[row]["labels"]) for row, found in enumerate(logits))
    options = {"remove_unused_columns": False, "num_train_epochs": 1, "learning_rate": 0.0, "logging_steps": 1}
    trainer = curriculum_run(tmp_path, "none", model=model, data=data, memory=memory, **options)
    (row,) = read_rows(tmp_path / "curriculum.json")
    assert (row["classified"], row["correct"], row["train_accuracy"]) == (9, right, right / 9)
    assert any(entry.get("train_accuracy") == right / 9 for entry in trainer.state.log_history)


def test_texts_have_no_accuracy_of_classes(runs):
    rows = read_rows(runs["none"][1] / "curriculum.json")
    assert all(row["train_accuracy"] is None and row["classified"] == 0 for row in rows)


def test_an_epoch_that_is_cut_short_says_so(tmp_path):
    curriculum_run(tmp_path, "none", data=DATA, num_train_epochs=1.5)
    first, second = read_rows(tmp_path / "curriculum.json")
    assert (first["complete"], first["steps"], second["complete"], second["steps"]) == (True, 6, False, 3)
    assert second["rows"] == second["seen"] == 12


# -- sequence-length warm-up -------------------------------------------------------------------------------------------


def limits(trainer, start: int) -> list[int]:
    """Tokens per row at each step: from ``start`` to 16 over half of the steps, in steps of 8."""
    steps = trainer.state.global_step
    return [8 if step < steps / 2 and start + (16 - start) * step / (steps / 2) < 12 else 16 for step in range(steps)]


def test_length_warmup_cuts_counts_and_divides_by_what_is_left(tmp_path):
    items, settings = [], CurriculumSettings("length_warmup", length_warmup_start=4, length_warmup_steps=0.5)

    def watch(trainer):
        def count(module, args, given):
            if module.training:
                items.append((given["input_ids"].shape, int(given["num_items_in_batch"])))

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)

    trainer = curriculum_run(tmp_path, settings, data=DATA, prepare=watch, gradient_accumulation_steps=1)
    allowed, lengths = limits(trainer, 4), iter(items)
    assert LENGTHS.max() == 16 and set(allowed) == {8, 16}
    cut, real = 0, 0
    for limit, (_, (ids,)) in zip(allowed, trainer.planned_steps(), strict=True):
        own = LENGTHS[ids.numpy()]
        left = numpy.minimum(own, limit)
        shape, divided_by = next(lengths)
        assert tuple(shape) == (len(own), left.max())
        assert divided_by == (left - 2).sum(), "the first two tokens of a row are a prompt"
        cut, real = cut + (own - left).sum(), real + own.sum()
    figures = trainer.curriculum.figures()["curriculum"]
    assert (figures["cut_tokens"], figures["real_tokens"]) == (cut, real) and cut > 0


class LateLabels(UnevenRows):
    """What is learned comes after the eighth token."""

    def __getitem__(self, index):
        row = {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}
        row["labels"][:8] = -100
        return row


def test_a_batch_whose_labels_would_all_be_cut_stays_whole(tmp_path):
    settings, widths = CurriculumSettings("length_warmup", length_warmup_start=8, length_warmup_steps=99), []

    def watch(trainer):
        trainer.model.register_forward_pre_hook(
            lambda module, args, given: widths.append(given["input_ids"].size(1)), with_kwargs=True
        )

    trainer = curriculum_run(tmp_path, settings, data=LateLabels(12), prepare=watch, num_train_epochs=1)
    assert set(widths) == {16} and trainer.curriculum.figures()["curriculum"]["cut_tokens"] == 0


# -- suspects ----------------------------------------------------------------------------------------------------------


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, **{f"w{number}": number for number in range(1, 64)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>")


def known(scores) -> Difficulty:
    difficulty = Difficulty(len(scores), 0.3, 3)
    for epoch in (0, 1):
        difficulty.update(numpy.arange(len(scores)), numpy.array(scores), epoch)
    return difficulty


def written(folder, ids, scores, rows, tokenizer=None) -> list[dict]:
    write_suspects(folder, numpy.array(ids, dtype=int), known(scores), rows, tokenizer)
    return [json.loads(line) for line in (folder / "suspects.jsonl").read_text().splitlines()]


def test_suspects_can_be_read_by_a_person(tmp_path):
    rows = datasets.Dataset.from_dict(
        {
            "input_ids": [[1, 2], [3, 4, 0], [5] * 60],
            "labels": [[1, 2], [3, 4, -100], [5] * 60],
            "documents": [[0], [0, 7], [9]],
        }
    )
    worst, other = written(tmp_path, [2, 1], [0.1, 2.0, 3.14159], rows, word_tokenizer())
    assert (worst["sample_index"], worst["loss"], worst["observations"], worst["documents"]) == (2, 3.1416, 2, [9])
    assert worst["mean_loss"] == pytest.approx(3.1416, abs=0.01)
    assert worst["text"].split() == ["w5"] * PREVIEW_TOKENS and "label" not in worst
    assert (other["sample_index"], other["text"], other["documents"]) == (1, "w3 w4", [0, 7])


def test_suspects_have_their_label(tmp_path):
    (line,) = written(tmp_path, [5], [1.0] * 8, images(8))
    assert (line["sample_index"], line["label"]) == (5, 2) and "text" not in line
    (line,) = written(tmp_path, [0], [1.0], Examples([{"label": 4, "labels": torch.tensor([1, 2])}]))
    assert line["label"] == 4
    (line,) = written(tmp_path, [0], [1.0], [("a row", "without names")])
    assert set(line) >= {"sample_index", "loss", "observations"}


def test_the_list_has_an_end(tmp_path):
    count = MOST_SUSPECTS + 5
    assert len(written(tmp_path, range(count), [1.0] * count, Examples([{"label": 0}] * count))) == MOST_SUSPECTS
    assert written(tmp_path, [], [1.0], Examples([{"label": 0}])) == []


def test_a_run_lists_what_the_guard_suspects(tmp_path):
    """A third of the labels is wrong in a task that the first token decides."""
    data = labelled(30, lambda row: torch.tensor(0))
    for row, example in enumerate(data.rows):
        side = row % 2
        example["input_ids"] = torch.full((6,), 10 + side)
        example["labels"] = torch.tensor(1 - side if row % 5 == 0 else side)
    model = bert(BertForSequenceClassification)
    trainer = curriculum_run(
        tmp_path, "noise_guard", model=model, data=data, num_train_epochs=8, processing_class=word_tokenizer()
    )
    lines = [json.loads(line) for line in (tmp_path / "suspects.jsonl").read_text().splitlines()]
    assert [line["sample_index"] for line in lines] == trainer.curriculum.sampler.suspects().tolist()
    assert lines and all(line["sample_index"] % 5 == 0 for line in lines)
    wrong = lines[0]
    assert wrong["label"] == 1 - wrong["sample_index"] % 2 and wrong["text"].split()[0] == f"w{11 - wrong['label']}"
    assert trainer.curriculum.figures()["curriculum"]["suspects"] == len(lines)
    assert read_json(tmp_path / "curriculum.json")[-1]["skipped"]["noise_guard"] > 0
