"""Count the weights of a model from its config only, on the meta device, so also for models larger than memory."""

from __future__ import annotations

import json
import sys

from scu_trainer.models.loading.load import config_of
from scu_trainer.models.quantize import meta_model, quantizable_layers
from scu_trainer.settings import ModelSettings


def weight_counts(name_or_path: str) -> dict[str, float]:
    """Return the number of all ``weights``, of ``linear_weights`` (which quantization packs), and ``stored_bytes`` of a
    weight in the files by the dtype of the config (2 without one). Raises ModelError if the config cannot be read."""
    import torch

    config = config_of(ModelSettings(model_name_or_path=name_or_path))
    model, dtype = meta_model(config), config.dtype or torch.float16
    return {
        "stored_bytes": float(dtype.itemsize),
        "weights": sum(weight.numel() for weight in model.parameters()),
        "linear_weights": sum(model.get_submodule(name).weight.numel() for name in quantizable_layers(model)),
    }


if __name__ == "__main__":
    print(json.dumps(weight_counts(sys.argv[1])))
