"""Whether packed documents see each other is asked of the model itself."""

from __future__ import annotations

import pytest
import torch

from scu_trainer.errors import ModelError
from scu_trainer.models.isolation import TOLERANCE, leak, require_isolation
from tests import tiny


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_keeps_packed_documents_apart(attention):
    model = tiny.llama(attn_implementation=attention)
    require_isolation(model, tiny.VOCAB)
    assert leak(model, tiny.VOCAB) < TOLERANCE / 100, "rounding alone should be far below the tolerance"


def test_mamba_carries_its_state_across_documents():
    model = tiny.granite_hybrid()
    with pytest.raises(ModelError, match=r"isolate_documents.*GraniteMoeHybridForCausalLM.*set packing: false"):
        require_isolation(model, tiny.VOCAB)


def test_attention_over_the_whole_row_is_a_leak():
    """The same model, with position ids that never restart: what it sees without isolation."""
    model = tiny.llama()

    def one_document(module, arguments, inputs):
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        return arguments, inputs

    model.register_forward_pre_hook(one_document, with_kwargs=True)
    assert leak(model, tiny.VOCAB) > 10 * TOLERANCE


def test_adapters_change_nothing_and_the_mode_stays():
    model = tiny.lora(tiny.llama()).train()
    require_isolation(model, tiny.VOCAB)
    assert model.training


def test_vocabularies_smaller_than_the_probe_are_fine():
    require_isolation(tiny.llama(), 5)
