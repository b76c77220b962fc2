"""What stands between the messages of a conversation, for Ollama."""

from __future__ import annotations

import json

import pytest

from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.models.exports import gguf, ollama

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}[{{ m.role }}]"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM_IN_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
BY_CONTENT = (
    "{% for m in messages %}{% if 'Fine' in m.content %}!{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    return embedded_tokenizer(default_cache_dir(None))


@pytest.mark.parametrize("template", [LLAMA_3, QWEN_2, NO_SYSTEM])
def test_what_was_read_off_renders_as_the_template_does(tokenizer, template):
    tokenizer.chat_template = template
    borders = ollama.borders_of(tokenizer)
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    messages = messages * 3 + messages[:1]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ollama.rendered_by(borders, messages) == expected.removeprefix("<|bos|>")
    if template is not NO_SYSTEM:
        with_system = [{"role": "system", "content": "s"}, *messages]
        expected = tokenizer.apply_chat_template(with_system, add_generation_prompt=True, tokenize=False)
        assert ollama.rendered_by(borders, with_system) == expected.removeprefix("<|bos|>")


@pytest.mark.parametrize("template", [SYSTEM_IN_LAST, BY_CONTENT])
def test_a_template_that_looks_at_more_than_roles_is_not_written(tokenizer, template):
    tokenizer.chat_template = template
    found, note = ollama.template_of(tokenizer)
    assert found is None and "depends on more than the roles" in note
    assert "TEMPLATE" not in ollama.modelfile("a.gguf", found, [], None)


def test_text_that_would_be_a_program_in_go_is_not_written(tokenizer):
    tokenizer.chat_template = NO_SYSTEM.replace("[", "{{ '{{' }}")
    assert ollama.borders_of(tokenizer) is None


def test_without_a_template_the_prompt_is_gone_on_with(tokenizer):
    tokenizer.chat_template = None
    assert ollama.template_of(tokenizer)[0] == "{{ .Prompt }}"
    text = ollama.modelfile("a.gguf", "{{ .Prompt }}", ['say "end"\n'], 131072)
    assert text == 'FROM ./a.gguf\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop "say \\"end\\"\\n"\n'


@pytest.mark.parametrize(
    ("name", "taken"), [("qwen2.5_lora-1", "qwen2.5_lora-1"), ("-my 'run' \u7a7a 2", "my-run-2"), ("\u7a7a", "model")]
)
def test_a_model_has_a_name_that_ollama_takes(name, taken):
    assert ollama.model_name(name) == taken


def declared(**changes) -> dict:
    return {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, **changes}


def split(pattern: str, **changes) -> dict:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [rule, letters]}, **changes}


LLAMA_3_WORDS, QWEN_2_WORDS = gguf.WORD_RULES


@pytest.mark.parametrize(
    ("declaration", "name"),
    [
        (declared(), "gpt-2"),
        (declared(normalizer={"type": "NFC"}), None),
        (declared(pre_tokenizer={"type": "Metaspace"}), None),
        (declared(pre_tokenizer=None), None),
        (split(LLAMA_3_WORDS), "llama-bpe"),
        (split(QWEN_2_WORDS, normalizer={"type": "NFC"}), "qwen2"),
        (split(LLAMA_3_WORDS, normalizer={"type": "NFC"}), None),
        (split(r"\w+"), None),
    ],
)
def test_the_rule_for_words_is_read_from_its_declaration(tmp_path, declaration, name):
    (tmp_path / "tokenizer.json").write_text(json.dumps(declaration))
    assert gguf.word_rule_name(tmp_path / "tokenizer.json") == name
    assert gguf.word_rule_name(tmp_path / "none.json") is None
