"""How documents are laid into rows where nobody says it: packed where the model keeps them apart, else one to a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from torch import nn
from transformers import PretrainedConfig

from scu_trainer.errors import ModelError
from scu_trainer.models.isolation import MEASURED, can_be_asked, declared_leak, isolates
from scu_trainer.settings import DataSettings

ANYHOW = "isolate_documents: false packs them anyway"


@dataclass(frozen=True)
class Packing:
    """``asked``: the setting ``isolate_documents``. ``isolates``: whether the model keeps documents apart. ``why``: the
    reason, for a person. ``is_measured``: other models of this family were seen to keep documents apart."""

    asked: Optional[bool]
    isolates: bool
    why: str
    is_measured: bool = False

    @classmethod
    def expected(cls, data: DataSettings, config: PretrainedConfig) -> Packing:
        """What ``config`` lets expect, before there is a model to ask."""
        leak = declared_leak(config)
        why = f"{config.model_type} {leak or 'is to be asked'}"
        return cls(data.isolate_documents, leak is None, why, leak is None and config.model_type in MEASURED)

    def applied(self, data: DataSettings) -> DataSettings:
        """``data`` with ``packing`` and ``isolate_documents`` decided."""
        if not data.packing or data.isolate_documents is not None:
            return replace(data, isolate_documents=bool(data.isolate_documents))
        return replace(data, packing=self.isolates, isolate_documents=self.isolates)

    def asked_of(self, model: nn.Module, vocab_size: int) -> Packing:
        """What the model itself says, where nothing is declared already. Raises ModelError where isolation was demanded
        and is not there.

        A model in parts on several ranks cannot be asked: its family decides, and of one that was not measured rows are
        not packed, for nobody would know.
        """
        if self.asked is False or (self.asked is None and not self.isolates):
            return self
        name = type(model).__name__
        if not can_be_asked(model):
            seen = "others of its family keep documents apart" if self.is_measured else "its family was not measured"
            why = f"the weights of {name} are sharded, so it cannot be tested; {seen}"
            return replace(self, isolates=self.is_measured, why=why)
        keeps_apart = isolates(model, vocab_size)
        if self.asked and not keeps_apart:
            raise ModelError(
                f"isolate_documents: {name} lets packed documents see each other; set packing: false, leave "
                "isolate_documents out, which does the same, or set it to false to accept it"
            )
        why = f"{name} {'keeps packed documents apart' if keeps_apart else 'lets packed documents see each other'}"
        return replace(self, isolates=keeps_apart, why=why)

    def line(self) -> str:
        """What was chosen, and why."""
        if self.asked is False:
            return "rows: packed; documents see those before them in the row (isolate_documents: false)"
        if self.isolates:
            return f"rows: packed, documents isolated: {self.why}"
        return f"rows: one document each, not packed, because {self.why}; {ANYHOW}"
