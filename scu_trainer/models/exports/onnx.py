"""Write ONNX with transformers' own exporter, and run it in ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scu_trainer.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn


def write_onnx(model: nn.Module, inputs: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write one graph, ``model.onnx`` with its weights next to it: the logits of any number of rows of any length.
    ``inputs`` are rows to trace with. Raises ModelError with the exporter's reason if it fails."""
    import torch
    from transformers.exporters import OnnxConfig, OnnxExporter

    model.config.use_cache = False
    try:
        with _quiet(), torch.no_grad():
            OnnxExporter().export(model.eval(), dict(inputs), OnnxConfig(dynamic=True)).save_pretrained(folder)
    except Exception as error:  # the exporter raises many types, for instance for an operator without a translation
        raise ModelError(f"ONNX cannot hold {type(model).__name__}: {_first_line(error)}") from error


def onnx_logits(folder: Path, inputs: Mapping[str, torch.Tensor], trust_remote_code: bool = False) -> torch.Tensor:
    """Return the logits that ONNX Runtime computes from the export in ``folder``, as float32 on the CPU.
    ``trust_remote_code`` is for the configuration. Raises ModelError if ONNX Runtime cannot run the export."""
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, NotImplemented
    from transformers.exporters import ExportedModel

    try:
        with _quiet():
            exported = ExportedModel.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        return exported(**inputs).logits.float().cpu()
    except (Fail, InvalidGraph, NotImplemented) as error:  # not if memory runs out, which another dtype would not fix
        raise ModelError(
            f"ONNX Runtime cannot run the export ({_first_line(error)}); nothing is kept. Try --dtype float32, "
            "which is the default, or --to safetensors"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters, which print each of their passes and warn about their own code."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
