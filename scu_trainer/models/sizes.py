"""How many weights a model has, from its config alone: on the meta device, so also for models larger than memory."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from scu_trainer.models.load import base_of, check_source
from scu_trainer.settings import ModelSettings


def weight_counts(settings: ModelSettings) -> dict[str, int]:
    """``weights`` of all, ``linear_weights`` of the layers that quantization packs. Raises ModelError."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    check_source(settings.model_name_or_path)
    name = base_of(Path(settings.model_name_or_path).expanduser())
    config = AutoConfig.from_pretrained(
        name, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    head = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "linear_weights": sum(module.weight.numel() for module in linear),
    }


if __name__ == "__main__":
    print(json.dumps(weight_counts(replace(ModelSettings(), model_name_or_path=sys.argv[1]))))
