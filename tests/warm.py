"""What libraries make at their first use and keep, made before a process forks: the children find it."""

from __future__ import annotations

import sys


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
