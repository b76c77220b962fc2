from __future__ import annotations

import pickle

import pytest
import torch

from scu_trainer.data import Collator


def row(*ids, **columns):
    return {"input_ids": list(ids), "labels": list(ids), **columns}


def test_pads_to_the_longest_row_with_a_mask():
    batch = Collator(pad_token_id=9)([row(1, 2, 3), row(4)])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_eos_is_learned_even_if_it_is_the_pad_token():
    batch = Collator(pad_token_id=2)([row(5, 6, 2), row(7, 2)])
    assert batch["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_isolated_rows_get_positions_and_no_mask():
    batch = Collator()([row(1, 2, 3, position_ids=[0, 1, 0]), row(4, position_ids=[0])])
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_pads_to_a_multiple():
    assert Collator(pad_to_multiple_of=8)([row(*range(9))])["input_ids"].shape == (1, 16)


def test_sample_index_goes_along():
    batch = Collator()([row(1, sample_index=7, length=1), row(2, sample_index=3, length=1)])
    assert batch["sample_index"].tolist() == [7, 3]
    assert "length" not in batch


@pytest.mark.parametrize(("pad", "eos", "expected"), [(4, 3, 4), (None, 3, 3), (None, None, 0), (0, 3, 0)])
def test_pad_token_of_a_tokenizer(pad, eos, expected):
    class Tokenizer:
        pad_token_id, eos_token_id = pad, eos

    assert Collator.of(Tokenizer).pad_token_id == expected


def test_survives_pickling(tokenizer):
    collator = Collator.of(tokenizer, pad_to_multiple_of=8)
    assert pickle.loads(pickle.dumps(collator)) == collator


def test_isolated_rows_do_not_see_each_other_in_a_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes)).eval()
    alone = Collator()([row(7, 8, 9, position_ids=[0, 1, 2])])
    packed = Collator()([row(1, 2, 3, 7, 8, 9, position_ids=[0, 1, 2, 0, 1, 2]), row(7, 8, 9, position_ids=[0, 1, 2])])
    with torch.no_grad():
        expected = model(input_ids=alone["input_ids"], position_ids=alone["position_ids"]).logits[0]
        logits = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"]).logits
    torch.testing.assert_close(logits[0, 3:], expected)
    torch.testing.assert_close(logits[1, :3], expected)
