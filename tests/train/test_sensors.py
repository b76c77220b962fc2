"""The sensor task: what its data can and cannot teach, and the three loops around its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from scu_trainer.cli import configuration, train
from scu_trainer.cli.evaluation import eval as evaluate
from scu_trainer.data.sensors.collate import SensorCollator
from scu_trainer.data.sensors.synthetic import ceiling_alone, export_synthetic
from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.models.loading.offloaded import has_offloaded_weights
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import (
    CurriculumSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    RegularizationSettings,
)
from scu_trainer.settings.sensors import BRANCHES, DEFAULT_BRANCHES, SYNTHETIC, SensorSettings
from scu_trainer.train.evaluation.classification import score_samples
from scu_trainer.train.job.components import EvaluationSource
from scu_trainer.train.tasks.sensors import SensorTask
from scu_trainer.train.trainer import SCUTrainer
from tests.faults import FakeGauge, fail_above_tokens, fail_in_backward
from tests.recordings import SHAPES, edit_manifest, folder_of, prepared, trident
from tests.tiny import arguments, same, weights_of
from tests.train.stepwise import ENDLESS_BYTES, compared, error_of
from tests.train.test_resume import StopAt

RECIPE = Path(__file__).parents[2] / "recipes" / "sensors.yaml"
TINY_SIZES = {"sensor_hidden_size": 16, "sensor_heads": 2, "sensor_channels": 4, "sensor_layers": 1}


def collator() -> SensorCollator:
    return SensorCollator(SHAPES)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """24 recordings of uneven lengths, some of which lack a branch."""
    own = {"sensor_missing_share": 0.3}
    return prepared(SYNTHETIC, tmp_path_factory.mktemp("cache"), own=own).train


# -- what can be learned -----------------------------------------------------------------------------------------------


def accuracy(data, branches: list[str], epochs: int) -> float:
    """Of a small model of these branches on held-out recordings, trained by hand."""
    shapes = data.train.store.shapes
    collate = SensorCollator({array: shapes[array] for name in branches for array in BRANCHES[name]})
    model = trident(hidden_size=32, intermediate_size=64, branches=branches, initializer_range=0.1)
    loader = torch.utils.data.DataLoader(data.train, 48, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for batch in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    batch = collate([data.eval[number] for number in range(len(data.eval))])
    with torch.no_grad():
        return (model.eval()(**batch).logits.argmax(dim=1) == batch["labels"]).double().mean().item()


def test_one_branch_cannot_reach_what_two_do(tmp_path):
    """Infrared and kinematics, the cheap ones; by construction one alone is right in half of four classes."""

    branches = ["infrared", "kinematics"]
    own = {"branches": branches, "sensor_samples": 720, "sensor_missing_share": 0.0}
    data = prepared(SYNTHETIC, tmp_path, own=own, validation_split_percentage=33)
    both = accuracy(data, branches, epochs=7)
    assert both >= 0.9
    for branch in branches:
        # Held-out recordings are a sample: 240 of them leave the ceiling by more than 0.1 once in a thousand.
        assert accuracy(data, [branch], epochs=7) <= ceiling_alone(4) + 0.1 < both


# -- the loops ---------------------------------------------------------------------------------------------------------


def trainer_of(folder, rows, model=None, **changes) -> SCUTrainer:
    loops = {name: changes.pop(name, None) for name in ("regularization", "memory", "memory_gauge", "curriculum")}
    return SCUTrainer(
        trident() if model is None else model,
        arguments(folder, **changes),
        train_dataset=rows,
        data_collator=collator(),
        callbacks=changes.pop("callbacks", None),
        **loops,
    )


def step(folder, rows, memory, prepare=None, **changes):
    """Gradients and weights of two steps of 8 recordings."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2, **changes}
    return compared(trident(), folder, memory, rows, prepare, data_collator=collator(), **given)


def test_chunks_of_a_batch_give_the_gradient_of_the_whole(tmp_path, rows):
    _, stock = step(tmp_path / "stock", rows, None)
    for cap in (1, 3):
        trainer, found = step(tmp_path / str(cap), rows, MemorySettings(max_batch_size=cap))
        assert trainer.micro_batches.reduction.is_exact and trainer.micro_batches.reduction.mixes is None
        for ours, theirs in zip(found.gradients, stock.gradients, strict=True):
            assert error_of(ours, theirs) < 2e-5


def test_memory_that_does_not_hold_the_batch_changes_no_gradient(tmp_path, rows):
    _, stock = step(tmp_path / "stock", rows, None)
    trainer = SCUTrainer(
        model := trident(),
        arguments(tmp_path / "ours", max_steps=2, optim="sgd", max_grad_norm=0.0, gradient_accumulation_steps=2),
        train_dataset=rows,
        data_collator=collator(),
        memory=MemorySettings(),
        memory_gauge=FakeGauge(ENDLESS_BYTES),
    )
    with fail_above_tokens(model, 2) as tried:
        trainer.train()
    assert max(tried) > 2 and 2 in tried
    difference = error_of(weights_of(model), stock.weights[-1])
    assert difference < 1e-5


def test_out_of_memory_in_backward_is_survived(tmp_path, rows):
    model = trident()
    with fail_in_backward(model.trident.fusion.queries, call=2) as counter:
        trainer = trainer_of(tmp_path, rows, model, memory=MemorySettings(), memory_gauge=FakeGauge(ENDLESS_BYTES))
        trainer.train()
    assert counter.calls > 3 and trainer.state.global_step == 6
    history = read_rows(tmp_path / "memory_history.json")
    assert any("out of memory" in str(row) for row in history)


def test_every_loop_acts(tmp_path, rows):
    trainer = trainer_of(
        tmp_path,
        rows,
        regularization=RegularizationSettings(target_s=0.05, sigma=0.1),
        memory=MemorySettings(max_batch_size=2),
        memory_gauge=FakeGauge(ENDLESS_BYTES),
        curriculum=CurriculumSettings("noise_guard"),
        max_steps=-1,
        num_train_epochs=4,
        learning_rate=3e-3,
    )
    trainer.train()
    assert any(row["lambda"] > 0 for row in read_rows(tmp_path / "scu_history.json"))
    assert all(row["rows_per_chunk"] <= 2 for row in read_rows(tmp_path / "memory_history.json"))
    difficulty = trainer.difficulty
    assert (difficulty.observations >= 3).all() and not difficulty.counts(0)["unseen"]
    model = trainer.model.eval()
    hard, easy = (int(pick) for pick in (difficulty.scores.argmax(), difficulty.scores.argmin()))
    with torch.no_grad():
        losses = [model(**collator()([rows[number]])).loss.item() for number in (hard, easy)]
    assert losses[0] > losses[1]


def test_losses_of_samples_are_those_of_the_model(tmp_path, rows):
    """One step from the start: what is noted of each recording is its loss alone."""
    trainer = trainer_of(
        tmp_path, rows, curriculum=CurriculumSettings(), max_steps=1, per_device_train_batch_size=24, learning_rate=0.0
    )
    trainer.train()
    model = trainer.model.eval()
    with torch.no_grad():
        expected = [model(**collator()([rows[number]])).loss.item() for number in range(24)]
    assert trainer.difficulty.scores.tolist() == pytest.approx(expected, rel=1e-4)


ALL_LOOPS = {
    "regularization": RegularizationSettings(target_s=0.05, sigma=0.1),
    "memory": MemorySettings(token_cap=3),
    "curriculum": CurriculumSettings("acmds"),
}


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, rows):
    def run(name, resume=False, stop=None):
        trainer = trainer_of(
            tmp_path / name,
            rows,
            trident(dropout=0.1),
            **ALL_LOOPS,
            memory_gauge=FakeGauge(ENDLESS_BYTES),
            per_device_train_batch_size=8,
            max_steps=-1,
            num_train_epochs=3,
            lr_scheduler_type="linear",
        )
        if stop is not None:
            trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    whole = run("whole")
    run("parts", stop=4)
    resumed = run("parts", resume=True)
    assert resumed.state.global_step == whole.state.global_step > 6  # more than an epoch later
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert (resumed.difficulty.scores == whole.difficulty.scores).all()


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Recordings with reports, a third without; and the head that knows their words."""
    folder = folder_of(tmp_path_factory.mktemp("written") / "recordings", samples=48)
    for number in range(3, 49, 3):
        edit_manifest(folder, number, report=None)
    data = prepared(folder, folder.parent / "cache", own={"report_head": True})
    return data, {"report_words": list(data.report_words), "report_length": 12}


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_micro_batches_with_reports_are_exact(tmp_path, written, weight):
    """Reports of uneven counts, some rows without: the loss is a sum over rows all the same."""
    data, head = written
    head = {**head, "report_weight": weight}
    given = {"per_device_train_batch_size": 8, "max_steps": 2, "data_collator": collator()}
    _, stock = compared(trident(**head), tmp_path / "stock", None, data.train, None, **given)
    trainer, found = compared(
        trident(**head), tmp_path / "ours", MemorySettings(max_batch_size=3), data.train, None, **given
    )
    assert trainer.micro_batches.reduction.is_exact
    for ours, theirs in zip(found.gradients, stock.gradients, strict=True):
        assert error_of(ours, theirs) < 2e-5


def test_the_curriculum_sees_the_loss_of_class_and_report(tmp_path, written):
    """And may weigh rows by it: the sum of what each row gives is the loss."""
    data, head = written
    given = {"train_dataset": data.train, "data_collator": collator(), "curriculum": CurriculumSettings("infobatch")}
    changes = {"per_device_train_batch_size": 6, "max_steps": -1, "num_train_epochs": 4, "learning_rate": 0.0}
    trainer = SCUTrainer(model := trident(**head, report_weight=2.0), arguments(tmp_path, **changes), **given)
    trainer.train()
    model.eval()
    with torch.no_grad():
        rows = [collator()([data.train[number]]) for number in range(len(data.train))]
        expected = [model(**row).loss.item() for row in rows]
        of_classes = [model(**{**row, "report_ids": None}).loss.item() for row in rows]
    assert trainer.difficulty.scores.tolist() == pytest.approx(expected, rel=1e-4)
    assert max(abs(one - two) for one, two in zip(expected, of_classes, strict=True)) > 1


def test_reports_are_learned_word_for_word(tmp_path):
    """The report follows from the class here, so a model that knows the class can write it."""
    data = prepared(SYNTHETIC, tmp_path, own={"branches": ["cooling", "geometry"], "sensor_samples": 480} | REPORTS)
    head = {"report_words": list(data.report_words), "report_length": 12}
    model = trident(hidden_size=32, intermediate_size=64, branches=["cooling", "geometry"], **head)
    collate = SensorCollator(data.train.store.shapes)
    loader = torch.utils.data.DataLoader(data.train, 32, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for batch in (batch for _ in range(8) for batch in loader):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    scores = score_samples(model.eval(), data.eval, collate)
    batch = collate([data.eval[number] for number in range(len(data.eval))])
    texts = [text.replace(" ,", ",") for text in model.generate_report(**batch)]
    exact = [text == report for text, report in zip(texts, data.eval.reports, strict=True)]
    assert scores.reports.correct.mean() == sum(exact) / len(exact) > 0.8 and scores.reports.bpt < 0.5


REPORTS = {"report_head": True, "sensor_missing_share": 0.0}


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "recordings"
    export_synthetic(folder, samples=32, classes=4)
    return folder


def words_of(folder, recordings, **changes) -> list[str]:
    given = {
        "task": SensorTask.name,
        "dataset": recordings,
        "output_dir": folder,
        "cache_dir": folder.parent / "cache",
        "use_cpu": "true",
        "mixed_precision": "no",
        "max_steps": 3,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "scu": "false",
        "predict_memory": "false",
        **TINY_SIZES,
        **changes,
    }
    return [word for name, value in given.items() for word in (f"--{name}", *str(value).split())]


def job_of(folder, recordings, **changes):
    return configuration.read_job(None, words_of(folder, recordings, **changes))


@pytest.fixture(scope="module")
def base(tmp_path_factory, recordings):
    """A trained model, by the command."""
    folder = tmp_path_factory.mktemp("base") / "run"
    assert train.main(words_of(folder, recordings)) == 0
    return folder


def test_the_command_trains_and_writes_a_run(base):
    metrics = read_json(base / "scu_metrics.json")
    assert metrics["steps"] == 3 and read_json(base / "run.json")["status"] == "finished"
    assert read_json(base / "training_config.json")["data"]["per_class"] == {"0": 6, "1": 6, "2": 6, "3": 6}
    assert (base / "config.json").is_file() and (base / "modeling_trident.py").is_file()


def test_the_command_learns_reports_and_tells_how_well(tmp_path, recordings, capsys):
    run = tmp_path / "run"
    given = {"report_head": "true", "report_weight": 0.5, "eval_strategy": "steps", "eval_steps": 3, "scu": "true"}
    assert train.main(words_of(run, recordings, **given)) == 0
    assert "reports word for word" in capsys.readouterr().out
    metrics, config = read_json(run / "scu_metrics.json"), read_json(run / "config.json")
    assert (
        metrics["held_out_report_bpt_after"]["value"] > 0 and 0 <= metrics["held_out_report_exact_after"]["value"] <= 1
    )
    assert config["report_weight"] == 0.5 and config["report_words"][:4] == ["<pad>", "<unk>", "<bos>", "<eos>"]
    row = next(row for row in read_json(run / "trainer_state.json")["log_history"] if "eval_report_bpt" in row)
    assert row["eval_report_bpt"] == pytest.approx(metrics["held_out_report_bpt_after"]["value"], rel=1e-4)
    assert {"eval_report_exact", "eval_accuracy", "eval_bpt"} <= {*row}
    again = scored(run, recordings)  # the head of a trained model is kept without being asked for
    assert list(again.data.report_words) == config["report_words"]
    assert SensorTask().score(again.model, again).reports is not None
    capsys.readouterr()
    assert evaluate.main([str(run), "--cache_dir", str(run.parent / "cache")]) == 0
    assert "word for word" in capsys.readouterr().out


def test_adapters_keep_a_report_head_and_make_no_new_one(tmp_path, recordings, base):
    changes = {"tuning": "lora", "lora_r": 2, "report_head": "true"}
    with pytest.raises(SettingsError, match=r"report_head: true adds a new head to .* use tuning: full"):
        load(job_of(tmp_path / "a", recordings, model_name_or_path=base, **changes))
    run = tmp_path / "run"
    assert train.main(words_of(run, recordings, model_name_or_path=base, report_head="true", max_steps=1)) == 0
    parts = load(job_of(tmp_path / "b", recordings, model_name_or_path=run, **changes))
    trains = {name for name, weight in parts.model.named_parameters() if weight.requires_grad}
    assert any(".report." in name for name in trains)
    assert all("lora_" in name or "classifier" in name or ".report." in name for name in trains)


def test_a_bad_recording_stops_the_command_before_training(tmp_path, recordings, capsys):
    folder = tmp_path / "recordings"
    export_synthetic(folder, samples=32, classes=4)
    (folder / "000004.npz").write_bytes(b"torn")
    assert train.main(words_of(tmp_path / "run", folder)) == 2
    assert "manifest.jsonl line 5 (000004.npz)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train.main(words_of(tmp_path / "run", folder, skip_bad_rows="true", max_steps=1)) == 0
    assert read_json(tmp_path / "run" / "training_config.json")["data"]["dropped"] == {"unreadable file": 1}


def test_the_trained_model_is_scored_on_what_it_has_not_seen(base, recordings):
    from scu_trainer.cli.subjects import held_out_settings, subject_of
    from scu_trainer.train.job.components import EvaluationSource

    subject = subject_of(str(base))
    data, seed = held_out_settings(subject, {}, 0)
    task = SensorTask()
    parts = task.load_scored(EvaluationSource(subject.model, data, subject.own(task.name), seed))
    scores = task.score(parts.model, parts)
    assert len(scores.nats) == 8 and not parts.model.training


@pytest.mark.parametrize("branch", BRANCHES)
def test_each_branch_alone_goes_through_the_command(tmp_path, recordings, branch):
    assert train.main(words_of(tmp_path / "run", recordings, branches=branch, max_steps=1)) == 0
    assert read_json(tmp_path / "run" / "config.json")["branches"] == [branch]


def test_qlora_over_random_weights_trains_all_but_the_packed_blocks(tmp_path, recordings):
    """From scratch: the weights that the adapters lie over are kept; the run is scored, and made again bit for bit."""
    pytest.importorskip("bitsandbytes")
    cache = tmp_path / "cache"
    given = {"tuning": "qlora", "sensor_hidden_size": 32, "cache_dir": cache, "learning_rate": 1e-2, "max_steps": 2}
    assert train.main(words_of(tmp_path / "run", recordings, **given)) == 0
    (start,) = (cache / "starts").glob("trident-????????????")
    assert read_json(tmp_path / "run" / "adapter_config.json")["base_model_name_or_path"] == str(start)
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "run" / "adapter_model.safetensors")
    whole = {name.removeprefix("base_model.model."): weight for name, weight in after.items() if "lora_" not in name}
    assert {*whole} <= {*before} and {"trident.branches.visible.stem.0.filter.weight", "trident.norm.weight"} <= {
        *whole
    }
    assert {name for name in before if ".layers." not in name} - {*whole} == {
        f"trident.fusion.{n}" for n in ("queries", "kinds")
    }
    still = {name for name, weight in whole.items() if torch.equal(weight, before[name])}
    assert not still
    again = scored(tmp_path / "run", recordings, "qlora")
    accuracy = SensorTask().score(again.model, again).accuracy
    figures = read_json(tmp_path / "run" / "scu_metrics.json")
    assert accuracy == pytest.approx(figures["held_out_accuracy_after"]["value"])
    assert train.main(words_of(tmp_path / "same", recordings, **given)) == 0  # found in the cache: the same run
    other = load_file(tmp_path / "same" / "adapter_model.safetensors")
    assert all(torch.equal(after[name], other[name]) for name in after)


def test_qlora_over_random_weights_needs_blocks_to_pack(tmp_path, recordings):
    with pytest.raises(ModelError, match="would quantize nothing"):
        load(job_of(tmp_path / "run", recordings, tuning="qlora", branches="cooling geometry", **NARROW))


NARROW = {"sensor_hidden_size": 16, "sensor_fusion_layers": 1}


def test_frozen_branches_of_a_trained_model_stay_as_they_are(tmp_path, recordings, base):
    frozen = {"model_name_or_path": base, "frozen_branches": "infrared fusion", "learning_rate": 1e-2}
    assert train.main(words_of(tmp_path / "run", recordings, **frozen)) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    kept = ("trident.branches.infrared.", "trident.fusion.")
    assert moved == {name for name in before if not name.startswith(kept)} and moved < {*before}


def test_all_branches_train_by_the_command(tmp_path, recordings):
    every = {"branches": " ".join(BRANCHES), "checkpoint_branches": "dual_vision plume cooling geometry"}
    every |= {"predict_memory": "true", "max_steps": 1}
    assert train.main(words_of(tmp_path / "run", recordings, **every)) == 0
    assert read_json(tmp_path / "run" / "config.json")["branches"] == list(BRANCHES)
    again = scored(tmp_path / "run", recordings)
    assert list(again.model.trident.branches) == list(BRANCHES)
    scores = SensorTask().score(again.model, again)
    assert len(scores.nats) == len(again.data.eval)


def test_micro_batches_of_all_branches_are_exact(tmp_path):
    own = {"sensor_missing_share": 0.4, "branches": list(BRANCHES)}
    rows = prepared(SYNTHETIC, tmp_path / "cache", own=own).train
    given = {"per_device_train_batch_size": 8, "max_steps": 2, "data_collator": collator()}
    every = {"branches": list(BRANCHES)}
    _, stock = compared(trident(**every), tmp_path / "stock", None, rows, None, **given)
    trainer, found = compared(
        trident(**every), tmp_path / "ours", MemorySettings(max_batch_size=3), rows, None, **given
    )
    assert trainer.micro_batches.reduction.is_exact
    for ours, theirs in zip(found.gradients, stock.gradients, strict=True):
        assert error_of(ours, theirs) < 2e-5


def load(job):
    return SensorTask().load(job, Console(quiet=True))


def test_adapters_over_a_trained_model(tmp_path, recordings, base):
    changes = {"tuning": "lora", "model_name_or_path": base, "lora_r": 2}
    plain = load(job_of(tmp_path / "a", recordings, **changes))
    trains = [name for name, weight in plain.model.named_parameters() if weight.requires_grad]
    assert trains and all("lora_" in name or "classifier" in name for name in trains)
    away = load(
        job_of(tmp_path / "b", recordings, **changes, offload_linears_mb=0, offload_linears_folder=tmp_path / "disk")
    )
    assert has_offloaded_weights(away.model)
    losses = []
    for name, parts in (("a", plain), ("b", away)):
        trainer = SCUTrainer(
            parts.model,
            arguments(tmp_path / name, logging_steps=1, max_steps=4, save_steps=4, save_strategy="steps"),
            train_dataset=parts.data.train,
            data_collator=parts.collator,
            memory=MemorySettings(),
            memory_gauge=FakeGauge(ENDLESS_BYTES),
            curriculum=CurriculumSettings("none"),
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4 and losses[0] == losses[1]


@pytest.fixture
def blind(tmp_path):
    """Recordings that all lack the camera."""
    folder = folder_of(tmp_path / "blind", samples=32)
    for number in range(1, 33):
        edit_manifest(folder, number, missing=["visible"])
    return folder


def test_a_model_is_tuned_on_recordings_that_all_lack_a_branch(tmp_path, blind, base):
    with pytest.raises(DataError, match=r"has the branch visible; set branches: \[infrared, kinematics\]"):
        load(job_of(tmp_path / "new", blind))
    parts = load(job_of(tmp_path / "run", blind, model_name_or_path=base))
    batch = parts.collator([parts.data.train[number] for number in range(4)])
    assert list(parts.model.config.branches) == list(DEFAULT_BRANCHES) and not batch["visible_mask"].any()
    assert torch.isfinite(parts.model(**batch).loss)


def scored(path, recordings, tuning="full"):
    model = ModelSettings(model_name_or_path=str(path), tuning=tuning)
    return SensorTask().load_scored(EvaluationSource(model, DataSettings(dataset=str(recordings)), SensorSettings(), 0))


def test_an_adapter_is_not_scored_on_other_classes(tmp_path, recordings, base):
    run = tmp_path / "run"
    assert train.main(words_of(run, recordings, tuning="lora", model_name_or_path=base, max_steps=1)) == 0
    assert scored(run, recordings, "lora").data.label_names == ["0", "1", "2", "3"]
    other = tmp_path / "other"
    export_synthetic(other, samples=32, classes=4)
    for number in range(1, 33):
        edit_manifest(other, number, label="abcd"[number % 4])
    with pytest.raises(DataError, match=r"label 'b' is not one of the 4 classes: 0, 1, 2, 3"):
        scored(run, other, "lora")
    with pytest.raises(ModelError, match="has a head for the classes 0, 1, 2, 3"):
        load(job_of(tmp_path / "more", other, tuning="lora", model_name_or_path=run))


def test_checkpointing_of_chosen_branches(tmp_path, recordings):
    console = Console(record=True, quiet=False, file=open("/dev/null", "w"), width=200)
    with console.file:
        parts = SensorTask().load(job_of(tmp_path / "run", recordings, checkpoint_branches="visible fusion"), console)
        text = console.export_text()
    assert "5 blocks of visible, fusion" in text
    assert parts.model.checkpointed == ("visible", "fusion")


REFUSED = [
    ({"report_weight": 0.5}, "report_weight is 0.5, but no report is learned; set report_head: true"),
    ({"frozen_branches": "plume"}, "frozen_branches has 'plume', but the model has visible, infrared"),
    (
        {"frozen_branches": "visible"},
        "frozen_branches keeps what a trained model knows, but this run starts from scratch",
    ),
    (
        {"frozen_branches": "visible", "model_name_or_path": "/some/model", "tuning": "lora"},
        "frozen_branches is for tuning: full, and tuning: lora already freezes all",
    ),
    ({"quantized_branches": "visible"}, "quantized_branches is for tuning: qlora, but tuning is full"),
    ({"tuning": "lora"}, "tuning: lora adapts a trained model, but there is none"),
    ({"synthetic": "true"}, "synthetic: true generates recordings, but dataset is"),
    ({"device_map": "auto", "torch_compile": "true"}, "device_map auto fetches weights in hooks that torch.compile"),
    (
        {"checkpoint_every_layer": "true", "checkpoint_branches": "visible"},
        "checkpoint_every_layer covers all branches",
    ),
    ({"offload_linears_mb": 1}, "offload_linears_mb moves frozen layers in full precision, but tuning is full"),
    (
        {"offload_linears_mb": 1, "tuning": "lora", "model_name_or_path": "/some/model"},
        "training on a CPU has them anyway; give offload_linears_folder",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_that_contradict_each_other_are_refused(tmp_path, recordings, changes, message):
    with pytest.raises(SettingsError, match=message):
        job_of(tmp_path / "run", recordings, **changes).check()


def test_the_recipe_is_for_this_task(tmp_path):
    recipe = yaml.safe_load(RECIPE.read_text())
    assert recipe["task"] == SensorTask.name and recipe["synthetic"] is True
    job = configuration.read_job(str(RECIPE), ["--use_cpu", "true", "--output_dir", str(tmp_path / "run")])
    job.check()
    assert job.data.dataset == SYNTHETIC and job.own.branches == list(DEFAULT_BRANCHES)
