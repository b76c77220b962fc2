"""ONNX by transformers' own exporter, read back by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError
from scu_trainer.models.exports.packages import require_packages

if TYPE_CHECKING:
    import torch
    from torch import nn


def require_onnx() -> None:
    require_packages("ONNX", "onnx", ("onnx", "onnxscript", "onnxruntime"))


def write_onnx(model: nn.Module, inputs: Mapping[str, torch.Tensor], folder: Path) -> None:
    """One graph, ``model.onnx`` with its weights beside it: logits of whole rows, of any number and length. ``inputs``:
    rows to trace with. Raises ModelError with the exporter's reason where it gives up."""
    import torch
    from transformers.exporters import OnnxConfig, OnnxExporter

    model.config.use_cache = False
    try:
        with _quiet(), torch.no_grad():
            OnnxExporter().export(model.eval(), dict(inputs), OnnxConfig(dynamic=True)).save_pretrained(folder)
    except (
        Exception
    ) as error:  # an operator without a translation, a shape that cannot be free: torch raises many kinds
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"ONNX cannot hold {type(model).__name__}: {reason[0] if reason else type(error).__name__}"
        ) from error


class OnnxModel:
    """What was written, as ONNX Runtime reads it on the CPU, called as a model of transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers.exporters import ExportedModel

        with _quiet():
            self.exported = ExportedModel.from_pretrained(str(folder))

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.exported(**inputs).logits.float()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters print each of their passes, and warn about what they do themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
