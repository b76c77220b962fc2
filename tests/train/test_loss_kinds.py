"""Losses of strangers: what each divides by, and that no reading is taken for another that came out alike."""

from __future__ import annotations

import random
import types
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import SequenceClassifierOutput

from scu_trainer.train.loss.analysis import analyze
from scu_trainer.train.loss.analysis.no_trace import WithoutNoise, has_drawn, rng_state
from scu_trainer.train.loss.rows.known import LossCalls, left_out_by
from scu_trainer.train.step.batches.reduction import Reduction
from scu_trainer.train.step.batches.rows import read_layout

ROWS, WORDS, CLASSES = 6, 32, 4
WEIGHTS = torch.tensor([1.0, 0.2, 3.0, 7.0])


class Net(nn.Module):
    """``loss(self, pooled, logits, **inputs)``; logits (rows, classes), token logits in ``self.words``."""

    def __init__(self, loss, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES), nn.Linear(8, WORDS)
        self.dropout, self.loss, self.calls = nn.Dropout(dropout), loss, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids, attention_mask, labels=None, weight=None, extra=None):
        inputs = {"labels": labels, "weight": weight, "extra": extra}
        inputs = {name: value for name, value in inputs.items() if value is not None}
        self.seen += 1
        self.calls += 1
        states = self.dropout(self.table(input_ids))
        mask = attention_mask.unsqueeze(-1)
        self.words = self.out(states)
        pooled = (states * mask).sum(1) / mask.sum(1)
        return self.loss(self, pooled, self.head(pooled), mask=attention_mask, **inputs)


def batch(labels, lengths=(9, 5, 8, 4, 7, 6), **more):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (ROWS, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels, **more}


def words(**more):
    made = batch(None, **more)
    return {**made, "labels": torch.where(made["attention_mask"].bool(), made["input_ids"], -100)}


def classes(labels=(0, 1, 2, 3, 1, 0), **more):
    return batch(torch.tensor(labels), **more)


def ask(loss, inputs, items=None, model=None, **options):
    model = model or Net(loss, options.pop("dropout", 0.0))
    model.train()
    return analyze(lambda given, count: model(**given), model, [read_layout(inputs)], items, 0, **options)


def contrast(pooled):
    return functional.cross_entropy(
        5 * functional.normalize(pooled) @ functional.normalize(pooled).T, torch.arange(len(pooled))
    )


def tokens(net, labels, **how):
    return functional.cross_entropy(net.words[:, :-1].transpose(1, 2), labels[:, 1:], **how)


KNOWN = {
    "mean over classes": (classes(), lambda n, p, o, mask, labels: functional.cross_entropy(o, labels), "labels"),
    "sum over classes": (
        classes(),
        lambda n, p, o, mask, labels: functional.cross_entropy(o, labels, reduction="sum"),
        "sum",
    ),
    "weights of classes": (
        classes(),
        lambda n, p, o, mask, labels: nn.CrossEntropyLoss(weight=WEIGHTS)(o, labels),
        "targets",
    ),
    "weights of classes, all rows of one class": (
        classes([2] * ROWS),
        lambda n, p, o, mask, labels: functional.cross_entropy(o, labels, weight=WEIGHTS),
        "targets",
    ),
    "smoothed weights of classes": (
        classes(),
        lambda n, p, o, mask, labels: functional.cross_entropy(o, labels, weight=WEIGHTS, label_smoothing=0.2),
        "targets",
    ),
    "another mark of what is not learned": (
        classes([0, 3, 3, 1, 2, 3]),
        lambda n, p, o, mask, labels: functional.cross_entropy(o, labels, ignore_index=3),
        "targets",
    ),
    "next tokens": (words(), lambda n, p, o, mask, labels: tokens(n, labels), "shifted_labels"),
    "tokens in their place": (
        words(),
        lambda n, p, o, mask, labels: functional.cross_entropy(n.words.transpose(1, 2), labels),
        "labels",
    ),
    "squares": (
        batch(torch.rand(ROWS, CLASSES)),
        lambda n, p, o, mask, labels: functional.mse_loss(o, labels),
        "rows",
    ),
    "ctc, targets of one length": (
        batch(torch.randint(1, CLASSES, (ROWS, 2)), lengths=[9] * ROWS),
        lambda n, p, o, mask, labels: functional.ctc_loss(
            n.words.log_softmax(-1).transpose(0, 1), labels, mask.sum(1), torch.full((len(labels),), 2)
        ),
        "rows",
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_public_functions_say_what_they_divide_by(case):
    inputs, loss, kind = KNOWN[case]
    found = ask(loss, inputs)
    assert found.is_exact and found.kind == kind and found.known.startswith("torch.nn.functional.")


@pytest.mark.parametrize("text", [{}, {"input_ids": torch.ones(4, 8, dtype=torch.int64)}], ids=["images", "text"])
def test_a_class_behind_the_last_one_that_is_no_column_leaves_a_row_out(text):
    """Batches may have further targets, or not."""
    given = {**text, "first": torch.tensor([0, 1, 2, 0]), "second": torch.tensor([1, 1, 0, 2])}
    with LossCalls() as seen:
        for target in (given["first"], given["second"]):
            functional.cross_entropy(torch.rand(4, 3), target, ignore_index=3)
    reduction = Reduction("rows", left_out_by=left_out_by(seen.calls, given, 4))
    assert reduction.obstacle_in(read_layout(given)) is None
    left_out = read_layout({**text, "first": torch.tensor([0, 3, 2, 0])})
    assert reduction.obstacle_in(left_out).startswith("in some batches first leaves rows out")
    assert reduction.obstacle_in(read_layout({**text, "others": given["first"]})) is None


def test_the_divisor_of_weights_is_that_of_every_class():
    """Also of those that no row asked about had."""
    found = ask(KNOWN["weights of classes"][1], classes([0, 1, 0, 1, 0, 1]))
    assert found.row_items({"labels": torch.tensor([3, 2, 0])}, 3) == pytest.approx([7.0, 3.0, 1.0])


ASKED = {
    "mean per sequence": (
        words(),
        lambda n, p, o, mask, labels: (
            tokens(n, labels, reduction="none").sum(1) / labels[:, 1:].ne(-100).sum(1).clamp(min=1)
        ).mean(),
        "rows",
    ),
    "mean over the mask": (
        words(),
        lambda n, p, o, mask, labels: (n.words.square().mean(-1) * mask).sum() / mask.sum(),
        "mask",
    ),
    "mean over the mask but its first column": (
        words(),
        lambda n, p, o, mask, labels: (n.words.square().mean(-1) * mask)[:, 1:].sum() / mask[:, 1:].sum(),
        "shifted_mask",
    ),
    "weights of rows": (
        classes(weight=torch.rand(ROWS) + 0.5),
        lambda n, p, o, mask, labels, weight: (
            (weight * functional.cross_entropy(o, labels, reduction="none")).sum() / weight.sum()
        ),
        "column weight",
    ),
    "focal": (
        classes(),
        lambda n, p, o, mask, labels: (
            (1 - o.softmax(-1).gather(1, labels[:, None])[:, 0]).square()
            * functional.cross_entropy(o, labels, reduction="none")
        ).mean(),
        "labels",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_losses_of_strangers_are_asked(case):
    inputs, loss, kind = ASKED[case]
    found = ask(loss, inputs)
    assert found.is_exact and found.kind == kind and found.known is None


MIXES = {
    "contrastive": lambda n, p, o, mask, labels: contrast(p),
    "contrastive in training only": lambda n, p, o, mask, labels: (
        functional.cross_entropy(o, labels) + (0.1 * contrast(p) if n.training else 0.0)
    ),
    "gradient without a value": lambda n, p, o, mask, labels: (
        functional.cross_entropy(o, labels) + contrast(p) - contrast(p).detach()
    ),
    "weights of classes by hand": lambda n, p, o, mask, labels: (
        (WEIGHTS[labels] * functional.cross_entropy(o, labels, reduction="none")).sum() / WEIGHTS[labels].sum()
    ),
    "the hardest row": lambda n, p, o, mask, labels: functional.cross_entropy(o, labels, reduction="none").max(),
    "rows that see each other": lambda n, p, o, mask, labels: functional.cross_entropy(n.head(p - p.mean(0)), labels),
    "a known loss and another": lambda n, p, o, mask, labels: (
        functional.cross_entropy(o, labels) + 0.1 * o.softmax(-1).mean(0).square().sum()
    ),
    "two means with different divisors": lambda n, p, o, mask, labels: (
        functional.cross_entropy(o, labels) + functional.cross_entropy(o, labels, weight=WEIGHTS)
    ),
}


@pytest.mark.parametrize("case", MIXES)
def test_losses_that_mix_rows_are_not_split(case):
    assert not ask(MIXES[case], classes()).is_exact


def test_near_a_flat_start_values_are_alike_and_gradients_tell():
    """All rows have the loss ln(classes): every mean of them is the same number."""

    def loss(net, pooled, logits, mask, labels):
        return MIXES["weights of classes by hand"](net, pooled, logits, mask, labels)

    model = Net(loss)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    assert not ask(loss, classes(), model=model).is_exact


def test_numbers_that_are_drawn_on_any_device_are_noticed(monkeypatch):
    """Apple's here, where no model can be."""
    drawn = [torch.zeros(1)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: drawn[-1])
    model = types.SimpleNamespace(parameters=lambda: [types.SimpleNamespace(device=torch.device("mps:0"))])
    before = rng_state(model)
    assert not has_drawn(model, before)
    drawn.append(torch.ones(1))
    assert has_drawn(model, before)


def test_dropout_is_the_identity_while_a_loss_is_asked():
    found = ask(KNOWN["mean over classes"][1], classes(), dropout=0.5)
    assert found.is_exact and found.known is not None


NOISE = {
    "dropout": lambda x: functional.dropout(x, 0.3, training=True),
    "channels": lambda x: functional.dropout1d(x[None], 0.3, training=True)[0],
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
    "layers": lambda x: x * torch.rand(len(x), 1).add(0.9).floor(),
    "gaussian": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "recurrent": lambda x: nn.GRU(4, 4, num_layers=2, dropout=0.5).train()(x[None])[0][0].detach() * 0 + x,
}


@pytest.mark.parametrize("case", NOISE)
def test_draws_give_their_means(case):
    x = torch.rand(3, 4)
    with WithoutNoise():
        first, second = NOISE[case](x), NOISE[case](x)
    assert torch.equal(first, second)
    if case not in ("attention",):
        torch.testing.assert_close(first, x)


def test_permutations_move_every_entry():
    """One that happened to move nothing would hide that rows are mixed."""
    with WithoutNoise():
        assert torch.randperm(4).tolist() == [3, 0, 1, 2]

    def mixed_up(net, pooled, logits, mask, labels):
        lam = 0.7
        mixed = lam * pooled + (1 - lam) * pooled[torch.randperm(len(pooled))]
        return functional.cross_entropy(net.head(mixed), labels)

    assert not ask(mixed_up, classes()).is_exact


def test_asking_in_training_mode_leaves_nothing_behind():
    def loss(net, pooled, logits, mask, labels):
        random.random(), np.random.rand(), torch.rand(1)
        net.flag = True
        return functional.cross_entropy(logits, labels)

    model, fired = Net(loss, dropout=0.3), []
    model.train()
    model.table.eval()
    model.flag = False
    for weight in model.parameters():
        weight.register_hook(fired.append)
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    weights = list(model.parameters())
    inputs = classes()
    assert analyze(lambda given, _: model(**given), model, [read_layout(inputs)], None, 0).is_exact
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert float(model.seen) == 0 and model.calls == 0 and model.flag is False
    assert not fired and all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters()) and not model._forward_hooks


def by(factor):
    """A loss whose logits are multiplied by ``factor()``, or for each row by ``factor(number of rows)``."""
    return lambda net, pooled, logits, mask, labels: functional.cross_entropy(logits * factor(len(logits)), labels)


ONCE = {
    "python": by(lambda rows: 1 + random.random()),
    "numpy": by(lambda rows: np.random.beta(0.4, 0.4)),
    "torch": by(lambda rows: 1 + torch.rand(1)),
    "a distribution": by(lambda rows: torch.distributions.Beta(0.4, 0.4).sample()),
    "beside a number per row": by(lambda rows: torch.rand(1) + torch.rand(rows, 1)),
    "a coin": by(lambda rows: 2 if random.random() < 0.3 else 1),
}
PER_ROW = {
    "python": by(lambda rows: torch.tensor([[random.random()] for _ in range(rows)])),
    "numpy": by(lambda rows: torch.tensor(np.random.beta(2.0, 2.0, size=(rows, 1))).float()),
    "torch": by(lambda rows: 1 + torch.rand(rows, 1)),
    "dropout": by(lambda rows: functional.dropout(torch.ones(rows, CLASSES), 0.1)),
    "no use": by(lambda rows: 1 if random.random() < 2 else torch.rand(1)),
}


@pytest.mark.parametrize("case", ONCE)
def test_what_is_drawn_once_per_batch_is_named(case):
    assert "draws random numbers once per batch" in ask(ONCE[case], classes(), dropout=0.1).mixes


@pytest.mark.parametrize("case", PER_ROW)
def test_what_is_drawn_for_rows_is_not_drawn_once(case):
    mixes = ask(PER_ROW[case], classes(), dropout=0.1).mixes
    assert mixes is None or "once per batch" not in mixes


class LeavesOut(nn.Dropout):
    """As transformers' layers, one of which may be left out for the whole batch."""

    def forward(self, states):
        return states * (torch.rand([]) + random.random() + np.random.rand())


def test_layers_that_are_left_out_are_noise_of_the_model(monkeypatch):
    monkeypatch.setattr(LeavesOut, "__module__", "transformers.models.some")
    model = Net(KNOWN["mean over classes"][1])
    model.dropout = LeavesOut()
    assert ask(None, classes(), model=model).is_exact


class Center(nn.Module):
    """Of DINO: subtracted from what the model says, and moved towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, logits):
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return (logits - self.center).square().mean()


def _set(net, pooled, logits):
    net.kept = 0.9 * net.kept + pooled.detach().mean(0)


KEEPING = {
    "a tensor": (lambda net, owner: net.kept, _set),
    "a tensor that is written to": (lambda net, owner: net.kept, lambda net, p, o: net.kept.add_(p.detach().mean(0))),
    "a queue": (lambda net, owner: torch.stack(list(net.queue)), lambda net, p, o: net.queue.append(p[0].detach())),
    "an array": (lambda net, owner: torch.tensor(net.array), lambda net, p, o: net.array.__iadd__(1)),
    "a table of lists": (lambda net, owner: torch.tensor(net.table_of["a"]), lambda n, p, o: n.table_of["a"].append(1)),
    "a name that is new": (lambda net, owner: torch.tensor(hasattr(net, "new")), lambda n, p, o: setattr(n, "new", 1)),
    "a hook": (
        lambda net, owner: torch.tensor(len(net._forward_hooks)),
        lambda net, p, o: net.register_forward_hook(lambda *given: None),
    ),
    "a frozen weight": (lambda net, owner: net.teacher.weight, lambda net, p, o: net.teacher.weight.data.mul_(0.5)),
    "a frozen weight with other data": (
        lambda net, owner: net.teacher.weight,
        lambda net, p, o: setattr(net.teacher.weight, "data", net.teacher.weight / 2),
    ),
    "several frozen weights": (
        lambda net, owner: net.teacher.bias,
        lambda net, p, o: torch._foreach_mul_(list(net.teacher.parameters()), 0.5),
    ),
    "a loss that the trainer holds": (lambda net, owner: owner.own.center, lambda net, p, o: net.of_owner(o)),
}


@pytest.mark.parametrize("what", KEEPING)
def test_asking_puts_back_what_a_loss_keeps(what):
    kept, keep = KEEPING[what]

    def loss(net, pooled, logits, mask, labels):
        keep(net, pooled, logits)
        return functional.cross_entropy(logits, labels)

    model, owner = Net(loss), types.SimpleNamespace(own=Center())
    model.kept, model.queue, model.array = torch.zeros(8), deque([torch.zeros(8)], maxlen=9), np.zeros(2)
    model.table_of = defaultdict(list, a=[1])
    model.of_owner, model.teacher = lambda logits: owner.own(logits), nn.Linear(2, 2).requires_grad_(False)
    before, tensor, queue = kept(model, owner).clone(), model.kept, model.queue
    assert ask(loss, classes(), model=model, owner=owner) is not None
    assert torch.equal(kept(model, owner), before) and model.kept is tensor and model.queue is queue


def test_asking_puts_back_tables_that_hold_themselves_and_outputs_that_refuse_changes():
    def loss(net, pooled, logits, mask, labels):
        net.outputs["loss"], net.itself["new"] = logits.detach(), 1
        return functional.cross_entropy(logits, labels)

    model = Net(loss)
    model.itself, model.outputs = {}, SequenceClassifierOutput(logits=torch.zeros(1))
    model.itself["a"] = model.itself
    assert ask(loss, classes(), model=model) is not None
    assert list(model.itself) == ["a"] and list(model.outputs) == ["logits"]


def test_kinds_that_came_out_alike_are_remembered():
    """Without a gap in the labels a mean over labels and one over rows are the same."""
    made = words(lengths=[9] * ROWS)

    def per_sequence(net, pooled, logits, mask, labels):
        counts = labels[:, 1:].ne(-100).sum(1).clamp(min=1)
        return (tokens(net, labels, reduction="none").sum(1) / counts).mean()

    found = ask(per_sequence, made)
    assert found.is_exact and "rows" in (found.kind, *found.tied) and found.tied
    assert not found.tells_apart(made, ROWS)
    uneven = words()
    assert found.tells_apart(uneven, ROWS)
    again = ask(per_sequence, uneven)
    assert again.kind == "rows" and not {"labels", "shifted_labels"} & set(again.tied)


class Masked(Net):
    def forward(self, loss_mask, **inputs):
        self.mask = loss_mask
        return super().forward(**inputs)


def test_rows_are_asked_that_count_differently_in_each_input_that_may_say_so():
    def over_mask(net, pooled, logits, mask, labels):
        each = functional.cross_entropy(net.words.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (each * net.mask).sum() / net.mask.sum()

    def asked(*learned: int) -> tuple[Reduction, dict[str, torch.Tensor]]:
        mask = torch.arange(9) < torch.tensor(learned)[:, None]
        made = {**words(lengths=[9] * ROWS), "loss_mask": mask.long()}
        return ask(over_mask, made, model=Masked(over_mask)), made

    alike, made = asked(4, 4, 4, 4, 4, 4)
    assert alike.is_exact and "count loss_mask" in alike.tied and not alike.tells_apart(made, ROWS)
    differing, made = asked(4, 4, 4, 4, 4, 7)
    assert not differing.is_exact and alike.tells_apart(made, ROWS)
    assert asked(4, 6, 4, 4, 4, 4)[0].mixes == differing.mixes
