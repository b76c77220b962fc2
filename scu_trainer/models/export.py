"""Write a merged model as files that stock transformers loads, then load them again and check the logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.errors import ModelError
from scu_trainer.models.merge import check_merge, merge_tolerance
from scu_trainer.run_files import apply_umask

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

CLASSES = {"text-generation": "AutoModelForCausalLM", "image-classification": "AutoModelForImageClassification"}
"""Stock class that loads a merged model, by task."""


def export_dtype(model: nn.Module, wanted: str) -> torch.dtype:
    """Return the dtype of the merged weights; "auto" is the one in which the base was loaded, before any packing."""
    import torch

    if wanted != "auto":
        return getattr(torch, wanted)
    found = (model.get_base_model() if hasattr(model, "peft_config") else model).config.dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def write_model(merged: PreTrainedModel, processor: Any, folder: Path, max_shard_size: str) -> None:
    """Save the model in safetensors files of up to ``max_shard_size``, with its ``processor`` (or tokenizer)."""
    merged.save_pretrained(folder, max_shard_size=max_shard_size)
    processor.save_pretrained(folder)
    apply_umask(folder.iterdir())


def read_back(folder: Path, task: str, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """Load the written model with stock transformers; ``trust_remote_code`` is for code copied from the base model.
    Raises ModelError if a weight is missing, unexpected or of another shape."""
    import transformers

    model, report = getattr(transformers, CLASSES[task]).from_pretrained(
        folder, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"], *map(str, report["mismatched_keys"])})
    if wrong:
        raise ModelError(f"the model cannot be read back: {wrong[0]} is not as it was written")
    return model.eval().to(device)


def require_same_logits(
    adapter_model: nn.Module, merged: nn.Module, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[float, float]:
    """Return (difference, tolerance), see ``check_merge``. Raises ModelError if rounding cannot explain it."""
    difference, tolerance = check_merge(adapter_model, merged, inputs), merge_tolerance(adapter_model, dtype)
    if difference <= tolerance:  # NaN is not
        return difference, tolerance
    finer = "" if str(dtype) == "torch.float32" else ", for instance with --dtype float32"
    raise ModelError(
        f"the merged model is not equal to base and adapter together: its logits differ by {difference:.2g} of the "
        f"largest, but only {tolerance:g} is allowed for {str(dtype).removeprefix('torch.')}; nothing was written. "
        f"Merge another checkpoint{finer}"
    )


def needed_bytes(weights: float, stored_bytes: float, dtype_bytes: Optional[float]) -> tuple[int, int]:
    """Return the (memory, disk) bytes that a merge of ``weights`` weights needs. Memory holds the loaded model and two
    float32 copies. ``dtype_bytes`` are those of a merged weight; None means as in the files of the base."""
    return int(weights * (stored_bytes + 8)), int(weights * (dtype_bytes or stored_bytes) * 1.02)
