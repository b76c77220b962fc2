"""A student learns from a teacher: the loss is the one that is written down, however the batch is cut."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import Trainer

from scu_trainer import with_loops
from scu_trainer.errors import ControlError
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.train.loops.distillation import Distillation, distance_to
from tests import processes
from tests.faults import fail_in_backward
from tests.tiny import Rows, UnevenRows, arguments, images, llama, pad, same, trained, vit, weights_of
from tests.train.test_resume import StopAt

WEIGHT, TEMPERATURE = 0.3, 2.5
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9, "per_device_train_batch_size": 4}
TEXT = {"dataset": UnevenRows(32), "data_collator": pad, **SGD}
STEPS = 4


def teacher():
    return llama(seed=7, hidden=64)


def distillation(model=None) -> Distillation:
    return Distillation(model or teacher(), WEIGHT, TEMPERATURE)


def by_hand(student, teacher, steps, of_labels):
    """Plain torch: ``steps`` of SGD; each a list of batches whose labels are divided by together."""
    student.train()
    for window in steps:
        items = sum(int((of_labels(batch["labels"]) != -100).sum()) for batch in window)
        for batch in window:
            inputs, labels = {k: v for k, v in batch.items() if k != "labels"}, of_labels(batch["labels"])
            with torch.no_grad():
                wanted = teacher.eval()(**inputs).logits
            logits = student(**inputs).logits
            if labels.dim() == 2:
                wanted, logits = wanted[:, :-1], logits[:, :-1]
            learned = labels != -100
            task = -logits[learned].log_softmax(-1).gather(1, labels[learned][:, None]).sum()
            shares = (wanted[learned] / TEMPERATURE).softmax(-1)
            found = (logits[learned] / TEMPERATURE).log_softmax(-1)
            distance = (shares * (shares.log() - found)).sum()
            (((1 - WEIGHT) * task + WEIGHT * TEMPERATURE**2 * distance) / items).backward()
        with torch.no_grad():
            for weight in student.parameters():
                weight -= SGD["learning_rate"] * weight.grad
                weight.grad = None
    return weights_of(student)


class NotedRows(torch.utils.data.Dataset):
    """Rows that note in which order they were asked for."""

    def __init__(self, rows) -> None:
        self.rows, self.order = rows, []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        self.order.append(index)
        return self.rows[index]


def windows(seen: NotedRows, collate, accumulation: int) -> list[list[dict]]:
    rows = [seen.rows[index] for index in seen.order]
    batches = [collate(rows[begin : begin + 4]) for begin in range(0, 4 * accumulation * STEPS, 4)]
    return [batches[begin : begin + accumulation] for begin in range(0, len(batches), accumulation)]


def assert_close(found, expected, bound=1e-6):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=bound, atol=bound)


@pytest.mark.parametrize("memory", [None, MemorySettings(), MemorySettings(max_batch_size=3)])
def test_text_is_what_plain_torch_gives(tmp_path, memory):
    seen = NotedRows(UnevenRows(32))
    options = {**TEXT, "dataset": seen, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    trainer = trained(llama(), tmp_path, callbacks=[distillation()], memory=memory, **options)
    steps = windows(seen, pad, 2)
    expected = by_hand(llama(), teacher(), steps, lambda labels: labels[..., 1:])
    assert_close(weights_of(trainer.model), expected)
    assert not same(expected, weights_of(trained(llama(), tmp_path / "plain", **options).model))


@pytest.mark.parametrize("memory", [None, MemorySettings(max_batch_size=1)])
def test_classes_are_what_plain_torch_gives(tmp_path, memory):
    seen = NotedRows(images(32))
    options = {**SGD, "dataset": seen, "data_collator": pad, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    trainer = trained(vit(), tmp_path, callbacks=[distillation(vit(seed=5))], memory=memory, **options)
    expected = by_hand(vit(), vit(seed=5), windows(seen, pad, 2), lambda labels: labels)
    assert_close(weights_of(trainer.model), expected)
    if memory is not None:
        assert trainer.micro_batches.reduction.is_exact and trainer.micro_batches.reduction.kind == "num_items"


def test_a_teacher_of_more_words_is_compared_over_those_that_both_have():
    student, wanted = torch.randn(5, 8), torch.randn(5, 8)
    more = torch.cat([wanted, torch.full((5, 3), 9.0)], dim=1)
    torch.testing.assert_close(distance_to(more, student, 2.0), distance_to(wanted, student, 2.0))
    assert float(distance_to(student, student, 2.0)) == pytest.approx(0.0, abs=1e-6)


RESUMED = {**TEXT, "optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 6, "logging_steps": 4}


@pytest.mark.parametrize("memory", [None, MemorySettings()])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, memory):
    """Stopped between two rows of the logs, whose means go on."""
    whole = trained(llama(), tmp_path / "whole", callbacks=[distillation()], memory=memory, **RESUMED)
    parts = tmp_path / "parts"
    trained(llama(), parts, callbacks=[distillation(), StopAt(3)], memory=memory, **RESUMED)
    checkpoint = parts / "checkpoint-3"
    again = trained(llama(seed=3), parts, callbacks=[distillation()], memory=memory, resume=str(checkpoint), **RESUMED)
    assert same(weights_of(again.model), weights_of(whole.model))
    rows = [next(row for row in t.state.log_history if "distillation/task_loss" in row) for t in (whole, again)]
    for name in ("distillation/task_loss", "distillation/teacher_distance"):
        assert rows[0][name] == rows[1][name]
    saved = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert saved < sum(p.nbytes for p in teacher().parameters()), "the teacher was saved"


def test_the_log_shows_both_parts_and_they_add_up(tmp_path):
    trainer = trained(llama(), tmp_path, callbacks=[distillation()], memory=MemorySettings(), **TEXT, logging_steps=2)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 3
    for row in rows:
        parts = row["distillation/task_loss"], row["distillation/teacher_distance"]
        assert (1 - WEIGHT) * parts[0] + WEIGHT * parts[1] == pytest.approx(row["loss"], rel=1e-4)
        assert min(parts) > 0


def test_evaluations_give_the_task_alone(tmp_path):
    held_out = Rows(8, seed=4)
    trainer = trained(llama(), tmp_path, callbacks=[distillation()], eval_dataset=held_out, **TEXT)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=held_out.tokens).logits[:, :-1]
    expected = functional.cross_entropy(logits.flatten(0, 1), held_out.tokens[:, 1:].flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_data_bpt_is_of_the_task(tmp_path):
    """The loop on lambda is to see the same bits, whatever the teacher adds."""
    regularization = RegularizationSettings(law="fixed", lambda_init=0.0, lambda_min=0.0, control_frequency=1)
    run = {"callbacks": [distillation()], "memory": MemorySettings(), **TEXT}
    trained(llama(), tmp_path, regularization, **run)
    rows = json.loads((Path(tmp_path) / "scu_history.json").read_text())
    student = llama().train()
    seen = NotedRows(UnevenRows(32))
    trained(llama(), tmp_path / "order", callbacks=[distillation()], **{**TEXT, "dataset": seen})
    batch = pad([seen.rows[index] for index in seen.order[:4]])
    nats = student(**batch).loss.item()
    assert rows[0]["data_bpt"] == pytest.approx(nats / math.log(2), rel=1e-5)


def test_out_of_memory_counts_nothing_twice(tmp_path):
    """A second micro-batch fails in mid backward, when gradients of the first are there: the window starts over, and
    what was noted of the first does not count twice."""
    parts = {"memory": MemorySettings(max_batch_size=2), "gradient_accumulation_steps": 2, "max_steps": 3}
    whole = trained(llama(), tmp_path / "whole", callbacks=[distillation()], **TEXT, **parts)
    with contextlib.ExitStack() as stack:

        def fault(trainer) -> None:
            weights = list(trainer.model.parameters())
            stack.enter_context(fail_in_backward(weights[len(weights) // 2], 1))

        again = trained(llama(), tmp_path / "again", callbacks=[distillation()], prepare=fault, **TEXT, **parts)
    assert again.micro_batches.loop.statistics.out_of_memory == 1
    assert_close(weights_of(again.model), weights_of(whole.model))
    assert again.loop("distillation").scalars() == pytest.approx(whole.loop("distillation").scalars(), rel=1e-4)


def test_a_loss_of_its_own_is_refused(tmp_path):
    model = llama()
    model.loss_type = "ForMaskedLM"
    with pytest.raises(ControlError, match="cross-entropy of next tokens or classes"):
        trained(model, tmp_path, callbacks=[distillation()], **TEXT)
    with pytest.raises(ControlError, match="a teacher replaces compute_loss_func"):
        trained(llama(), tmp_path, callbacks=[distillation()], label_smoothing_factor=0.1, **TEXT)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_a_trainer_with_a_loss_of_its_own_is_refused(tmp_path):
    with pytest.raises(ControlError, match="compute_loss of OwnLoss is its own"):
        with_loops(OwnLoss)(llama(), arguments(tmp_path), train_dataset=Rows(), callbacks=[distillation()])


# -- two ranks; this file is also the program that both execute --------------------------------------------------------

SHARED = {**TEXT, "optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 4, "logging_steps": 2, "ddp_timeout": 60}


def logged(trainer) -> list[dict]:
    names = "loss distillation/task_loss distillation/teacher_distance".split()
    return [{name: row[name] for name in names} for row in trainer.state.log_history if "loss" in row]


def main(folder: Path) -> None:
    trainer = trained(
        llama(),
        folder,
        callbacks=[distillation()],
        memory=MemorySettings(),
        **{**SHARED, "per_device_train_batch_size": 2},
    )
    torch.save((weights_of(trainer.model), logged(trainer)), folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_are_one(tmp_path):
    whole = trained(llama(), tmp_path / "whole", callbacks=[distillation()], memory=MemorySettings(), **SHARED)
    done = processes.run([__file__, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert same(first[0], second[0])
    assert_close(first[0], weights_of(whole.model), 1e-5)
    for row, expected in zip(first[1], logged(whole), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
