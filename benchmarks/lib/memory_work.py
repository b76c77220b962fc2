"""Shared by the memory benchmarks: rows of different lengths, a model, fresh processes, peaks, limits, and turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Optional
from unittest.mock import patch

import numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from benchmarks.lib.common import quiet, scratch_arguments
from scu_trainer import SCUTrainer
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.micro_batch_sizer import MemoryStatistics
from scu_trainer.train.step.recovery.memory import Gauge, MemoryReading, free_memory, gauge_for

MIB = 2**20
PAD = 2
NOT_LEARNED = -100
SHORTEST_ROW = 4
WARM_UP_TOKENS = 8

EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Environment in which freed tensors go back to the kernel immediately, so that a process holds live memory only."""

KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 1024 * MIB)}
"""Environment in which no memory goes back: the varying number of page faults would hide small differences."""


# -- work --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of tokens per row. ``spread``: standard deviation of ln(length)."""

    name: str
    median: float
    spread: float

    def draw(self, count: int, longest: int, seed: int = 0) -> list[int]:
        """Draw lengths. Those above ``longest`` are cut to it, as by a maximum sequence length."""
        drawn = numpy.random.default_rng(seed).lognormal(numpy.log(self.median), self.spread, count)
        return [int(length) for length in drawn.round().clip(SHORTEST_ROW, longest)]


DISTRIBUTIONS = {
    one.name: one
    for one in (
        Lengths("alpaca", 100, 0.6),
        Lengths("gsm8k", 150, 0.35),  # question and answer
        Lengths("chat", 400, 0.9),
        Lengths("heavy", 250, 1.2),
    )
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama with random float32 weights."""

    vocab: int = 32_000
    hidden: int = 256
    layers: int = 4
    longest_row: int = 2048

    def model(self, seed: int = 0) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocab,
                hidden_size=self.hidden,
                intermediate_size=2 * self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=max(4, self.hidden // 64),
                num_key_value_heads=max(4, self.hidden // 64),
                max_position_embeddings=self.longest_row,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=PAD,
            )
        )


class TokenRows(torch.utils.data.Dataset):
    """Rows of the given lengths with all tokens learned. They are random walks over a part of the vocabulary, so that a
    few steps show in the loss. ``template_tokens``: the number of tokens at the start of each row that are not learned,
    from one of two alternating templates with the same first half."""

    def __init__(self, lengths: Sequence[int], vocab: int, template_tokens: int = 0) -> None:
        self.words, self.template_tokens = min(vocab - 3, 256), template_tokens
        fewest = template_tokens + SHORTEST_ROW if template_tokens else 0
        self.lengths = [max(length, fewest) for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        steps = torch.randint(1, 8, (self.lengths[index],), generator=generator)
        start = torch.randint(0, self.words, (), generator=generator)
        tokens = 3 + (start + steps.cumsum(0)) % self.words
        if not self.template_tokens:
            return {"input_ids": tokens, "sample_index": index}
        tokens[: self.template_tokens] = self._template(index % 2)
        labels = tokens.clone()
        labels[: self.template_tokens] = NOT_LEARNED
        return {"input_ids": tokens, "labels": labels, "sample_index": index}

    def _template(self, kind: int) -> torch.Tensor:
        template = 3 + torch.arange(self.template_tokens) % self.words
        template[self.template_tokens // 2 :] += kind
        return template


def pad(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate rows to a batch, padded on the right to the longest row."""

    def stack(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    tokens = [row["input_ids"] for row in rows]
    return {
        "input_ids": stack(tokens, PAD),
        "labels": stack([row.get("labels", row["input_ids"]) for row in rows], NOT_LEARNED),
        "attention_mask": stack([torch.ones_like(row) for row in tokens], 0),
        "sample_index": torch.tensor([row["sample_index"] for row in rows]),
    }


# -- trainers ----------------------------------------------------------------------------------------------------------


class WithoutIndices:
    """Mixin that removes ``sample_index`` from the batch before the model gets it."""

    def _prepare_inputs(self, inputs):
        return {name: value for name, value in super()._prepare_inputs(inputs).items() if name != "sample_index"}


class Stock(WithoutIndices, Trainer):
    """``transformers.Trainer``."""


class Ours(WithoutIndices, SCUTrainer):
    """``SCUTrainer``."""


@contextlib.contextmanager
def trainer_for(
    device: str,
    model: torch.nn.Module,
    dataset: torch.utils.data.Dataset,
    memory: Optional[MemorySettings],
    gauge: Optional[Gauge] = None,
    kinds: tuple[type[Trainer], type[Trainer]] = (Stock, Ours),
    **arguments: Any,
) -> Iterator[Trainer]:
    """Yield the stock trainer (``memory`` None) or ours, by default with SGD and rows in order."""
    defaults = {
        "use_cpu": device == "cpu",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "sgd",
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    with scratch_arguments(**{**defaults, **arguments}) as given:
        stock, ours = kinds
        parts = {"model": model, "args": given, "train_dataset": dataset, "data_collator": pad}
        yield quiet(stock(**parts) if memory is None else ours(**parts, memory=memory, memory_gauge=gauge))


# -- time --------------------------------------------------------------------------------------------------------------


def work_seconds(device: str) -> float:
    """Return the CPU time of this process, which other programs hardly affect; for a GPU, the wall time of its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Turns:
    """Trainers in threads that run one optimizer step each, in turn, so that load on the machine slows all of them.

    ``seconds``: of every step of every trainer, including data loading and logging. The first step includes the setup.
    """

    def __init__(self, trainers: Sequence[Trainer], device: str) -> None:
        self.trainers, self.device = trainers, device
        self.seconds: list[list[float]] = [[] for _ in trainers]
        self._waiting = list(range(len(trainers)))
        self._changed = threading.Condition()
        self._begun_s = 0.0

    def run(self) -> list[list[float]]:
        for number, trainer in enumerate(self.trainers):
            trainer.add_callback(_EndsTurn(self, number))
        with ThreadPoolExecutor(len(self.trainers)) as pool:
            for finished in [pool.submit(self._train, number) for number in range(len(self.trainers))]:
                finished.result()
        return self.seconds

    def _train(self, number: int) -> None:
        self._await(number)
        try:
            self.trainers[number].train()
        finally:
            with self._changed:
                self._waiting.remove(number)
                self._changed.notify_all()

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == number)
        self._begun_s = work_seconds(self.device)

    def step_ended(self, number: int) -> None:
        self.seconds[number].append(work_seconds(self.device) - self._begun_s)
        with self._changed:
            self._waiting.append(self._waiting.pop(0))
            self._changed.notify_all()
        self._await(number)


class _EndsTurn(TrainerCallback):
    def __init__(self, turns: Turns, number: int) -> None:
        self.turns, self.number = turns, number

    def on_step_end(self, args, state, control, **kwargs):
        self.turns.step_ended(self.number)


# -- memory ------------------------------------------------------------------------------------------------------------


class Witness(Gauge):
    """A gauge that records the highest own bytes over all resets, because the memory loop resets the peak."""

    def __init__(self, device: str) -> None:
        self.inner = gauge_for(torch.device(device))
        self.highest_bytes = 0

    def read(self) -> MemoryReading:
        reading = self.inner.read()
        self.highest_bytes = max(self.highest_bytes, reading.own_peak_bytes)
        return reading

    def reset(self, exact: bool = False) -> None:
        self.read()
        self.inner.reset(exact)

    def start(self) -> int:
        """Reset the peak, and return the own bytes now."""
        self.inner.reset(exact=True)
        self.highest_bytes = self.inner.read().own_bytes
        return self.highest_bytes


def limit_memory(device: str, headroom_bytes: int) -> None:
    """Limit this process to ``headroom_bytes`` more than it holds now."""
    free_memory(torch.device(device))
    if device == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_private_bytes() + headroom_bytes, hard))
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + headroom_bytes) / total_bytes)


def _private_bytes() -> int:
    """Return the memory that RLIMIT_DATA counts."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def counted(trainer: Trainer) -> Optional[MemoryStatistics]:
    """Return the statistics of the memory loop; None for a trainer without it."""
    micro_batches = getattr(trainer, "micro_batches", None)
    return None if micro_batches is None else micro_batches.loop.statistics


# -- processes ---------------------------------------------------------------------------------------------------------


def in_fresh_process(function: Callable[..., Any], *arguments: Any, allocator: dict[str, str] = EXACT_MEMORY) -> Any:
    """Call ``function`` in a new process, and return or raise what it does. Raises BrokenProcessPool if the process was
    killed.

    ``allocator``: environment variables for the allocator of the C library; {} keeps its defaults.
    """
    # Only one GPU is visible, because the Trainer would spread the batch over several.
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    given = {"CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1", **allocator}
    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, given), ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
