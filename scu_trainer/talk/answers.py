"""Generate answers: one as a stream of pieces, or many in batches that fit in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Optional

import torch
from transformers import GenerationConfig, StoppingCriteriaList, TextIteratorStreamer

from scu_trainer.errors import ModelError, OutOfMemory
from scu_trainer.settings.base import require
from scu_trainer.talk.model import Message, Talker
from scu_trainer.train.evaluation.answers import ONE_ANSWER
from scu_trainer.train.step.recovery.halving import Halving

LOWEST_TEMPERATURE = 1e-30
"""With a lower temperature, scaled logits can overflow a float32."""

DRAWS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
"""transformers' defaults for sampling, if neither the settings nor the model's generation config set them."""

GOOD_BEFORE_GROWTH = 8
"""Number of consecutive batches that must fit before a larger one is tried again."""


@dataclass(frozen=True)
class AnswerSettings:
    """Settings by transformers' names; None: as in the model's generation config. ``seed``: of sampling."""

    max_new_tokens: int = 256
    do_sample: Optional[bool] = None
    temperature: Optional[float] = None
    top_p: Optional[float] = None
    top_k: Optional[int] = None
    repetition_penalty: Optional[float] = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            greedy = ", or 0 for greedy answers" if name == "temperature" else ""
            greedy = "; for greedy answers leave it out and set do_sample to false" if value == 0 else greedy
            require(value is None or value > 0, f"{name} is {value}; it must be above 0{greedy}")
        require(self.temperature is None or self.temperature >= LOWEST_TEMPERATURE,
                f"temperature is {self.temperature}; the lowest is {LOWEST_TEMPERATURE:g}")  # fmt: skip
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p is {self.top_p}; allowed: above 0, up to 1")
        require(self.top_k is None or self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 or more")
        drawn = [name for name in ("temperature", "top_p", "top_k") if getattr(self, name) is not None]
        require(not (self.do_sample is False and drawn), f"{', '.join(drawn)} have an effect only when tokens "
        f"are sampled; drop do_sample: false")  # fmt: skip

    def config(self, talker: Talker) -> GenerationConfig:
        """Return the generation config of the model, with these settings and the stop tokens of ``talker``."""
        changes = {name: value for name, value in asdict(self).items() if value is not None and name != "seed"}
        if "do_sample" not in changes and {"temperature", "top_p", "top_k"} & changes.keys():
            changes["do_sample"] = True
        stops = talker.stops
        config = GenerationConfig.from_dict(talker.model.generation_config.to_dict())
        if not changes.get("do_sample", config.do_sample):  # transformers would warn about settings of sampling
            changes |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            changes = {name: value for name, value in DRAWS.items() if getattr(config, name) is None} | changes
        changes |= {**ONE_ANSWER, "max_length": None}
        config.update(**changes, eos_token_id=stops or None, pad_token_id=stops[0] if stops else 0)
        return config

    def in_words(self, talker: Talker) -> str:
        config = self.config(talker)
        if not config.do_sample:
            return "greedy: each token is the most likely one (--temperature 0.7 draws)"
        drawn = f"temperature {config.temperature:g}, top_p {config.top_p:g}, top_k {config.top_k}"
        return f"sampled at {drawn}, seed {self.seed}"


def fit_to_positions(
    talker: Talker, messages: Sequence[Message], settings: AnswerSettings
) -> tuple[list[int], int, AnswerSettings]:
    """Fit a conversation and its answer into the positions of the model, of which up to a quarter is reserved for the
    answer. Returns the token ids, how many of the oldest messages were dropped, and settings with max_new_tokens
    limited to the positions that are left."""
    if talker.positions is None:
        return talker.encoded(messages), 0, settings
    token_ids, dropped = talker.trimmed(messages, min(settings.max_new_tokens, talker.positions // 4))
    left = talker.positions - len(token_ids)
    return token_ids, dropped, replace(settings, max_new_tokens=min(settings.max_new_tokens, left))


@dataclass(frozen=True)
class Reply:
    """An answer. ``finish_reason``: "stop" if a stop token ended it, "length" if it reached max_new_tokens."""

    text: str
    tokens: int
    finish_reason: str


def stream(
    talker: Talker, token_ids: Sequence[int], settings: AnswerSettings, count: Optional[Callable[[int], None]] = None
) -> Iterator[str]:
    """Yield pieces of the answer to a prompt as they are generated. At the end, ``count`` gets its number of tokens.
    Closing the iterator stops the generation. Raises ModelError if it fails."""
    inputs = torch.tensor([list(token_ids)], device=talker.device)
    streamer = TextIteratorStreamer(talker.tokenizer, skip_prompt=True, skip_special_tokens=True)
    is_closed, errors = threading.Event(), []
    stops = StoppingCriteriaList([lambda *_, **__: is_closed.is_set()])

    def generate() -> None:
        try:
            torch.manual_seed(settings.seed)
            with talker.answering():
                output = talker.model.generate(
                    input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=settings.config(talker),
                    streamer=streamer, stopping_criteria=stops, tokenizer=talker.tokenizer,
                )  # fmt: skip
            if count is not None:
                count(output.shape[1] - inputs.shape[1])
        except Exception as error:  # raised below, in the thread of the caller
            errors.append(error)
            streamer.end()

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    try:
        yield from (piece for piece in streamer if piece)
    finally:
        is_closed.set()
        thread.join()
    if errors:
        raise ModelError(f"{talker.name} cannot answer: {errors[0]}") from errors[0]


class BatchedAnswers:
    """Answers many prompts in batches of up to ``batch_rows``, padded on the left. If memory runs out, batches become
    smaller, and later grow again; no prompt is lost."""

    def __init__(self, talker: Talker, settings: AnswerSettings, batch_rows: int) -> None:
        self.talker, self.settings, self.batch_rows = talker, settings, batch_rows
        self._halving, self._good = Halving(), 0

    @property
    def out_of_memory(self) -> int:
        return self._halving.out_of_memory

    def answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[Reply]:
        """Yield the answers in the order of ``prompts``. Raises OutOfMemory if a single prompt does not fit."""
        for begin in range(0, len(prompts), self.batch_rows):
            part = prompts[begin : begin + self.batch_rows]
            yield from self._answer_batch(part)

    def _answer_batch(self, prompts: Sequence[Sequence[int]]) -> list[Reply]:
        before = self.out_of_memory
        try:
            done = self._halving.run(len(prompts), lambda rows: self._generate([prompts[row] for row in rows]))
        except OutOfMemory as error:
            longest = max(map(len, prompts))
            raise OutOfMemory(
                f"one prompt (up to {longest:,} tokens) with an answer of {self.settings.max_new_tokens:,} does not "
                "fit in memory; lower --max_new_tokens, or use a smaller model"
            ) from error
        self._good = 0 if self.out_of_memory > before else self._good + 1
        if self._good >= GOOD_BEFORE_GROWTH and self._halving.largest_rows is not None:
            larger, self._good = 2 * self._halving.largest_rows, 0
            self._halving.largest_rows = larger if larger < self.batch_rows else None
        return [answer for _, answers in done for answer in answers]

    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[Reply]:
        talker, width = self.talker, max(map(len, prompts))
        pad = talker.stops[0] if talker.stops else 0
        inputs = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts], device=talker.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=talker.device)
        torch.manual_seed(self.settings.seed)
        with talker.answering():
            output = talker.model.generate(
                input_ids=inputs, attention_mask=mask, generation_config=self.settings.config(talker),
                tokenizer=talker.tokenizer,
            )  # fmt: skip
        return [self._reply(row) for row in output[:, width:].tolist()]

    def _reply(self, token_ids: list[int]) -> Reply:
        end = next((place for place, token in enumerate(token_ids) if token in self.talker.stops), None)
        text = self.talker.tokenizer.decode(token_ids[:end], skip_special_tokens=True)
        return Reply(text, len(token_ids[:end]), "length" if end is None else "stop")
