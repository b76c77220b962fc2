"""Retention while training: what is measured, replayed and unseen; share, scale, resume, and what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import datasets
import numpy
import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, GenerationConfig

from scu_trainer.control.retention import SOLVED_AT
from scu_trainer.data import Collator, default_cache_dir, embedded_tokenizer
from scu_trainer.data.text.anchor import Anchor, round_robin_rows, split_documents
from scu_trainer.errors import CheckpointError, ControlError, DataError
from scu_trainer.settings import (
    CurriculumSettings,
    MemorySettings,
    RegularizationSettings,
    RetentionSettings,
    SafetySettings,
)
from scu_trainer.train.retention.choice import make_actuator_chooser
from scu_trainer.train.retention.loop import BASE_FILE, Retention
from scu_trainer.train.retention.replay import NO_NUMBER, Replay, joined_rows
from scu_trainer.train.retention.sampled import MOST_DOCUMENTS, sampled_text
from scu_trainer.train.retention.verdict import _measure_loss_increase
from tests import processes, tiny
from tests.tiny import VOCAB, Rows, lora, same, saved_llama, trained, weights_of
from tests.train.test_resume import StopAt

COLLATE = Collator(pad_token_id=2)
OLD_ROWS = Rows(72, 16, seed=5)
STEPS = 12
NOTHING = numpy.empty(0, dtype=int)


class Reversed(Rows):
    """Rows whose tokens come the other way round: what they teach contradicts the others."""

    def __getitem__(self, index):
        tokens = self.tokens[index].flip(0)
        return {"input_ids": tokens, "labels": tokens.clone()}


def rows_of(numbers, named: str) -> datasets.Dataset:
    rows = [OLD_ROWS.tokens[number].tolist() for number in numbers]
    return datasets.Dataset.from_list(
        [{"input_ids": row, "labels": row, "length": len(row), named: n} for n, row in zip(numbers, rows, strict=True)]
    )


def anchor(replays: bool = True, fingerprint: str = "one") -> Anchor:
    parts = {"measured": range(24), "unseen": range(24, 40), "replayed": range(40, 72)}
    return Anchor(
        "old.txt",
        rows_of(parts["replayed"], "documents") if replays else None,
        rows_of(parts["measured"], "document"),
        rows_of(parts["unseen"], "document"),
        {**{name: len(numbers) for name, numbers in parts.items()}, "in_the_data": 0},
        fingerprint,
        "of the test",
    )


@pytest.fixture(scope="module")
def base():
    return base_weights()


def llama():
    return tiny.llama(layers=1)


def base_weights() -> dict[str, torch.Tensor]:
    """Of a model that has learned the anchor, so that there is something to lose."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=OLD_ROWS.tokens, labels=OLD_ROWS.tokens).loss.backward()
        optimizer.step()
    return model.state_dict()


def from_base(base):
    model = llama()
    model.load_state_dict(base)
    return model


def retention(base=None, settings=None, **changes) -> Retention:
    settings = RetentionSettings("old.txt", **{"retain_frequency": 3, **(settings or {})})
    load = None if base is None else lambda: from_base(base)
    return Retention(changes.pop("anchor", None) or anchor(), settings, COLLATE, load, **changes)


def learned(base, folder, loop, model=None, **changes):
    """A trainer that has learned rows which contradict the anchor."""
    more = {"max_steps": STEPS, "learning_rate": 3e-3, "data_collator": COLLATE, **changes}
    callbacks = [*more.pop("callbacks", []), *([loop] if loop else [])]
    return trained(model or from_base(base), folder, dataset=Reversed(32, 16, seed=6), callbacks=callbacks, **more)


def rows_in(folder) -> list[dict]:
    return json.loads((Path(folder) / "retain_history.json").read_text())


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_forgetting_is_measured_and_replay_answers(base, tmp_path):
    loop = retention(base, {"retain_budget_bits": 0.05})
    trainer = learned(base, tmp_path, loop)
    rows = rows_in(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 5, 8, 11, 12]
    assert rows[-1]["excess_bits"] > 0.05 and rows[-1]["share"] > rows[0]["share"]
    figures = trainer.loop("retention").figures()["retention"]
    assert figures["replayed_rows"] == loop.replay.used == rows[-1]["replayed_rows"] > 0
    assert set(loop.scalars()) == {"retain/excess_bits", "retain/high_bits", "retain/share"}
    assert figures["actuator"] == "replay" and figures["measurements"] == 6


def test_the_excess_is_the_loss_over_the_bases_own(base, tmp_path):
    """By hand, over all measured rows: of a model that has made one step, against the base."""
    loop = retention(base, {"retain_budget_bits": 9.0})
    model = learned(base, tmp_path, loop, max_steps=1).model.eval()

    def bits(model) -> float:
        tokens = OLD_ROWS.tokens[:16]  # the first documents, as the first sample has them
        with torch.no_grad():
            return float(model(input_ids=tokens, labels=tokens).loss) / float(numpy.log(2))

    assert rows_in(tmp_path)[0]["measured_bits"] == pytest.approx(bits(model) - bits(from_base(base).eval()), rel=1e-3)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_update_is_scaled_to_the_budget(base, tmp_path, tuning):
    """Judged by rows that decided nothing; all of the update would cost more."""
    torch.manual_seed(0)
    model = from_base(base) if tuning == "full" else lora(from_base(base))
    settings = {"retain_budget_bits": 0.1, "retain_max_share": 0.2}
    rate = 3e-3 if tuning == "full" else 2e-2
    own_rows = rows_of(range(8), "document") if tuning == "lora" else None
    loop = retention(base, settings, own_rows=own_rows)
    learned(base, tmp_path, loop, model, learning_rate=rate)
    found = loop.figures()["retention"]
    assert found["lost_bits_of_the_whole_update"]["value"] > 0.1
    assert 0 < found["scale"] < 1 and found["tried"][0]["share"] == 1.0
    kept = [one for one in found["tried"] if one["share"] == found["scale"]]
    assert kept[0]["high"] <= 0.1
    assert found["lost_bits"]["value"] < found["lost_bits_of_the_whole_update"]["value"]
    assert any(f"{found['scale']:.1%} of what was learned is kept" in notice for notice in loop.notices)
    assert _measure_loss_increase(loop, "measured", SOLVED_AT).high == kept[0]["high"]  # of the model that is left
    assert ("own_text" in found) == (tuning == "lora")


@pytest.fixture(scope="module")
def adapter() -> dict[str, torch.Tensor]:
    """State of a model whose adapter has learned the anchor."""
    model = lora(llama(), r=8)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        model(input_ids=OLD_ROWS.tokens, labels=OLD_ROWS.tokens).loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("is_given", [True, False])
def test_an_adapter_that_goes_on_is_not_scaled_back_to_its_base(adapter, tmp_path, is_given):
    """The anchor is what the adapter has learned before, so that without it more would be lost."""

    def start():
        model = lora(llama(), r=8)
        model.load_state_dict(adapter)
        return model

    loop = retention(None, {"retain_budget_bits": 0.05})
    if is_given:
        loop.base = start
    after = learned(None, tmp_path, loop, start(), learning_rate=2e-2).model
    found = loop.figures()["retention"]
    assert found["lost_bits_of_the_whole_update"]["value"] > 0.2
    if is_given:
        kept = [one["high"] for one in found["tried"] if one["share"] == found["scale"]]
        assert 0 < found["scale"] < 1 and kept[0] <= 0.05 and found["lost_bits"]["value"] < 0.1
    else:
        assert found["scale"] == 1.0 and found["lost_bits"] == found["lost_bits_of_the_whole_update"]
        assert any("the update is left whole: without it" in notice for notice in loop.notices)
        assert _measure_loss_increase(loop, "unseen", 0.95).value == found["lost_bits"]["value"]
    assert not same(weights_of(after), {name: adapter[name] for name in weights_of(after)})


def test_an_update_that_cannot_be_scaled_is_left_and_said(base, tmp_path):
    loop = retention(None, {"retain_budget_bits": 0.01, "retain_max_share": 0.1})
    learned(base, tmp_path, loop)
    found = loop.figures()["retention"]
    assert found["scale"] == 1.0 and not found["is_within_budget"]
    assert any(
        "cannot be scaled here: the model that full tuning started from was not given" in n for n in loop.notices
    )
    assert any("more than the budget of 0.01" in notice for notice in loop.notices)
    assert "lost on old" in dict(loop.lines({"retention": found}))


def test_a_budget_that_cannot_be_held_is_said_and_may_end_the_run(base, tmp_path):
    settings = {"retain_budget_bits": 0.002, "retain_max_share": 0.01, "retain_frequency": 1}
    said = retention(base, settings)
    assert learned(base, tmp_path / "a", said, learning_rate=1e-2).state.global_step == STEPS
    assert "could not be held" in said.notices[0] and "retain_stop: true would end the run here" in said.notices[0]
    stopped = retention(base, {**settings, "retain_stop": True})
    assert learned(base, tmp_path / "b", stopped, learning_rate=1e-2).state.global_step < STEPS
    assert stopped.notices[0].endswith("the run ends here (retain_stop)")


def test_a_budget_below_what_can_be_measured_is_said(base, tmp_path):
    loop = retention(base, {"retain_budget_bits": 1e-6})
    learned(base, tmp_path, loop)
    assert any("known only to within" in notice for notice in loop.notices)
    wide = retention(base, {"retain_budget_bits": 9.0})
    learned(base, tmp_path / "wide", wide)
    assert wide.notices == []


def test_lambda_acts_where_nothing_is_replayed(base, tmp_path):
    settings = {"retain_budget_bits": 0.02, "retain_frequency": 1}
    law = RegularizationSettings(law="fixed", lambda_init=0.0)
    loop = retention(base, settings, anchor=anchor(replays=False))
    learned(base, tmp_path / "a", loop, regularization=law, learning_rate=1e-2)
    rows = rows_in(tmp_path / "a")
    assert rows[-1]["lambda"] == pytest.approx(loop.state.effort * 0.05 / 1e-2) and rows[-1]["share"] == 0
    assert loop.trainer.regularizer.state.lam > 0
    free = retention(base, {**settings, "retain_budget_bits": 1000.0}, anchor=anchor(replays=False))
    learned(base, tmp_path / "b", free, regularization=law, learning_rate=1e-2)
    assert rows[-1]["excess_bits"] < rows_in(tmp_path / "b")[-1]["excess_bits"]


def test_lambda_without_a_loop_to_act_through(base, tmp_path):
    with pytest.raises(ControlError, match="the regularization loop is not steering"):
        learned(base, tmp_path, retention(base, anchor=anchor(replays=False)))


def test_rows_of_the_data_are_all_trained_on_and_counted_alone(base, tmp_path):
    """Beside the loops on memory and on data: replayed rows come on top, and are in no book of theirs."""
    loop = retention(base, {"retain_budget_bits": 0.05})
    loops = {"memory": MemorySettings(), "curriculum": CurriculumSettings()}
    trainer = learned(base, tmp_path, loop, max_steps=8, **loops)
    difficulty = trainer.difficulty
    assert loop.replay.used > 0
    assert difficulty.observations.sum() == 32 and (difficulty.observations == 1).all()
    epoch = json.loads((tmp_path / "curriculum.json").read_text())[-1]
    assert epoch["rows"] == 32


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replays", "memory"), [(True, None), (True, MemorySettings()), (False, None)])
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(base, tmp_path, replays, memory, monkeypatch):
    law = None if replays else RegularizationSettings(law="fixed", lambda_init=0.0)

    def run(folder, **changes):
        loop = retention(base, {"retain_budget_bits": 0.05, "retain_max_share": 0.3}, anchor=anchor(replays))
        loops = {"memory": memory, "regularization": law}
        return learned(base, folder, loop, save_steps=9, save_strategy="steps", **loops, **changes)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", callbacks=[StopAt(9)])
    assert (tmp_path / "parts" / "checkpoint-9" / BASE_FILE).is_file()
    (tmp_path / "parts" / BASE_FILE).unlink()
    scored = []
    monkeypatch.setattr(Retention, "_require_finite", lambda self: scored.append(self))
    resumed = run(tmp_path / "parts", resume=str(tmp_path / "parts" / "checkpoint-9"))
    assert scored == []  # the base is not measured again: by now the weights are others
    assert same(weights_of(whole.model), weights_of(resumed.model))
    assert rows_in(tmp_path / "whole") == rows_in(tmp_path / "parts")
    assert (tmp_path / "whole" / BASE_FILE).read_text() == (tmp_path / "parts" / BASE_FILE).read_text()


def test_a_start_before_the_interval_was_chosen_chooses_it(base, tmp_path):
    """From step 3 on, whose time was to say how often may be measured. Its logs say what was measured before."""
    settings = {"retain_budget_bits": 0.05, "retain_frequency": None}
    saving = {"save_steps": 3, "save_strategy": "steps", "logging_steps": 1}
    learned(base, tmp_path, retention(base, settings), callbacks=[StopAt(3)], **saving)
    loop = retention(base, settings)
    trainer = learned(base, tmp_path, loop, resume=str(tmp_path / "checkpoint-3"), **saving)
    assert loop.figures()["retention"]["steps_between_measurements"] >= 1
    logged = next(row for row in trainer.state.log_history if row["step"] == 4)
    assert logged["retain/excess_bits"] == rows_in(tmp_path)[1]["excess_bits"]


def test_a_start_that_measures_nothing_claims_no_cost(base, tmp_path):
    settings = {"save_steps": STEPS, "save_strategy": "steps", "regularization": RegularizationSettings()}
    learned(base, tmp_path, retention(base), **settings)
    trainer = learned(base, tmp_path, retention(base), resume=str(tmp_path / f"checkpoint-{STEPS}"), **settings)
    found = {name: trainer.loop(name).figures()[name] for name in ("retention", "regularization")}
    assert [figures["overhead_fraction"] for figures in found.values()] == [None, None]
    assert found["retention"]["last"] == rows_in(tmp_path)[-1]


def checkpoint_of(base, folder) -> Path:
    loop = retention(base, {"retain_budget_bits": 0.05})
    learned(base, folder, loop, max_steps=2, save_steps=2, save_strategy="steps")
    return folder / "checkpoint-2"


def test_a_checkpoint_of_another_anchor_or_of_none(base, tmp_path):
    checkpoint = checkpoint_of(base, tmp_path / "a")
    other = retention(base, anchor=anchor(fingerprint="two"))
    with pytest.raises(CheckpointError, match="belongs to another text"):
        learned(base, tmp_path / "b", other, resume=str(checkpoint))
    learned(base, tmp_path / "c", None, max_steps=2, save_steps=2, save_strategy="steps", callbacks=[Nothing()])
    with pytest.raises(CheckpointError, match="written without retain"):
        learned(base, tmp_path / "d", retention(base), resume=str(tmp_path / "c" / "checkpoint-2"))


def test_a_base_that_is_lost_is_not_measured_on_other_weights(base, tmp_path):
    checkpoint = checkpoint_of(base, tmp_path / "a")
    for path in (checkpoint / BASE_FILE, checkpoint.parent / BASE_FILE):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"the loss of the base on old\.txt is no longer known"):
        learned(base, tmp_path / "b", retention(base), resume=str(checkpoint))


@pytest.mark.parametrize("name", ["retain_state.json", BASE_FILE])
@pytest.mark.parametrize("content", ["", "[]", '{"law": {"effort": 1}, "fingerprint": "one"}', '{"fingerprint": "one"'])
def test_a_torn_file_is_one_line(base, tmp_path, name, content):
    checkpoint = checkpoint_of(base, tmp_path / "a")
    (checkpoint / "manifest.json").unlink()
    (checkpoint / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
        learned(base, tmp_path / "b", retention(base), resume=str(checkpoint))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["checkpoint", "run directory"])
def test_weights_alone_go_on_with_the_base_of_before(base, tmp_path, where):
    """Without optimizer state everything starts over, but for what was lost since the start."""
    checkpoint = checkpoint_of(base, tmp_path / "a")
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "retain_state.json").unlink()
    if where == "run directory":
        (checkpoint / BASE_FILE).unlink()
    loop = retention(base, {"retain_budget_bits": 0.05})
    safety = SafetySettings(weights_only=True)
    learned(base, tmp_path / "b", loop, max_steps=4, resume=str(checkpoint), safety=safety)
    expected = json.loads((tmp_path / "a" / BASE_FILE).read_text())
    assert json.loads((tmp_path / "b" / BASE_FILE).read_text()) == expected


class Nothing(StopAt):
    def __init__(self) -> None:
        super().__init__(10**9)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_measurement_that_runs_out_of_memory_is_made_in_parts(base, tmp_path, monkeypatch, caplog):
    """As an evaluation: the same figures, in forward passes of half the rows."""
    expected = retention(base, {"retain_budget_bits": 9.0})
    learned(base, tmp_path / "a", expected)
    from scu_trainer.train.evaluation import scoring

    true_scores, refused = scoring._batch_scores, []

    def scores(model, batch, device):
        if len(batch["input_ids"]) > 8:
            refused.append(len(batch["input_ids"]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return true_scores(model, batch, device)

    monkeypatch.setattr(scoring, "_batch_scores", scores)
    loop = retention(base, {"retain_budget_bits": 9.0})
    learned(base, tmp_path / "b", loop)
    assert refused and "8 from now on" in caplog.text
    found, wanted = rows_in(tmp_path / "b"), rows_in(tmp_path / "a")
    assert [row["measured_bits"] for row in found] == pytest.approx([row["measured_bits"] for row in wanted], abs=1e-5)


def test_a_base_for_the_scale_that_does_not_fit_is_said(base, tmp_path):
    def load():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    loop = retention(None, {"retain_budget_bits": 0.01, "retain_max_share": 0.1})
    loop.base = load
    learned(base, tmp_path, loop)
    assert any("cannot be scaled here" in notice and "does not fit in memory" in notice for notice in loop.notices)
    assert loop.judged.figures["scale"] == 1.0


def test_a_base_without_a_finite_loss(base, tmp_path):
    model = from_base(base)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ControlError, match=r"24 of 24 measured rows of old\.txt"):
        learned(base, tmp_path, retention(base), model)


# -- rows --------------------------------------------------------------------------------------------------------------


def batch(rows: int, width: int, **more) -> dict[str, torch.Tensor]:
    tokens = torch.arange(rows * width).reshape(rows, width) % VOCAB
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens), **more}


def test_the_share_of_replayed_rows_is_met_to_within_one_row():
    replay = Replay(list(rows_of(range(32, 64), "documents")), COLLATE, seed=0)
    for step in range(1, 101):
        replay.add_to_batch(batch(4, 16), 4, 0.3)
        assert abs(replay.used - step * 4 * 0.3 / 0.7) <= 1


def test_each_row_is_replayed_once_in_a_pass_over_all_ranks():
    rows = list(rows_of(range(32, 64), "documents"))
    ranks = [Replay(rows, lambda found: found, 0, rank, 2) for rank in (0, 1)]
    first = [number for replay in ranks for number in replay._next_numbers(16)]
    assert sorted(first) == list(range(32))
    for replay in ranks:
        replay.used = 16
    second = [number for replay in ranks for number in replay._next_numbers(16)]
    assert sorted(second) == list(range(32)) and second != first


@pytest.mark.parametrize("widths", [(8, 8), (8, 5), (5, 8)])
def test_rows_are_joined_as_the_collator_would_have(widths):
    rows = [[{"input_ids": list(range(3, 3 + width)), "labels": list(range(3, 3 + width))}] * 2 for width in widths]
    joined = joined_rows(COLLATE(rows[0]), COLLATE(rows[1]))
    expected = Collator(pad_token_id=0)([*rows[0], *rows[1]])
    assert {name: value.tolist() for name, value in joined.items()} == {n: v.tolist() for n, v in expected.items()}


def test_isolated_documents_stay_apart_when_joined():
    def row(width):
        return {"input_ids": list(range(width)), "labels": list(range(width)), "position_ids": list(range(width))}

    joined, expected = joined_rows(COLLATE([row(5)]), COLLATE([row(8)])), Collator()([row(5), row(8)])
    assert joined["position_ids"].tolist() == expected["position_ids"].tolist()


def test_a_replayed_row_has_no_number_and_other_columns_are_refused():
    joined = joined_rows(batch(2, 8, sample_index=torch.tensor([4, 5])), batch(1, 8))
    assert joined["sample_index"].tolist() == [4, 5, NO_NUMBER]
    with pytest.raises(ControlError, match="batches with attention_mask, input_ids, labels, pixels"):
        joined_rows(batch(1, 8, pixels=torch.zeros(1)), batch(1, 8))


def test_the_parts_share_no_document_and_copies_count_once():
    digests = numpy.array([number % 40 for number in range(60)])
    parts = split_documents(digests, 0, "a.txt has", NOTHING)
    everything = numpy.concatenate(list(parts.values()))
    assert len({*digests[everything].tolist()}) == len(everything) == 40
    assert (len(parts["measured"]), len(parts["unseen"]), len(parts["replayed"])) == (8, 8, 24)
    assert split_documents(digests, 1, "a.txt has", NOTHING)["unseen"].tolist() != parts["unseen"].tolist()


def test_rows_next_to_each_other_are_of_different_documents():
    documents = numpy.array([7, 7, 7, 3, 3, 9])
    assert round_robin_rows(documents).tolist() == [0, 3, 5, 1, 4, 2]


def test_documents_of_the_training_data_are_in_no_part():
    digests = numpy.arange(40)
    parts = split_documents(digests, 0, "a.txt has", digests[:20])
    assert sorted(digests[numpy.concatenate(list(parts.values()))]) == list(range(20, 40))
    with pytest.raises(DataError, match=r"10 different documents of 40 \(30 more are also in the training data\)"):
        split_documents(digests, 0, "a.txt has", digests[:30])


def test_too_few_documents_are_refused_with_numbers():
    with pytest.raises(DataError, match=r"a\.txt has 9 different documents of 12, but 16 are needed"):
        split_documents(numpy.array([number % 9 for number in range(12)]), 0, "a.txt has", NOTHING)


def test_which_actuator_is_used_and_why():
    def chosen(rows, planned, has_lambda=True, **settings):
        return make_actuator_chooser(RetentionSettings("a.txt", **settings), planned, has_lambda)(rows)

    assert chosen(100, 900) == (True, "100 rows to train on, 1.0 passes over them at a share of 10%")
    assert chosen(100, 9000) == (False, "100 rows to train on, 10.0 passes over them at a share of 10% are more than 4")
    assert chosen(100, 9000, retain_actuator="replay")[0]
    assert chosen(100, 900, retain_actuator="lambda") == (False, "as requested")
    assert chosen(0, 900) == (False, "no rows are left to train on")
    for rows, planned, has_lambda, settings in (
        (100, 9000, False, {}),
        (0, 900, False, {}),
        (0, 900, True, {"retain_actuator": "replay"}),
    ):
        with pytest.raises(DataError, match=re.escape("give more of that text")):
            chosen(rows, planned, has_lambda, **settings)


# -- several ranks -----------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    old = base_weights()
    loop = retention(old, {"retain_budget_bits": 0.05, "retain_max_share": 0.3})
    used: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "_next_numbers", noted_in(used))
        trainer = learned(old, folder, loop, memory=MemorySettings(), per_device_train_batch_size=2)
    counts = {loop.figures()["retention"]["replayed_rows"], loop.newest["replayed_rows"], loop.state_dict()["replayed"]}
    torch.save((weights_of(trainer.model), loop.state, used, counts), folder / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def noted_in(used: list[int]):
    true_next = Replay._next_numbers

    def next_rows(self, count):
        found = true_next(self, count)
        used.extend(found)
        return found

    return next_rows


def test_ranks_agree_and_replay_rows_of_their_own(tmp_path):
    done = processes.run([__file__, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert same(first[0], second[0]) and first[1] == second[1] and first[1].measurements == 6
    assert not {*first[2]} & {*second[2]}  # less than a pass
    assert first[3] == second[3] == {len(first[2]) + len(second[2])} and first[2]


if __name__ == "__main__":
    main(Path(sys.argv[1]))


# -- text that the model writes itself ---------------------------------------------------------------------------------


def test_the_help_says_how_many_texts_are_written_at_most():
    help_sentence = RetentionSettings.__dataclass_fields__["retain_documents"].metadata["help"]
    assert f"with sampled, at most {MOST_DOCUMENTS} are generated" in help_sentence


def test_sampled_text_is_decided_by_the_seed_and_leaves_the_random_numbers_alone(tmp_path):
    tokenizer = embedded_tokenizer(default_cache_dir(None))
    model = AutoModelForCausalLM.from_pretrained(saved_llama(tmp_path / "model"))
    how = {"documents": 5, "tokens": 8}
    state = torch.get_rng_state()
    one, same_seed = (sampled_text(model, tokenizer, tmp_path / name, seed=0, **how) for name in "ab")
    other = sampled_text(model, tokenizer, tmp_path / "a", seed=1, **how)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.read_text() == same_seed.read_text() != other.read_text()
    for config in ({"repetition_penalty": 9.0}, {"num_beams": 2}, {"return_dict_in_generate": True}):
        model.generation_config = GenerationConfig(**config)
        again = sampled_text(model, tokenizer, tmp_path / "-".join(config), seed=0, **how)
        assert again.read_text() == one.read_text()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither bos nor eos; give a file of text instead"):
        sampled_text(model, tokenizer, tmp_path / "c", seed=0, **how)


def packed_by_torchao(model) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(version=2))


@pytest.mark.parametrize("store", [cpu_offload, packed_by_torchao])
def test_a_model_that_is_offloaded_or_packed_by_torchao_writes_too(tmp_path, store):
    tokenizer, how = embedded_tokenizer(default_cache_dir(None)), {"documents": 1, "tokens": 4, "seed": 0}
    folder = saved_llama(tmp_path / "model")
    files = set()
    for factor in (1, 1, 2):  # the same weights have the same text, others another
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(factor)
        store(model)
        files.add(sampled_text(model, tokenizer, tmp_path, **how))
    assert len(files) == 2
