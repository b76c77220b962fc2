"""What a training did step by step, and the same steps once more: for tests that compare two trainings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Trainer, TrainerCallback

from scu_trainer.train.step.batches.window import MicroBatch
from scu_trainer.train.trainer import SCUTrainer
from tests.faults import FakeGauge
from tests.tiny import Rows, arguments, pad, weights_of

ENDLESS_BYTES = 2**40

Steps = list[list[MicroBatch]]


class Recorder(TrainerCallback):
    """Per optimizer step: ``gradients`` as the optimizer gets them, ``weights`` and ``buffers`` after the step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.buffers: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(weights_of(model))
        self.buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})


def record_micro_batches(trainer) -> Steps:
    """The micro-batches of every optimizer step to come, in the order in which they succeeded."""
    steps: Steps = []
    end = trainer.micro_batches.loop.end

    def recording(done, agree):
        steps.append([piece for piece, _ in done])
        end(done, agree)

    trainer.micro_batches.loop.end = recording
    return steps


def replay_micro_batches(trainer, steps: Sequence[Sequence[MicroBatch]]) -> None:
    """Run exactly these micro-batches: they bear ``has_run``, so nothing cuts them again."""
    begin = trainer.micro_batches.loop.begin

    def recorded(window, step, keep_step=None):
        begin(window, step, keep_step)
        return list(steps[step - 1])

    trainer.micro_batches.loop.begin = recorded


def assert_every_row_once(steps: Steps, rows_per_batch: int, batches: int) -> None:
    expected = {(batch, row) for batch in range(batches) for row in range(rows_per_batch)}
    for number, pieces in enumerate(steps, start=1):
        rows = [row for piece in pieces for row in piece.rows]
        assert len(rows) == len(set(rows)) and set(rows) == expected, f"step {number}: {rows}"


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference over the largest number, both over all tensors."""
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest


def compared(
    model: torch.nn.Module, output_dir, memory=None, dataset=None, prepare=None, gauge=None, resume=None, **changes
):
    """(trainer, recorder) of a training with plain SGD, no clipping and every loss logged.

    ``memory`` None: by ``transformers.Trainer`` itself. ``gauge`` None: memory without end.
    """
    recorder, changes = Recorder(), {"optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1, **changes}
    collator, loss_function = changes.pop("data_collator", pad), changes.pop("compute_loss_func", None)
    callbacks = [recorder, *changes.pop("callbacks", [])]
    parts = {"data_collator": collator, "compute_loss_func": loss_function, "callbacks": callbacks}
    parts["train_dataset"] = Rows() if dataset is None else dataset
    if memory is None:
        trainer = Trainer(model, arguments(output_dir, **changes), **parts)
    else:
        gauge = FakeGauge(ENDLESS_BYTES) if gauge is None else gauge
        trainer = SCUTrainer(model, arguments(output_dir, **changes), memory=memory, memory_gauge=gauge, **parts)
    if prepare is not None:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def apart(first: Trainer, second: Trainer) -> float:
    """The largest difference of a weight."""
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


class FailsOnce(TrainerCallback):
    """Out of memory in a backward of step 2: its first, or that of this number in the training."""

    def __init__(self, backward: int = 1) -> None:
        self.failed, self.left = 0, backward

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def fail(gradient: torch.Tensor) -> None:
            self.left -= 1
            if state.global_step == 1 and self.left <= 0 and not self.failed:
                self.failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        next(p for p in model.parameters() if p.requires_grad).register_hook(fail)
