"""Wrapped modules on two ranks that see different rows: they take the loss for the same, and end with the weights of
one process that has the rows of both.

This file is also the program that the processes execute.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import SequentialSampler

from scu_trainer import SCUTrainer, wrap
from scu_trainer.settings import SafetySettings
from tests import processes
from tests.tiny import Examples, arguments

WEIGHTS = torch.tensor([0.0, 2.0, 3.0])
"""A class that counts nothing has no mean alone."""

ZERO_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


class InOrder(SCUTrainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))


class Stock(Net):
    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(super().forward(x), labels, weight=WEIGHTS)}


def own_loss(outputs, targets):
    """Nobody sees whether it weighs classes: it is asked about each that is new."""
    likelihoods = outputs - outputs.exp().sum(-1, keepdim=True).log()
    return -likelihoods.gather(1, targets.unsqueeze(1)).mean()


def rows(label) -> Examples:
    """The first four of each eight are those of the first rank."""
    generator = torch.Generator().manual_seed(1)
    return Examples({"x": torch.randn(8, generator=generator), "labels": torch.tensor(label(i))} for i in range(64))


def zero_on_one_rank(i: int) -> int:
    return 0 if i % 8 >= 4 else i % 3


def late_on_one_rank(i: int) -> int:
    return 2 if i == 20 else i % 2


def trained(folder: Path, model: torch.nn.Module, data: Examples, loops=None, **changes) -> dict[str, torch.Tensor]:
    batch = 8 // int(os.environ.get("WORLD_SIZE", 1))
    changes |= {"optim": "sgd", "learning_rate": 0.3, "per_device_train_batch_size": batch}
    trainer = InOrder(model, arguments(folder, **changes), train_dataset=data, **loops or {})
    trainer.train()
    trained = getattr(trainer.model, "module", trainer.model)
    if not changes.get("deepspeed"):
        return {name: weight.detach() for name, weight in trained.named_parameters()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        return {name: weight.detach().clone() for name, weight in trained.named_parameters()}


def not_finite_first(folder: Path) -> dict[str, torch.Tensor]:
    """The first rows of the second rank have no finite loss, so they do not tell how the loss adds up."""
    data = rows(lambda i: i % 3)
    for i in range(4, 8):
        data.rows[i]["x"] = torch.full((8,), float("nan"))
    model = wrap(Net(), loss=torch.nn.CrossEntropyLoss(weight=WEIGHTS + 1))
    return trained(folder, model, data, {"safety": SafetySettings()})


def without_shards(folder: Path) -> dict:
    weighed = wrap(Net(), loss=torch.nn.CrossEntropyLoss(weight=WEIGHTS))
    return {
        "not finite": not_finite_first(folder),
        "weighed": trained(folder, weighed, rows(zero_on_one_rank)),
        "own": trained(folder, wrap(Net(), loss=own_loss), rows(late_on_one_rank)),
    }


def with_shards(folder: Path) -> dict:
    import deepspeed

    # DeepSpeed would compile its shared-memory communication for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    weighed = wrap(Net(), loss=torch.nn.CrossEntropyLoss(weight=WEIGHTS))
    return {
        "weighed": trained(folder, weighed, rows(zero_on_one_rank), deepspeed=ZERO_3),
        "own": trained(folder, wrap(Net(), loss=own_loss), rows(late_on_one_rank), deepspeed=ZERO_3),
    }


def found_by(program: str, folder: Path) -> list[dict]:
    done = processes.run([__file__, program, folder], ranks=2, environment={"DS_ACCELERATOR": "cpu"}, timeout=60)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return found_by("without_shards", tmp_path_factory.mktemp("ranks"))


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_a_rank_whose_rows_tell_nothing_does_not_stop_the_others(ranks):
    """It would not take part when they count what their labels weigh."""
    for weight in ranks[0]["not finite"].values():
        assert torch.isfinite(weight).all()
    close(ranks[0]["not finite"], ranks[1]["not finite"])


def test_rows_that_weigh_nothing_change_nothing(ranks, tmp_path):
    stock = trained(tmp_path, Stock(), rows(zero_on_one_rank))
    alone = trained(tmp_path, wrap(Net(), loss=torch.nn.CrossEntropyLoss(weight=WEIGHTS)), rows(zero_on_one_rank))
    for found in (alone, *(rank["weighed"] for rank in ranks)):
        close(found, stock)


def test_shards_give_the_weights_of_whole_copies(ranks, tmp_path):
    """A class that one rank alone sees is a question that needs a forward pass of all."""
    pytest.importorskip("deepspeed")
    for rank in found_by("with_shards", tmp_path):
        close(rank["weighed"], ranks[0]["weighed"])
        close(rank["own"], ranks[0]["own"])


if __name__ == "__main__":
    kept = {"without_shards": without_shards, "with_shards": with_shards}[sys.argv[1]](Path(sys.argv[2]))
    torch.save(kept, Path(sys.argv[2]) / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
