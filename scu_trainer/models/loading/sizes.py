"""How many weights a model has, from its config alone: on the meta device, so also for models larger than memory."""

from __future__ import annotations

import json
import sys

from scu_trainer.models.loading.load import config_of
from scu_trainer.models.quantize import quantizable_layers, skeleton_of
from scu_trainer.settings import ModelSettings


def weight_counts(name_or_path: str) -> dict[str, float]:
    """``weights`` of all, ``linear_weights`` of the layers that quantization packs, ``stored_bytes`` of a weight in its
    file by what the config says, 2 where it says nothing. Raises ModelError."""
    import torch

    config = config_of(ModelSettings(model_name_or_path=name_or_path))
    model, dtype = skeleton_of(config), config.dtype or torch.float16
    return {
        "stored_bytes": float(dtype.itemsize),
        "weights": sum(weight.numel() for weight in model.parameters()),
        "linear_weights": sum(model.get_submodule(name).weight.numel() for name in quantizable_layers(model)),
    }


if __name__ == "__main__":
    print(json.dumps(weight_counts(sys.argv[1])))
