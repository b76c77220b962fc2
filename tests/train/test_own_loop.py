"""The loop that docs/loops.md shows, as a user outside the package writes it."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

from scu_trainer import Loop, SCUTrainer
from scu_trainer.errors import CheckpointError, ControlError, NonFiniteLoss
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from tests.tiny import Rows, UnevenRows, arguments, llama, pad, same, trained, weights_of
from tests.train.test_retention import BASE_FILE, COLLATE, retention

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
STEPS = 12
# So large a rate that the loss soon finds no new minimum.
RUN = {"max_steps": STEPS, "learning_rate": 0.2, "logging_steps": 1, "save_steps": 6, "save_strategy": "steps"}


def shown() -> type[Loop]:
    """The class of the page's first block of code."""
    code = re.search(r"```python\n(import torch.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    found = {"__name__": "own"}
    exec(compile(code, str(PAGE), "exec"), found)
    return found["Cooldown"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return trained(llama(layers=1), folder, callbacks=[shown()(patience=2)], **RUN), folder


def test_it_is_as_short_as_the_page_says():
    code = re.search(r"```python\n(import torch.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    body = code[code.index("class ") :].strip().split("\n")
    assert len([line for line in body if line.strip()]) <= 31


def test_the_rate_is_the_scheduled_one_times_its_factor(run):
    trainer, _ = run
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[-1]["cooldown/rate_factor"] < 1.0, "it never acted"
    for row, before in zip(rows[1:], rows, strict=False):
        assert row["cooldown/rate_factor"] in (before["cooldown/rate_factor"], before["cooldown/rate_factor"] / 2)
    scheduled = trained(llama(layers=1), run[1] / "without", **RUN).state.log_history
    factors = [1.0, *(row["cooldown/rate_factor"] for row in rows)]  # decided after a step, for the next one
    for row, other, factor in zip(rows, [row for row in scheduled if "loss" in row], factors, strict=False):
        assert row["learning_rate"] == other["learning_rate"] * factor


def test_its_history_is_written(run):
    trainer, folder = run
    rows = read_rows(folder / "cooldown.json")
    factors = [row["cooldown/rate_factor"] for row in trainer.state.log_history if "loss" in row]
    assert rows and rows[-1]["rate_factor"] == factors[-1] == 0.5 ** len(rows)
    assert all(factors[row["step"] - 1] == row["rate_factor"] for row in rows)


def test_a_resumed_run_is_the_uninterrupted_one(run, tmp_path):
    trainer, folder = run
    saved = read_json(folder / "checkpoint-6" / "cooldown_state.json")
    assert set(saved) == {"rate_factor", "lowest", "waited"}
    checkpoint = str(folder / "checkpoint-6")
    resumed = trained(llama(seed=7, layers=1), folder, callbacks=[shown()(patience=2)], resume=checkpoint, **RUN)
    assert same(weights_of(resumed.model), weights_of(trainer.model))
    factors = [
        [row["rate_factor"] for row in read_rows(folder / "cooldown.json")],
        [0.5 ** (i + 1) for i in range(len(read_rows(folder / "cooldown.json")))],
    ]
    assert factors[0] == factors[1], "rows that were written again were not cut"


def test_it_forgets_an_earlier_training(run):
    trainer, _ = run
    loop = trainer.loop("cooldown")
    loop.begin()
    assert loop.rate_factor == 1.0


def test_beside_the_loops_of_the_package_it_comes_last(tmp_path):
    loops = {"memory": MemorySettings(), "regularization": RegularizationSettings(target_s=0.1)}
    trainer = trained(llama(layers=1), tmp_path, callbacks=[shown()(patience=2)], **{**RUN, **loops, "max_steps": 4})
    names = [loop.name for loop in trainer.loops]
    assert names[-1] == "cooldown" and {"memory", "regularization"} < set(names)
    assert all({"cooldown/rate_factor", "scu/s"} <= set(row) for row in trainer.state.log_history if "loss" in row)


class Silent(Loop):
    """Has every moment, and uses none."""


def test_a_loop_that_does_nothing_changes_nothing(tmp_path):
    stock = trained(llama(layers=1), tmp_path / "stock", **RUN)
    silent = trained(llama(layers=1), tmp_path / "silent", callbacks=[Silent()], **RUN)
    assert same(weights_of(silent.model), weights_of(stock.model))
    assert not silent.is_stock and stock.is_stock


class Recorded(TrainerCallback):
    """The rate that the optimizer uses in each step, and what is left of it after."""

    def __init__(self) -> None:
        self.used, self.left = [], []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.left.append(optimizer.param_groups[0]["lr"])


class Half(Loop):
    rate_factor = 0.5


def test_factors_multiply_once_and_do_not_stay_in_the_optimizer(tmp_path):
    plain, both = Recorded(), Recorded()
    trained(llama(layers=1), tmp_path / "plain", callbacks=[plain], **RUN)
    trained(llama(layers=1), tmp_path / "both", callbacks=[Half(), both, Half()], **RUN)
    assert both.used == [rate / 4 for rate in plain.used]
    assert both.left == plain.left, "a schedule that builds on the last rate would take the factor again"


def test_a_rate_without_a_schedule_of_steps_is_logged_as_it_was_taken(tmp_path):
    """The stock Trainer reads it from the optimizer, which holds it with the factors."""
    recorded = Recorded()
    plateau = {**RUN, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_dataset": Rows(4)}
    trainer = trained(llama(layers=1), tmp_path, callbacks=[Half(), recorded], **plateau)
    assert [row["learning_rate"] for row in trainer.state.log_history if "loss" in row] == recorded.used


class Named(Loop):
    name = "own"


class Stateful(Named):
    state_file = "own_state.json"

    def __init__(self, state=None) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Unread(Named):
    def state_dict(self):
        return {"best": 1.0}

    def load_statedict(self, state):
        """One letter from a hook."""


class Misspelt(Named):
    def on_gradient(self, loss_scale):
        """One letter from a hook."""

    def on_paper(self):
        """Of its own, and like no hook."""


def given(loop: Loop, **values) -> Loop:
    vars(loop).update(values)
    return loop


@pytest.mark.parametrize(
    ("loops", "said"),
    [
        ([given(Named(), name="memory")], "MemoryLoop both have name 'memory'"),
        ([Named(), Named()], "both have name 'own'"),
        ([Silent()] * 2, "the loop Silent was passed twice"),
        ([Misspelt()], r"Misspelt has on_gradient \(did you mean 'on_gradients'\?\), which nothing calls"),
        ([given(Stateful(), state_file=None)], 'no state_file.*set state_file = "own_state.json"'),
        ([given(Unread(), state_file="own.json")], "Unread has a state_dict but no load_state_dict"),
        ([given(Stateful(), state_file="memory_state.json")], "both have state_file 'memory_state.json'"),
        ([given(Named(), history_file="memory_history.json")], "both have history_file"),
        ([given(Named(), history_file="../rows.json")], "not a file name"),
        ([given(Named(), history_file="rows.csv")], "not a file name"),
        ([given(Named(), state_file="trainer_state.json")], "a file that a run already writes"),
    ],
)
def test_what_would_be_lost_is_refused_when_the_loop_is_given(tmp_path, loops, said):
    with pytest.raises(ControlError, match=said):
        SCUTrainer(llama(layers=1), arguments(tmp_path), memory=MemorySettings(), callbacks=loops)


def test_a_refused_loop_is_not_kept(tmp_path):
    trainer = SCUTrainer(llama(layers=1), arguments(tmp_path), memory=MemorySettings())
    with pytest.raises(ControlError):
        trainer.add_callback(given(Named(), name="memory"))
    assert [loop.name for loop in trainer.loops].count("memory") == 1


class Recording(Named):
    def __init__(self, *more) -> None:
        self.more = more

    def on_step_end(self, args, state, control, **kwargs):
        self.record(*self.more or [{"step": state.global_step}])


class Scalars(Named):
    def __init__(self, scalars) -> None:
        self._scalars = scalars

    def scalars(self):
        return self._scalars


class FinalScalars(Named):
    def final_scalars(self):
        """As where a return was forgotten."""


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (Stateful({"tensor": torch.zeros(2)}), "cannot be saved as JSON"),
        (Stateful([1]), "a list is not a dict"),
        (Stateful({"seen": [{3: 1}]}), "the key 3 is not a string, and would be read back as one"),
        (Recording(), 'no history_file.*set history_file = "own.json"'),
        (given(Recording({"epoch": 1}), history_file="own.json"), "records {'epoch': 1}, a row without its step"),
        (given(Recording([1]), history_file="own.json"), r"records \[1\], a row without its step"),
        (given(Recording({"step": 1, "x": torch.zeros(2)}), history_file="own.json"), "cannot be saved as JSON"),
        (given(Named(), rate_factor=None), "rate_factor None"),
        (given(Named(), rate_factor=float("nan")), "rate_factor nan"),
        (given(Named(), rate_factor=-1.0), "rate_factor -1.0"),
        (given(Named(), batches=lambda batches, count: list(batches)), r"returns a list from batches\(\), not an iter"),
        (Scalars(None), r"returns a NoneType from scalars\(\)"),
        (FinalScalars(), r"returns a NoneType from final_scalars\(\)"),
        (Scalars({3: 1.0}), 'the name 3, which is not text; put it in quotes, as in "own/3"'),
        (Scalars({"own/x": "high"}), "'own/x' as str"),
        (Scalars({"own/x": torch.zeros(2)}), "'own/x' as Tensor"),
        (Scalars({"loss": 1.0}), "'loss', which this row of the logs already has"),
    ],
)
def test_what_shows_later_is_refused_by_name(tmp_path, loop, said):
    with pytest.raises(ControlError, match=said) as raised:
        trained(llama(layers=1), tmp_path, callbacks=[loop], **RUN)
    assert type(loop).__name__ in str(raised.value)


STATE = {"best": math.inf, "mean": math.nan, "rates": [-math.inf, 0.1]}


def test_numbers_of_a_state_that_are_not_finite_come_back(tmp_path):
    trained(llama(layers=1), tmp_path, callbacks=[Stateful(STATE)], **RUN)
    loop = Stateful({})
    trained(llama(layers=1), tmp_path, callbacks=[loop], resume=str(tmp_path / "checkpoint-6"), **RUN)
    assert repr(loop.state) == repr(STATE)


def test_a_loop_that_cannot_take_its_state_is_named(tmp_path):
    class Renamed(Stateful):
        def load_state_dict(self, state):
            self.best = state["lowest"]

    trained(llama(layers=1), tmp_path, callbacks=[Stateful(STATE)], **RUN)
    said = r"own_state.json cannot be read by load_state_dict of the loop Renamed \(KeyError: 'lowest'\)"
    with pytest.raises(CheckpointError, match=said):
        trained(llama(layers=1), tmp_path, callbacks=[Renamed({})], resume=str(tmp_path / "checkpoint-6"), **RUN)


def test_a_loop_that_finds_no_state_says_so(tmp_path, caplog):
    trained(llama(layers=1), tmp_path, **RUN)
    trained(llama(layers=1), tmp_path, callbacks=[Stateful({})], resume=str(tmp_path / "checkpoint-6"), **RUN)
    assert "checkpoint-6 has no own_state.json: the loop Stateful starts fresh" in caplog.text


def test_a_loop_that_is_left_out_when_resuming_is_named(tmp_path, caplog):
    memory, loop = MemorySettings(memory_control=True), Stateful({"best": 1.0})
    trained(llama(layers=1), tmp_path, memory=memory, callbacks=[loop], **RUN)
    checkpoint = str(tmp_path / "checkpoint-6")
    trained(llama(layers=1), tmp_path, memory=memory, callbacks=[Stateful({})], resume=checkpoint, **RUN)
    assert "does not have" not in caplog.text
    trained(llama(layers=1), tmp_path, resume=checkpoint, **RUN)
    said = [line for line in caplog.messages if "does not have" in line]
    assert len(said) == 2
    assert "memory_state.json" in said[0] and "with memory=MemorySettings(...)" in said[0]
    assert "own_state.json, the state of a loop (Stateful)" in said[1] and "callbacks=[Stateful(...)]" in said[1]


def test_a_trainer_without_loops_is_refused(tmp_path):
    trainer = Trainer(llama(layers=1), arguments(tmp_path), train_dataset=Rows(), callbacks=[Silent()])
    with pytest.raises(ControlError, match=r"the loop Silent was passed to a trainer without loops.*with_loops"):
        trainer.train()


class Adds(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.add_callback(Named())


def test_a_loop_that_comes_late_is_refused(tmp_path):
    adds = Adds()
    with pytest.raises(ControlError, match="the loop Named was added during training"):
        trained(llama(layers=1), tmp_path, callbacks=[adds], prepare=lambda t: vars(adds).update(trainer=t), **RUN)
    assert adds.trainer.loops == [] and adds.trainer.is_stock


def test_every_trial_of_a_search_has_its_history(tmp_path):
    pytest.importorskip("optuna")
    trainer = SCUTrainer(
        args=arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        data_collator=COLLATE,
        model_init=lambda: llama(layers=1),
        memory=MemorySettings(),
        regularization=RegularizationSettings(),
        callbacks=[given(Recording(), history_file="own.json"), retention()],
    )
    rates = [1e-3, 1e-2]
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": rates[trial.number]}, n_trials=2, backend="optuna", direction="minimize"
    )
    rows = [[row["step"] for row in read_rows(tmp_path / f"run-{trial}" / "own.json")] for trial in (0, 1)]
    assert rows == [[1, 2], [1, 2]]
    assert (tmp_path / "run-1" / "memory_history.json").is_file()
    for file in ("scu_config.json", BASE_FILE):
        assert sorted(path.parent.name for path in tmp_path.rglob(file)) == ["run-0", "run-1"]


class InfiniteFrom(TrainerCallback):
    """The gradient is, from the step after ``step`` on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.lm_head.weight.register_hook(lambda grad: grad * math.inf if state.global_step >= self.step else grad)


def test_a_trial_of_a_search_keeps_its_suspects_and_its_last_good_step(tmp_path):
    """Of another trial the checkpoint of the same step would be taken for its own."""
    pytest.importorskip("optuna")
    trainer = SCUTrainer(
        args=arguments(tmp_path, max_steps=9, save_steps=100),
        train_dataset=Rows(8),
        model_init=lambda: llama(layers=1),
        curriculum=CurriculumSettings("noise_guard"),
        safety=SafetySettings(max_nonfinite_steps=1),
        callbacks=[InfiniteFrom(step=4)],
    )
    with pytest.raises(NonFiniteLoss, match=rf"resume_from_checkpoint: {tmp_path}/run-0/checkpoint-5\."):
        trainer.hyperparameter_search(lambda trial: {}, n_trials=1, backend="optuna", compute_objective=len)
    assert [path.name for path in tmp_path.iterdir()] == ["run-0"]
    assert (tmp_path / "run-0" / "suspects.jsonl").is_file()


class Ends(Silent):
    def end(self):
        self.has_ended = True
        raise ValueError("this one cannot end")


def test_every_loop_ends_where_one_cannot(tmp_path):
    loops = [Ends(), given(Recording(), history_file="own.json"), Ends()]
    with pytest.raises(ValueError, match="cannot end"):
        trained(llama(layers=1), tmp_path, callbacks=loops, **RUN)
    assert loops[0].has_ended and loops[2].has_ended and loops[1].history is None


def test_a_loop_of_two_trainers_belongs_to_the_one_that_trains(tmp_path):
    loop = Silent()
    first, _ = (
        SCUTrainer(llama(layers=1), arguments(tmp_path), train_dataset=Rows(), callbacks=[loop]) for _ in range(2)
    )
    first.train()
    assert loop.trainer is first


class Evaluated(Named):
    def begin(self):
        self.of = []

    def evaluation(self):
        self.of.append(self.trainer)
        return contextlib.nullcontext()

    def on_evaluate(self, args, state, control, **kwargs):
        self.of.append(self.trainer)


def test_an_evaluation_is_that_of_its_trainer_while_another_one_has_the_loop(tmp_path):
    loop = Evaluated()
    loop.begin()
    first, second = (
        SCUTrainer(llama(layers=1), arguments(tmp_path), eval_dataset=Rows(4), callbacks=[loop]) for _ in range(2)
    )
    first.evaluate()
    first.predict(Rows(4))
    second.evaluate()
    assert loop.of == [first, first, first, second, second] and loop.trainer is second


class Looks(Named):
    def begin(self):
        self.norms = []

    def on_grad_norm(self, norm):
        self.norms.append(norm)


def test_who_only_looks_at_the_norm_leaves_it_in_the_logs(tmp_path):
    stock = trained(llama(layers=1), tmp_path / "stock", **RUN)
    looks, last = Looks(), given(Looks(), name="last")
    looked = trained(llama(layers=1), tmp_path / "looked", callbacks=[looks, last], **RUN)
    norms = [[row["grad_norm"] for row in t.state.log_history if "loss" in row] for t in (stock, looked)]
    assert norms[0] == norms[1] == [float(norm) for norm in looks.norms] and looks.norms == last.norms


def spoil(trainer):
    """The loss of the third step is NaN."""
    count, stock_step = itertools.count(), trainer.stock_training_step

    def step(*given):
        loss = stock_step(*given)
        return loss * math.nan if next(count) == 2 else loss

    trainer.stock_training_step = step


def test_behind_a_vetoed_step_there_is_no_norm(tmp_path):
    looks = Looks()
    run = {**RUN, "logging_steps": 2, "callbacks": [given(Looks(), name="first"), looks], "safety": SafetySettings()}
    trainer = trained(llama(layers=1), tmp_path, prepare=spoil, **run)
    assert [i for i, norm in enumerate(looks.norms) if norm is None] == [2]
    assert all(math.isfinite(row["grad_norm"]) for row in trainer.state.log_history if "loss" in row)


def test_the_one_of_the_page_keeps_its_lowest_loss_through_a_nan(tmp_path):
    loop = shown()(patience=2)
    run = {**RUN, "max_steps": 5, "callbacks": [loop], "safety": SafetySettings()}
    trainer = trained(llama(layers=1), tmp_path, prepare=spoil, **run)
    assert loop.lowest == pytest.approx(min(row["loss"] for row in trainer.state.log_history if "loss" in row))


def test_two_negative_factors_do_not_make_a_sound_one(tmp_path):
    loops = [given(Named(), rate_factor=-1.0), given(Named(), name="other", rate_factor=-1.0)]
    with pytest.raises(ControlError, match="the loop Named has rate_factor"):
        trained(llama(layers=1), tmp_path, callbacks=loops, **RUN)


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array(0.5), 0.5])
def test_a_number_of_any_kind_is_a_scalar(tmp_path, value):
    trainer = trained(llama(layers=1), tmp_path, callbacks=[Scalars({"own/x": value})], **{**RUN, "max_steps": 2})
    assert [row["own/x"] for row in trainer.state.log_history if "loss" in row] == [0.5, 0.5]


@pytest.mark.parametrize("value", [torch.tensor(0.5), np.float32(0.5)])
def test_a_number_of_any_kind_is_a_factor(tmp_path, value):
    trainer = trained(llama(layers=1), tmp_path, callbacks=[given(Named(), rate_factor=value)], **RUN)
    assert trainer.state.log_history[0]["learning_rate"] == RUN["learning_rate"] / 2


def test_a_method_whose_name_is_nearly_that_of_a_hook_is_told_of(tmp_path, caplog):
    near = type("Near", (Named,), {"before_saves": lambda self: None, "of_its_own": lambda self: None})
    SCUTrainer(llama(layers=1), arguments(tmp_path), callbacks=[near()])
    assert caplog.messages == [
        "the loop Near has before_saves (did you mean 'before_save'?), which training does not call"
    ]


class Begins(Named):
    def on_train_begin(self, args, state, control, **kwargs):
        """And does not call that of Loop."""


def test_a_trainer_without_loops_is_refused_whatever_the_loop_does_when_training_begins(tmp_path):
    trainer = Trainer(llama(layers=1), arguments(tmp_path), train_dataset=Rows(), callbacks=[Begins()])
    with pytest.raises(ControlError, match="the loop Begins was passed to a trainer without loops"):
        trainer.train()


class Averages(Stateful):
    """A tensor in its state from the first step on."""

    def begin(self):
        self.state = {"mean": 0.0}

    def on_loss(self, loss, num_items):
        self.state = {"mean": self.state["mean"] + loss}


def test_a_state_that_cannot_be_saved_is_refused_after_the_first_step(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 6}
    seen = {}
    with pytest.raises(ControlError, match="Averages has a state_dict that cannot be saved"):
        trained(llama(layers=1), tmp_path, callbacks=[Averages()], prepare=lambda t: seen.update(trainer=t), **saves)
    assert seen["trainer"].state.global_step == 1


def test_a_state_that_is_never_saved_may_be_anything(tmp_path):
    assert trained(llama(layers=1), tmp_path, callbacks=[Averages()], save_strategy="no").state.global_step == 6


class Leaves(Recording):
    """Takes itself off the trainer on the way."""

    history_file = "own.json"
    has_ended = False

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control)
        if state.global_step == 3:
            self.trainer.remove_callback(self)

    def end(self):
        self.has_ended = True


def test_a_loop_that_is_removed_during_training_ends_with_it(tmp_path):
    loop = Leaves()
    trained(llama(layers=1), tmp_path, callbacks=[loop])
    assert loop.has_ended and loop.history is None
    assert [row["step"] for row in read_rows(tmp_path / "own.json")] == [1, 2, 3]


@pytest.mark.parametrize("hook", ["training_values", "batches", "on_forward", "evaluation"])
def test_a_return_that_was_forgotten_is_named(tmp_path, hook):
    forgets = type("Forgets", (Named,), {hook: lambda self, *given: None})
    with pytest.raises(ControlError, match=rf"the loop Forgets returns None from {hook}\(\)"):
        trained(
            llama(layers=1), tmp_path, callbacks=[forgets()], max_steps=1, eval_dataset=Rows(4), eval_strategy="epoch"
        )


def test_no_change_to_an_epoch_may_be_none(tmp_path):
    same_epoch = type("SameEpoch", (Named,), {"begin_epoch": lambda self, epoch, skipped_batches: None})
    assert trained(llama(layers=1), tmp_path, callbacks=[same_epoch()]).state.global_step == 6


class Relabels(Named):
    """Changes labels where ``where`` says."""

    def __init__(self, where: str) -> None:
        self.where = where

    def batches(self, batches, count):
        for batch in batches:
            yield self._changed(batch) if self.where == "batches" else batch

    def on_batch(self, inputs, num_items):
        if self.where == "on_batch":
            self._changed(inputs)

    def _changed(self, batch):
        batch["labels"] = torch.where(batch["labels"] == -100, -100, 5)
        return batch


def test_batches_may_be_changed_before_they_are_trained_on(tmp_path):
    run = {"dataset": UnevenRows(), "data_collator": pad, "gradient_accumulation_steps": 2, "logging_steps": 1}

    def losses(where, folder, **more):
        trainer = trained(llama(layers=1), tmp_path / folder, callbacks=[Relabels(where)], **run, **more)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    stock = losses("batches", "stock")
    assert stock == pytest.approx(losses("on_batch", "late"))
    for where in ("batches", "on_batch"):
        assert stock == pytest.approx(losses(where, f"memory {where}", memory=MemorySettings()), rel=1e-4)
