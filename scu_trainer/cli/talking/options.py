"""Options that chat, generate and serve have in common: the model, and how it answers."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Optional

from scu_trainer.cli.origin import base_subject
from scu_trainer.cli.parsing import add_consent, add_switch
from scu_trainer.cli.subjects import Subject, subject_of
from scu_trainer.errors import ModelError, SettingsError
from scu_trainer.settings.base import require
from scu_trainer.settings.tasks import TEXT

if TYPE_CHECKING:
    from scu_trainer.talk.answers import AnswerSettings
    from scu_trainer.talk.model import Talker

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    add = parser.add_argument
    add("--max_new_tokens", type=int, default=max_new_tokens, metavar="N",
        help=f"largest number of tokens of an answer; default: {max_new_tokens}")  # fmt: skip
    about = "sample tokens; default: as in the model's generation_config, or if one of the next three is given"
    add_switch(parser, "--do_sample", about, default=None)
    add("--temperature", type=float, help="sampling temperature; 0: greedy")
    add("--top_p", type=float, help="sample from the likeliest tokens that together have this probability")
    add("--top_k", type=int, help="sample from this many of the likeliest tokens")
    add(
        "--repetition_penalty",
        type=float,
        help="above 1: make tokens that already occurred less likely",
    )
    add("--seed", type=int, default=0, help="seed of the sampling; default: 0")
    add("--dtype", choices=DTYPES, default="auto", help="type of the weights; auto: as in the run")
    add_switch(parser, "--use_cpu", "do not use the GPU")
    add_consent(parser)


def answer_settings(options: argparse.Namespace) -> AnswerSettings:
    from scu_trainer.talk.answers import AnswerSettings

    given = {name: getattr(options, name) for name in AnswerSettings.__dataclass_fields__}
    if given["temperature"] == 0 and not given["do_sample"]:  # in other programs this means greedy
        ignored = ", ".join(name for name in ("top_p", "top_k") if given[name] is not None)
        require(not ignored, f"temperature 0 is greedy, so {ignored} would have no effect; drop one or the other")
        given |= {"temperature": None, "do_sample": False}
    return AnswerSettings(**given)


def subject_from_options(name: str, options: argparse.Namespace, base_of: Optional[Subject] = None) -> Subject:
    """Return the subject of ``name``, with the consent and type of ``options``. ``base_of``: the subject that the word
    base refers to. Raises ModelError if it cannot answer."""
    if options.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    if name == "base" and base_of is None:
        raise ModelError("base is a keyword of --against; give a path or a Hub id first (./base for a folder)")
    resolved = base_subject(base_of) if name == "base" else subject_of(name)
    if resolved.task != TEXT:
        raise ModelError(f"{resolved.name} has task {resolved.task}: it writes no text; only {TEXT} can answer")
    return resolved.with_consent(options, dtype=resolved.model.dtype if options.dtype == "auto" else options.dtype)


def talker(subject: Subject) -> Talker:
    """Load the model of ``subject``, in the mixed precision of its run. Raises SettingsError if it does not fit on the
    GPU."""
    import torch

    from scu_trainer.talk.model import load_talker

    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(subject.mixed_precision or "")
    try:
        return load_talker(subject.name, subject.model, precision, subject.answers_plain_text)
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"{subject.name} does not fit on the GPU; add --use_cpu, or --dtype bfloat16") from error
