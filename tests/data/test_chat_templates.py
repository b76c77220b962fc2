"""Our own chat templates: nothing is dropped in silence, the end of an answer is learned, turns add up."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scu_trainer.data.records import Record
from scu_trainer.data.text.chat import read_chat_template, unstable_prompt_end
from scu_trainer.data.text.encode import NOT_LEARNED, Document, Encoder
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.data import CHAT_TEMPLATES

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which tea?"},
    {"role": "assistant", "content": "Green."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Black, with milk."},
]
MARKERS = {
    "chatml": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "mistral": "<|eos|>",
    "alpaca": "<|eos|>",
    "vicuna": "<|eos|>",
}
KNOW_TOOLS = ("qwen", "llama3")


@pytest.fixture(params=CHAT_TEMPLATES)
def template(request) -> str:
    return request.param


@pytest.fixture
def encode(tokenizer, template):
    own = copy.deepcopy(tokenizer)
    own.chat_template = read_chat_template(template)
    encoder = Encoder(DataSettings(chat_template=template), own, "tiny")

    def run(messages, **columns):
        [result] = encoder.encode([Record("row 1", {"messages": messages, **columns})])
        return result

    run.tokenizer = own
    return run


def learned(encode, document: Document) -> str:
    return encode.tokenizer.decode([label for label in document.labels if label != NOT_LEARNED])


def test_answers_are_learned_with_their_ends(encode, template):
    document, end = encode(CONVERSATION), MARKERS[template]
    last = end if end == "<|eos|>" else end + "<|eos|>"
    said = learned(encode, document).replace(" Green", "Green").replace(" Black", "Black")
    assert said == f"Green.{end}Black, with milk.{last}"
    assert document.read.rendered_away == ()


def test_a_turn_that_is_not_learned_leaves_the_others_as_the_template_marks_them(encode):
    every = learned(encode, encode(CONVERSATION))
    for turn in (2, 4):
        kept = CONVERSATION[6 - turn]["content"]
        said = learned(
            encode, encode([*CONVERSATION[:turn], {**CONVERSATION[turn], "weight": 0}, *CONVERSATION[turn + 1 :]])
        )
        assert kept in said and said.strip(" ") in every


@pytest.mark.parametrize("template", ["phi3"])
def test_answers_are_learned_where_only_the_last_turn_has_an_end_of_text(encode):
    """As in the template of Phi 3.5 itself, which ends there whatever speaks last."""
    encode.tokenizer.chat_template = (
        "{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    )
    encode.tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    said = "Green.<|end|>\nBlack, with milk.<|end|>\n<|endoftext|>"
    assert learned(encode, encode(CONVERSATION)) == said
    assert learned(encode, encode(CONVERSATION[2:])) == said


@pytest.mark.parametrize("template", ["phi3"])
def test_of_answers_that_end_otherwise_than_the_last_one_the_end_is_not_learned(encode):
    """As gpt-oss, where that of the last one alone is what the model is to say."""
    encode.tokenizer.chat_template = (
        "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}"
        "{{ eos_token if loop.last and turn.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    document, eos = encode(CONVERSATION), encode.tokenizer.eos_token
    assert learned(encode, document) == f"Green.Black, with milk.{eos}"
    assert document.read.rendered_away == (f"{eos!r}, with which it ends an answer",)


FORGETS_REASONING = (
    "{% set last = messages | map(attribute='role') | list %}{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% set words = turn.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if turn.role == 'assistant' and 'user' not in last[loop.index0 :] %}"
    "<think>\n{{ turn.content.split('</think>')[0].removeprefix('<think>').strip() if '</think>' in turn.content }}"
    "\n</think>\n\n{% endif %}{{ words }}"
    "{% for call in turn.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3, whose answers have their reasoning, an empty one too, until the next question."""

ASKS_FOR_REASONING = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content.split('</think>')[-1] }}"
    "{{ eos_token if turn.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""As DeepSeek R1, which asks with "<think>" and renders answers without."""


@pytest.mark.parametrize("template", ["qwen"])
def test_answers_are_learned_where_reasoning_is_rendered_in_the_last_alone(encode):
    encode.tokenizer.chat_template = FORGETS_REASONING
    last = f"<think>\n\n</think>\n\nBlack, with milk.<|im_end|>\n{encode.tokenizer.eos_token}"
    assert learned(encode, encode(CONVERSATION)) == f"Green.<|im_end|>\n{last}"
    thought = [
        *CONVERSATION[:2],
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nGreen."},
        *CONVERSATION[3:],
    ]
    document = encode(thought)
    assert learned(encode, document) == f"Green.<|im_end|>\n{last}"
    assert document.read.rendered_away == ("reasoning",)


@pytest.mark.parametrize("template", ["qwen"])
@pytest.mark.parametrize("asked_with", ["", "<think>\n"])
def test_calls_are_learned_where_reasoning_is_rendered_in_the_last_alone(encode, asked_with):
    """Those that begin like what is asked with, too."""
    encode.tokenizer.chat_template = FORGETS_REASONING.replace(
        "assistant\n{% endif", f"assistant\n{asked_with}{{% endif"
    )
    call = {"function": {"name": "shelf", "arguments": {}}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "two"}]
    said = learned(encode, encode([CONVERSATION[1], *calls, *CONVERSATION[2:]]))
    last = f"<think>\n\n</think>\n\nBlack, with milk.<|im_end|>\n{encode.tokenizer.eos_token}".removeprefix(asked_with)
    assert said == f"<tool_call>shelf</tool_call><|im_end|>\nGreen.<|im_end|>\n{last}"


@pytest.mark.parametrize("template", ["qwen"])
def test_answers_to_nothing_are_learned_where_reasoning_is_rendered_in_the_last_alone(encode):
    """As a tool has it that found nothing."""
    encode.tokenizer.chat_template = FORGETS_REASONING
    last = f"<think>\n\n</think>\n\nBlack, with milk.<|im_end|>\n{encode.tokenizer.eos_token}"
    for asked in ({"role": "user", "content": ""}, {"role": "tool", "content": " "}):
        document = encode([*CONVERSATION[1:3], asked, *CONVERSATION[2:]])
        assert learned(encode, document) == f"Green.<|im_end|>\nGreen.<|im_end|>\n{last}"


FORGETS_ANALYSIS = (
    "{% for turn in messages %}{% if turn.tool_calls %}{% set call = turn.tool_calls[0].function.name %}"
    "{% if turn.content and turn.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% set later = messages[loop.index :] | rejectattr('tool_calls') | map(attribute='role') | list %}"
    "{% if turn.thinking and 'assistant' not in later %}<|start|>assistant: {{ turn.thinking }}{% endif %}"
    "<|start|>assistant to={{ call }}<|call|>"
    "{% elif turn.role == 'tool' %}<|start|>{{ messages[loop.index0 - 1].tool_calls[0].function.name }}: "
    "{{ turn.content }}<|end|>{% else %}<|start|>{{ turn.role }}: {{ turn.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss, which takes no words beside reasoning and a call, forgets the reasoning once there is an answer, and
names the tool again where it answers."""


@pytest.mark.parametrize("template", ["qwen"])
def test_calls_are_learned_whose_reasoning_is_rendered_until_there_is_an_answer(encode):
    encode.tokenizer.chat_template = FORGETS_ANALYSIS
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "shelf", "arguments": {}}}], "reasoning": "Hm."}
    document = encode([CONVERSATION[1], call, {"role": "tool", "content": "two"}, *CONVERSATION[2:]])
    said = f" to=shelf<|call|>: Green.<|end|>: Black, with milk.<|end|>{encode.tokenizer.eos_token}"
    assert learned(encode, document) == said
    assert document.read.rendered_away == ("reasoning",)


@pytest.mark.parametrize("template", ["qwen"])
def test_a_template_that_takes_arguments_as_text_gets_them_as_text(encode):
    """As DeepSeek V3, which adds them to a text."""
    encode.tokenizer.chat_template = read_chat_template("qwen").replace("| tojson", "+ ''")
    marked = encode.tokenizer.chat_template
    call = {"function": {"name": "shelf", "arguments": '{"city": "Łódź"}'}}
    messages = [CONVERSATION[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    for encode.tokenizer.chat_template in (marked, re.sub(r"\{%-? (end)?generation -?%\}", "", marked)):
        document = encode(messages)
        assert '{"city": "Łódź"}' in learned(encode, document)
        assert document.read.rendered_away == ()


@pytest.mark.parametrize("template", ["qwen"])
@pytest.mark.parametrize(("words", "kept"), [("Tea \N{TEACUP WITHOUT HANDLE}", None), ("Cafe\u0301", "Caf\xe9")])
def test_marks_that_end_within_a_character_learn_the_whole_of_it_and_no_more(encode, words, kept):
    """Of a character of several tokens, and of one that Qwen's tokenizer joins with the one before it."""
    encode.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    encode.tokenizer.chat_template = (
        "{% for turn in messages %}<|{{ turn.role }}|>{% if turn.role == 'assistant' %}{% generation %}"
        "{{ turn.content }}{% endgeneration %}{% else %}{{ turn.content }}{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": words}
    document = encode([CONVERSATION[1], answer, CONVERSATION[3], answer])
    assert learned(encode, document) == 2 * (kept or words) + encode.tokenizer.eos_token


@pytest.mark.parametrize("template", ["qwen"])
def test_a_long_conversation_is_rendered_a_few_times_for_each_answer(encode, monkeypatch):
    encode.tokenizer.chat_template = FORGETS_REASONING
    rendered, render = [], encode.tokenizer.apply_chat_template
    monkeypatch.setattr(
        encode.tokenizer, "apply_chat_template", lambda *args, **more: rendered.append(1) or render(*args, **more)
    )
    encode(CONVERSATION[1:] * 10)
    assert len(rendered) <= 8 * 20


@pytest.mark.parametrize("template", ["qwen"])
def test_answers_are_learned_where_the_prompt_asks_with_more_than_stands_before_them(encode):
    """An answer that begins like what is asked with is learned from its first character."""
    encode.tokenizer.chat_template = ASKS_FOR_REASONING
    answer = {"role": "assistant", "content": "<table>"}
    document = encode([*CONVERSATION[:2], answer, CONVERSATION[3], answer])
    eos = encode.tokenizer.eos_token
    assert learned(encode, document) == f"<table>{eos}<table>{eos}"
    assert document.read.rendered_away == ("'<think>', with which it asks for an answer",)
    pair = encode(None, prompt=CONVERSATION[:2], completion=[answer, CONVERSATION[3], answer])
    assert learned(encode, pair) == f"<table>{eos}<|user|>And now?<|assistant|><table>{eos}"


@pytest.mark.parametrize("template", ["qwen"])
@pytest.mark.parametrize(
    "words", ["{{ turn.content | upper }}", "{{ turn.content[:4] }}", "{{ turn.content | length }}"]
)
def test_a_template_that_changes_words_is_refused_where_their_place_is_needed(encode, words):
    encode.tokenizer.chat_template = FORGETS_REASONING.replace("{{ words }}", words)
    assert "the chat template" in encode(CONVERSATION).example


def test_a_prompt_is_the_beginning_of_its_conversation(encode, template):
    """What the model is asked with is what it has seen before the answer."""
    render = encode.tokenizer.apply_chat_template
    asked = render(CONVERSATION[:-1], tokenize=False, add_generation_prompt=True)
    assert render(CONVERSATION, tokenize=False).startswith(asked)
    assert asked.count("<|bos|>") == 1


def test_tools_calls_and_reasoning_are_rendered_or_named(encode, template):
    call = {"function": {"name": "weather", "arguments": '{"city": "Łódź", "days": 3}'}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Yes."},
    ]
    result = encode(messages, tools=[{"type": "function", "function": {"name": "weather", "parameters": {}}}])
    if template in KNOW_TOOLS:
        assert '{"city": "Łódź", "days": 3}' in encode.tokenizer.decode(result.input_ids)
        assert result.read.rendered_away == ()
    else:
        assert "leaves out the tool calls of message 2" in result.example
    thinking = encode([messages[0], {"role": "assistant", "content": "Yes.", "reasoning_content": "It is autumn."}])
    if template == "qwen":
        assert "It is autumn." in learned(encode, thinking)
    else:
        assert "leaves out the reasoning of message 2" in thinking.example


def test_keys_of_messages_that_a_template_does_not_read_are_named(encode):
    messages = [
        {"role": "user", "content": "Which tea?", "name": "Ann", "id": None},
        {"role": "assistant", "content": "Green.", "thought": "It is noon.", "weight": 1, "annotations": []},
    ]
    assert encode(messages).read.not_used == ("name of messages", "thought of messages")
    encode.tokenizer.chat_template = "{% for one in messages %}{{ one.name + one.content if one.name is defined else "
    encode.tokenizer.chat_template += "one.content }}{% generation %}{{ one.thought }}{% endgeneration %}{% endfor %}"
    assert encode(messages).read.not_used == ()


def test_markers_that_the_tokenizer_spells_out_are_named(prepared, jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template)  # as it will be set: put back at the end
    data = prepared(jsonl([{"messages": CONVERSATION}] * 3), chat_template="llama3")
    assert "no token for <|start_header_id|>, <|end_header_id|>, <|eot_id|>" in "\n".join(data.statistics.lines())
    with_tokens = prepared(jsonl([{"messages": CONVERSATION}] * 3), chat_template="chatml")
    assert "no token for" not in "\n".join(with_tokens.statistics.lines())


@pytest.mark.parametrize(("template", "end"), [("llama3", "'\\n\\n'"), ("spaced.jinja", "' '")])
def test_a_prompt_that_ends_in_other_tokens_than_are_learned_is_named(
    prepared, jsonl, tokenizer, monkeypatch, tmp_path, template, end
):
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template)
    monkeypatch.chdir(tmp_path)
    text = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}{% endfor %}"
    Path("spaced.jinja").write_text(text + "{% if add_generation_prompt %}assistant: {% endif %}")
    data = prepared(jsonl([{"messages": CONVERSATION}] * 3), chat_template=template)
    assert f"different tokens of {end} at the end of a prompt" in "\n".join(data.statistics.lines())
    as_asked = prepared(jsonl([{"messages": CONVERSATION}] * 3), chat_template="chatml")
    assert "different tokens" not in "\n".join(as_asked.statistics.lines())


@pytest.mark.parametrize(("end", "named"), [(": ", " "), (":", "")])
def test_a_blank_at_the_end_of_a_prompt_is_named_with_sentencepiece(end, named):
    """Where it stands alone it is a token of its own, which decodes to nothing."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(("?", ":", "▁", "▁an"))}, "?"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Split(":", "isolated")])
    words.decoder = decoders.Metaspace()
    own = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    own.chat_template = (
        "{% for turn in messages %}: {{ turn.content }}{% endfor %}{% if add_generation_prompt %}END{% endif %}"
    ).replace("END", end)
    assert unstable_prompt_end(own) == named


def test_a_name_that_is_nearly_one_of_ours(prepared, jsonl):
    with pytest.raises(DataError, match=r"chat_template 'lama3'.*did you mean 'llama3'.*chatml.*Jinja file"):
        prepared(jsonl([{"messages": CONVERSATION}] * 3), chat_template="lama3")
