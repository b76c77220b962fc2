"""A stock Trainer that runs each optimizer window in micro-batches through ``ranks``, with faults on demand.

The smallest loop that uses the interface, for the tests of ``train/step/distributed``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Trainer

from scu_trainer.train.step.distributed.launchers import ranks_for


@dataclass(frozen=True)
class Fault:
    """Out of memory on ``rank`` in the middle of micro-batch ``call`` of its run (from 0), or from there on
    ``forever``.

    ``place``: "forward", or "backward" when some gradients have been added.
    """

    rank: int
    call: int
    place: str = "backward"
    forever: bool = False


class Windowed(Trainer):
    """``splits``: micro-batches per accumulation batch on each rank. ``recover`` False: what a naive retry would do."""

    def __init__(self, *args, splits=(1, 1), fault: Fault | None = None, recover: bool = True, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.splits, self.fault, self.recover = splits, fault, recover
        self.chunk_calls, self.faults_hit, self.windows = 0, 0, 0
        self.was_last: list[bool] = []
        """By micro-batch, what a loss reads off accelerate."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self.batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.losses = []
        return self.batches, items

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.ranks = getattr(self, "ranks", None) or ranks_for(self)
        if not self.losses:
            self._run_window(model, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.ranks.finish()
        return self.losses[0] / len(self.batches)

    def compute_loss(self, *args, **kwargs):
        self.was_last.append(self.accelerator.sync_gradients)
        return super().compute_loss(*args, **kwargs)

    def _run_window(self, model, items) -> None:
        parts = self.splits[self.ranks.rank % len(self.splits)]
        chunks = [chunk for batch in self.batches for chunk in cut(batch, parts)]
        with self.ranks.window():
            failed = self._run_chunks(model, chunks, items)
            seen = self.ranks.all_reduce_max([failed, self.ranks.rank, -self.ranks.rank])
            assert seen[1:] == [self.ranks.world_size - 1, 0]
            if seen[0]:
                raise RuntimeError("some rank failed for good")
        self.windows += 1

    def _run_chunks(self, model, chunks, items) -> bool:
        i = 0
        while i < len(chunks):
            out_of_memory = False
            try:
                with self.ranks.micro_batch(last=i == len(chunks) - 1), self._faults():
                    self.losses.append(super().training_step(model, dict(chunks[i]), items))
            except torch.OutOfMemoryError:
                out_of_memory = True
            if not out_of_memory:
                i += 1
                continue
            if self.fault.forever:
                return True
            if self.recover:
                self.ranks.drop_gradients()
                self.losses.clear()
                i = 0
        self.losses[:] = [torch.stack(self.losses).sum()]
        return False

    def _faults(self):
        call, self.chunk_calls = self.chunk_calls, self.chunk_calls + 1
        fault = self.fault
        hit = fault is not None and fault.rank == self.ranks.rank
        hit = hit and (call >= fault.call if fault.forever else call == fault.call)
        return OutOfMemory(self.model, fault.place if hit else None, self)


class OutOfMemory:
    """Context that raises ``torch.OutOfMemoryError`` at ``place``."""

    def __init__(self, model, place: str | None, trainer: Windowed) -> None:
        self.model, self.place, self.trainer, self.handles = model, place, trainer, []

    def __enter__(self) -> None:
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        if self.place == "backward":
            self.handles.append(weights[len(weights) // 2].register_hook(self._raise))
        if self.place == "forward":
            *_, last = self.model.modules()
            self.handles.append(last.register_forward_pre_hook(self._raise))

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()

    def _raise(self, *unused) -> None:
        self.trainer.faults_hit += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def cut(batch: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """``parts`` micro-batches of rows, as even as they can be."""
    rows = len(next(iter(batch.values())))
    edges = [rows * part // parts for part in range(parts + 1)]
    return [{name: tensor[a:b] for name, tensor in batch.items()} for a, b in itertools.pairwise(edges) if b > a]


class Branches(nn.Module):
    """A branch that only rows of rank 1 take, one that nobody takes, and a running mean that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.rare, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x, labels, rare):
        hidden = self.trunk(x)
        if bool(rare.any()):
            hidden = hidden + self.rare(x)
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * hidden.detach().mean(0))
            self.seen.fill_(True)
        return {"loss": (hidden - self.mean - labels).square().mean()}


class BranchRows(torch.utils.data.Dataset):
    """Blocks of ``block`` rows, the size of a rank's batch, are alternately plain and rare: rank 1 sees the rare."""

    def __init__(self, block: int) -> None:
        self.block, generator = block, torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(2, 64, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index], "rare": torch.tensor(index // self.block % 2 == 1)}
