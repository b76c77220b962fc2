from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scu_trainer.data import embedded_tokenizer
from scu_trainer.data.text import tokenizer as tokenizer_module
from scu_trainer.errors import StorageError


def test_size_and_distinct_special_tokens(tokenizer):
    assert len(tokenizer) == 2048
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    turns = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert len({*special, *turns}) == 6


def test_any_text_comes_back_unchanged(tokenizer):
    text = "def f(x):\n\treturn  'čaj 茶 \U0001f375'  # \x00\r\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_it_compresses_its_own_documentation(tokenizer):
    from pydoc_data.topics import topics

    text = topics["while"]
    assert len(text) / len(tokenizer(text)["input_ids"]) > 3


def test_training_gives_the_same_tokenizer_again(tokenizer, tmp_path):
    again = embedded_tokenizer(tmp_path)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_it_is_trained_once(tokenizer, embedded_cache, monkeypatch):
    def fail(cache_dir):
        raise AssertionError("trained again")

    monkeypatch.setattr(tokenizer_module, "_train", fail)
    assert embedded_tokenizer(embedded_cache).get_vocab() == tokenizer.get_vocab()


def test_a_damaged_one_says_which_folder_to_delete(tokenizer, embedded_cache, tmp_path):
    kept = Path(shutil.copytree(embedded_cache / "tokenizer", tmp_path / "tokenizer"))
    (damaged,) = kept.glob("*/tokenizer.json")
    damaged.write_text(damaged.read_text().replace('"BPE"', '"BQE"'))
    with pytest.raises(StorageError, match=f"{damaged.parent} cannot be read"):
        embedded_tokenizer(tmp_path)


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
