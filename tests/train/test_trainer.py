"""SCUTrainer beside the stock Trainer: the same where the loop is off, the promised difference where it is on."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from transformers import Trainer, TrainerCallback

from scu_trainer import with_loops
from scu_trainer.errors import ControlError
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import MemorySettings
from scu_trainer.settings import RegularizationSettings as Settings
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, UnevenRows, arguments, llama, lora, pad, same, small_llama, trained, weights_of

TOKENS = 480.0  # 32 rows of 15 predicted tokens

HARD = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05, "max_steps": 4}


def stock(model, output_dir, dataset=None, callbacks=None, **changes) -> Trainer:
    collator = changes.pop("data_collator", None)
    trainer = Trainer(
        model,
        arguments(output_dir, **changes),
        train_dataset=dataset or Rows(),
        data_collator=collator,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def assert_close(found: dict, expected: dict, relative: float = 1e-6) -> None:
    """Within ``relative`` of the largest weight of each tensor."""
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max())
        assert error <= relative, f"{name}: {error:.3g}"


def largest_difference(first: dict, second: dict) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


# -- off is off --------------------------------------------------------------------------------------------------------

EQUIVALENT = {
    "plain": (lambda: llama(), {}),
    "accumulation and clipping": (lambda: small_llama(), HARD),
    "dropout": (lambda: small_llama(attention_dropout=0.2), {}),
    "bf16 autocast": (lambda: small_llama(), {"bf16": True}),
    "lora with dropout": (lambda: lora(small_llama(), lora_dropout=0.2), HARD),
    "bfloat16 weights": (lambda: small_llama().bfloat16(), {}),
}


@pytest.fixture(scope="module")
def stock_of(tmp_path_factory):
    """case -> the stock trainer after its training."""

    @functools.cache
    def of(case: str):
        make, changes = EQUIVALENT[case]
        return stock(make(), tmp_path_factory.mktemp("stock"), **changes)

    return of


@pytest.mark.parametrize("case", EQUIVALENT)
@pytest.mark.parametrize(
    "settings",
    [
        None,
        Settings(),
        Settings(law="original"),
        Settings(law="fixed", lambda_init=0.0),
        Settings(law="fixed", lambda_init=0.0, actuator="penalty"),
    ],
    ids=["none", "measured", "measured, original", "lambda 0", "penalty 0"],
)
def test_without_lambda_it_is_the_stock_trainer_bit_for_bit(tmp_path, stock_of, case, settings):
    make, changes = EQUIVALENT[case]
    found, expected = trained(make(), tmp_path / "scu", settings, **changes), stock_of(case)
    assert same(weights_of(found.model), weights_of(expected.model))
    assert not same(weights_of(found.model), weights_of(make())), "nothing was trained"
    timing = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    logs = [{k: v for k, v in t.state.log_history[-1].items() if k not in timing} for t in (found, expected)]
    assert logs[0] == logs[1]


def test_off_writes_no_files_of_the_loop(tmp_path):
    trained(small_llama(), tmp_path, save_strategy="steps", save_steps=6)
    assert not [path for path in tmp_path.rglob("scu_*")]
    trained(small_llama(), tmp_path / "on", Settings(target_s=0.1), save_strategy="steps", save_steps=6)
    names = {str(path.relative_to(tmp_path / "on")) for path in (tmp_path / "on").rglob("scu_*")}
    assert names == {"scu_history.json", "scu_config.json", "checkpoint-6/scu_state.json"}


# -- the decoupled actuator --------------------------------------------------------------------------------------------


class AnalyticDecay(TrainerCallback):
    """w + u (w0 - w) in float64 after every step of the stock Trainer: the promise, written down independently."""

    def __init__(self, model, shrink: float) -> None:
        self.shrink, self.model, self.start = shrink, model, weights_of(model)

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs):
        for name, parameter in self.model.named_parameters():
            if name in self.start:
                w, w0 = parameter.double(), self.start[name].double()
                parameter.copy_(w + self.shrink * (w0 - w))


def assert_step_then_decay(tmp_path, make, lam: float, **changes) -> SCUTrainer:
    model = make()
    pull = AnalyticDecay(model, shrink=lam * changes.get("learning_rate", 1e-2))
    expected = stock(model, tmp_path / "stock", callbacks=[pull], **changes)
    unpulled = stock(make(), tmp_path / "plain", **changes)
    found = trained(make(), tmp_path / "scu", Settings(law="fixed", lambda_init=lam), **changes)
    assert_close(weights_of(found.model), weights_of(expected.model))
    assert largest_difference(weights_of(found.model), weights_of(unpulled.model)) > 1e-5
    return found


ONE_STEP = {
    "adamw": (lambda: small_llama(), {}),
    "accumulation": (lambda: small_llama(), {"gradient_accumulation_steps": 3}),
    "clipping": (lambda: small_llama(), {"max_grad_norm": 0.01}),
    "bf16 autocast": (lambda: small_llama(), {"bf16": True}),
    "weight decay": (lambda: small_llama(), {"weight_decay": 0.3}),
    "lora": (lambda: lora(small_llama()), {"gradient_accumulation_steps": 3}),
}


@pytest.mark.parametrize("case", ONE_STEP)
def test_one_step_is_the_stock_step_and_then_the_pull(tmp_path, case):
    make, changes = ONE_STEP[case]
    assert_step_then_decay(tmp_path, make, lam=5.0, max_steps=1, **changes)


def test_many_steps_are_stock_steps_each_followed_by_the_pull(tmp_path):
    assert_step_then_decay(tmp_path, small_llama, lam=1.5, optim="sgd", learning_rate=0.05, **HARD)


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_bnb_8bit"])
def test_eight_bit_optimizers_are_pulled_like_any_other(tmp_path, optim):
    pytest.importorskip("bitsandbytes", reason="the qlora extra is not installed")
    found = assert_step_then_decay(tmp_path, lambda: small_llama(hidden=64), lam=5.0, max_steps=1, optim=optim)
    states = found.optimizer.optimizer.state.values()
    assert torch.uint8 in {state["state1"].dtype for state in states}, "no tensor was large enough for 8 bits"


def test_lambda_times_the_rate_of_this_step_is_what_acts(tmp_path):
    """With a linear schedule each step pulls by lambda times its own rate."""
    schedule = {"optim": "sgd", "lr_scheduler_type": "linear", "max_steps": 4, "learning_rate": 0.02}
    found = trained(small_llama(), tmp_path, Settings(law="fixed", lambda_init=5.0), **schedule)
    rows = read_rows(tmp_path / "scu_history.json")
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.02, 0.015, 0.01, 0.005])
    assert [row["shrink"] for row in rows] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert found.state.global_step == 4


# -- the penalty actuator ----------------------------------------------------------------------------------------------


class PenalizedTrainer(Trainer):
    """lambda ||w - w0||^2 / (2 sigma^2 N) added to the loss that autograd differentiates."""

    lam, sigma, tokens = 0.0, 0.1, TOKENS
    start: dict

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        weights = {name: p for name, p in model.named_parameters() if name in self.start}
        distance = sum((p - self.start[name]).square().sum() for name, p in weights.items())
        penalty = self.lam * distance / (2 * self.sigma**2 * self.tokens)
        return loss + penalty / self.current_gradient_accumulation_steps


@pytest.mark.parametrize("make", [small_llama, lambda: lora(small_llama())], ids=["full", "lora"])
def test_penalty_is_what_autograd_makes_of_the_penalized_loss(tmp_path, make):
    changes = {"optim": "sgd", "learning_rate": 0.05, **HARD}
    model = make()
    reference = PenalizedTrainer(model, arguments(tmp_path / "reference", **changes), train_dataset=Rows())
    reference.lam, reference.start = 3000.0, weights_of(model)
    reference.train()
    settings = Settings(law="fixed", lambda_init=3000.0, actuator="penalty", measure="factors")
    found = trained(make(), tmp_path / "scu", settings, regularization_tokens=TOKENS, **changes)
    without = stock(make(), tmp_path / "stock", **changes)
    assert_close(weights_of(found.model), weights_of(reference.model), relative=1e-5)
    assert largest_difference(weights_of(found.model), weights_of(without.model)) > 1e-4


def test_the_original_law_acts(tmp_path):
    """The published implementation detached its penalty: any lambda gave the same weights."""
    runs = [
        trained(
            small_llama(),
            tmp_path / str(lam),
            Settings(law="original", target_s=0.1, lambda_init=lam, lambda_max=1e4, sigma=0.03),
            max_steps=20,
            regularization_tokens=TOKENS,
        )
        for lam in (1e-4, 1e3)
    ]
    assert largest_difference(*(weights_of(run.model) for run in runs)) > 1e-2
    free, held = (run.loop("regularization").last_row["s"] for run in runs)
    assert held < 0.8 * free


# -- what lambda does --------------------------------------------------------------------------------------------------


def test_two_lambdas_give_two_models(tmp_path):
    runs = [
        trained(small_llama(), tmp_path / str(lam), Settings(law="fixed", lambda_init=lam), max_steps=20)
        for lam in (1.0, 8.0)
    ]
    assert largest_difference(*(weights_of(run.model) for run in runs)) > 1e-2
    weak, strong = (run.loop("regularization").last_row["s"] for run in runs)
    assert strong < 0.7 * weak


@pytest.mark.parametrize("make", [small_llama, lambda: lora(small_llama())], ids=["full", "lora"])
def test_model_law_holds_s_at_the_target(tmp_path, make):
    changes = {"max_steps": 120, "per_device_train_batch_size": 2, "learning_rate": 3e-3}
    run = trained(make(), tmp_path, Settings(target_s=0.1, sigma=0.1), **changes)
    late = [row["s_ema"] for row in read_rows(tmp_path / "scu_history.json")[80:]]
    assert min(late) > 0.09
    assert max(late) < 0.11
    assert run.regularizer.progress.notices == []


# -- what is measured --------------------------------------------------------------------------------------------------


class Recorder:
    """A collator that keeps every batch it makes, in the order in which the loop consumes them."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []

    def __call__(self, rows):
        self.batches.append(pad(rows))
        return self.batches[-1]


@torch.no_grad()
def reference_nats(model, batch) -> tuple[float, int]:
    """Summed loss over the predicted tokens, row by row without padding, in float64."""
    nats, tokens = 0.0, 0
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        logits = model(ids[None, :length]).logits[0].double().log_softmax(-1)
        for position in range(1, length):
            if labels[position] != -100:
                nats -= float(logits[position - 1, ids[position]])
                tokens += 1
    return nats, tokens


@pytest.mark.parametrize("control_frequency", [1, 2])
def test_data_bpt_is_the_token_weighted_mean_over_the_window(tmp_path, control_frequency):
    """Learning rate 0 keeps the weights, so that every window can be computed again afterwards."""
    recorder, accumulation = Recorder(), 3
    settings = Settings(law="fixed", lambda_init=0.0, control_frequency=control_frequency)
    changes = {"learning_rate": 0.0, "gradient_accumulation_steps": accumulation, "max_steps": 4}
    run = trained(small_llama(), tmp_path, settings, UnevenRows(48), data_collator=recorder, **changes)
    scores = [reference_nats(run.model, batch) for batch in recorder.batches]
    assert len({tokens for _, tokens in scores}) > 3, "batches must differ, or a plain mean would do"
    rows, per_row, seen = read_rows(tmp_path / "scu_history.json"), accumulation * control_frequency, 0
    assert len(rows) == 4 // control_frequency
    for index, row in enumerate(rows):
        window = scores[index * per_row : (index + 1) * per_row]
        nats, tokens = sum(n for n, _ in window), sum(t for _, t in window)
        seen += tokens
        assert row["data_bpt"] == pytest.approx(nats / tokens / math.log(2.0), rel=1e-6)
        assert row["tokens"] == seen


def test_the_last_row_describes_the_final_weights(tmp_path):
    model = small_llama()
    start = weights_of(model)
    settings = Settings(sigma=0.2, law="fixed", lambda_init=3.0)
    trained(model, tmp_path, settings, regularization_tokens=TOKENS)
    distance = sum(float((w.double() - start[name].double()).square().sum()) for name, w in weights_of(model).items())
    row = read_rows(tmp_path / "scu_history.json")[-1]
    assert row["param_bpt"] == pytest.approx(distance / (2 * 0.04 * TOKENS * math.log(2.0)), rel=1e-6)
    assert row["s"] == pytest.approx(row["param_bpt"] / (row["param_bpt"] + row["data_bpt"]), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 6},
        {"max_steps": 12},
        {"max_steps": -1, "num_train_epochs": 0.5},
        {"gradient_accumulation_steps": 3},
    ],
    ids=str,
)
def test_n_is_one_pass_over_the_data_however_long_the_run(tmp_path, changes):
    run = trained(small_llama(), tmp_path, Settings(target_s=0.1), **changes)
    windows = -(-8 // changes.get("gradient_accumulation_steps", 1))
    first_window = 60.0 * changes.get("gradient_accumulation_steps", 1)
    assert run.regularizer.progress.tokens_n == first_window * windows


def test_n_from_settings_beats_n_from_the_caller(tmp_path):
    run = trained(small_llama(), tmp_path, Settings(target_s=0.1, tokens=77), regularization_tokens=TOKENS)
    config = read_json(tmp_path / "scu_config.json")
    assert run.regularizer.progress.tokens_n == config["tokens_n"] == 77
    assert config["resolved"]["max_steps"] == 6
    assert config["settings"]["tokens"] == 77


def test_logs_carry_the_newest_decision(tmp_path):
    run = trained(small_llama(), tmp_path, Settings(target_s=0.1), logging_steps=3)
    rows = {row["step"]: row for row in read_rows(tmp_path / "scu_history.json")}
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [3, 6]
    for entry in logged:
        row = rows[entry["step"]]
        for name in ("s", "s_ema", "s_target", "lambda", "data_bpt", "param_bpt"):
            assert entry[f"scu/{name}"] == row[name]


# -- mixed precision with a gradient scaler ----------------------------------------------------------------------------


def with_scaler(scale: float):
    """A real GradScaler, which by itself only runs for float16 on a GPU; powers of two scale without rounding."""

    def prepare(trainer) -> None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-40)

    return prepare


@pytest.mark.parametrize("actuator", ["decoupled", "penalty"])
def test_scaled_gradients_get_a_scaled_penalty(tmp_path, actuator):
    settings = Settings(law="fixed", lambda_init=20.0, actuator=actuator)
    runs = [
        trained(
            small_llama(), tmp_path / str(scale), settings, prepare=with_scaler(scale), max_grad_norm=0.0, max_steps=4
        )
        for scale in (1.0, 1024.0)
    ]
    assert runs[1]._loss_scale() == 1024.0
    assert_close(weights_of(runs[1].model), weights_of(runs[0].model), relative=1e-5)
    plain = trained(small_llama(), tmp_path / "plain", settings, max_grad_norm=0.0, max_steps=4)
    assert plain._loss_scale() == 1.0
    assert_close(weights_of(plain.model), weights_of(runs[0].model), relative=1e-5)


def test_steps_that_overflow_are_neither_pulled_nor_measured(tmp_path):
    """The scale starts so high that gradients overflow: the optimizer skips these steps, and so does the loop."""
    settings = Settings(law="fixed", lambda_init=5.0)
    changes = {"max_grad_norm": 0.0, "max_steps": 6, "optim": "sgd"}
    start = weights_of(small_llama())
    seen = []

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
            seen.append((optimizer.step_was_skipped, same(weights_of(model), start)))

    run = trained(small_llama(), tmp_path, settings, prepare=with_scaler(2.0**127), callbacks=[Watch()], **changes)
    skipped = [index + 1 for index, (was_skipped, _) in enumerate(seen) if was_skipped]
    assert 0 < len(skipped) < 6
    assert skipped == list(range(1, len(skipped) + 1))
    assert all(unmoved == was_skipped for was_skipped, unmoved in seen)
    rows = read_rows(tmp_path / "scu_history.json")
    assert [row["step"] for row in rows] == list(range(len(skipped) + 1, 7))
    assert all(row["loss"] < 10.0 for row in rows)
    assert run.regularizer._losses == []


# -- S alone -----------------------------------------------------------------------------------------------------------


def test_a_run_without_a_target_shows_s_as_a_measurement(tmp_path):
    run = trained(small_llama(), tmp_path, Settings(sigma=0.05), logging_steps=3, max_steps=6)
    loop = run.loop("regularization")
    rows, figures = read_rows(tmp_path / "scu_history.json"), loop.figures()
    found = figures["regularization"]
    assert [row["step"] for row in rows] == [3, 6] and rows[-1]["s_ema"] > rows[0]["s_ema"] > 0
    assert (found["steers"], found["final_lambda"], found["target_s"]) == (False, 0.0, None)
    (name, text), (cost, _) = loop.lines(figures)
    assert (name, cost) == ("S", "cost of measuring S")
    assert text == f"{rows[-1]['s_ema']:.4f}, measured, not steered (no scu_target_s)"
    assert [("scu/s_ema" in row, "scu/lambda" in row) for row in run.state.log_history[:2]] == [(True, False)] * 2


def test_where_s_cannot_be_measured_training_goes_on_and_says_so(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="scu_trainer"):
        run = SCUTrainer(small_llama().half(), arguments(tmp_path), train_dataset=Rows(), regularization=Settings())
    loop = run.loop("regularization")
    assert "S is not measured: trainable weight" in caplog.text and "is float16" in caplog.text
    assert loop.lines(loop.figures())[0][1].startswith("not measured: trainable weight")
    assert loop.notices == loop.figures()["regularization"]["notices"] and run.regularizer is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_float16_weights_are_refused_before_training(tmp_path):
    with pytest.raises(ControlError, match="is float16"):
        SCUTrainer(
            small_llama().half(), arguments(tmp_path), train_dataset=Rows(), regularization=Settings(target_s=0.1)
        )


def test_sharded_weights_are_refused_before_training(tmp_path, monkeypatch):
    original = Trainer.__init__

    def launched(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "__init__", launched)
    with pytest.raises(ControlError, match="use DDP"):
        SCUTrainer(small_llama(), arguments(tmp_path), train_dataset=Rows(), regularization=Settings(target_s=0.1))
    SCUTrainer(small_llama(), arguments(tmp_path), train_dataset=Rows())


def test_operations_are_those_of_the_stock_trainer(tmp_path):
    """Rows of several lengths: the weights are counted once, the inputs in every step."""
    expected = stock(small_llama(), tmp_path / "stock", UnevenRows(), data_collator=pad, max_steps=4)
    ours = trained(small_llama(), tmp_path / "ours", dataset=UnevenRows(), data_collator=pad, max_steps=4)
    assert ours.state.total_flos == expected.state.total_flos > 0
    again = dict.fromkeys(("input_ids", "labels"), torch.zeros(3, 7, dtype=torch.int64))
    assert ours.floating_point_ops(again) == expected.floating_point_ops(again)
    assert ours.floating_point_ops({}) == expected.floating_point_ops({}) == 0


class CountsItsWay(Trainer):
    """Operations that do not grow with the inputs."""

    def floating_point_ops(self, inputs):
        return 7 + inputs["input_ids"].numel() ** 2


def test_operations_of_a_trainer_that_counts_its_own_way_are_counted_so(tmp_path):
    given = {"data_collator": pad, "train_dataset": UnevenRows()}
    trainers = [
        CountsItsWay(small_llama(), arguments(tmp_path / "stock", max_steps=4), **given),
        with_loops(CountsItsWay)(
            small_llama(), arguments(tmp_path / "ours", max_steps=4), memory=MemorySettings(), **given
        ),
    ]
    for trainer in trainers:
        trainer.train()
    assert trainers[0].state.total_flos == trainers[1].state.total_flos
