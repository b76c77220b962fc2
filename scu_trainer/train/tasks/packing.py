"""The default of packing: documents are packed if the model isolates them, otherwise each gets its own row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from torch import nn
from transformers import PretrainedConfig

from scu_trainer.errors import ModelError
from scu_trainer.models.isolation import MEASURED, declared_leak, has_all_weights, isolates
from scu_trainer.settings import DataSettings

ANYHOW = "isolate_documents: false packs them anyway"


@dataclass(frozen=True)
class Packing:
    """Whether and why documents are packed. ``asked``: the setting ``isolate_documents``. ``isolates``: whether the
    model isolates packed documents. ``why``: the reason, for the user. ``is_measured``: whether other models of this
    family were tested and isolate documents."""

    asked: Optional[bool]
    isolates: bool
    why: str
    is_measured: bool = False

    @classmethod
    def expected(cls, data: DataSettings, config: PretrainedConfig) -> Packing:
        """Return what ``config`` suggests, before the model is loaded and can be tested."""
        leak = declared_leak(config)
        why = f"{config.model_type} {leak or 'is not tested yet'}"
        return cls(data.isolate_documents, leak is None, why, leak is None and config.model_type in MEASURED)

    def applied(self, data: DataSettings) -> DataSettings:
        """Return ``data`` with ``packing`` and ``isolate_documents`` decided."""
        if not data.packing or data.isolate_documents is not None:
            return replace(data, isolate_documents=bool(data.isolate_documents))
        return replace(data, packing=self.isolates, isolate_documents=self.isolates)

    def tested_on(self, model: nn.Module, vocab_size: int) -> Packing:
        """Return the decision after testing the model, unless the configuration already decides. Raises ModelError if
        isolation is required and the model does not isolate documents.

        A model that is sharded over ranks cannot be tested, so its family decides. If the family was not tested, rows
        are not packed.
        """
        if self.asked is False or (self.asked is None and not self.isolates):
            return self
        name = type(model).__name__
        if not has_all_weights(model):
            seen = "others of its family keep documents apart" if self.is_measured else "its family was not tested"
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
        """Return the decision and its reason in one line."""
        if self.asked is False:
            return "rows: packed; documents see the documents before them in the row (isolate_documents: false)"
        if self.isolates:
            return f"rows: packed, documents isolated: {self.why}"
        return f"rows: one document each, not packed, because {self.why}; {ANYHOW}"
