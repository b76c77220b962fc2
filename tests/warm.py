"""What libraries make at their first use and keep, made before a process forks: the children find it. And what they
make again and again although it stays as it is, made once."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from types import SimpleNamespace


def make_what_is_kept() -> None:
    """What the first model that is loaded and the first command line that is read make, and the next ones find."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from transformers import TrainingArguments
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from scu_trainer.cli.fields import settings_parser
    from scu_trainer.cli.names.known import known_names, stock_fields

    get_checkpoint_conversion_mapping("llama")
    known_names(), stock_fields()
    settings_parser(TrainingArguments)

    # The name of the method that calls. torchrun asks for it at every look at its rendezvous, by inspect.stack, which
    # reads sources and walks over all modules that are loaded: most of its time in a process that has imported all.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def make_once_what_stays_the_same() -> None:
    """A twentieth of the time of a short training, more where the stack is deep. In this process and all its forks."""
    import jinja2
    import torch
    from transformers import hf_argparser

    # Which packages are there: accelerate reads what DeepSpeed says of itself for every training, we all versions.
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)

    # What types the settings have: every command line is read by a parser of its own.
    hf_argparser.get_type_hints = functools.cache(hf_argparser.get_type_hints)

    # The card that peft writes with each adapter: huggingface_hub compiles its template for every one.
    compile_anew = jinja2.Environment.compile
    compiled = functools.cache(compile_anew)

    def compile_once(environment: jinja2.Environment, *given, **named):
        return (compiled if environment.shared else compile_anew)(environment, *given, **named)

    jinja2.Environment.compile = compile_once

    # Who set a seed before there was a card: the whole stack with its sources, three times for every seed.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.traceback = SimpleNamespace(format_stack=list)
