"""How many weights a model has, from its config alone: on the meta device, so also for models larger than memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scu_trainer.models.load import base_of, check_source
from scu_trainer.models.quantize import quantizable_layers, skeleton_of


def weight_counts(name_or_path: str) -> dict[str, int]:
    """``weights`` of all, ``linear_weights`` of the layers that quantization packs. Raises ModelError."""
    from transformers import AutoConfig

    check_source(name_or_path)
    model = skeleton_of(AutoConfig.from_pretrained(base_of(Path(name_or_path).expanduser())))
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "linear_weights": sum(model.get_submodule(name).weight.numel() for name in quantizable_layers(model)),
    }


if __name__ == "__main__":
    print(json.dumps(weight_counts(sys.argv[1])))
