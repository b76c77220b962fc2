"""Trainings with a curriculum that note what they planned and what they saw."""

from __future__ import annotations

from pathlib import Path

import torch

from scu_trainer.control.curriculum import EpochPlan
from scu_trainer.settings import CurriculumSettings
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import UnevenRows, arguments, llama, pad
from tests.train.stepwise import Recorder

EPOCHS = {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SGD = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.3}
NAN_TOKEN = 1
"""Stands in no row of ``tiny.Rows``."""


class Watched(SCUTrainer):
    """``plans`` by epoch; ``delivered``: (epoch, sample numbers) of every batch that trains, as it comes to the loss;
    ``steps``: (epoch, first micro-batch) of every optimizer step; ``rates`` after it; ``recorder``: see there."""

    def __init__(self, *args, **kwargs) -> None:
        self.plans: dict[int, EpochPlan] = {}
        self.delivered: list[tuple[int, list[int]]] = []
        self.recorder = Recorder()
        super().__init__(*args, **kwargs)
        self.add_callback(self.recorder)

    def _run_epoch(self, **kwargs):
        self.now = kwargs["epoch"]
        return super()._run_epoch(**kwargs)

    def stock_training_step(self, model, inputs, *args, **kwargs):
        if self.curriculum is not None:
            self.plans.setdefault(self.now, self.curriculum.sampler.current)  # as the epoch began
        if "sample_index" in inputs:
            self.delivered.append((self.now, inputs["sample_index"].tolist()))
        return super().stock_training_step(model, inputs, *args, **kwargs)

    def rows_of(self, epoch: int) -> list[int]:
        """Sample numbers in the order in which they were delivered."""
        return [row for number, rows in self.delivered for row in rows if number == epoch]

    def planned_steps(self) -> list[tuple[EpochPlan, list[torch.Tensor]]]:
        """(plan, sample numbers of each of its micro-batches) of every optimizer step of one rank."""
        every, steps = self.args.gradient_accumulation_steps, []
        for plan in self.plans.values():
            batches = [torch.from_numpy(ids) for ids in plan.batches]
            steps += [(plan, batches[start : start + every]) for start in range(0, len(batches), every)]
        return steps


def curriculum_run(folder, curriculum=None, *, model=None, data=None, resume=None, prepare=None, **changes) -> Watched:
    """``curriculum``: methods, settings, or None for a trainer without. ``changes``: arguments of Trainer or training.

    Three epochs of 12 uneven rows, two at a time, two batches per step.
    """
    own = {
        name: changes.pop(name)
        for name in ("memory", "memory_gauge", "callbacks", "compute_loss_func", "processing_class")
        if name in changes
    }
    collator = changes.pop("data_collator", pad)
    settings = CurriculumSettings(curriculum) if isinstance(curriculum, str) else curriculum
    trainer = Watched(
        llama(layers=1) if model is None else model,
        arguments(folder, **{**EPOCHS, **changes}),
        train_dataset=UnevenRows(12) if data is None else data,
        data_collator=collator,
        curriculum=settings,
        **own,
    )
    if prepare is not None:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def checkpoints(folder) -> list[Path]:
    """By step, the last one left out: nothing is left to do after it."""
    return sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))[:-1]


def poisoned(model: torch.nn.Module) -> torch.nn.Module:
    """The model, for which ``NAN_TOKEN`` is not a number; no weight of its own is."""

    def poison(module, args, output):
        return output.masked_fill((args[0] == NAN_TOKEN).unsqueeze(-1), float("nan"))

    model.get_input_embeddings().register_forward_hook(poison)
    return model


class PoisonedRows(UnevenRows):
    """The rows ``bad`` have a ``NAN_TOKEN``."""

    def __init__(self, count: int, bad) -> None:
        super().__init__(count)
        self.tokens[list(bad), 1] = NAN_TOKEN
