"""Answers a few held-out prompts before training, at each evaluation and at the end, to show the metrics in words.
Nothing is drawn at random, and weights and modes are restored, so training is not affected."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import nn

from scu_trainer.errors import OutOfMemory
from scu_trainer.figures import count_text
from scu_trainer.models.asking import evaluating
from scu_trainer.models.loading.adapters import generation_obstacle
from scu_trainer.train.evaluation.answers import Prompt, answered, spread_prompts, stop_tokens
from scu_trainer.train.loop import Loop
from scu_trainer.train.step.distributed.sharded import is_sharded, training_precision
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

logger = logging.getLogger("scu_trainer")

SAMPLES_FILE = "samples.json"
LONGEST_PROMPT_TOKENS = 512


class Samples(Loop):
    """Answers held-out prompts greedily, with the weights that an evaluation would use.

    count: number of prompts. max_new_tokens: of an answer; ``reference`` is cut to the same length. Rows of
    samples.json hold the step, and for each prompt its row, prompt, reference and answer.
    """

    name = "samples"
    history_file = SAMPLES_FILE

    def __init__(self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, count: int, max_new_tokens: int) -> None:
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self.prompts = spread_prompts(rows, count, LONGEST_PROMPT_TOKENS)
        self.notices: list[str] = []
        self._answered_at_step: Optional[int] = None
        self._answer_count = 0

    def opening_lines(self) -> list[str]:
        if not self.prompts:
            return [f"samples: no held-out row has a prompt of {LONGEST_PROMPT_TOKENS} tokens or less; none are taken"]
        return [f"samples: none are made, because {obstacle}"] if (obstacle := self._obstacle()) else []

    def _obstacle(self) -> Optional[str]:
        return (
            "no process has the whole weights" if is_sharded(self.trainer) else generation_obstacle(self.trainer.model)
        )

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._answered_at_step, self._answer_count = None, 0
        if state.global_step == 0:
            self._answer_all(state.global_step)

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        if self.trainer.is_in_train:
            self._answer_all(state.global_step)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Answer again if load_best_model_at_end may have loaded other weights than at the last evaluation."""
        if self._answered_at_step != state.global_step or args.load_best_model_at_end:
            self._answer_all(state.global_step)

    def figures(self) -> dict[str, Any]:
        return {"samples": {"prompts": len(self.prompts)}} if self._answer_count else {}

    def lines(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        if not self._answer_count:
            return []
        prompts = count_text(len(self.prompts), "held-out prompt")
        return [("samples", f"{prompts} answered: {SAMPLES_FILE}, and in the report")]

    def _answer_all(self, step: int) -> None:
        """Answer all prompts on the first rank. Every rank calls this, because loops may act around an evaluation."""
        if not self.prompts or self._obstacle():
            return
        self._answered_at_step = step
        try:
            answers = self._answers()
        except (RuntimeError, MemoryError, OutOfMemory) as error:
            if not (is_out_of_memory(error) or isinstance(error, OutOfMemory)):
                raise
            forget_traceback(error)
            answers = None
        if answers is None:
            free_memory(self.trainer.args.device)
            self.notices.append(f"no samples were taken at step {step}: not enough memory")
            logger.warning("%s", self.notices[-1])
            return
        self._answer_count += 1
        self.record({"step": step, "samples": answers})

    def _answers(self) -> list[dict[str, Any]]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)
        with contextlib.ExitStack() as contexts:
            for loop in self.trainer.loops:
                contexts.enter_context(loop.evaluation())
            contexts.enter_context(training_precision(self.trainer))
            contexts.enter_context(evaluating(model))
            return [self._row(prompt, model) for prompt in self.prompts if self.history is not None]

    def _row(self, prompt: Prompt, model: nn.Module) -> dict[str, Any]:
        stops = stop_tokens(model, self.tokenizer, prompt.reference_ids)
        answer = answered(model, self.tokenizer, prompt.token_ids, stops, self.max_new_tokens)
        return {
            "row": prompt.row,
            "prompt": self.tokenizer.decode(list(prompt.token_ids)),
            "reference": self._text(prompt.reference_ids[: self.max_new_tokens]),
            "answer": self._text(answer),
        }

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
