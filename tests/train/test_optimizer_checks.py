"""What optimizers and schedules need and take, against what transformers reads of it; schedule-free weights."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext
from transformers.training_args import OptimizerNames

from scu_trainer.errors import SettingsError
from scu_trainer.hardware.optimizers import OPTIMIZERS, check_optimizer
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.job.checks import check_text_values
from scu_trainer.train.job.optimizer_checks import argument_names_of, check_optimizer_arguments, check_schedule
from scu_trainer.train.loops.weight_average import ScheduleFreeWeights
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, arguments, llama, same, trained, weights_of


class Asked(dict):
    """Optimizer arguments that remember which names were looked for."""

    def __init__(self) -> None:
        super().__init__(present="1")  # else some do not look
        self.names: set[str] = set()

    def get(self, name, default=None):
        self.names.add(name)
        return default

    pop = get

    def __contains__(self, name) -> bool:
        self.names.add(name)
        return False


def runs(name: str) -> bool:
    try:
        check_optimizer(name, "cpu")
    except Exception:
        return False
    return not OPTIMIZERS[name].in_backward


@pytest.mark.parametrize("optim", [one.value for one in OptimizerNames if runs(one.value)])
def test_names_that_are_taken_are_those_that_transformers_reads(optim, tmp_path):
    asked = Asked()
    args = arguments(tmp_path, optim=optim, optim_target_modules="all-linear")
    adam = {"betas": (0.9, 0.999), "eps": 1e-8}
    _OPTIMIZER_HANDLERS[args.optim](OptimizerContext(args, llama(layers=1), {"lr": 1e-2}, adam, asked))
    assert asked.names == set(argument_names_of(optim))


@pytest.mark.parametrize(("optim", "name"), [("rmsprop", "nesterov"), ("adafactor", "beta1"), ("galore_adamw", "rang")])
def test_a_name_that_would_be_dropped_is_refused(optim, name, tmp_path):
    args = arguments(tmp_path, optim=optim, optim_target_modules="all-linear")
    with pytest.raises(SettingsError, match=f"optim_args names {name}, which optim: {optim} does not take"):
        check_optimizer_arguments(args, {name: "1"})


def test_a_size_that_torchao_would_get_as_text_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="block_size, which transformers passes to optim: adamw_torch_8bit as text"):
        check_optimizer_arguments(arguments(tmp_path, optim="adamw_torch_8bit"), {"block_size": "128"})


@pytest.mark.parametrize(
    ("optim", "given", "message"),
    [
        ("sgd", "momentum=abc", "optim_args has momentum=abc; it takes a number"),
        ("sgd", "momentum=nan", "it takes a number"),
        ("sgd", "momentum=-0.9", "optim_args has momentum=-0.9; it takes a number, 0 or more"),
        ("rmsprop", "eps=-1", "it takes a number, 0 or more"),
        ("ademamix", "beta3=1", "it takes a number, at least 0 and below 1"),
        ("galore_adamw", "scale=-inf", "it takes a number"),
        ("galore_adamw", "weight_decay=0.5", "which optim: galore_adamw does not take"),  # the field has no effect
        ("sgd", "nesterov=on", "allowed: true, yes, 1, false, no, 0"),  # false for SGD, true for torchao
        ("sgd", "nesterov=true", "add momentum=0.9, and drop dampening"),
        ("sgd", "nesterov=True,momentum=0.9,dampening=0.1", "add momentum=0.9, and drop dampening"),
        *((optim, "weight_decay=0.5", "set weight_decay: 0.5") for optim in ("sgd", "adagrad", "rmsprop")),
        ("rmsprop", "centered=maybe", "centered=maybe; allowed: true"),
        ("adamw_torch_8bit", "bf16_stochastic_round=yep", "allowed: true"),
        ("stable_adamw", "kahan_sum=False", "drop it for false"),
        ("ademamix", "t_alpha=1.5", "it takes a whole number, 1 or more"),
        ("galore_adamw", "update_proj_gap=0", "it takes a whole number, 1 or more"),
        ("galore_adamw", "proj_type=STD", "allowed: std, reverse_std, right, left, full"),
        ("apollo_adamw", "scale_type=channels", "did you mean 'channel'"),
        ("apollo_adamw", "proj_type=left", "with scale_type=tensor also reverse_std, right and left"),
        ("apollo_adamw", "proj_type=full,scale_type=tensor", "takes std, and with scale_type=tensor"),
    ],
)
def test_a_value_that_would_end_the_run_or_do_nothing_is_refused(optim, given, message, tmp_path):
    args = arguments(tmp_path, optim=optim, optim_args=given, optim_target_modules="all-linear")
    with pytest.raises(SettingsError, match=message):
        check_text_values(args)


@pytest.mark.parametrize(
    ("optim", "given"),
    [
        ("sgd", "momentum=0.9, nesterov=True"),
        ("rmsprop", "centered=false,eps=1e-6"),
        ("apollo_adamw", "rank=1, proj=svd, proj_type=left, scale_type=tensor"),
        ("galore_adamw", "proj_type=full,scale=-1"),
        ("stable_adamw", "kahan_sum=true,max_lr=1"),
    ],
)
def test_values_that_optimizers_take_pass(optim, given, tmp_path):
    check_text_values(arguments(tmp_path, optim=optim, optim_args=given, optim_target_modules="all-linear"))


def test_weight_decay_among_the_arguments_is_of_no_group_of_weights(tmp_path):
    """Why it is refused: the stock Trainer gives each group the decay of its own field."""
    args = arguments(tmp_path, optim="sgd", optim_args="weight_decay=0.5")
    trainer = Trainer(llama(layers=1), args)
    assert {group["weight_decay"] for group in trainer.create_optimizer().param_groups} == {0.0}


def test_layer_wise_optimizers_do_not_accumulate(tmp_path):
    changes = {"optim_target_modules": "all-linear", "gradient_accumulation_steps": 2}
    with pytest.raises(SettingsError, match="set it to 1, or use optim: galore_adamw"):
        check_text_values(arguments(tmp_path, optim="galore_adamw_layerwise", **changes))


@pytest.mark.parametrize("optim", ["galore_adamw", "apollo_adamw"])
def test_low_rank_without_its_layers_is_refused(optim, tmp_path):
    with pytest.raises(SettingsError, match="add optim_target_modules: all-linear"):
        check_optimizer_arguments(arguments(tmp_path, optim=optim), {})


def schedule(kind: str, given=None):
    return SimpleNamespace(lr_scheduler_type=kind, lr_scheduler_kwargs=given)


def makes(kind: str, given) -> bool:
    """Whether transformers does."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    try:
        get_scheduler(kind, optimizer, 2, 10, scheduler_specific_kwargs=given)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("given", [{}, {"min_lr_rate": 0.1}, {"num_decay_steps": 3}, {"num_cycles": 2}, {"foo": 1}])
@pytest.mark.parametrize("kind", [one.value for one in TYPE_TO_SCHEDULER_FUNCTION])
def test_schedules_that_pass_are_those_that_transformers_makes(kind, given):
    drops = kind in ("constant", "constant_with_warmup") and bool(given)
    try:
        check_schedule(schedule(kind, given))
    except SettingsError:
        assert drops or not makes(kind, given)
    else:
        assert makes(kind, given) and not drops


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("warmup_stable_decay", {}, "needs num_decay_steps; add lr_scheduler_kwargs: {num_decay_steps: 100}"),
        ("cosine_with_min_lr", None, "add lr_scheduler_kwargs: {min_lr_rate: 0.1}"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "drop one of them"),
        ("polynomial", {"powr": 2}, "did you mean 'power'"),
        ("constant", {"power": 2}, "drop it"),
    ],
)
def test_what_to_type_for_a_schedule(kind, given, message):
    with pytest.raises(SettingsError, match=message.replace("{", r"\{")):
        check_schedule(schedule(kind, given))


SCHEDULE_FREE = [n for n in ("schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam") if runs(n)]
every_schedule_free = pytest.mark.parametrize("optim", SCHEDULE_FREE)


def averaged(trainer) -> dict[str, torch.Tensor]:
    """Weights of the model once the optimizer has put its averages in."""
    trainer.optimizer.eval()
    return weights_of(trainer.model)


@every_schedule_free
def test_the_final_model_and_checkpoints_hold_the_average_and_resume_exactly(optim, tmp_path):
    changes = {"optim": optim, "memory": MemorySettings(), "save_strategy": "steps", "save_steps": 3}
    whole = trained(llama(layers=1), tmp_path, **changes)
    final = weights_of(whole.model)
    assert same(final, averaged(whole))
    saved = llama(layers=1, seed=3).from_pretrained(tmp_path / "checkpoint-6")
    assert same(weights_of(saved), final)
    whole.optimizer.train()
    assert not same(weights_of(whole.model), final)  # or the above could not fail
    resumed = trained(llama(layers=1), tmp_path, resume=str(tmp_path / "checkpoint-3"), **changes)
    assert same(weights_of(resumed.model), final)


@pytest.mark.skipif(not SCHEDULE_FREE, reason="schedulefree is not installed")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "linear"}, "set only lr_scheduler_type: constant"),
        ({"warmup_steps": 0.1}, "whole number of steps"),
        ({"regularization": RegularizationSettings(target_s=0.1)}, "drop scu_target_s"),
        ({"efficiency": EfficiencySettings(ema_decay=0.9)}, "drop ema_decay"),
    ],
)
def test_what_schedule_free_contradicts(changes, message, tmp_path):
    with pytest.raises(SettingsError, match=message):
        trained(llama(layers=1), tmp_path, optim="schedule_free_adamw", **{"memory": MemorySettings(), **changes})


class MakesScheduleFree(SCUTrainer):
    def create_optimizer(self, model=None):
        from schedulefree import AdamWScheduleFree

        self.optimizer = AdamWScheduleFree(self.model.parameters(), lr=1e-2)
        return self.optimizer


@pytest.mark.skipif(not SCHEDULE_FREE, reason="schedulefree is not installed")
@pytest.mark.parametrize("kind", [SCUTrainer, MakesScheduleFree], ids=["given", "made by its create_optimizer"])
def test_a_schedule_free_optimizer_that_somebody_has_made_is_known_too(tmp_path, kind):
    from schedulefree import AdamWScheduleFree

    def run(**changes):
        model = llama(layers=1)
        if kind is SCUTrainer:
            optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
            changes |= {"optimizers": (optimizer, None), "lr_scheduler_type": "linear"}
        changes |= {"memory": MemorySettings(), "save_strategy": "steps", "save_steps": 3, "kind": kind}
        return trained(model, tmp_path, **changes)

    whole = run()
    final = weights_of(whole.model)
    assert same(final, averaged(whole))
    assert same(weights_of(llama(layers=1, seed=3).from_pretrained(tmp_path / "checkpoint-6")), final)
    assert same(weights_of(run(resume=str(tmp_path / "checkpoint-3")).model), final)
    with pytest.raises(SettingsError, match=r"but AdamWScheduleFree switches to others.*drop scu_target_s"):
        run(regularization=RegularizationSettings(target_s=0.1))
    with pytest.raises(SettingsError, match=r"AdamWScheduleFree already averages the weights.*drop ema_decay"):
        run(efficiency=EfficiencySettings(ema_decay=0.9))


@pytest.mark.skipif(not SCHEDULE_FREE, reason="schedulefree is not installed")
def test_a_schedule_free_optimizer_that_deepspeed_has_wrapped_is_refused():
    """ZeRO gives it flat copies of the weights: their average would reach no checkpoint, and nothing would say so."""
    from schedulefree import AdamWScheduleFree

    wrapped = SimpleNamespace(optimizer=AdamWScheduleFree(llama(layers=1).parameters()))
    loop = ScheduleFreeWeights()
    loop.trainer = SimpleNamespace(optimizer=wrapped, is_deepspeed_enabled=True)
    with pytest.raises(SettingsError, match=r"AdamWScheduleFree switches.*train without DeepSpeed"):
        loop.on_train_begin(None, None, None)


def test_an_optimizer_of_ones_own_create_optimizer_that_averages_nothing_is_left_alone(tmp_path):
    class Switching(torch.optim.SGD):
        """Another that has two kinds of weights, which nobody asks for here."""

        switched = 0

        def eval(self):
            self.switched += 1

    class Own(SCUTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = Switching(self.model.parameters(), lr=1e-2)
            return self.optimizer

    found = trained(llama(layers=1), tmp_path, kind=Own, memory=MemorySettings(), save_strategy="steps", save_steps=3)
    assert found.optimizer.optimizer.switched == 0


@pytest.mark.skipif(not SCHEDULE_FREE, reason="schedulefree is not installed")
@pytest.mark.parametrize("kind", ["ScheduleFreeWrapper", "ScheduleFreeWrapperReference"])
def test_one_that_wraps_another_optimizer_says_itself_whether_it_has_switched(tmp_path, kind):
    def run(**changes):
        model = llama(layers=1)
        base = torch.optim.SGD(model.parameters(), lr=0.5)
        wrapper = getattr(importlib.import_module("schedulefree"), kind)(base, momentum=0.9)
        changes |= {"optimizers": (wrapper, torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1.0))}
        return trained(model, tmp_path, memory=MemorySettings(), save_strategy="steps", save_steps=3, **changes)

    whole = run()
    final = weights_of(whole.model)
    assert not whole.optimizer.train_mode
    assert same(weights_of(llama(layers=1, seed=3).from_pretrained(tmp_path / "checkpoint-6")), final)
    assert same(weights_of(run(resume=str(tmp_path / "checkpoint-3")).model), final)
    whole.optimizer.train()
    assert not same(weights_of(whole.model), final)


@every_schedule_free
def test_the_final_model_is_the_average_where_nothing_was_saved(optim, tmp_path):
    trainer = trained(llama(layers=1), tmp_path, optim=optim, memory=MemorySettings())
    final = weights_of(trainer.model)
    assert not any(group["train_mode"] for group in trainer.optimizer.param_groups)
    trainer.optimizer.train()
    assert not same(weights_of(trainer.model), final)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Rows(8, seed=4)}


@every_schedule_free
def test_an_evaluation_changes_no_bit_of_the_training(optim, tmp_path):
    changes = {"optim": optim, "memory": MemorySettings()}
    plain = trained(llama(layers=1), tmp_path / "plain", **changes)
    evaluated = trained(llama(layers=1), tmp_path / "evaluated", **changes, **EVALUATED)
    assert same(weights_of(evaluated.model), weights_of(plain.model))


@every_schedule_free
def test_the_best_model_is_the_average_of_its_step(optim, tmp_path):
    """The highest loss counts as the best, so that it is not that of the last step."""
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    changes = {"optim": optim, "memory": MemorySettings(), **saves, **EVALUATED}
    trainer = trained(llama(layers=1), tmp_path, **changes)
    best = trainer.state.best_model_checkpoint
    assert best != str(tmp_path / "checkpoint-6")
    assert same(weights_of(trainer.model), weights_of(llama(layers=1, seed=3).from_pretrained(best)))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


@every_schedule_free
def test_a_checkpoint_of_the_stock_trainer_is_gone_on_from(optim, tmp_path):
    changes = {"optim": optim, "save_strategy": "steps", "save_steps": 3}
    trained(llama(layers=1), tmp_path, **changes)
    (tmp_path / "checkpoint-6").rename(tmp_path / "later")
    resumed = trained(llama(layers=1), tmp_path, resume=True, memory=MemorySettings(), **changes)
    assert resumed.state.global_step == 6


@pytest.mark.filterwarnings("ignore:This implementation of AdamW:FutureWarning")  # of galore-torch, about itself
@pytest.mark.parametrize("optim", [n for n in ("galore_adamw", "galore_adafactor", "apollo_adamw") if runs(n)])
def test_low_rank_resumes_exactly(optim, tmp_path):
    """The projection changes every second step, so that one which is not carried over shows."""
    changes = {"optim": optim, "optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=2"}
    changes |= {"memory": MemorySettings(), "save_strategy": "steps", "save_steps": 3}
    whole = trained(llama(layers=1), tmp_path, **changes)
    resumed = trained(llama(layers=1), tmp_path, resume=str(tmp_path / "checkpoint-3"), **changes)
    assert same(weights_of(resumed.model), weights_of(whole.model))
