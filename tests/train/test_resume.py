"""A run that was interrupted and resumed is the run that was not; a checkpoint that does not fit is refused."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    EarlyStoppingCallback,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
    default_data_collator,
)

from scu_trainer.errors import CheckpointError
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import CurriculumSettings, SafetySettings
from scu_trainer.settings import RegularizationSettings as Settings
from tests.tiny import VOCAB, Rows, llama, lora, same, trained, weights_of

STEPS = {"max_steps": 6, "lr_scheduler_type": "linear"}

LAWS = {
    "model": Settings(target_s=0.02),
    "original": Settings(law="original", target_s=0.02, sigma=0.03, lambda_init=5.0, lambda_max=1e3),
    "fixed": Settings(law="fixed", lambda_init=3.0),
    # The interruption at step 3 falls between two decisions.
    "sparse": Settings(target_s=0.02, control_frequency=2),
}

MODELS = {
    "full": lambda seed=0: llama(),
    "bfloat16": lambda seed=0: llama().bfloat16(),
    # Adapters of a resumed run start elsewhere: what weights decay toward must come from the checkpoint.
    "lora": lambda seed=0: lora(llama(), seed=1 + seed, lora_dropout=0.1),
}


class StopAt(TrainerCallback):
    """An interruption with a checkpoint, in the middle of the schedule."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class SaveAt(StopAt):
    """Only a checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= state.global_step == self.step


def optimizer_state(trainer) -> dict[str, torch.Tensor]:
    state = trainer.optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value) for index, entry in state.items() for name, value in entry.items()
    }


@pytest.mark.parametrize(
    ("model", "law"),
    [
        ("full", "model"),
        ("full", "original"),
        ("lora", "model"),
        ("lora", "original"),
        ("bfloat16", "fixed"),
        ("full", "sparse"),
    ],
)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, model, law, caplog):
    make, settings = MODELS[model], LAWS[law]
    whole = trained(make(), tmp_path / "whole", settings, **STEPS)
    trained(make(), tmp_path / "parts", settings, callbacks=[StopAt(3)], **STEPS)
    assert len(read_rows(tmp_path / "parts" / "scu_history.json")) == 3 // settings.control_frequency
    resumed = trained(make(seed=9), tmp_path / "parts", settings, resume=True, **STEPS)

    assert resumed.state.global_step == 6
    assert "accelerate replaces" not in caplog.text
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert same(optimizer_state(resumed), optimizer_state(whole))
    assert same(resumed.regularizer.prior.state_dict(), whole.regularizer.prior.state_dict())
    assert resumed.regularizer.state == whole.regularizer.state
    assert resumed.regularizer.progress == whole.regularizer.progress
    files = [(tmp_path / name / "scu_history.json").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    rows = read_rows(tmp_path / "whole" / "scu_history.json")
    assert all(row["lambda"] > 0 for row in rows if row["step"] > 2), "a loop that is idle shows nothing"
    if law == "original":
        assert all(row["integral"] != 0 for row in rows)


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    """Its files hold each expert by itself, under another name; the model holds them in one tensor."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    counts = {"num_local_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, **counts))


@pytest.mark.parametrize("shard_size", ["50GB", "8KB"])
def test_weights_that_are_stored_under_other_names_are_loaded(tmp_path, caplog, monkeypatch, shard_size):
    """By a run that resumes, and of the best checkpoint. With every loop off a line says that they are not."""
    save = functools.partialmethod(MixtralForCausalLM.save_pretrained, max_shard_size=shard_size)
    monkeypatch.setattr(MixtralForCausalLM, "save_pretrained", save)
    for safety in (SafetySettings(), None):
        folder, is_exact = tmp_path / str(safety is None), safety is not None
        whole = trained(mixtral(), folder, safety=safety, callbacks=[SaveAt(3)], **STEPS)
        checkpoint = folder / "checkpoint-3"
        rest = trained(mixtral(seed=9), folder, safety=safety, resume=str(checkpoint), **STEPS)
        assert same(weights_of(rest.model), weights_of(whole.model)) is is_exact
        rest.state.best_model_checkpoint = str(checkpoint)
        rest._load_best_model()
        best = MixtralForCausalLM.from_pretrained(checkpoint)
        assert same(weights_of(rest.model), weights_of(best)) is is_exact
        assert ("which the stock Trainer does not convert" in caplog.text) is not is_exact


SAMPLERS = {
    "by length": {"train_sampling_strategy": "group_by_length"},
    "without a seed": {"accelerator_config": {"use_seedable_sampler": False}},
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_an_order_that_the_process_draws_is_that_of_before(tmp_path, caplog, sampler):
    """In the second epoch, which a resume had begun, too. With every loop off it is another one there, as in the stock
    Trainer."""
    runs = {}
    for name, settings in (("ours", LAWS["model"]), ("stock", None)):
        given = {"max_steps": 14, "save_strategy": "steps", "save_steps": 100, **sampler}
        whole = trained(MODELS["lora"](), tmp_path / name / "whole", settings, **given)
        told = []
        for before, step in itertools.pairwise((0, 3, 8, 11, 14)):  # an epoch has 8 steps
            parts, is_resumed = tmp_path / name / "parts", before > 0
            caplog.clear()
            run = trained(MODELS["lora"](), parts, settings, None, is_resumed, callbacks=[StopAt(step)], **given)
            if "the rows of this epoch come in another order than before" in caplog.text:
                told.append(before)
        runs[name] = same(weights_of(run.model), weights_of(whole.model)), told
    assert runs == {"ours": (True, []), "stock": (False, [11])}


class Stream(torch.utils.data.IterableDataset):
    """20 rows in another order in each pass: 5 batches of 4."""

    passes = 0

    def set_epoch(self, epoch):
        self.passes = epoch

    def __iter__(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.passes)).tolist()
        yield from map(Rows(20).__getitem__, order)


@pytest.mark.parametrize("step", [5, 8])
def test_data_without_a_length_go_on_in_the_pass_that_was_interrupted(tmp_path, caplog, step):
    """Where a loop is on: the stock Trainer goes on with the start of a pass, and says so."""
    runs = {}
    for name, settings in (("ours", LAWS["model"]), ("stock", None)):
        given = {"dataset": Stream(), "max_steps": 12, "lr_scheduler_type": "linear"}
        whole = trained(llama(), tmp_path / name / "whole", settings, **given)
        trained(llama(), tmp_path / name / "parts", settings, callbacks=[StopAt(step)], **given)
        caplog.clear()
        resumed = trained(llama(), tmp_path / name / "parts", settings, resume=True, **given)
        assert resumed.state.global_step == 12
        told = "the data have no length, and this run is in pass 2 over them" in caplog.text
        exact = same(weights_of(resumed.model), weights_of(whole.model)) and resumed.state.epoch == whole.state.epoch
        runs[name] = exact, told
    assert runs == {"ours": (True, False), "stock": (step < 8, step == 8)}


@pytest.mark.parametrize("looped", [True, False])
def test_a_pass_over_a_stream_is_evaluated_once_at_its_end(tmp_path, caplog, looped):
    """Where a loop is on: the checkpoint of its last step holds the evaluation, and the dropout that comes after it."""
    given = {"dataset": Stream(), "eval_dataset": Rows(4), "max_steps": 6, "lr_scheduler_type": "reduce_lr_on_plateau"}
    given |= {f"{what}_strategy": "epoch" for what in ("eval", "save")} | {"load_best_model_at_end": True}
    given |= {"safety": SafetySettings() if looped else None}
    runs = [
        trained(MODELS["lora"](), tmp_path, resume=resume, **given) for resume in (None, f"{tmp_path}/checkpoint-5")
    ]
    steps = [[row["step"] for row in run.state.log_history if "eval_loss" in row] for run in runs]
    assert steps == [[5, 6], [5, 6] if looped else [5, 5, 6]]
    assert same(*(weights_of(run.model) for run in runs)) is looped
    assert ("a pass over them ended with" in caplog.text) is not looped


def test_data_without_a_length_go_on_where_they_were_with_another_accumulation_too(tmp_path):
    def rows_of(name, **changes):
        seen, model = [], llama()
        model.register_forward_pre_hook(lambda *given: seen.append(given[2]["input_ids"].tolist()), with_kwargs=True)
        trained(model, tmp_path / name, LAWS["model"], dataset=Stream(), max_steps=12, **changes)
        return seen

    whole = rows_of("whole")
    rows_of("parts", callbacks=[StopAt(8)])
    resumed = rows_of("parts", resume=True, gradient_accumulation_steps=2)
    assert whole[-4:] in [resumed[i : i + 4] for i in range(4)], "behind what S is asked about"


@pytest.mark.parametrize("step", [8, 16])
def test_an_epoch_that_was_saved_before_its_evaluation_is_evaluated(tmp_path, caplog, step):
    """With every loop off it is not, as in the stock Trainer, and later steps draw another dropout."""
    runs = {}
    for name, settings in (("ours", LAWS["model"]), ("stock", None)):
        given = {"max_steps": 16, "eval_strategy": "epoch", "eval_dataset": Rows(4)}
        whole = trained(MODELS["lora"](), tmp_path / name / "whole", settings, **given)
        trained(MODELS["lora"](), tmp_path / name / "parts", settings, callbacks=[StopAt(step)], **given)
        caplog.clear()
        resumed = trained(MODELS["lora"](), tmp_path / name / "parts", settings, resume=True, **given)
        losses = [[row["eval_loss"] for row in one.state.log_history if "eval_loss" in row] for one in (resumed, whole)]
        told = "was saved before its end-of-epoch evaluation" in caplog.text
        runs[name] = same(weights_of(resumed.model), weights_of(whole.model)), losses[0] == losses[1], told
    assert runs == {"ours": (True, True, False), "stock": (step == 16, False, True)}


def test_a_resumed_run_has_evaluated_at_its_start(tmp_path, caplog):
    """With every loop off it evaluates again, as the stock Trainer, and early stopping counts that."""
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    runs = {}
    for name, safety in (("ours", SafetySettings()), ("stock", None)):
        given = {**every_step, "max_steps": 3, "load_best_model_at_end": True, "eval_on_start": True, "safety": safety}
        for resume in (None, str(tmp_path / name / "checkpoint-1")):
            caplog.clear()
            given |= {"callbacks": [EarlyStoppingCallback(1)], "eval_dataset": Rows(4)}
            run = trained(llama(), tmp_path / name, resume=resume, **given)
        steps = [row["step"] for row in run.state.log_history if "eval_loss" in row]
        runs[name] = steps, "eval_on_start: the stock Trainer evaluates again" in caplog.text
    assert runs == {"ours": ([0, 1, 2, 3], False), "stock": ([0, 1, 1, 2], True)}


def masked(rows):
    batch = default_data_collator(rows)
    return {**batch, "input_ids": batch["input_ids"].where(torch.rand(batch["input_ids"].shape) < 0.8, 2)}


@pytest.mark.parametrize("curriculum", [None, CurriculumSettings("none")])
@pytest.mark.parametrize("collate", [default_data_collator, masked])
def test_masks_that_no_checkpoint_holds_are_told(tmp_path, caplog, collate, curriculum):
    given = {"max_steps": 6, "data_collator": collate, "curriculum": curriculum, "safety": SafetySettings()}
    whole = trained(llama(), tmp_path / "whole", **given)
    trained(llama(), tmp_path / "parts", callbacks=[StopAt(3)], **given)
    before = caplog.text
    resumed = trained(llama(), tmp_path / "parts", resume=True, **given)
    is_exact = curriculum is not None or collate is default_data_collator
    assert same(weights_of(resumed.model), weights_of(whole.model)) is is_exact
    assert ("the dataset or its collator draws at random" in caplog.text) is not is_exact
    assert "draws at random" not in before


@pytest.mark.parametrize("persists", [False, True])
def test_workers_that_persist_are_told_not_to_resume_exactly(tmp_path, caplog, persists):
    given = {"max_steps": 10, "dataloader_num_workers": 1, "dataloader_persistent_workers": persists}
    whole = trained(MODELS["lora"](), tmp_path / "whole", LAWS["model"], **given)
    trained(MODELS["lora"](), tmp_path / "parts", LAWS["model"], callbacks=[StopAt(8)], **given)
    resumed = trained(MODELS["lora"](), tmp_path / "parts", LAWS["model"], resume=True, **given)
    assert same(weights_of(resumed.model), weights_of(whole.model)) is not persists
    assert ("dataloader_persistent_workers: the workers start again" in caplog.text) is persists


def test_rows_after_the_checkpoint_are_written_again(tmp_path):
    """The run went on after its checkpoint before it was killed: its later rows go."""
    settings = LAWS["model"]
    trained(llama(), tmp_path, settings, save_strategy="steps", save_steps=3, **STEPS)
    before = (tmp_path / "scu_history.json").read_bytes()
    trained(llama(), tmp_path, settings, resume=str(tmp_path / "checkpoint-3"), **STEPS)
    assert (tmp_path / "scu_history.json").read_bytes() == before


def test_a_new_run_in_an_old_directory_starts_a_new_history(tmp_path):
    trained(llama(), tmp_path, LAWS["model"], **STEPS)
    trained(llama(seed=4), tmp_path, LAWS["fixed"], max_steps=2)
    rows = read_rows(tmp_path / "scu_history.json")
    assert [(row["step"], row["lambda"]) for row in rows] == [(1, 3.0), (2, 3.0)]
    assert read_json(tmp_path / "scu_config.json")["settings"]["law"] == "fixed"


def test_resumed_in_the_middle_of_a_hold(tmp_path):
    settings = Settings(target_s=0.05, stop_at_target=True, hold_steps=6)
    changes = {"max_steps": 100, "lr_scheduler_type": "constant"}
    whole = trained(llama(), tmp_path / "whole", settings, **changes)
    reached = whole.regularizer.state.reached_step
    trained(llama(), tmp_path / "parts", settings, callbacks=[StopAt(reached + 3)], **changes)
    resumed = trained(llama(), tmp_path / "parts", settings, resume=True, **changes)
    assert resumed.state.global_step == whole.state.global_step == reached + 6
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert read_rows(tmp_path / "parts" / "scu_history.json") == read_rows(tmp_path / "whole" / "scu_history.json")


# -- what a checkpoint holds -------------------------------------------------------------------------------------------


def test_the_start_of_adapters_is_kept_and_that_of_full_tuning_is_not(tmp_path):
    model = lora(llama())
    start = weights_of(model)
    trained(model, tmp_path / "lora", LAWS["model"], save_strategy="steps", save_steps=6)
    assert same(load_file(tmp_path / "lora" / "checkpoint-6" / "scu_prior.safetensors"), start)
    trained(llama(), tmp_path / "full", LAWS["model"], save_strategy="steps", save_steps=6)
    trained(lora(llama()), tmp_path / "zero", Settings(target_s=0.1, prior="zero"), save_strategy="steps", save_steps=6)
    for name in ("full", "zero"):
        assert (tmp_path / name / "checkpoint-6" / "scu_state.json").is_file()
        assert not (tmp_path / name / "checkpoint-6" / "scu_prior.safetensors").exists()


@pytest.fixture
def interrupted(tmp_path):
    trained(llama(), tmp_path, LAWS["model"], callbacks=[StopAt(3)], **STEPS)
    return tmp_path


def test_a_checkpoint_of_the_stock_trainer_is_refused(tmp_path):
    trained(llama(), tmp_path, None, callbacks=[StopAt(3)], **STEPS)
    with pytest.raises(CheckpointError, match=r"checkpoint-3 holds no scu_state.json.*resume with scu: false"):
        trained(llama(), tmp_path, LAWS["model"], resume=True, **STEPS)


def test_a_checkpoint_of_the_stock_trainer_is_gone_on_from_without_s_where_nothing_is_steered(tmp_path):
    stock = trained(llama(), tmp_path / "stock", None, **STEPS)
    trained(llama(), tmp_path / "ours", None, callbacks=[StopAt(3)], **STEPS)
    measured = Settings(target_s=None, sigma=0.5)
    resumed = trained(llama(), tmp_path / "ours", measured, resume=True, **STEPS)
    assert same(weights_of(resumed.model), weights_of(stock.model)) and resumed.state.global_step == 6
    said = "holds no scu_state.json, and S can only be measured from the start"
    assert said in resumed.loop("regularization").notices[0]
    assert not (tmp_path / "ours" / "scu_history.json").exists()


def test_a_checkpoint_of_ours_resumes_without_the_loop(interrupted):
    assert trained(llama(), interrupted, None, resume=True, **STEPS).state.global_step == 6


def test_another_sigma_is_refused(interrupted):
    with pytest.raises(CheckpointError, match=r"scu_sigma is 0.2, the checkpoint was written with 0.1"):
        trained(llama(), interrupted, Settings(target_s=0.02, sigma=0.2), resume=True, **STEPS)


def test_another_start_is_refused(interrupted):
    """The same shapes from another seed: the checkpoint's weights would load, but lambda would act elsewhere."""
    with pytest.raises(CheckpointError, match=r"lambda would decay toward a different point\. Resume with"):
        trained(llama(seed=1), interrupted, LAWS["model"], resume=True, **STEPS)
