"""The options of ``scu-trainer eval``, and the checks on them that run before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from scu_trainer.settings.base import Allowed, check_fields, option, require
from scu_trainer.settings.tasks import KINDS, TEXT, TaskSettings

BATCH_TOKENS = 8192
BATCH_SIZE = 8
ALLOWED_VALUES = {
    "max_length": Allowed(least=2),
    "stride": Allowed(least=1),
    "batch_tokens": Allowed(least=1),
    "confidence": Allowed(above=0, below=1),
    "resamples": Allowed(least=1),
}
HELD_OUT_COUNTERPARTS = {
    "batch_size": "; batch_tokens is the size of a forward pass over held-out data",
    "limit": "; max_eval_documents limits the held-out documents",
}
"""Options of the harness that may have been meant for held-out data, and the option that does the same there."""


@dataclass(frozen=True)
class EvalOptions:
    """How to score, and what to compare with."""

    _argument_group_name = "evaluation"

    task: Optional[str] = option(None, f"one of {', '.join(KINDS)}; default: that of the run, or {TEXT} without a run")
    against: Optional[list[str]] = option(
        None,
        "other models, each compared with RUN_OR_MODEL; the word base: the model that it was tuned from; the word "
        "merged: that model with the adapter merged in",
    )
    merge_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "type of the merged weights; auto: that of the base, or for a base in 4 or 8 bits the one it computes in",
    )
    max_length: Optional[int] = option(
        None,
        "text-generation: tokens in a window; default: block_size; without a run, at most the model's positions",
    )
    stride: Optional[int] = option(
        None,
        "text-generation: tokens from one window over a long document to the next; a smaller stride gives each token "
        "more context and takes more time; default: max_length, no overlap",
    )
    batch_tokens: Optional[int] = option(None, f"padded tokens per forward pass; default: {BATCH_TOKENS}")
    confidence: float = option(0.95, "level of the intervals, above 0 and below 1")
    resamples: int = option(2000, "resamples of the documents behind each interval")
    seed: int = option(0, "seed of the resampling, and of the held-out split if no run sets it")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = option(
        "auto",
        "arithmetic: bf16 or fp16 autocast, or no (the type of the weights); auto: as in the run, no without a run",
    )
    trust_remote_code: bool = option(False, "run Python code that comes with a model")
    allow_pickle: bool = option(False, "also read weights that are stored as pickle files: tensors only")

    def __post_init__(self) -> None:
        check_fields(self, ALLOWED_VALUES)
        if self.task is not None:
            TaskSettings(self.task)
        names = self.against or []
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"--against names {twice} twice; name it once")

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of every bootstrap."""
        return {"resamples": self.resamples, "confidence": self.confidence, "seed": self.seed}


@dataclass(frozen=True)
class HarnessOptions:
    """Tasks of lm-evaluation-harness. All options have the names that they have there."""

    _argument_group_name = "tasks of lm-evaluation-harness"

    tasks: Optional[str] = option(
        None, "names of its tasks, groups or tags, separated by commas; needs pip install 'scu-trainer[lm-eval]'"
    )
    num_fewshot: Optional[int] = option(None, "few-shot examples before each question; default: what the task says")
    limit: Optional[float] = option(
        None, "questions per task (below 1: a share of them); for a quick check, not for a result"
    )
    include_path: Optional[str] = option(None, "folder with your own tasks (YAML; their Python functions are run)")
    apply_chat_template: bool = option(False, "apply the chat template of the tokenizer to the questions")
    batch_size: Optional[int] = option(None, f"questions per forward pass; default: {BATCH_SIZE}")

    def __post_init__(self) -> None:
        check_fields(self, {"batch_size": Allowed(least=1)})
        typed = [name for name, value in vars(self).items() if name != "tasks" and value is not None]
        typed = [name for name in typed if getattr(self, name) is not False]  # False is the default, but 0 was typed
        require(
            self.tasks is not None or not typed,
            f"{typed and typed[0]} is for tasks of lm-evaluation-harness; add --tasks NAME, or drop it"
            f"{HELD_OUT_COUNTERPARTS.get(typed[0], '') if typed else ''}",
        )
        require(self.tasks is None or bool(self.names), "tasks is empty; give names separated by commas")
        limit = self.limit
        require(
            limit is None or 0 < limit < 1 or (limit >= 1 and limit == int(limit)),
            f"limit is {limit}; give a whole number of questions, or a share below 1",
        )

    @property
    def names(self) -> list[str]:
        return (self.tasks or "").replace(",", " ").split()
