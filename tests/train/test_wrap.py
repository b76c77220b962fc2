"""Modules of one's own: any loss, any items, all three loops, and files that load into the bare module."""

from __future__ import annotations

import functools
from collections import namedtuple

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from scu_trainer.errors import DataError, ModelError, SettingsError
from scu_trainer.run_files import read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.train.loss import wrapped_loss
from scu_trainer.train.loss.wrap import wrap
from scu_trainer.train.trainer import SCUTrainer
from tests.faults import FakeGauge, fail_above_tokens
from tests.tiny import arguments, same
from tests.train.stepwise import ENDLESS_BYTES, Recorder, error_of
from tests.train.test_resume import StopAt

ROWS, WIDTH, CLASSES = 24, 6, 3
SGD = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1, "max_steps": 4, "per_device_train_batch_size": 6}


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


X = numbers()
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
PAIRS = list(zip(X, Y, strict=True))


def net(outputs: int = CLASSES, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def fit(model, folder, rows=PAIRS, memory=None, resume=None, **changes):
    """(trainer, recorder)"""
    recorder = Recorder()
    own = {name: changes.pop(name) for name in ("curriculum", "regularization", "efficiency") if name in changes}
    parts = {name: changes.pop(name) for name in ("eval_dataset", "compute_metrics") if name in changes}
    callbacks = [recorder, *changes.pop("callbacks", [])]
    if memory is not None:
        own |= {"memory": memory, "memory_gauge": FakeGauge(ENDLESS_BYTES)}
    args = arguments(folder, **{**SGD, **changes})
    trainer = SCUTrainer(model, args, train_dataset=rows, callbacks=callbacks, **parts, **own)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


# -- losses ------------------------------------------------------------------------------------------------------------


def with_numbers(output, target):
    """Cannot be mapped over rows: it looks at a number."""
    return functional.cross_entropy(output, target) * (1.0 if float(output.detach().sum()) < 1e9 else 2.0)


def that_writes(output, target):
    """To what it is given, and something else each time."""
    return functional.cross_entropy(output.mul_(1.5), target)


LOSSES = {
    "module": (nn.CrossEntropyLoss(), "labels", "_by_reduction_none"),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), "labels", "_by_reduction_none"),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), "sum", "_by_reduction_none"),
    "none": (nn.CrossEntropyLoss(reduction="none"), "rows", "_directly"),
    "function": (functional.cross_entropy, "labels", "_by_reduction_none"),
    "own function": (lambda o, y: functional.cross_entropy(o, y, label_smoothing=0.1), "labels", "_by_vmap"),
    "own sum": (lambda o, y: functional.cross_entropy(o, y, reduction="sum"), "sum", "_by_vmap"),
    "looks at numbers": (with_numbers, "labels", "_by_loop"),
    "writes": (that_writes, "labels", "_by_vmap"),
}


def plain_gradients(module, loss, rows, count: int) -> dict[str, torch.Tensor]:
    """Of the loss over ``rows`` at once, as a loop of one's own takes it."""
    x, y = zip(*rows, strict=True)
    value = loss(module(torch.stack(x)), torch.stack(y))
    (value.sum() / count if value.dim() else value).backward()
    return {f"module.{name}": p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("case", LOSSES)
def test_every_kind_of_loss_trains_as_in_a_plain_loop_whole_or_in_chunks(tmp_path, case):
    """Two accumulation batches of 6 rows: one plain batch of all 12."""
    loss, kind, way = LOSSES[case]
    window = {"max_steps": 1, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    expected = plain_gradients(net(), loss, PAIRS[:12], 12)
    whole, first = fit(wrap(net(), loss), tmp_path, **window)
    _, chunked = fit(
        wrap(net(), loss), tmp_path, memory=MemorySettings(memory_control=True, max_batch_size=5), **window
    )
    assert (whole.model.row_loss.kind, whole.model.row_loss._row_method.__name__) == (kind, way)
    assert error_of(first.gradients[0], expected) < 1e-6
    assert error_of(chunked.gradients[0], expected) < 1e-6


def test_labels_that_are_not_learned_do_not_count(tmp_path):
    """(rows, time) labels of which 2 to 5 are learned: the mean over labels, not over rows; one row has none."""
    labels = torch.randint(0, CLASSES, (ROWS, 5), generator=torch.Generator().manual_seed(1))
    for row in range(ROWS):
        labels[row, 2 + row % 4 :] = -100
    labels[3] = -100

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, 5 * CLASSES)

        def forward(self, x):
            return self.linear(x).view(-1, CLASSES, 5)

    rows = list(zip(X, labels, strict=True))
    window = {"max_steps": 1, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    memory = MemorySettings(memory_control=True, max_batch_size=4)
    for loss in (nn.CrossEntropyLoss(), lambda o, y: functional.cross_entropy(o, y)):
        trainer, recorder = fit(wrap(Steps(), loss), tmp_path, rows, memory=memory, **window)
        assert trainer.model.row_loss.kind == "labels"
        assert error_of(recorder.gradients[0], plain_gradients(Steps(), loss, rows[:12], 12)) < 1e-6


def test_numbers_of_minus_a_hundred_are_targets_like_others(tmp_path):
    """-100 marks labels that are not learned; a temperature of -100 does not."""
    rows = [(x, torch.tensor([-100.0, float(i), 1.0])) for i, x in enumerate(X)]
    trainer, recorder = fit(
        wrap(net(3), nn.MSELoss()), tmp_path, rows, max_steps=1, train_sampling_strategy="sequential"
    )
    assert trainer.model.row_loss.kind == "rows"
    assert error_of(recorder.gradients[0], plain_gradients(net(3), nn.MSELoss(), rows[:6], 6)) < 1e-6


def contrastive(outputs, targets):
    """Rows act on each other."""
    shares = functional.normalize(outputs) @ functional.normalize(outputs).T
    return functional.cross_entropy(shares, torch.arange(len(outputs)))


def test_a_loss_that_mixes_rows_runs_whole_and_is_said(tmp_path, caplog):
    window = {"max_steps": 1, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    memory = MemorySettings(memory_control=True)
    trainer, recorder = fit(wrap(net(), contrastive), tmp_path, memory=memory, **window)
    assert trainer.model.row_loss.kind == "whole" and not trainer.micro_batches.reduction.is_exact
    assert "batches run whole" in caplog.text
    halves = [plain_gradients(net(), contrastive, PAIRS[start : start + 6], 6) for start in (0, 6)]
    mean = {name: (halves[0][name] + halves[1][name]) / 2 for name in halves[0]}
    assert error_of(recorder.gradients[0], mean) < 1e-6


TEN = torch.arange(40) % 10
LAST = torch.tensor([1.0] * 9 + [5.0])


def at_a_temperature(outputs, targets):
    return functional.cross_entropy(outputs * (1 + torch.rand(1)), targets)


def test_a_loss_that_draws_once_per_batch_runs_whole(tmp_path):
    trainers = [
        fit(wrap(net(), loss=at_a_temperature), tmp_path, memory=memory)[0]
        for memory in (None, MemorySettings(memory_control=True, max_batch_size=2))
    ]
    assert "once per batch" in trainers[1].micro_batches.reduction.mixes
    assert same(*(trainer.model.state_dict() for trainer in trainers))


def written_out(outputs, targets):
    """A mean with weights of classes that no public function knows of."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return (LAST[targets] * losses).sum() / LAST[targets].sum()


WEIGHTED = {
    "module": nn.CrossEntropyLoss(weight=LAST),
    "smoothed": nn.CrossEntropyLoss(weight=LAST, label_smoothing=0.1),
    "partial": functools.partial(functional.cross_entropy, weight=LAST),
    "hidden": lambda o, y: functional.cross_entropy(o, y, weight=LAST),
    "likelihood": lambda o, y: functional.nll_loss(o.log_softmax(-1), y, weight=LAST),
}


@pytest.mark.parametrize("case", WEIGHTED)
def test_weights_of_classes_are_read_off_the_function_that_is_called(case):
    """Also before the class that weighs more has come."""
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))
    model = wrap(net(10), WEIGHTED[case])
    model(labels=torch.zeros(4, dtype=torch.int64), inputs=x[:4])
    assert model.row_loss.kind == "targets"
    found, expected = model(labels=TEN, inputs=x), WEIGHTED[case](model.module(x), TEN)
    torch.testing.assert_close(found["loss"], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["losses"].sum() / LAST[TEN].sum(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", WEIGHTED)
def test_a_mean_with_weights_of_classes_is_split_exactly(tmp_path, case):
    """Two accumulation batches of 6 rows are one mean over 12, by what their labels weigh."""
    rows = [(x, torch.tensor(9 if i % 5 == 0 else i % 3)) for i, x in enumerate(X)]
    window = {"max_steps": 1, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    expected = plain_gradients(net(10), WEIGHTED[case], rows[:12], 12)
    for memory in (None, MemorySettings(max_batch_size=5), MemorySettings(max_batch_size=1)):
        trainer, recorder = fit(wrap(net(10), WEIGHTED[case]), tmp_path, rows, memory=memory, **window)
        assert error_of(recorder.gradients[0], expected) < 1e-6
    assert trainer.micro_batches.reduction.is_exact and trainer.micro_batches.loop.statistics.chunks == 12


def test_weights_that_nobody_states_mix_rows():
    order = TEN.argsort(stable=True)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))
    model = wrap(net(10), written_out)
    same_class = model(labels=TEN[order[:4]], inputs=x[order[:4]])
    assert model.row_loss.kind is None and torch.equal(same_class["loss"], same_class["losses"].mean())
    found = model(labels=TEN, inputs=x)["loss"]
    assert model.row_loss.kind == "whole" and torch.equal(found, written_out(model.module(x), TEN))


def test_weights_that_are_all_alike_are_none():
    equal = wrap(net(10), nn.CrossEntropyLoss(weight=torch.ones(10)))
    equal(labels=TEN[:4], inputs=X[:4])
    assert equal.row_loss.kind == "labels"


def test_hidden_weights_of_classes_that_come_later_are_said(tmp_path):
    """Not in the third step, which has no other class to compare with: in the fourth."""
    rows = [(x, torch.tensor(9 if 12 <= i < 20 else i % 3)) for i, x in enumerate(X)]
    order = {"train_sampling_strategy": "sequential"}
    with pytest.raises(ModelError, match="weights classes, as class 9 shows"):
        fit(wrap(net(10), written_out), tmp_path, rows, **order)
    trainer, _ = fit(
        wrap(net(10), lambda o, y: (o - functional.one_hot(y, 10)).square().mean()), tmp_path, rows, **order
    )
    assert trainer.model.row_loss.kind == "labels" and 9 in trainer.model.row_loss.seen


def test_classes_that_come_later_are_asked_about_a_bounded_number_of_times(monkeypatch):
    monkeypatch.setattr(wrapped_loss, "MOST_CHECKS", 2)
    model, asked = wrap(net(10), lambda o, y: (o - functional.one_hot(y, 10)).square().mean()), 0
    for label in range(2, 8):
        batch = {"inputs": X[:4], "labels": torch.tensor([0, 1, 1, label])}
        if model.row_loss.may_show_more([batch["labels"]]):
            model.find_loss_kind([batch])
            asked += 1
    assert asked == 1 + 2


def test_rows_of_one_class_settle_the_loss_after_a_few_steps():
    """Trials undo what they change in the module; how many there were must remain."""
    model = wrap(net(10), lambda o, y: (o - functional.one_hot(y, 10)).square().mean())
    batch = {"inputs": X[:4], "labels": torch.tensor([1, 1, 1, 1])}
    kinds = []
    for _ in range(wrapped_loss.MOST_SINGLE_CLASS_STEPS):
        model.find_loss_kind([batch])
        kinds.append(model.row_loss.kind)
    assert kinds[-1] == "labels" and not any(kinds[:-1])


SUMS = {"module": nn.MSELoss(reduction="sum"), "function": lambda o, y: (o - y).square().sum()}


@pytest.mark.parametrize("case", SUMS)
def test_a_sum_is_one_with_a_row_at_a_time_too(tmp_path, case):
    """4 rows as 1 x 4, 2 x 2 and 4 x 1 accumulation batches."""
    rows, loss = [(x, x[:3] * 2) for x in X], SUMS[case]
    expected = plain_gradients(net(), loss, rows[:4], 1)
    for size in (1, 2, 4):
        window = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "max_steps": 1}
        trainer, recorder = fit(wrap(net(), loss), tmp_path, rows, train_sampling_strategy="sequential", **window)
        assert trainer.model.row_loss.kind == "sum" and error_of(recorder.gradients[0], expected) < 1e-6


def test_one_row_alone_is_believed_what_the_loss_says_of_itself():
    model = wrap(net(), SUMS["module"])
    model(labels=X[:1, :3], inputs=X[:1])
    assert model.row_loss.kind == "sum"


def test_integers_below_zero_are_no_classes(tmp_path):
    rows = [(x, torch.tensor(i - 60)) for i, x in enumerate(X)]
    trainer, _ = fit(wrap(net(1), lambda o, y: (o[:, 0] - y).square().mean()), tmp_path, rows)
    assert trainer.model.row_loss.kind == "labels" and not trainer.model.row_loss.is_plain


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(ignore_index=0), functools.partial(functional.cross_entropy, ignore_index=0)]
)
def test_another_mark_of_what_is_not_learned_is_refused(loss):
    with pytest.raises(ModelError, match="ignores targets of 0"):
        wrap(net(), loss)


# -- what modules and datasets give ------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two inputs; its outputs in the form ``kind``."""

    def __init__(self, kind=lambda a, b: a + b) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.kind = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES), kind

    def forward(self, first, second):
        return self.kind(self.one(first), self.two(second))


def both(outputs, y):
    a, b = outputs.values() if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(a, y) + functional.cross_entropy(b, y)


OUTPUTS = {"tuple": lambda a, b: (a, b), "list": lambda a, b: [a, b], "dict": lambda a, b: {"a": a, "b": b}}
Item = namedtuple("Item", "a b y")
TRIPLES = [Item(x, z, y) for x, z, y in zip(X, numbers(1), Y, strict=True)]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_modules_with_several_outputs(tmp_path, kind):
    memory = MemorySettings(memory_control=True, max_batch_size=4)
    runs = [fit(wrap(Two(OUTPUTS[kind]), both), tmp_path, TRIPLES, memory=m) for m in (None, memory)]
    (trainer, whole), (_, chunked) = runs
    assert trainer.model.row_loss._row_method.__name__ == "_by_vmap"
    assert all(error_of(a, b) < 1e-5 for a, b in zip(chunked.weights, whole.weights, strict=True))
    predictions = trainer.predict(TRIPLES).predictions
    assert [part.shape for part in predictions] == [(ROWS, CLASSES)] * 2


ITEMS = {
    "triples": (TRIPLES, {}),
    "order": ([(y, z, x) for x, z, y in TRIPLES], {"targets": 0, "inputs": [2, 1]}),
    "dicts": ([{"second": z, "label": y, "first": x, "name": "n"} for x, z, y in TRIPLES], {}),
    "keys": ([{"p": z, "q": x, "t": y} for x, z, y in TRIPLES], {"targets": "t", "inputs": ["q", "p"]}),
    "lists": ([{"first": x.tolist(), "second": z.numpy(), "label": int(y)} for x, z, y in TRIPLES], {}),
    "datasets": (
        Dataset.from_list([{"first": x.tolist(), "second": z.tolist(), "label": int(y)} for x, z, y in TRIPLES]),
        {},
    ),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_of_every_kind_train_the_same(tmp_path, kind, caplog):
    _, expected = fit(wrap(Two(), nn.CrossEntropyLoss()), tmp_path, TRIPLES)
    rows, where = ITEMS[kind]
    curriculum = CurriculumSettings("noise_guard") if kind in ("dicts", "datasets") else None
    _, found = fit(wrap(Two(), nn.CrossEntropyLoss(), **where), tmp_path, rows)
    assert all(error_of(a, b) < 1e-6 for a, b in zip(found.weights, expected.weights, strict=True))
    assert ("does not accept name" in caplog.text) == (kind == "dicts")
    if curriculum is not None:
        trainer, _ = fit(wrap(Two(), nn.CrossEntropyLoss(), **where), tmp_path, rows, curriculum=curriculum)
        assert (trainer.difficulty.observations > 0).all()


REFUSED_ITEMS = {
    "strings": (["a", "b"], {}, "returns a str per item"),
    "no target": ([{"x": x, "y": y} for x, y in PAIRS], {}, "no target; name its key"),
    "one part": ([(x,) for x in X], {}, r"no target; let the dataset return \(x, y\)"),
    "other name": ([{"x": x, "y": y} for x, y in PAIRS], {"targets": "yy"}, "not one of them .did you mean 'y'"),
    "other input": (
        [{"x": x, "y": y} for x, y in PAIRS],
        {"targets": "y", "inputs": ["z"]},
        "the input 'z' is not one",
    ),
    "which input": ([{"a": x, "b": x, "labels": y} for x, y in PAIRS], {}, r"forward takes input; name the keys"),
    "no position": (PAIRS, {"targets": 4}, "4 is not a position"),
    "text": ([{"x": "abc", "labels": y} for _, y in PAIRS], {}, "x is a str that cannot become a tensor.*leave it out"),
    "named class": (
        [(x, "cat") for x in X],
        {},
        "labels is a str .*let the dataset return the number of the class .from 0",
    ),
    "two targets": ([(x, {"a": y, "b": x}) for x, y in PAIRS], {}, "labels is a dict .*a tensor for several"),
}


@pytest.mark.parametrize("case", REFUSED_ITEMS)
def test_items_that_cannot_be_trained_on_are_refused_before_training(tmp_path, case):
    rows, where, words = REFUSED_ITEMS[case]
    with pytest.raises(DataError, match=words):
        SCUTrainer(wrap(net(), nn.CrossEntropyLoss(), **where), arguments(tmp_path), train_dataset=rows)


class Recurrent(nn.Module):
    """Beside the logits its hidden state: (4, rows, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        steps, hidden = self.cell(x.view(len(x), 3, 2))
        return self.head(steps[:, -1]), hidden


@pytest.mark.parametrize("size", [4, 6])
def test_a_state_that_has_as_many_entries_as_rows_by_chance(tmp_path, caplog, size):
    model = wrap(Recurrent(), lambda o, y: functional.cross_entropy(o[0], y))
    fit(model, tmp_path, per_device_train_batch_size=size)
    assert model.row_loss.kind == "whole" and "not have one entry per row" in caplog.text


def test_no_batch_is_said_to_run_whole_that_is_split(tmp_path, caplog):
    model = wrap(Recurrent(), lambda o, y: functional.cross_entropy(o[0], y))
    trainer, _ = fit(model, tmp_path, memory=MemorySettings(max_batch_size=4))
    assert trainer.micro_batches.reduction.is_exact
    assert "losses of single rows are unknown" in caplog.text and "run whole" not in caplog.text


class Prefixed(nn.Module):
    """Names of inputs such as those of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, CLASSES), []

    def forward(self, input_a, input_b):
        self.seen.append((input_a, input_b))
        return self.linear(input_a) + 0 * self.linear(input_b)


def test_parts_of_a_dict_enter_by_their_names(tmp_path):
    rows = [{"input_b": x + 100, "input_a": x, "labels": y} for x, y in PAIRS]
    model = wrap(Prefixed(), nn.CrossEntropyLoss())
    fit(model, tmp_path, rows, max_steps=1)
    assert model.module.seen and all(bool((b > 50).all() and (a < 50).all()) for a, b in model.module.seen)


def test_inputs_whose_order_nobody_has_said_are_refused():
    with pytest.raises(ModelError, match="it is not clear which is which"):
        wrap(Two(), nn.CrossEntropyLoss())(a=X, b=X, labels=Y)


@pytest.mark.parametrize(
    ("module", "rows", "words"),
    [(net, TRIPLES, "2 inputs.*too many"), (Two, PAIRS, "1 inputs.*missing a required argument: 'second'")],
)
def test_inputs_that_the_module_does_not_take_are_refused_before_training(tmp_path, module, rows, words):
    with pytest.raises(ModelError, match=words):
        SCUTrainer(wrap(module(), nn.CrossEntropyLoss()), arguments(tmp_path), train_dataset=rows)


def test_batches_that_are_no_dicts_are_refused(tmp_path):
    collate = torch.utils.data.default_collate
    model = wrap(net(), nn.CrossEntropyLoss())
    trainer = SCUTrainer(model, arguments(tmp_path, **SGD), train_dataset=PAIRS, data_collator=collate)
    with pytest.raises(ModelError, match="data_collator gives a list"):
        trainer.train()


def test_items_of_unequal_shapes_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"the shape of .* differs between items, for instance \(3,\) and \(6,\)"):
        fit(wrap(net(), nn.CrossEntropyLoss()), tmp_path, [(x[: 3 + 3 * (i % 2)], y) for i, (x, y) in enumerate(PAIRS)])
    collator = wrap(net(), nn.CrossEntropyLoss()).data_collator
    with pytest.raises(DataError, match="items of one batch differ"):
        collator([{"x": X[0], "labels": Y[0]}, {"x": X[0]}])


def test_a_stream_without_targets_is_refused_at_its_first_batch(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(X)

    with pytest.raises(DataError, match="a training batch has no target"):
        fit(wrap(net(), nn.CrossEntropyLoss()), tmp_path, Stream())


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


REFUSED_LOSSES = {
    "float": (lambda o, y: float(functional.cross_entropy(o, y)), "returns a float"),
    "shape": (lambda o, y: o.sum(dim=0), r"returns shape \(3,\) for"),
    "no loss": (3, "loss is a int"),
    "weights": (Learned(), "weights of its own"),
}


@pytest.mark.parametrize("case", REFUSED_LOSSES)
def test_losses_that_are_none_are_refused(tmp_path, case):
    loss, words = REFUSED_LOSSES[case]
    with pytest.raises(ModelError, match=words):
        fit(wrap(net(), loss), tmp_path)


@pytest.mark.parametrize("row", [0, 23])
def test_a_class_without_an_output_is_told(tmp_path, row):
    """In the first step, and in a later one."""
    rows = [(x, torch.tensor(2 if number == row else number % 2)) for number, x in enumerate(X)]
    model = wrap(net(outputs=2), nn.CrossEntropyLoss())
    with pytest.raises(ModelError, match=r"targets are \d to 2, and .* the shape \(\d, 2\): Target 2 is out of bounds"):
        fit(model, tmp_path, rows, train_sampling_strategy="sequential")


def test_what_is_no_module_is_refused():
    with pytest.raises(ModelError, match="this is a function"):
        wrap(lambda x: x, nn.CrossEntropyLoss())


def test_label_smoothing_of_the_trainer_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="would replace the loss given to wrap"):
        fit(wrap(net(), nn.CrossEntropyLoss()), tmp_path, label_smoothing_factor=0.1)


# -- the loops ---------------------------------------------------------------------------------------------------------


def test_all_loops_survive_out_of_memory(tmp_path):
    """A device of 4 rows, batches of 6: the same run as one of endless memory."""
    loops = {"regularization": RegularizationSettings(target_s=0.02), "curriculum": CurriculumSettings("noise_guard")}
    memory, changes = MemorySettings(memory_control=True), {"max_steps": -1, "num_train_epochs": 2}
    _, expected = fit(wrap(net(), nn.CrossEntropyLoss()), tmp_path / "a", memory=memory, **loops, **changes)
    model = wrap(net(), nn.CrossEntropyLoss())
    with fail_above_tokens(model, 4) as tried:
        trainer, found = fit(model, tmp_path / "b", memory=memory, **loops, **changes)
    assert max(tried) > 4 and trainer.micro_batches.loop.statistics.out_of_memory > 0
    assert all(error_of(a, b) < 1e-5 for a, b in zip(found.weights, expected.weights, strict=True))
    assert trainer.regularizer.progress.tokens_n == ROWS
    assert all(row["s"] is not None for row in read_rows(tmp_path / "b" / "scu_history.json"))
    assert trainer.loss_path.reading.kind == "classes" and trainer.loss_path.reading.exact


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_noise_guard_finds_wrong_labels(tmp_path, smoothing):
    """Three clouds, one row in ten with the label of another."""
    generator = torch.Generator().manual_seed(2)
    clouds, wrong = torch.arange(120) % CLASSES, set(range(0, 120, 10))
    x = 5 * functional.one_hot(clouds, WIDTH) + torch.randn(120, WIDTH, generator=generator)
    rows = [(x[i], (clouds[i] + (i in wrong)) % CLASSES) for i in range(120)]
    changes = {"max_steps": -1, "num_train_epochs": 6, "optim": "adamw_torch", "learning_rate": 0.02}
    model = wrap(net(), nn.CrossEntropyLoss(label_smoothing=smoothing))
    trainer, _ = fit(model, tmp_path, rows, curriculum=CurriculumSettings("noise_guard"), **changes)
    worst = set(trainer.difficulty.scores.argsort()[-len(wrong) :].tolist())
    assert len(worst & wrong) >= 10
    assert trainer.loss_path.reading.kind == ("own" if smoothing else "classes") and trainer.loss_path.reading.exact
    assert trainer.curriculum.figures()["curriculum"]["suspects"] > 0


def test_evaluation_gives_logits_and_labels(tmp_path):
    seen = {}

    def metrics(prediction):
        seen.update(logits=prediction.predictions, labels=prediction.label_ids)
        return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    model = wrap(net(), nn.CrossEntropyLoss(label_smoothing=0.1))
    trainer, _ = fit(model, tmp_path, eval_dataset=PAIRS, compute_metrics=metrics, per_device_eval_batch_size=5)
    found = trainer.evaluate()
    with torch.no_grad():
        logits = model.module(X)
    assert torch.allclose(torch.tensor(seen["logits"]), logits) and torch.equal(torch.tensor(seen["labels"]), Y)
    assert found["eval_accuracy"] == pytest.approx(float((logits.argmax(1) == Y).float().mean()))
    assert found["eval_loss"] == pytest.approx(float(model.row_loss.loss(logits, Y)), rel=0.2)
    assert trainer.predict([(x,) for x in X]).predictions.shape == (ROWS, CLASSES)


class WithHelper(nn.Module):
    """As GoogLeNet: a second output in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.helper = net(), net(seed=1)

    def forward(self, x):
        return (self.main(x), self.helper(x)) if self.training else self.main(x)


def test_an_output_that_only_training_has_counts_in_the_losses_of_rows(tmp_path):
    def loss(outputs, targets):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(functional.cross_entropy(o, targets) * w for o, w in zip(outputs, (1.0, 0.4), strict=False))

    model = wrap(WithHelper(), loss)
    curriculum, memory = CurriculumSettings("noise_guard"), MemorySettings(memory_control=True, max_batch_size=4)
    whole = {"max_steps": 1, "per_device_train_batch_size": ROWS}
    trainer, recorder = fit(model, tmp_path, curriculum=curriculum, memory=memory, eval_dataset=PAIRS, **whole)
    assert trainer.loss_path.reading.kind == "own" and trainer.evaluate()["eval_loss"] > 0
    assert error_of(recorder.gradients[0], plain_gradients(WithHelper(), loss, PAIRS, ROWS)) < 1e-6


class KeepsMean(nn.Module):
    """Of what it has seen, for evaluations alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        outputs = self.net(x)
        if self.training:
            self.keep(outputs.detach())
        return outputs if self.training else outputs - self.mean

    def keep(self, outputs):
        self.mean.data.lerp_(outputs.mean(dim=0), 0.1)


class ReplacesMean(KeepsMean):
    def keep(self, outputs):
        self.mean = 0.9 * self.mean + 0.1 * outputs.mean(dim=0)


class NormOfRows(nn.Module):
    """Rows do not act on each other in training; evaluations take the running statistics of all."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x):
        return self.norm(self.net(x).unsqueeze(1)).squeeze(1)


class LastMean(KeepsMean):
    def keep(self, outputs):
        self.mean = outputs.mean(dim=0)


class MeanInAttribute(ReplacesMean):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.mean = torch.zeros(CLASSES)


class KeepsLoss(KeepsMean):
    """For its own log, as layers of experts do with a term of their loss."""

    def keep(self, outputs):
        self.last = outputs.mean()


class Fills(MeanInAttribute):
    """Room that is made once, and a figure of which there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.none = torch.full((), torch.nan)

    def keep(self, outputs):
        self.mean.copy_(outputs.mean(dim=0))
        self.none = self.none.clone()


class Caches(KeepsMean):
    """As masks of attention are: made again for another length alone."""

    def keep(self, outputs):
        if len(self.mean) != len(outputs):
            self.mean = torch.zeros(len(outputs))

    def state_dict(self, *args, **kwargs):
        return self.net.state_dict(*args, **kwargs)


MOVING = [
    (KeepsMean, "mean"), (ReplacesMean, "mean"), (NormOfRows, "norm.running"), (LastMean, "mean"),
    (MeanInAttribute, "mean"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), MOVING)
def test_a_buffer_that_each_forward_moves_moves_once_per_batch(tmp_path, caplog, kind, name):
    plain, _ = fit(wrap(kind(), nn.CrossEntropyLoss()), tmp_path, max_steps=4)
    memory = MemorySettings(max_batch_size=2)
    cut, _ = fit(wrap(kind(), nn.CrossEntropyLoss()), tmp_path, memory=memory, max_steps=4)
    assert same(cut.model.state_dict(), plain.model.state_dict())
    of = [getattr(trainer.model.module, "mean", torch.zeros(())) for trainer in (cut, plain)]
    assert torch.equal(*of)
    what = "attribute" if kind is MeanInAttribute else "buffer"
    assert f"each forward writes to the {what} module.{name}" in caplog.text and "Batches run whole" in caplog.text


class CountsCalls(KeepsMean):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def keep(self, outputs):
        self.mean += 1


def test_a_count_of_calls_among_the_buffers_leaves_the_split_and_is_named(tmp_path, caplog):
    memory = MemorySettings(max_batch_size=2)
    cut, _ = fit(wrap(CountsCalls(), nn.CrossEntropyLoss()), tmp_path, memory=memory, max_steps=2)
    assert cut.micro_batches.reduction.is_exact
    assert "mean of CountsCalls counts micro-batches" in caplog.text


@pytest.mark.parametrize("kind", [Caches, KeepsLoss, Fills])
def test_a_cache_among_the_buffers_leaves_the_split(tmp_path, kind):
    memory = MemorySettings(max_batch_size=2)
    cut, _ = fit(wrap(kind(), nn.CrossEntropyLoss()), tmp_path, memory=memory, max_steps=2)
    assert cut.micro_batches.reduction.is_exact


def test_saved_files_are_those_of_the_module(tmp_path):
    module = net()
    trainer, _ = fit(wrap(module, nn.CrossEntropyLoss(weight=torch.ones(CLASSES))), tmp_path)
    trainer.save_model(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert same(saved, dict(net().state_dict()) | dict(module.state_dict()))
    fresh = net(seed=5)
    fresh.load_state_dict(saved)
    assert same(dict(fresh.state_dict()), dict(module.state_dict()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_tied_weights_are_saved_under_all_their_names_and_resumed(tmp_path):
    rows = [(y, (y + 1) % CLASSES) for y in Y]
    model = lambda: wrap(Tied(), nn.CrossEntropyLoss())  # noqa: E731
    trainer, _ = fit(model(), tmp_path, rows, callbacks=[StopAt(2)])
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    assert torch.equal(fresh.head.weight, trainer.model.module.embed.weight)
    resumed, _ = fit(model(), tmp_path, rows, resume=True)
    module = resumed.model.module
    assert resumed.state.global_step == 4 and module.head.weight is module.embed.weight


def test_weights_in_channels_last_are_saved(tmp_path):
    pixels = [(torch.randn(3, 4, 4), y) for y in Y]
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, CLASSES))
    module.to(memory_format=torch.channels_last)
    fit(wrap(module, nn.CrossEntropyLoss()), tmp_path, pixels, callbacks=[StopAt(2)])
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert same(saved, dict(module.state_dict())) and not module[0].weight.is_contiguous()


def test_resumed_is_uninterrupted_bit_for_bit_with_everything_on(tmp_path):
    settings = {
        "regularization": RegularizationSettings(target_s=0.02),
        "curriculum": CurriculumSettings("noise_guard"),
        "efficiency": EfficiencySettings(ema_decay=0.9, lr_milestones=[0.5]),
    }
    changes = {"max_steps": -1, "num_train_epochs": 3, "learning_rate": 0.01, "lr_scheduler_type": "linear", **settings}
    memory = MemorySettings(memory_control=True, max_batch_size=4)
    model = lambda: wrap(net(), nn.CrossEntropyLoss())  # noqa: E731
    whole, _ = fit(model(), tmp_path / "whole", memory=memory, **changes)
    fit(model(), tmp_path / "parts", memory=memory, callbacks=[StopAt(6)], **changes)
    resumed, _ = fit(model(), tmp_path / "parts", memory=memory, resume=True, **changes)
    assert same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


def test_batch_norm_is_warned_of(tmp_path, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    trainer, _ = fit(wrap(model, nn.CrossEntropyLoss()), tmp_path, memory=MemorySettings(memory_control=True))
    assert "(BatchNorm)" in trainer.micro_batches.reduction.mixes and "would not give the gradient" in caplog.text


def test_batch_norm_can_be_trained_by_the_losses_of_rows(tmp_path):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    model = wrap(nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Linear(8, CLASSES)), nn.CrossEntropyLoss())
    trainer, _ = fit(model, tmp_path, curriculum=CurriculumSettings("noise_guard"))
    assert trainer.loss_path.reading.exact and norm.num_batches_tracked == SGD["max_steps"]


def test_no_batch_of_one_row_is_left_for_batch_norm(tmp_path):
    model = wrap(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)), nn.CrossEntropyLoss())
    rows = (PAIRS * 2)[:25]  # four batches of six, and one row
    trainer, _ = fit(model, tmp_path, rows, curriculum=CurriculumSettings("noise_guard"), max_steps=10)
    assert trainer.curriculum.figures()["curriculum"]["rows"] == 50
