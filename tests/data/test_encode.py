"""Rows of every format -> tokens, and which of them are learned."""

from __future__ import annotations

import copy
import logging
import os
import re
import signal

import pytest

from scu_trainer.data.records import Record
from scu_trainer.data.text.chat import read_chat_template
from scu_trainer.data.text.encode import EMPTY, NO_ANSWER, NOT_LEARNED, NOTHING_TO_LEARN, UNREADABLE, encode_records
from scu_trainer.errors import DataError
from scu_trainer.settings.data import CHAT_TEMPLATES

WITHOUT_GENERATION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which tea?"},
    {"role": "assistant", "content": "Green tea."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Black — with milk."},
]


def one(encoder, value):
    [result] = encoder.encode([Record("row 1", value)])
    return result


def learned_text(encoder, document, **decoding):
    return encoder.tokenizer.decode(document.labels[document.labels != NOT_LEARNED], **decoding)


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_plain_text_is_learned_whole_and_ends_with_eos(encoder, tokenizer):
    document = one(encoder(), {"text": "Green tea."})
    assert tokenizer.decode(document.input_ids) == "<|bos|>Green tea.<|eos|>"
    assert (document.labels == document.input_ids).all()
    assert document.utf8_bytes == len("Green tea.")


def test_eos_is_not_written_twice(encoder, tokenizer):
    assert tokenizer.decode(one(encoder(), {"text": "tea<|eos|>"}).input_ids) == "<|bos|>tea<|eos|>"


def test_eos_is_written_when_bos_is_the_same_token(encoder, tokenizer):
    shared = copy.deepcopy(tokenizer)
    shared.eos_token = shared.bos_token
    assert shared.decode(one(encoder(shared), {"text": "a"}).input_ids) == "<|bos|>a<|bos|>"


def test_completion_is_learned_with_its_end(encoder):
    encode = encoder()
    document = one(encode, {"prompt": "2 + 2 =", "completion": " 4"})
    assert learned_text(encode, document) == " 4<|eos|>"
    assert encode.tokenizer.decode(document.input_ids) == "<|bos|>2 + 2 = 4<|eos|>"


def test_prompt_is_learned_too_when_asked(encoder):
    encode = encoder(completion_only_loss=False)
    assert learned_text(encode, one(encode, {"prompt": "2 + 2 =", "completion": " 4"})) == "<|bos|>2 + 2 = 4<|eos|>"


def test_prompt_and_completion_of_messages(encoder):
    encode = encoder()
    document = one(encode, {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:3]})
    assert learned_text(encode, document) == "Green tea.<|im_end|><|eos|>\n"


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_assistant_tokens_by_generation_marks(encoder, column):
    encode = encoder()
    document = one(encode, {column: CONVERSATION})
    assert learned_text(encode, document) == "Green tea.<|im_end|>Black — with milk.<|im_end|><|eos|>"
    assert encode.tokenizer.decode(document.input_ids).endswith("<|im_end|><|eos|>\n")


def test_assistant_tokens_by_difference_of_prefixes(encoder, tokenizer):
    encode = encoder(with_template(tokenizer, WITHOUT_GENERATION))
    document = one(encode, {"messages": CONVERSATION})
    assert learned_text(encode, document, skip_special_tokens=True) == "Green tea.\nBlack — with milk.\n"
    marked = one(encoder(), {"messages": CONVERSATION})
    assert (document.input_ids[:-2] == marked.input_ids[1:-2]).all()  # this template writes no bos, and no eos


def test_a_completion_may_be_a_text_after_messages(encoder):
    given = {"prompt": CONVERSATION[:2], "completion": "Green tea."}
    messages = {**given, "completion": [{"role": "assistant", "content": "Green tea."}]}
    assert (one(encoder(), given).labels == one(encoder(), messages).labels).all()


@pytest.mark.parametrize(
    "mark",
    [*({"weight": no} for no in (0, 0.0, "0")), *({"train": no} for no in (False, 0, "false")), {"loss": False}]
    + [{"training": False}],
)
def test_a_turn_that_is_marked_is_not_learned(encoder, mark):
    turns = [*CONVERSATION[:2], {"role": "assistant", "content": "spilled", **mark}, *CONVERSATION[3:]]
    document = one(encoder(), {"messages": turns})
    assert "spilled" in encoder().tokenizer.decode(document.input_ids)
    assert "spilled" not in learned_text(encoder(), document) and learned_text(encoder(), document)


def test_marks_on_questions_leave_answers_to_the_generation_marks(encoder, tokenizer):
    template = (  # a longer conversation begins differently
        "{% for m in messages %}{{ '(last) ' if loop.last }}{{ m.role }}: {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    encode = encoder(with_template(tokenizer, template))
    marked = [{**turn, "training": turn["role"] == "assistant"} for turn in CONVERSATION]
    documents = [one(encode, {"messages": turns}) for turns in (CONVERSATION, marked)]
    assert (documents[0].labels == documents[1].labels).all()


def test_a_turn_that_is_marked_is_not_learned_in_a_completion_of_messages(encoder):
    turns = [{"role": "assistant", "content": "spilled", "train": False}, *CONVERSATION[1:3]]
    document = one(encoder(), {"prompt": CONVERSATION[:2], "completion": turns})
    learned = learned_text(encoder(), document)
    assert "spilled" not in learned and CONVERSATION[2]["content"] in learned, learned
    for mark in ({"weight": 0}, {"loss": False}):
        dropped = one(encoder(), {"prompt": CONVERSATION[:2], "completion": [{**CONVERSATION[2], **mark}]})
        assert dropped.reason == NOTHING_TO_LEARN


def test_eos_ends_an_answer_that_the_template_leaves_open(encoder, tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encode = encoder(with_template(tokenizer, template))
    assert learned_text(encode, one(encode, {"messages": CONVERSATION[1:3]})) == "Green tea.<|eos|>"


def test_whole_conversation_is_learned_when_asked(encoder):
    encode = encoder(assistant_only_loss=False)
    document = one(encode, {"messages": CONVERSATION})
    assert (document.labels == document.input_ids).all()


def test_eos_of_the_template_is_kept_alone(encoder, tokenizer):
    ended = copy.deepcopy(tokenizer)
    ended.eos_token = "<|im_end|>"
    document = one(encoder(ended), {"messages": CONVERSATION})
    assert ended.decode(document.input_ids).endswith("milk.<|im_end|>\n")


def test_sharegpt_names_of_roles(encoder):
    rows = [{"from": "human", "value": "Which tea?"}, {"from": "gpt", "value": "Green."}]
    encode = encoder()
    assert learned_text(encode, one(encode, {"conversations": rows})) == "Green.<|im_end|><|eos|>"


@pytest.mark.parametrize("name", ["Assistant", " GPT ", "ASSISTANT", "Bot"])
def test_a_role_is_known_in_any_case_and_with_spaces(encoder, name):
    encode = encoder()
    for column, keys in (("messages", ("role", "content")), ("conversations", ("from", "value"))):
        rows = [dict(zip(keys, turn, strict=True)) for turn in (("User", "Which tea?"), (name, "Green."))]
        document = one(encode, {column: rows})
        assert learned_text(encode, document) == "Green.<|im_end|><|eos|>"
        assert document.read.unknown_roles == ()


def test_a_turn_of_an_unknown_role_is_counted_with_its_first_row(prepared, jsonl):
    rows = [[*CONVERSATION, {"role": "narrator", "content": "She pours."}], CONVERSATION]
    rows = [{"messages": turns} for turns in (CONVERSATION, *rows, rows[0])]
    lines = prepared(jsonl(rows), block_size=256).statistics.lines()
    assert [line for line in lines if line.startswith("role")] == [
        "role 'narrator' is not known (2 turns, first in rows.jsonl row 2): not learned; rename it to assistant in the "
        "data if its words should be learned"
    ]
    learns_all = prepared(jsonl(rows), block_size=256, assistant_only_loss=False)
    assert not learns_all.statistics.roles_not_known


@pytest.mark.parametrize("template", [None, WITHOUT_GENERATION])
def test_an_empty_answer_beside_others_is_counted_and_not_learned(encoder, tokenizer, template):
    rows = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": " "}, *CONVERSATION[1:3]]
    usual = encoder(tokenizer=tokenizer if template is None else with_template(tokenizer, template))
    document = one(usual, {"messages": rows})
    assert learned_text(usual, document, skip_special_tokens=True).strip() == "Green tea."
    assert document.read.empty_answers == 1
    learns_all = encoder(tokenizer=usual.tokenizer, assistant_only_loss=False)
    document = one(learns_all, {"messages": rows})
    assert (document.labels != NOT_LEARNED).all() and document.read.empty_answers == 0


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
@pytest.mark.parametrize("skipped", [{"content": ""}, {"content": "spilled", "weight": 0}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_answer_is_left_out_wherever_it_stands_and_whatever_the_template(
    encoder, tokenizer, template, skipped, place
):
    answers = [{"content": f"Tea {number}."} for number in range(3)]
    answers[place] = skipped
    rows = [turn for answer in answers for turn in (CONVERSATION[1], {"role": "assistant", **answer})]
    encode = encoder(with_template(tokenizer, read_chat_template(template)))
    text = learned_text(encode, one(encode, {"messages": rows}), skip_special_tokens=True)
    assert re.findall(r"\w+ ?\d?\.", text) == [f"Tea {number}." for number in range(3) if number != place]
    assert "spilled" not in text and "Which" not in text
    if place > 0:
        document = one(encode, {"prompt": rows[:3], "completion": rows[3:]})
        text = learned_text(encode, document, skip_special_tokens=True)
        assert re.findall(r"\w+ ?\d?\.", text) == [f"Tea {3 - place}."]


def test_a_row_with_nothing_to_learn_names_the_unknown_role(encoder):
    rows = [{"role": "user", "content": "?"}, {"role": "Chatbot", "content": "Green."}]
    result = one(encoder(), {"messages": rows})
    assert result.reason == NOTHING_TO_LEARN and "which has an unknown role: 'Chatbot'" in result.example


def test_a_conversation_may_begin_with_the_assistant(encoder, tokenizer):
    chatml = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"from": "gpt", "value": "Tea?"}, {"from": "human", "value": "Yes."}, {"from": "gpt", "value": "Here."}]
    encode = encoder(with_template(tokenizer, chatml))
    assert learned_text(encode, one(encode, {"conversations": rows})).startswith("Tea?<|im_end|>\nHere.<|im_end|>\n")
    silent = encoder(with_template(tokenizer, chatml.partition("{% if")[0]))
    result = one(silent, {"conversations": rows})
    assert "row 1: begins with a turn of the assistant" in result.example and "--assistant_only" in result.example


def test_template_that_rewrites_the_past_is_refused(encoder, tokenizer):
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    result = one(encoder(with_template(tokenizer, template)), {"messages": CONVERSATION})
    assert result.reason == UNREADABLE
    assert "{% generation %}" in result.example and "--assistant_only_loss false" in result.example


def test_conversation_that_the_template_refuses_is_a_bad_row(encoder, tokenizer):
    encode = encoder(with_template(tokenizer, "{{ raise_exception('roles must alternate') }}"))
    assert "roles must alternate" in one(encode, {"messages": CONVERSATION}).example


def test_chat_without_template_says_what_to_do(encoder, tokenizer):
    with pytest.raises(DataError, match="tokenizer of tiny has no chat template; give one with --chat_template NAME"):
        one(encoder(with_template(tokenizer, None)), {"messages": CONVERSATION})


@pytest.mark.parametrize(
    ("value", "reason", "words"),
    [
        ({"text": 3}, UNREADABLE, "column 'text' holds int, not text"),
        ({"text": None}, UNREADABLE, "column 'text' holds NoneType"),
        ({"texts": "a"}, UNREADABLE, "columns: texts (did you mean 'texts'?)"),
        ({"body": "a", "id": 1}, UNREADABLE, "--text_column body"),
        ({"instruction": "a", "input": "b"}, UNREADABLE, "has a question (instruction) and no answer (output, "),
        ({"prompt": "a"}, UNREADABLE, "has a question (prompt) and no answer (output, "),
        ({"conversations": None}, UNREADABLE, "column 'conversations' is empty"),
        ({"train": [{"text": "a"}], "test": [{"text": "b"}]}, UNREADABLE, "holds several lists (train, test)"),
        ({"dialog": [{"role": "user"}], "id": 1}, UNREADABLE, "--messages_column"),
        ({"messages": "a"}, UNREADABLE, "'messages' holds str, not a list"),
        ({"messages": "[{'role': 'user', 'content': 'a'}]"}, UNREADABLE, "text that is not JSON (a table writes"),
        ({"messages": []}, UNREADABLE, "an empty list"),
        ({"question": {"0": "a"}, "answer": {"0": "b"}}, UNREADABLE, "orient='records'"),
        ({"question": ["a"], "answer": ["b"]}, UNREADABLE, "if each column holds the values of all"),
        ({"messages": [{"role": "user"}]}, UNREADABLE, "message 1 of 'messages' has no content"),
        ({"messages": [{"content": "a"}]}, UNREADABLE, "message 1 of 'messages' has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, UNREADABLE, "this task can use only text"),
        ({"prompt": 1, "completion": "a"}, UNREADABLE, "column 'prompt' holds int"),
        ({"text": " \n"}, EMPTY, "row 1"),
        ({"prompt": "a", "completion": ""}, NO_ANSWER, "row 1"),
        ({"messages": [{"role": "user", "content": "a"}]}, NOTHING_TO_LEARN, "row 1"),
        ({"messages": [{**turn, "train": False} for turn in CONVERSATION]}, NOTHING_TO_LEARN, "row 1"),
        ({"messages": [CONVERSATION[0], {"role": "assistant", "content": " "}]}, NO_ANSWER, "row 1"),
        ({"prompt": CONVERSATION, "completion": [{"role": "assistant", "content": ""}]}, NO_ANSWER, "row 1"),
    ],
)
def test_unusable_rows(encoder, value, reason, words):
    result = one(encoder(), value)
    assert result.reason == reason
    assert words in result.example


def test_a_named_text_column_comes_before_other_formats(encoder, tokenizer):
    row = {"story": "tea", "messages": CONVERSATION}
    assert tokenizer.decode(one(encoder(text_column="story"), row).input_ids) == "<|bos|>tea<|eos|>"


@pytest.mark.parametrize("setting", ["text_column"])
@pytest.mark.parametrize("row", [{"question": "a", "answer": "b"}, {"messages": CONVERSATION}, {"text": "a"}])
def test_a_named_column_that_is_missing_is_refused(encoder, setting, row):
    result = one(encoder(**{setting: "nope"}), row)
    assert f"has no column 'nope', which {setting} names" in result.example


@pytest.mark.parametrize("row", [{"question": "a", "answer": "b"}, {"messages": CONVERSATION}])
def test_a_named_system_column_is_read_with_columns_of_usual_names(encoder, tokenizer, row):
    document = one(encoder(system_column="rule"), {**row, "rule": "Be brief."})
    assert "Be brief." in tokenizer.decode(document.input_ids)


def test_empty_columns_of_arrow_are_ignored(encoder):
    rows = [{**message, "tool_calls": None} for message in CONVERSATION]
    assert (one(encoder(), {"messages": rows}).input_ids == one(encoder(), {"messages": CONVERSATION}).input_ids).all()


def test_identity_follows_tokenizer_and_rules_but_not_calls(encoder, tokenizer):
    before = encoder().identity
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    assert encoder().identity == before
    assert encoder(text_column="body").identity != before
    assert encoder(with_template(tokenizer, WITHOUT_GENERATION)).identity != before


def test_long_documents_raise_no_warning(encoder, tokenizer):
    short = copy.deepcopy(tokenizer)
    short.model_max_length = 4
    messages = []
    handler = logging.Handler()
    handler.emit = messages.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        rows = [{"text": "tea " * 50}, {"messages": CONVERSATION}, {"prompt": "a " * 9, "completion": "b " * 9}]
        encoder(short).encode([Record("r", row) for row in rows])
    finally:
        logger.removeHandler(handler)
    assert messages == []


def test_workers_give_the_same_in_the_same_order(encoder, monkeypatch):
    monkeypatch.setattr("scu_trainer.data.text.encode.BATCH_RECORDS", 7)
    records = [Record(f"row {n}", {"text": f"Cup {n}." if n % 5 else ""}) for n in range(100)]
    alone, together = (list(encode_records(records, encoder(), processes)) for processes in (1, 2))
    assert [type(result) for result in together] == [type(result) for result in alone]
    assert [str(result) for result in together] == [str(result) for result in alone]


def test_one_batch_waits_for_no_worker(encoder, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: pytest.fail("workers were started"))
    records = [Record(f"row {n}", {"text": f"Cup {n}."}) for n in range(20)]
    alone, together = (list(encode_records(records, encoder(), processes)) for processes in (1, 2))
    assert len(together) == 20 and [str(result) for result in together] == [str(result) for result in alone]


class Killed:
    def encode(self, batch):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_ends_the_reading(monkeypatch):
    """multiprocessing's own pool would wait for its rows for ever."""
    monkeypatch.setattr("scu_trainer.data.text.encode.BATCH_RECORDS", 7)
    records = [Record(f"row {n}", {"text": f"Cup {n}."}) for n in range(20)]
    with pytest.raises(DataError, match="one of the 2 processes of preprocessing_num_workers died: it was killed"):
        list(encode_records(records, Killed(), 2))
