"""Changes that the product has no switch for, as contexts around one training of ``tried.py``.

Each is a context manager without arguments. Inside, what the side makes is another thing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.lib import text_job
from benchmarks.lib.memory_work import TokenRows
from benchmarks.lib.text_job import Job, OurTrainer
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.train.loss.rows import kernels as losses
from scu_trainer.train.step.batches.rows import NOT_LEARNED

MIB = 2**20


# -- batches -----------------------------------------------------------------------------------------------------------


class EndToEnd(OurTrainer):
    """The rows of a chunk in one row, without padding: position_ids tell where each begins, and there is no mask."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, end_to_end(inputs), return_outputs, num_items_in_batch)


def end_to_end(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(rows, time) padded on the right -> (1, real tokens). A row's first token is predicted by nobody, as before."""
    kept = inputs["attention_mask"].bool()
    positions = torch.arange(kept.size(1)).expand_as(kept)
    labels = inputs["labels"].clone()
    labels[:, 0] = NOT_LEARNED
    columns = {"input_ids": inputs["input_ids"], "labels": labels, "position_ids": positions}
    return {name: column[kept].unsqueeze(0) for name, column in columns.items()}


class WithoutMask(OurTrainer):
    """Padding stands on the right, where causal attention does not look and nothing is learned."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        seen = {name: value for name, value in inputs.items() if name != "attention_mask"}
        return super().compute_loss(model, seen, return_outputs, num_items_in_batch)


def trained_by(kind: type) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: patch.object(text_job, "OurTrainer", kind)


class RowsMadeBefore(TokenRows):
    """Every row is made once, before training."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._made = [super(RowsMadeBefore, self).__getitem__(index) for index in range(len(self))]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._made[index]


@contextlib.contextmanager
def rows_made_before() -> Iterator[None]:
    with patch.object(text_job, "TokenRows", RowsMadeBefore):
        yield


# -- model -------------------------------------------------------------------------------------------------------------


def _with_model(change: Callable[[torch.nn.Module], None]) -> contextlib.AbstractContextManager:
    made = Job.model

    def model(job: Job) -> torch.nn.Module:
        found = made(job)
        change(found)
        return found

    return patch.object(Job, "model", model)


def compiled() -> contextlib.AbstractContextManager:
    """The decoder, with lengths that may change: the loss stays ours."""
    return _with_model(lambda model: model.model.compile(dynamic=True))


def eager_attention() -> contextlib.AbstractContextManager:
    return _with_model(lambda model: model.set_attn_implementation("eager"))


# -- memory and optimizer ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """For the rest of the process."""
    keep_freed()
    yield


def logits_of(chunk_bytes: int) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: patch.object(losses, "CHUNK_BYTES", chunk_bytes)


def foreach() -> contextlib.AbstractContextManager:
    made = torch.optim.AdamW.__init__

    def init(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "foreach": True})

    return patch.object(torch.optim.AdamW, "__init__", init)


def gradients_kept() -> contextlib.AbstractContextManager:
    """Filled with zeros after a step, not freed."""
    freed = torch.nn.Module.zero_grad
    return patch.object(torch.nn.Module, "zero_grad", lambda model, set_to_none=True: freed(model, set_to_none=False))
