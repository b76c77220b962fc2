"""One fine-tuning job of a causal language model, done in five ways: the contenders of the text benchmarks.

All contenders use the same model, documents in the same order, optimizer, schedule and logical batch. Each reports its
held-out loss, which proves that all did the same work. Tokens are those of the documents, without padding.

    plain     a hand-written PyTorch loop: the lower bound
    stock     transformers.Trainer; also with its option against padding, batches grouped by length
    trl ...   TRL's SFTTrainer: with its defaults, padding-free, and packing. Its loss uses tiles of the logits, 4,096
              tokens by 32,768 words
    ours ...  SCUTrainer: without regularization, which changes weights on purpose; with all three loops, as the
              commands use it; and with none

TRL's defaults of bfloat16 and gradient checkpointing are replaced by the settings of all contenders; otherwise the
benchmark would compare precisions. Packing keeps the tokens per optimizer step with fewer, longer rows; grouping by
length has other rows in each step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, get_scheduler

from benchmarks.lib.common import quiet, scratch_arguments
from benchmarks.lib.memory_work import NOT_LEARNED, WARM_UP_TOKENS, Lengths, Shape, TokenRows, Witness, pad
from benchmarks.lib.turns import Contender, TakesTurns, Turns
from scu_trainer import SCUTrainer
from scu_trainer.hardware.heap import keep_freed
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings, SafetySettings
from scu_trainer.train.run_directory.logs import run_log

HELD_OUT_ROWS, HELD_OUT_SEED = 64, 100_000
PACKED_TOKENS = 1024
"""The default of ``max_length`` in SFTConfig."""
SHIFT = 1
"""Tokens at the start of a row that have no prediction."""


@dataclass(frozen=True)
class Job:
    """A job with ``step_rows`` documents per optimizer step, as ``batch_rows`` x ``accumulation``. ``arguments``:
    TrainingArguments besides the common ones. ``template_tokens``: see ``TokenRows``; not for TRL."""

    shape: Shape
    lengths: Lengths
    steps: int
    batch_rows: int = 8
    accumulation: int = 4
    lora_rank: Optional[int] = None
    precision: str = "no"
    checkpointing: bool = False
    learning_rate: float = 1e-3
    device: str = "cpu"
    template_tokens: int = 0
    arguments: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def step_rows(self) -> int:
        return self.batch_rows * self.accumulation

    def token_rows(self) -> TokenRows:
        lengths = self.lengths.draw(self.steps * self.step_rows, self.shape.longest_row)
        return TokenRows(lengths, self.shape.vocab, self.template_tokens)

    def model(self) -> torch.nn.Module:
        return self.adapted(self.shape.model())

    def adapted(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model`` with the adapters of this job, if it has any."""
        if self.lora_rank is None:
            return model
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=self.lora_rank, lora_alpha=2 * self.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return get_peft_model(model, adapters)

    def training(self) -> dict[str, Any]:
        """Return the TrainingArguments of all contenders that use a Trainer."""
        return {
            "use_cpu": self.device == "cpu",
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch_rows,
            "gradient_accumulation_steps": self.accumulation,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "remove_unused_columns": False,
            "bf16": self.precision == "bf16",
            "activation_checkpointing": self.checkpointing,
            **dict(self.arguments),
        }


class Counted:
    """Mixin for any Trainer that counts the predicted tokens of each optimizer step, on the device until the end."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == len(self.step_tokens):
            self.step_tokens.append(num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


class StockTrainer(Counted, Trainer):
    """``transformers.Trainer``."""


class OurTrainer(Counted, SCUTrainer):
    """``SCUTrainer``."""


# -- the contenders ----------------------------------------------------------------------------------------------------


Trained = tuple[torch.nn.Module, list[int]]
"""The model, and the predicted tokens of each optimizer step."""


def plain(job: Job, turns: Turns) -> Trained:
    """Train with a hand-written loop, with the optimizer of the Trainer."""
    rows, model = job.token_rows(), job.model().to(job.device).train()
    if job.checkpointing:
        model.gradient_checkpointing_enable()
    with scratch_arguments(**job.training()) as args:
        optimizer = Trainer(model, args).create_optimizer()
    schedule = get_scheduler("constant", optimizer)
    order = RandomSampler(rows, generator=torch.Generator().manual_seed(args.seed))  # as the Trainer's first epoch
    loader = iter(DataLoader(rows, job.batch_rows, sampler=order, collate_fn=padded))
    step_tokens = []
    turns.begin()
    for step in range(1, job.steps + 1):
        window = [_on(job, next(loader)) for _ in range(job.accumulation)]
        items = sum(int((batch["labels"][:, SHIFT:] != -100).sum()) for batch in window)
        step_tokens.append(items)
        for batch in window:
            with _precision(job):
                loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step < job.steps:
            turns.step()
    return model, step_tokens


def _on(job: Job, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(job.device) for name, tensor in batch.items()}


def _precision(job: Job) -> contextlib.AbstractContextManager:
    return torch.autocast(job.device, torch.bfloat16) if job.precision == "bf16" else contextlib.nullcontext()


def stock(job: Job, turns: Turns, **changes: Any) -> Trained:
    """Train with the stock Trainer. ``changes``: of TrainingArguments."""
    with scratch_arguments(**{**job.training(), **changes}) as args:
        trainer = StockTrainer(job.model(), args, data_collator=padded, train_dataset=job.token_rows())
        return _trained(trainer, turns)


def stock_keeping(job: Job, turns: Turns) -> Trained:
    """Train with the stock Trainer while the C library keeps freed memory, as with MALLOC_TRIM_THRESHOLD_ and
    MALLOC_MMAP_THRESHOLD_."""
    if not keep_freed():
        raise RuntimeError("this C library has no switch to keep freed memory")
    return stock(job, turns)


def ours(job: Job, turns: Turns, **loops: Any) -> Trained:
    with scratch_arguments(**job.training()) as args:
        trainer = OurTrainer(job.model(), args, data_collator=padded, train_dataset=job.token_rows(), **loops)
        return _trained(trainer, turns)


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in pad(rows).items() if name != "sample_index"}


def trl(job: Job, turns: Turns, **changes: Any) -> Trained:
    """Train with TRL's SFTTrainer. ``changes``: of SFTConfig."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from scu_trainer.data import default_cache_dir, embedded_tokenizer

    rows = job.token_rows()
    columns = datasets.Dataset.from_dict({"input_ids": [rows[i]["input_ids"].tolist() for i in range(len(rows))]})
    with scratch_arguments(**job.training()) as args:
        given = {**job.training(), "output_dir": args.output_dir, "report_to": "none", "disable_tqdm": True}
        given |= {"save_strategy": "no", "logging_steps": 100_000, "max_length": job.shape.longest_row}
        if changes.get("packing"):
            given |= _packed(rows, job.steps)
        config = SFTConfig(**{**given, "remove_unused_columns": True, **changes})
        tokenizer = embedded_tokenizer(default_cache_dir(None))
        kind = type("CountedSFTTrainer", (Counted, SFTTrainer), {})
        trainer = kind(job.model(), config, train_dataset=columns, processing_class=tokenizer)
        return _trained(trainer, turns)


def _packed(rows: TokenRows, steps: int) -> dict[str, int]:
    """Return arguments for packing: rows of TRL's default length, or of the longest document, and as many per step as
    hold the tokens of a step of the others, for one epoch."""
    longest = max(rows.lengths)
    length = max(longest, min(PACKED_TOKENS, 8 * longest))  # a few tiny documents per row, so that there are more rows
    rows_per_step = max(1, round(sum(rows.lengths) / steps / length))
    one_pass = {"max_steps": -1, "num_train_epochs": 1, "max_length": length}
    return {**one_pass, "per_device_train_batch_size": 1, "gradient_accumulation_steps": rows_per_step}


def _trained(trainer: Trainer, turns: Turns) -> Trained:
    trainer.step_tokens = []
    trainer.add_callback(TakesTurns(turns))
    quiet(trainer).train()
    return trainer.model, [int(tokens) for tokens in trainer.step_tokens]


LOOPS = {"memory": MemorySettings(), "curriculum": CurriculumSettings(), "safety": SafetySettings()}
"""The loops that the commands turn on: batches are split and measured, row losses are recorded, and non-finite steps
are skipped. Regularization, which the commands also turn on, is added separately."""

WORKERS: dict[str, tuple[Callable[..., Trained], dict[str, Any]]] = {
    "plain": (plain, {}),
    "stock": (stock, {}),
    "stock, group_by_length": (stock, {"train_sampling_strategy": "group_by_length"}),
    "stock, freed memory kept": (stock_keeping, {}),
    "ours": (ours, LOOPS),
    "ours, no loop": (ours, {}),
    "ours, all loops": (ours, {**LOOPS, "regularization": RegularizationSettings(target_s=0.1)}),
    "trl": (trl, {}),
    "trl, padding-free": (trl, {"padding_free": True, "max_length": None}),
    "trl, packing": (trl, {"packing": True}),
}


def contender_of(name: str, job: Job) -> Contender:
    return Contender(name, run, (name, job))


def run(turns: Turns, name: str, job: Job) -> dict[str, Any]:
    """Train one contender, and return its results with the held-out loss. Runs in its own process."""
    work, settings = WORKERS[name]
    with run_log():
        model, step_tokens = work(job, turns, **settings)
    return {"held_out_bits": held_out_bits(model, job), "step_tokens": step_tokens}


class Watches:
    """Replaces turns: records the memory after the first optimizer step, and the peak of all steps."""

    def __init__(self, device: str) -> None:
        self.witness, self.level_bytes = Witness(device), 0

    def begin(self) -> None:
        self.witness.start()

    def step(self) -> None:
        reading = self.witness.read()
        self.level_bytes = self.level_bytes or reading.own_bytes


def memory(name: str, job: Job) -> dict[str, int]:
    """Return the bytes that one contender holds after its first step, and its peak. Runs in its own process."""
    work, settings = WORKERS[name]
    watches = Watches(job.device)
    if "memory" in settings:
        settings = {**settings, "memory_gauge": watches.witness}
    with run_log():
        work(job, watches, **settings)
        watches.witness.read()
    if not watches.level_bytes:
        raise RuntimeError(f"{name} made one optimizer step; what it holds between steps shows from two on")
    return {"level_bytes": watches.level_bytes, "peak_bytes": watches.witness.highest_bytes}


def tiny(job: Job) -> Job:
    """Return the job with rows of eight tokens, which shows the memory of model, optimizer and trainer. Packed rows are
    so short that they make two steps as well."""
    shape = replace(job.shape, longest_row=8 * WARM_UP_TOKENS)
    return replace(job, lengths=Lengths("tiny", WARM_UP_TOKENS, 0.0), shape=shape, steps=2)


@torch.no_grad()
def held_out_bits(model: torch.nn.Module, job: Job) -> float:
    """Return the bits per predicted token on held-out documents, which are the same for every contender."""
    lengths = job.lengths.draw(HELD_OUT_ROWS, job.shape.longest_row, seed=HELD_OUT_SEED)
    rows = TokenRows([0] * HELD_OUT_SEED + lengths, job.shape.vocab, job.template_tokens)
    nats, tokens = 0.0, 0
    model.eval()
    for index in range(HELD_OUT_SEED, HELD_OUT_SEED + HELD_OUT_ROWS):
        row = {name: tensor.to(job.device) for name, tensor in padded([rows[index]]).items()}
        logits, targets = model(input_ids=row["input_ids"]).logits[0, :-SHIFT].float(), row["labels"][0, SHIFT:]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        tokens += int((targets != NOT_LEARNED).sum())
    return nats / tokens / math.log(2)
