"""The trainer with its loops on, used otherwise than by one ``train()``: steps by hand, twice, from a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import skip_first_batches
from peft import IA3Config, LoraConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import BertForSequenceClassification, Trainer, TrainerCallback

from scu_trainer.errors import CheckpointError, ControlError, SettingsError
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.checkpoints.adapters import check_adapter
from scu_trainer.train.loop_checks import warn_about_unsaved_weights
from scu_trainer.train.trainer import SCUTrainer, with_loops
from tests.faults import FakeGauge
from tests.tiny import Examples, Rows, UnevenRows, arguments, bert, llama, pad, same, small_llama, trained, weights_of
from tests.train.test_off_is_stock import BareLoss, Points, tensors, untimed

LOOPS = {
    "regularization": RegularizationSettings(target_s=0.02),
    "memory": MemorySettings(),
    "curriculum": CurriculumSettings("token_budget+noise_guard"),
    "efficiency": EfficiencySettings(ema_decay=0.9),
    "safety": SafetySettings(),
}
EACH = {**{name: {name: settings} for name, settings in LOOPS.items()}, "all": LOOPS}


def made(folder, kind=SCUTrainer, model=None, rows=None, **changes) -> Trainer:
    loops = {name: changes.pop(name) for name in list(changes) if name in LOOPS}
    args = arguments(folder, **changes)
    return kind(model or small_llama(), args, train_dataset=rows or UnevenRows(), data_collator=pad, **loops)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"target_modules": r".*\.q_proj"}, "target_modules was ['q_proj'], now"),
        ({"lora_alpha": 99}, "lora_alpha was 8, now 99. Training continues with its weights"),
        ({"target_modules": ["o_proj"]}, "target_modules was ['q_proj'], now ['o_proj']. 8 weights are not in both"),
        ({"r": 2}, "r was 8, now 2. 4 weights are not in both or have another shape"),
        ({"layers_to_transform": [0]}, "layers_to_transform was None, now [0]. 2 weights are not in both"),
    ],
    ids=str,
)
def test_a_resume_with_another_adapter_is_told_or_refused(tmp_path, caplog, changes, told):
    def model(**changes):
        return get_peft_model(llama(), LoraConfig(**{"target_modules": ["q_proj"], **changes}))

    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "safety": SafetySettings()}
    made(tmp_path, model=model(), **saves).train()
    refused = pytest.raises(CheckpointError) if "not in both" in told else contextlib.nullcontext()
    with refused as error:
        made(tmp_path, model=model(**changes), **saves).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    said = f"{caplog.text}{error and error.value}"
    assert told in said and ("the adapter of" in said) == bool(told)


@pytest.mark.parametrize("loops", EACH.values(), ids=EACH)
def test_a_step_before_training_is_that_of_the_model(tmp_path, loops):
    batch = pad([UnevenRows()[i] for i in range(4)])
    model = small_llama().train()
    model(**batch).loss.backward()
    trainer = made(tmp_path, **loops)
    expected = {name: p.grad for name, p in model.named_parameters()}
    for inputs in (batch, batch):
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, dict(inputs))
        assert same({name: p.grad for name, p in trainer.model.named_parameters()}, expected)
    trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())))
    trainer.model.zero_grad()
    trainer.train()
    untouched = made(tmp_path, **loops)
    untouched.train()
    assert same(weights_of(trainer.model), weights_of(untouched.model))
    trainer.training_step(trainer.model, dict(batch))


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("value", [True, False, {}, "noise_guard"])
def test_settings_of_another_kind_are_refused(tmp_path, name, value):
    with pytest.raises(SettingsError, match=rf"{name} is {value!r}; allowed: {type(LOOPS[name]).__name__}\(\.\.\.\)"):
        made(tmp_path, **{name: value})


@pytest.mark.parametrize("tokens", [-1, 0, "5"])
def test_tokens_that_are_no_number_of_tokens_are_refused(tmp_path, tokens):
    with pytest.raises(SettingsError, match=f"regularization_tokens is {tokens!r}; it must be 1 or more"):
        SCUTrainer(
            small_llama(),
            arguments(tmp_path),
            train_dataset=Rows(),
            regularization=LOOPS["regularization"],
            regularization_tokens=tokens,
        )


@pytest.mark.parametrize("argument", [{"regularization_tokens": 100.0}, {"memory_gauge": FakeGauge(2**40)}])
def test_an_argument_without_the_loop_that_reads_it_is_told(tmp_path, caplog, argument):
    name, user = *argument, next(iter(argument)).partition("_")[0]
    parts = {"args": arguments(tmp_path), "train_dataset": Rows(), **argument}
    SCUTrainer(small_llama(), **parts, **{user: LOOPS[user]})
    assert "has no effect" not in caplog.text
    SCUTrainer(small_llama(), **parts)
    assert f"{name} has no effect without {user}={type(LOOPS[user]).__name__}(...)" in caplog.text


def test_an_adapter_is_the_one_that_was_saved_whatever_peft_adds_to_its_names(tmp_path, caplog):
    saved, loaded = (bert(BertForSequenceClassification) for _ in range(2))
    get_peft_model(saved, LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(loaded, tmp_path, is_trainable=True)  # its modules_to_save: each name twice
    check_adapter(tmp_path, model, tells=True)
    assert not caplog.text
    model.peft_config["default"].lora_alpha = 99
    check_adapter(tmp_path, model, tells=False)  # as on the other ranks
    assert not caplog.text


PEFT_SAVES = {
    "beside the adapter": (LoraConfig(), "norm", "3 trained weights are not part of the adapter"),
    "in modules_to_save": (LoraConfig(modules_to_save=["lm_head"]), "lm_head", ""),
    "biases": (LoraConfig(bias="all"), "bias", ""),
    "no rank": (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "ia3", ""),
    "prompts": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "prompt", ""),
    "their encoder": (
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "prompt",
        "of P_TUNING produces",
    ),
}


@pytest.mark.parametrize("name", PEFT_SAVES)
def test_trained_weights_that_peft_does_not_save_are_told(tmp_path, caplog, name):
    config, trained_too, told = PEFT_SAVES[name]
    model = get_peft_model(small_llama(), config)
    for weight_name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or (trained_too in weight_name and "original" not in weight_name))
    made(tmp_path, model=model, max_steps=1, safety=SafetySettings()).train()
    assert ("peft saves" in caplog.text) == bool(told) and told in caplog.text


def test_the_hub_is_not_asked_which_modules_are_saved(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *of: asked.append(of))
    base = small_llama()
    base.name_or_path = "me/base"
    warn_about_unsaved_weights(get_peft_model(base, LoraConfig(modules_to_save=["lm_head"])))
    assert not asked and not caplog.text


class Named(Examples):
    nickname = "mine"


def test_a_planned_loader_has_what_the_stock_one_has(tmp_path):
    rows = Named(Rows(12)[i] for i in range(12))
    stock, ours = (
        made(tmp_path, kind, rows=rows, **loops).get_train_dataloader()
        for kind, loops in ((Trainer, {}), (SCUTrainer, {"curriculum": CurriculumSettings("none")}))
    )
    plain = ("total_batch_size", "total_dataset_length", "batch_size", "drop_last", "num_workers", "skip_batches")
    for name in plain:
        assert getattr(ours, name) == getattr(stock, name), name
    assert set(dir(stock)) - {"_loader"} <= set(dir(ours))
    assert len(ours) == len(stock) and ours.dataset.nickname == stock.dataset.nickname
    ours.set_epoch(1)
    assert len(list(skip_first_batches(ours, 1))) == len(ours) - 1
    with pytest.raises(AttributeError):
        _ = ours.dataset.nothing


class OwnLoader(SCUTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, collate_fn=pad)


class OwnLoss(SCUTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"])["loss"]


def test_who_chooses_samples_and_losses_past_a_curriculum_is_told(tmp_path):
    with pytest.raises(ControlError, match=r"get_train_dataloader of OwnLoader .* super\(\)\.get_train_dataloader"):
        made(tmp_path, OwnLoader, **LOOPS).train()
    with pytest.raises(ControlError, match=r"compute_loss of OwnLoss does not call it; .* super\(\)\.compute_loss"):
        made(tmp_path, OwnLoss, **LOOPS).train()
    only_statistics = made(tmp_path, OwnLoss, **LOOPS | {"curriculum": CurriculumSettings("none")})
    only_statistics.train()
    assert only_statistics.state.global_step == 6 and only_statistics.nonfinite_guard.skipped_steps == 0
    assert any("compute_loss of OwnLoss does not call" in notice for notice in only_statistics.curriculum.notices)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_whose_callback_was_taken_off_says_so(tmp_path, name):
    trainer = made(tmp_path, **{name: LOOPS[name]})
    taken = trainer._own_loops
    assert taken
    trainer.remove_callback(type(taken[0]))
    with pytest.raises(ControlError, match=f"{type(taken[0]).__name__} was removed from this trainer"):
        trainer.train()
    trainer.add_callback(taken[0])
    assert trainer.train().global_step == 6


# -- twice -------------------------------------------------------------------------------------------------------------

IDLE = {
    "regularization": RegularizationSettings(law="fixed", lambda_init=0.0),
    "memory": MemorySettings(memory_control=False, token_cap=None),
    "curriculum": CurriculumSettings("none"),
    "safety": SafetySettings(),
}


def test_trained_twice_it_is_the_stock_trainer_trained_twice(tmp_path):
    both = [made(tmp_path / kind.__name__, kind, **loops) for kind, loops in ((Trainer, {}), (SCUTrainer, IDLE))]
    for trainer in both:
        trainer.train()
        trainer.train()
    assert same(weights_of(both[1].model), weights_of(both[0].model))


def counted(trainer) -> tuple[float, ...]:
    """Windows, rows, tokens."""
    loop, curriculum, regularizer = trainer.micro_batches.loop, trainer.curriculum, trainer.regularizer
    return loop.statistics.windows, curriculum.rows_trained, regularizer.progress.tokens_seen


def test_the_second_training_has_its_own_statistics(tmp_path, caplog):
    trainer = made(tmp_path, **LOOPS)
    trainer.train()
    assert "earlier training" not in caplog.text
    start = weights_of(small_llama())
    firsts = counted(trainer)
    trainer.train()
    assert same(trainer.regularizer.prior.state_dict(), start), (
        "lambda decays weights toward where the first training began"
    )
    assert counted(trainer) == firsts
    said = f"removed 6 rows of scu_history.json in {tmp_path}, from an earlier training"
    assert any(said in row.getMessage() for row in caplog.records if row.levelname == "WARNING")
    rows = read_rows(tmp_path / "scu_history.json")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["tokens"] == firsts[2]
    assert read_json(tmp_path / "scu_config.json")["tokens_n"] == trainer.regularizer.progress.tokens_n


def test_a_run_that_goes_on_in_its_first_epoch_is_no_earlier_training(tmp_path, caplog):
    saves = {"curriculum": CurriculumSettings("none"), "save_strategy": "steps", "save_steps": 3, "max_steps": 9}
    trained(small_llama(), tmp_path, **saves)  # its first epoch is eight steps
    assert len(read_rows(tmp_path / "curriculum.json")) > 0
    trained(small_llama(), tmp_path, resume=str(tmp_path / "checkpoint-3"), **saves)
    assert "earlier training" not in caplog.text


def test_skipped_steps_and_notices_are_those_of_the_last_training(tmp_path):
    trainer = made(tmp_path, safety=SafetySettings(), curriculum=CurriculumSettings("none"))
    trainer.train()
    trainer.nonfinite_guard.skipped_steps = 3
    trainer.nonfinite_guard.divergence.notices.append("it diverged")
    trainer.curriculum.notices.append("said before")
    trainer.train()
    assert trainer.nonfinite_guard.skipped_steps == 0 and trainer.nonfinite_guard.notices == []
    assert "said before" not in trainer.curriculum.notices


def test_every_training_of_a_model_init_is_pulled(tmp_path):
    """Each has a model of its own, as in a search for hyperparameters."""
    lam = RegularizationSettings(law="fixed", lambda_init=5.0)
    ends = []
    for times in (1, 2):
        args = arguments(tmp_path / str(times))
        trainer = SCUTrainer(args=args, model_init=lambda: small_llama(), train_dataset=Rows(), regularization=lam)
        for _ in range(times):
            trainer.train()
        assert trainer.regularizer.prior.weights[0] is next(trainer.model.parameters())
        ends.append(weights_of(trainer.model))
    reference = SCUTrainer(small_llama(), arguments(tmp_path / "one"), train_dataset=Rows(), regularization=lam)
    reference.train()
    assert same(ends[0], weights_of(reference.model)) and same(ends[1], ends[0])


class Normed(BareLoss):
    """Whose rows act on each other, where the mean of ``BareLoss`` adds up over them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(self.inner, torch.nn.BatchNorm1d(1))


def test_what_was_found_out_of_one_model_is_not_taken_for_the_next(tmp_path):
    kinds = iter((BareLoss, BareLoss, Normed))  # the first is made with the trainer
    args, memory = arguments(tmp_path, max_steps=2), MemorySettings(max_batch_size=2)
    trainer = SCUTrainer(args=args, model_init=lambda: next(kinds)(), train_dataset=Points(), memory=memory)
    trainer.train()
    assert trainer.micro_batches.reduction.is_exact
    trainer.train()
    assert not trainer.micro_batches.reduction.is_exact


# -- again from a checkpoint, in the same process ----------------------------------------------------------------------


def everything(trainer: Trainer) -> dict:
    folder = Path(trainer.args.output_dir)
    newest = folder / "checkpoint-6"
    histories = [
        read_rows(folder / name) for name in ("scu_history.json", "curriculum.json") if (folder / name).is_file()
    ]
    states = {path.name: path.read_text() for path in newest.glob("*_state.json") if path.name != "trainer_state.json"}
    states = {name: json.loads(text) for name, text in states.items() if name != "memory_state.json"}
    return {
        "weights": {name: w.tolist() for name, w in weights_of(trainer.model).items()},
        "optimizer": {k: v.tolist() for k, v in tensors(trainer.optimizer.state_dict()).items()},
        "histories": histories,
        "states": states,
        "logs": [_unmeasured(untimed(row)) for row in trainer.state.log_history],
        "generator": torch.get_rng_state().tolist(),
    }


def _unmeasured(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("memory/") or key.endswith("_per_chunk")}


@pytest.mark.parametrize("loops", [{}, *EACH.values()], ids=["off", *EACH])
def test_resumed_in_the_process_that_trained_it_is_resumed_in_a_fresh_one(tmp_path, loops):
    saved = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1, "lr_scheduler_type": "linear", **loops}
    first = made(tmp_path / "same", **saved)
    first.train()
    uninterrupted = everything(first)
    shutil.copytree(tmp_path / "same", tmp_path / "fresh")
    first.train(resume_from_checkpoint=str(tmp_path / "same" / "checkpoint-3"))
    fresh = made(tmp_path / "fresh", **saved)
    fresh.train(resume_from_checkpoint=str(tmp_path / "fresh" / "checkpoint-3"))
    for part, expected in everything(fresh).items():
        assert everything(first)[part] == expected, part
    assert everything(first)["weights"] == uninterrupted["weights"]


@pytest.mark.parametrize("length", [{"max_steps": 6}, {"max_steps": -1, "num_train_epochs": 1}])
def test_a_resume_where_the_run_ended_says_that_no_step_is_trained(tmp_path, length, caplog):
    length |= {"save_strategy": "steps", "save_steps": 1, "memory": MemorySettings()}
    whole = made(tmp_path, **length)
    last = whole.train().global_step
    assert "no step is trained" not in caplog.text
    again = made(tmp_path, model=small_llama(seed=5), **length)
    assert again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{last}")).global_step == last
    assert (
        f"no step is trained: the run resumes from step {last}, which was its last; to continue training" in caplog.text
    )
    assert same(weights_of(again.model), weights_of(whole.model))


def test_a_rate_that_a_resume_does_not_take_is_named_beside_a_curriculum(tmp_path, caplog):
    """Which says itself what other seeds mean for its rows."""
    common = {"curriculum": LOOPS["curriculum"], "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    made(tmp_path, **common).train()
    changed = {"learning_rate": 1e-4, "seed": 3}
    made(tmp_path, **common | changed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert caplog.text.count("changed since") == caplog.text.count("learning_rate was 0.01, now 0.0001") == 1


def test_a_stream_that_other_workers_share_is_named(tmp_path, caplog):
    class Shared(torch.utils.data.IterableDataset):
        def __iter__(self):
            one = torch.utils.data.get_worker_info()
            return iter([*Rows()][one.id :: one.num_workers] if one else [*Rows()])

    common = {"rows": Shared(), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    made(tmp_path, **common).train()
    for workers in (0, 1):
        made(tmp_path, **common, dataloader_num_workers=workers).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
    assert "changed since" not in caplog.text
    made(tmp_path, **common, dataloader_num_workers=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "dataloader_num_workers was 0, now 2: where they share a stream, its rows come in another" in caplog.text


@pytest.mark.parametrize("loops", [{}, {"memory": MemorySettings()}], ids=["off", "memory"])
def test_a_resume_with_other_batches_says_what_that_means_for_the_epoch(tmp_path, loops, caplog):
    common = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, **loops}
    made(tmp_path, **common).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    made(tmp_path, **common).train(resume_from_checkpoint=checkpoint)
    assert "changed since" not in caplog.text
    made(tmp_path, **common | {"gradient_accumulation_steps": 1}).train(resume_from_checkpoint=checkpoint)
    said = [row.getMessage() for row in caplog.records if "changed since" in row.getMessage()]
    assert said == [
        "changed since checkpoint-2: gradient_accumulation_steps was 2, now 1: the rows of this epoch come in another "
        "order, so some are seen twice or not at all"
    ]
    caplog.clear()
    made(tmp_path, **common | {"learning_rate": 1e-4}).train(resume_from_checkpoint=checkpoint)
    assert "learning_rate was 0.01, now 0.0001: no effect, the optimizer and schedule state" in caplog.text
    assert caplog.text.count("changed since") == 1
    with pytest.raises(KeyError):  # torch's
        made(tmp_path, **common | {"optim": "sgd"}).train(resume_from_checkpoint=checkpoint)
    assert "optim was adamw_torch_fused, now sgd: weights and optimizer state would not fit" in caplog.text


COPIED = {
    "memory": {"memory": MemorySettings(token_cap=24)},
    "chunked loss": {"memory": MemorySettings(memory_control=False, chunked_loss="always")},
    "curriculum": {"curriculum": CurriculumSettings(curriculum="noise_guard")},
}


@pytest.mark.parametrize("loops", COPIED.values(), ids=COPIED)
def test_a_copy_of_a_trainer_trains_as_a_trainer_of_its_own(tmp_path, caplog, loops):
    changes = {"data_collator": pad, "dataset": UnevenRows(32), "max_steps": 3, **loops}
    copies: list[Trainer] = []
    own = trained(small_llama(), tmp_path, prepare=lambda trainer: copies.append(copy.deepcopy(trainer)), **changes)
    copies[0].train()
    assert same(weights_of(copies[0].model), weights_of(own.model))
    assert "padding_free is not used" not in caplog.text


def test_a_class_takes_loops_after_a_trainer_of_it_was_copied():
    """Python then notes something in the class, as it does in ours."""

    class Own(Trainer):
        pass

    for kind in (Own, SCUTrainer):
        copy.copy(kind.__new__(kind))
        assert "__slotnames__" in vars(kind)
    assert issubclass(with_loops(Own), Own)


class OtherBatches(TrainerCallback):
    """After three steps, or as the fourth begins: another number of batches in a step."""

    def __init__(self, event: str, count: int) -> None:
        self.count = count
        setattr(self, event, self._change)

    def _change(self, args, state, control, **kwargs) -> None:
        if state.global_step == 3:
            args.gradient_accumulation_steps = self.count


@pytest.mark.parametrize(
    ("before", "event", "after"), [(2, "on_step_end", 4), (2, "on_step_begin", 3), (4, "on_step_begin", 2)]
)
def test_a_step_that_begins_or_ends_within_a_window_has_its_own_rows(tmp_path, caplog, before, event, after):
    changes = {"optim": "sgd", "gradient_accumulation_steps": before, "num_train_epochs": 2, "max_steps": -1}
    changes |= {"data_collator": pad, "dataset": UnevenRows(64), "logging_steps": 1}
    memory = MemorySettings(token_cap=24)
    stock, ours = (
        trained(
            small_llama(),
            tmp_path / ("stock" if loops is None else "ours"),
            callbacks=[OtherBatches(event, after)],
            memory=loops,
            **changes,
        )
        for loops in (None, memory)
    )
    for name, weight in weights_of(stock.model).items():
        torch.testing.assert_close(weights_of(ours.model)[name], weight, atol=1e-6, rtol=0)
    assert "not pooled" not in caplog.text
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (stock, ours)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
