"""How many weights a model has, from its config alone: on the meta device, so also for models larger than memory."""

from __future__ import annotations

import json
import sys

from scu_trainer.models.loading.names import as_model_error, base_of, check_source
from scu_trainer.models.quantize import quantizable_layers, skeleton_of


def weight_counts(name_or_path: str) -> dict[str, float]:
    """``weights`` of all, ``linear_weights`` of the layers that quantization packs, ``stored_bytes`` of a weight in its
    file by what the config says, 2 where it says nothing. Raises ModelError."""
    import torch
    from transformers import AutoConfig

    check_source(name_or_path)
    name = base_of(name_or_path)
    with as_model_error(name, "configuration", asked_for=name_or_path):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    model, dtype = skeleton_of(config), config.dtype or torch.float16
    return {
        "stored_bytes": float(dtype.itemsize),
        "weights": sum(weight.numel() for weight in model.parameters()),
        "linear_weights": sum(model.get_submodule(name).weight.numel() for name in quantizable_layers(model)),
    }


if __name__ == "__main__":
    print(json.dumps(weight_counts(sys.argv[1])))
