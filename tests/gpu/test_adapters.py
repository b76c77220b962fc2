"""LoftQ, which peft computes on a GPU only."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from scu_trainer.models.loading.load import prepare_for_tuning
from scu_trainer.settings import ModelSettings
from scu_trainer.train.regularization.penalty import Prior
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_loftq_is_measured_and_loads_on_the_original_base(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny.saved_llama(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").cuda()
    model = prepare_for_tuning(base, ModelSettings(lora_r=4, init_lora_weights="loftq"))
    prior, ids = Prior(model), torch.arange(3, 40, device="cuda").unsqueeze(0)
    with torch.no_grad():
        for weight in prior.weights:
            weight.add_(0.1)
    assert float(prior.squared_distance()) > 0
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base").cuda(), tmp_path / "adapter"
    )
    with torch.no_grad():
        assert torch.allclose(again.eval()(ids).logits, model.eval()(ids).logits, atol=1e-3)
