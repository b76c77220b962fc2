"""The register of ``tried.py``: what was tried to make training faster or smaller, and what was expected of it.

``predicted`` was written before the first measurement and stays as it was. Nothing that was measured stands here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from benchmarks.lib import tried_changes as changes

MIB = 2**20
USUAL_SAVE_STEPS = 500
"""Optimizer steps between two checkpoints, by default."""

NO_FAST_BINS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}


@dataclass(frozen=True)
class Entry:
    """One thing that was tried: ``predicted`` speed and memory with the reason, and how it is switched.

    ``is_used``: it is part of ours already; the switches then take it away. ``why``: why it is kept or not; ``verdict``
    one of "kept", "not kept", "an option". ``memory``: of MemorySettings; ``job``: of text_job's Job; ``both``: of the
    Job of either side; ``arguments``: of TrainingArguments; ``change``: a context around the training.
    ``as_users``: memory of a process as users have it, not with an exact allocator. ``per_steps``: the switches do
    something in every step that is usually done once in so many. ``needs``: what this machine lacks, if it was not run.
    ``is_slow``: it takes minutes however small the work is: others do not wait for it, and no test run has it.
    """

    name: str
    what: str
    predicted: str
    verdict: str
    why: str
    is_used: bool = False
    memory: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    change: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    as_users: bool = False
    per_steps: int = 1
    needs: Optional[str] = None
    is_slow: bool = False

    @property
    def has_memory(self) -> bool:
        """Memory is measured where something of it was predicted."""
        return self.needs is None and "memory" in self.predicted


USED = (
    Entry(
        "chunked cross-entropy",
        "the logits of 32 MiB at a time, their gradient in the forward",
        "speed 1.05, memory 0.5: logits, their gradient and float32 copies of 32,000 words are the largest tensors",
        "kept", "less memory, the same gradient",
        is_used=True, memory={"chunked_loss": "never"},
    ),
    Entry(
        "exact split by length",
        "rows of the whole optimizer step sorted by length, cut into chunks",
        "speed 1.9, memory 0.7: processed / real tokens go from about 2 to 1.05",
        "kept", "fewer tokens, the same gradient",
        is_used=True, memory={"memory_control": False, "chunked_loss": "always"},
    ),
    Entry(
        "chunks of 768 tokens on a CPU, against 512",
        "fewer chunks: each adds to the gradient of the whole output layer, however few its rows are",
        "speed 1.03, memory 1.1: a third fewer chunks, each costs as much as some twenty tokens more",
        "kept", "faster, and still a fifth of stock's peak",
        is_used=True, memory={"token_cap": 512},
    ),
    Entry(
        "fused AdamW, against a loop",
        "one kernel for the whole optimizer step",
        "speed 1.03: 14 against 44 ms for 19 million weights, in a step of about 1.5 s",
        "kept", "the default of transformers",
        is_used=True, arguments={"optim": "adamw_torch"},
    ),
    Entry(
        "fused AdamW, against foreach",
        "the same, against one operation on lists of tensors",
        "speed 1.04, memory 0.9: 14 against 82 ms for 19 million weights, and lists of temporaries",
        "kept", "the default of transformers",
        is_used=True, arguments={"optim": "adamw_torch"}, change=changes.foreach,
    ),
    Entry(
        "SDPA, against eager attention",
        "attention without its matrix of weights",
        "speed 1.03, memory 0.95: attention is 4 % of a step at 100 tokens",
        "kept", "the default of transformers",
        is_used=True, change=changes.eager_attention,
    ),
    Entry(
        "gradients freed after a step",
        "zero_grad(set_to_none=True)",
        "speed 1.00, memory 0.95: no gradient is alive while the first chunk runs; zeros cost little",
        "kept", "the default of torch; an out-of-memory is taken back by dropping gradients",
        is_used=True, change=changes.gradients_kept,
    ),
)  # fmt: skip

OPTIONS = (
    Entry(
        "bf16 autocast",
        "matrices multiplied in bfloat16",
        "speed 1.3, memory 1.0: the processor multiplies it natively, weights are cast in every chunk",
        "an option", "mixed_precision: another arithmetic is the user's choice",
        job={"precision": "bf16"},
    ),
    Entry(
        "activation checkpointing",
        "activations of a layer made again in the backward",
        "speed 0.75, memory 0.8: one more forward; chunks are small already",
        "an option", "activation_checkpointing: for what does not fit otherwise",
        job={"checkpointing": True},
    ),
    Entry(
        "freed memory kept (text)",
        "the C library keeps what a step frees for the next one",
        "speed 1.05, memory 1.1: no page faults, but the heap keeps its holes",
        "an option", "keep_freed_memory: off for text, on where steps are short",
        change=changes.freed_memory_kept, as_users=True,
    ),
    Entry(
        "a loader process",
        "dataloader_num_workers: 1",
        "speed 0.98: making rows takes 1 % of a step, and the process takes a core from it",
        "an option", "pays where rows are decoded, not for tokens",
        arguments={"dataloader_num_workers": 1},
    ),
)  # fmt: skip

NOT_USED = (
    Entry(
        "rows of a chunk end to end",
        "no padding: position_ids instead of a mask (varlen attention)",
        "speed 1.00 on a CPU: 2 % less tokens, but attention over the whole chunk; 1.1 on a GPU, where chunks are "
        "larger and varlen kernels skip what is not attended to",
        "not kept", "the CPU has no varlen kernel",
        change=changes.trained_by(changes.EndToEnd),
    ),
    Entry(
        "no mask for right padding",
        "attention_mask left out: causal attention does not look to the right",
        "speed 1.02, memory 1.0: no mask is made nor added; a GPU may take its flash kernel and does not wait",
        "not kept", "every family would have to be asked whether its mask does more than hide padding",
        change=changes.trained_by(changes.WithoutMask),
    ),
    Entry(
        "torch.compile of the decoder",
        "inductor, with lengths that may change",
        "speed 1.08 after 20 to 60 s: element-wise operations are fused, 80 % of the time is in matrices",
        "not kept", "minutes of compiling before the first steps; torch_compile is open to users",
        change=changes.compiled, is_slow=True,
    ),
    Entry(
        "logits of 8 MiB",
        "CHUNK_BYTES a quarter",
        "speed 0.95, memory 0.95: the weight is read four times as often",
        "not kept", "32 MiB was chosen by benchmarks/headline/chunked_loss.py",
        change=changes.logits_of(8 * MIB),
    ),
    Entry(
        "logits of 128 MiB",
        "CHUNK_BYTES fourfold",
        "speed 1.00, memory 1.2: chunks of the loss are as long as a chunk of rows",
        "not kept", "32 MiB was chosen by benchmarks/headline/chunked_loss.py",
        change=changes.logits_of(128 * MIB),
    ),
    Entry(
        "rows made before",
        "each row kept in memory, made once: the bound of what an index cache can give",
        "speed 1.01: making rows takes 1 % of a step",
        "not kept", "it would hold the whole data set in memory",
        change=changes.rows_made_before,
    ),
    Entry(
        "no fast bins (LoRA)",
        "glibc without caches of small freed blocks: tcache_count=0, mxfast=0",
        "speed 1.00, memory 0.8: small freed blocks no longer keep the heap from shrinking; seen once",
        "not kept", "it must stand in the environment before the process starts; users would have to be asked for it",
        both={"lora_rank": 8}, environment=NO_FAST_BINS, as_users=True,
    ),
    Entry(
        "checkpoints written asynchronously",
        "bound: all that saving costs, at the default of one in 500 steps",
        "speed 1.001 at most: a save takes about as long as half a step",
        "not kept", "the bound is what it could gain; and a save that fails must be told before training goes on",
        is_used=True, arguments={"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
        per_steps=USUAL_SAVE_STEPS,
    ),
    Entry(
        "batches copied without waiting",
        "accelerator_config: {non_blocking: true} with pinned memory",
        "fewer waits of the host: three per accumulation batch, see host_syncs; below 1 % of a step",
        "an option", "TrainingArguments have it", needs="a GPU",
    ),
    Entry(
        "activations offloaded to the host",
        "torch.autograd.graph.save_on_cpu",
        "memory 0.5 of activations, speed 0.5 without overlap: the bus is slower than computing them again",
        "not kept", "activation checkpointing is there for the same need", needs="a GPU",
    ),
)  # fmt: skip

ENTRIES = (*USED, *OPTIONS, *NOT_USED)
