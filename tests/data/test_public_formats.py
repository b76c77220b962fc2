"""Files as users of other tools have them, small: the format read, what is learned by hand count, what is not read."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from scu_trainer.data.formats import Columns, read_content
from scu_trainer.data.records import BadRow, Record
from scu_trainer.data.text.encode import NOT_LEARNED
from scu_trainer.errors import DataError

END = "<|im_end|><|eos|>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'


def json_array(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps(rows, indent=2))


def json_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def packed_lines(path: Path, rows: list[dict]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def wrapped(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps({"version": 1, "data": rows}, indent=1))


def table(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def arrow_stream(path: Path, rows: list[dict]) -> None:
    import pyarrow

    of_rows = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, of_rows.schema) as writer:
        writer.write_table(of_rows)


def feather(path: Path, rows: list[dict]) -> None:
    import pyarrow
    from pyarrow import feather

    feather.write_feather(pyarrow.Table.from_pylist(rows), path)


ALPACA = [
    {"instruction": "Name a tea.", "input": "", "output": "Assam.", "text": "Below is an instruction. Assam."},
    {"instruction": "Translate.", "input": "Tee", "output": "Tea", "text": "Below is another. Tea"},
]
GSM8K = [{"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}, {"question": "1 + 1?", "answer": "#### 2"}]
SHAREGPT_TOOLS = [
    {
        "conversations": [
            {"from": "human", "value": "Rain in Łódź?"},
            {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Łódź"}})},
            {"from": "observation", "value": '{"rain": true}'},
            {"from": "gpt", "value": "Yes, it rains."},
        ],
        "system": "Be brief.",
        "tools": json.dumps([TOOL["function"]]),
    }
]
OPENAI_TOOLS = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Rain in "}, {"type": "text", "text": "Łódź?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Łódź"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": '{"rain": true}'},
            {"role": "assistant", "content": "Yes, it rains.", "reasoning_content": "The tool says so."},
        ],
        "tools": [TOOL],
    }
]

QUESTIONS = "question and answer (question, answer)"

CASES = {
    "Alpaca, a JSON array": ("a.json", json_array, ALPACA, {}, "Alpaca", ["Assam." + END, "Tea" + END], {"text": 2}),
    "Alpaca, with system and history": (
        "a.json",
        json_array,
        [{**ALPACA[0], "text": "", "system": "Be brief.", "history": [["Hi?", "Hello."], ["Well?", "Yes."]]}],
        {},
        "Alpaca (instruction, input, output, system, history) by the chat template",
        ["Hello.<|im_end|>Yes.<|im_end|>Assam." + END],
        {},
    ),
    "GSM8K as JSON lines": ("a.jsonl", json_lines, GSM8K, {}, QUESTIONS, None, {}),
    "GSM8K as parquet": ("a.parquet", parquet, GSM8K, {}, QUESTIONS, None, {}),
    "GSM8K as an Arrow stream": (
        "a.arrow",
        arrow_stream,
        GSM8K,
        {},
        "question and answer (question, answer)",
        None,
        {},
    ),
    "GSM8K as Feather": ("a.feather", feather, GSM8K, {}, QUESTIONS, None, {}),
    "GSM8K packed": ("a.jsonl.gz", packed_lines, GSM8K, {}, QUESTIONS, None, {}),
    "GSM8K in an object": ("a.json", wrapped, GSM8K, {}, QUESTIONS, None, {}),
    "GSM8K as a table": ("a.csv", table, GSM8K, {}, QUESTIONS, None, {}),
    "GSM8K with tabs": ("a.tsv", table, GSM8K, {}, QUESTIONS, None, {}),
    "Dolly": (
        "a.jsonl",
        json_lines,
        [{"instruction": "Why?", "context": "It is late.", "response": "So.", "category": "open_qa"}],
        {},
        "question and answer (instruction, context, response)",
        ["So." + END],
        {"category": 1},
    ),
    "prompt and response": (
        "a.jsonl",
        json_lines,
        [{"prompt": "Why?", "response": "So."}],
        {},
        "question and answer (prompt, response)",
        ["So." + END],
        {},
    ),
    "prompt and completion of TRL": (
        "a.jsonl",
        json_lines,
        [{"prompt": "2 + 2 =", "completion": " 4", "id": 7}],
        {},
        "prompt and completion (prompt, completion)",
        [" 4<|eos|>"],
        {"id": 1},
    ),
    "names of one's own": (
        "a.jsonl",
        json_lines,
        [{"frage": "Why?", "antwort": "So.", "rolle": "Be brief.", "quelle": "x"}],
        {"prompt_column": "frage", "response_column": "antwort", "system_column": "rolle"},
        "question and answer (frage, antwort, rolle)",
        ["So." + END],
        {"quelle": 1},
    ),
    "a conversation under another name": (
        "a.jsonl",
        json_lines,
        [{"dialogue": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}],
        {"messages_column": "dialogue"},
        "messages (dialogue)",
        ["So." + END],
        {},
    ),
    "the chosen answers of preferences": (
        "a.jsonl",
        json_lines,
        [{"prompt": "Why?", "chosen": "So.", "rejected": "No."}],
        {"prompt_column": "prompt", "response_column": "chosen"},
        "question and answer (prompt, chosen)",
        ["So." + END],
        {"rejected": 1},
    ),
    "answers marked as good": (
        "a.jsonl",
        json_lines,
        [{"prompt": "Why?", "completion": "So.", "label": True}],
        {},
        "prompt and completion (prompt, completion)",
        ["So.<|eos|>"],
        {},
    ),
    "a class beside an answer, which is no mark": (
        "a.jsonl",
        json_lines,
        [{"question": "Why?", "answer": "So.", "label": 0}],
        {},
        "question and answer (question, answer)",
        ["So." + END],
        {"label": 1},
    ),
    "a class beside named columns": (
        "a.jsonl",
        json_lines,
        [{"prompt": "Why?", "completion": "So.", "label": 1}, {"prompt": "Who?", "completion": "Me.", "label": 0}],
        {"prompt_column": "prompt", "response_column": "completion"},
        "question and answer (prompt, completion)",
        ["So." + END, "Me." + END],
        {"label": 2},
    ),
    "ShareGPT with all its roles": (
        "a.json",
        json_array,
        SHAREGPT_TOOLS,
        {},
        "ShareGPT conversations (conversations, tools, system)",
        [CALL + "<|im_end|>Yes, it rains." + END],
        {},
    ),
    "messages with calls, parts, null and reasoning": (
        "a.jsonl",
        json_lines,
        OPENAI_TOOLS,
        {},
        "messages (messages, tools)",
        [CALL + "<|im_end|><think>\nThe tool says so.\n</think>\n\nYes, it rains." + END],
        {},
    ),
    "the same as parquet": (
        "a.parquet",
        parquet,
        [
            {
                "messages": [{"role": "user", "content": "Rain in Łódź?"}, *OPENAI_TOOLS[0]["messages"][1:]],
                "tools": json.dumps([TOOL]),
            }
        ],
        {},
        "messages (messages, tools)",
        [CALL + "<|im_end|><think>\nThe tool says so.\n</think>\n\nYes, it rains." + END],
        {},
    ),
    "Capybara": (
        "a.jsonl",
        json_lines,
        [{"conversation": [{"input": "Tea?", "output": "Yes."}, {"input": "Now?", "output": "So."}], "source": "x"}],
        {},
        "messages (conversation)",
        ["Yes.<|im_end|>So." + END],
        {"source": 1},
    ),
    "copies of what is read": (
        "a.jsonl",
        json_lines,
        [{"problem": "1?", "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1."}]}],
        {},
        "messages (messages)",
        ["1." + END],
        {"problem (a copy)": 1},
    ),
    "a system message in two places": (
        "a.jsonl",
        json_lines,
        [
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Tea?"},
                    {"from": "gpt", "value": "Yes."},
                ],
                "system": "Be long.",
            }
        ],
        {},
        "ShareGPT conversations (conversations)",
        ["Yes." + END],
        {"system": 1},
    ),
    "inputs and targets": (
        "a.tsv",
        table,
        [{"inputs": "Tea?", "targets": "Yes."}],
        {},
        "question and answer (inputs, targets)",
        ["Yes." + END],
        {},
    ),
    "messages with a system prompt beside them": (
        "a.jsonl",
        json_lines,
        [
            {
                "prompt": [{"role": "user", "content": "Tea?"}],
                "completion": [{"role": "assistant", "content": "Yes."}],
                "how": "Be brief.",
            }
        ],
        {"system_column": "how"},
        "prompt and completion as messages (prompt, completion, how)",
        ["Yes." + END + "\n"],
        {},
    ),
    "messages that a table holds as text": (
        "a.csv",
        table,
        [
            {
                "prompt": '[{"role": "user", "content": "Tea?"}]',
                "completion": '[{"role": "assistant", "content": "Yes."}]',
            }
        ],
        {},
        "prompt and completion as messages (prompt, completion)",
        ["Yes." + END + "\n"],
        {},
    ),
    "an answer that is a list of other objects": (
        "a.jsonl",
        json_lines,
        [{"prompt": "Who?", "completion": f'[{{"{key}": "Rome", "to": "Ann"}}]'} for key in ("role", "from", "value")],
        {},
        "prompt and completion (prompt, completion)",
        [f'[{{"{key}": "Rome", "to": "Ann"}}]<|eos|>' for key in ("role", "from", "value")],
        {},
    ),
    "an empty column before one with content": (
        "a.jsonl",
        json_lines,
        [{"question": "Tea?", "input": "", "context": "So.", "answer": "Yes.", "system": "", "system_prompt": "S"}],
        {},
        "question and answer (question, context, answer, system_prompt) by",
        ["Yes." + END],
        {},
    ),
    "a turn of weight 0": (
        "a.jsonl",
        json_lines,
        [
            {
                "messages": [
                    {"role": "user", "content": "Tea?"},
                    {"role": "assistant", "content": "Never.", "weight": 0},
                    {"role": "user", "content": "Sure?"},
                    {"role": "assistant", "content": "Yes, tea.", "weight": 1},
                ]
            }
        ],
        {},
        "messages (messages)",
        ["Yes, tea." + END],
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_public_format(prepared, tokenizer, tmp_path, case):
    name, write, rows, settings, read, answers, not_used = CASES[case]
    write(tmp_path / name, rows)
    rules = {"packing": False, "block_size": 512, "validation_split_percentage": 0.0, **settings}
    data = prepared(tmp_path / name, **rules)
    answers = [row["answer"] + END for row in rows] if answers is None else answers
    learned = [[label for label in row["labels"] if label != NOT_LEARNED] for row in data.train]
    assert sorted(map(tokenizer.decode, learned)) == sorted(answers)
    by_hand = sum(len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers)
    assert data.statistics.supervised_tokens == by_hand
    [(said, count)] = data.statistics.formats.items()
    assert said.startswith(read) and count == len(rows)
    assert data.statistics.columns_not_used == not_used


REFUSED = {
    "preferences": ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "chosen and a rejected.*DPOTrainer"),
    "preferences as conversations": (
        {"chosen": [{"role": "user", "content": "?"}], "rejected": [{"role": "user", "content": "?"}]},
        "chosen and a rejected.*--messages_column chosen",
    ),
    "preferences as texts": ({"chosen": "? Yes.", "rejected": "? No."}, r"\(--text_column chosen, if it is text\)"),
    "answers marked as bad": ({"prompt": "Why?", "completion": "No.", "label": False}, r"bad answer \(label: false\)"),
    "the same in a table": ({"prompt": "Why?", "response": "No.", "label": "False"}, r"bad answer \(label: false\)"),
    "the same as a number": ({"prompt": "Why?", "completion": "No.", "label": 0}, r"bad answer \(label: 0\)"),
    "a number in a table": ({"instruction": "Why?", "output": "No.", "kto_tag": "0"}, r"bad answer \(kto_tag: 0\)"),
    "no answer": ({"question": "Why?", "answer": None}, "column 'answer' holds NoneType, not text"),
    "images": (
        {"messages": [{"role": "user", "content": "<image>?"}], "images": ["a.png"]},
        "refers to media in its column 'images'.*only learns text",
    ),
    "two answers": (
        {"problem": "1?", "solution": "It is 1.", "answer": "1"},
        "--prompt_column problem --response_column",
    ),
    "an image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "type 'image_url'; this task can use only text",
    ),
    "an image in a message": (
        {"messages": [{"role": "user", "content": "?", "images": ["a.png"]}, {"role": "assistant", "content": "So."}]},
        "message 1 of 'messages' refers to media in 'images'; this task can use only text",
    ),
    "a number beside a question": ({"instruction": "Double it.", "input": 21, "output": "42"}, "'input' holds int"),
    "a history that is no list": ({"instruction": "?", "output": "!", "history": 5}, "'history' is not a list"),
    "names in capitals": (
        {"Question": "Why?", "Answer": "So."},
        "lower case only; name them: --prompt_column Question --response_column Answer",
    ),
    "a context in capitals": (
        {"Input": "1?", "Instruction": "Double it.", "Output": "2"},
        "lower case only; Input belongs to them and is not read under this name: rename Input to input, "
        "Instruction to instruction, Output to output",
    ),
    "several texts beside a question": (
        {"question": "Who?", "context": {"title": ["Tea"], "sentences": [["Basho wrote it."]]}, "answer": "Basho"},
        "'context' holds dict, not text, .* ignore it with --prompt_column question --response_column answer",
    ),
    "a number as a system prompt": ({"question": "Why?", "answer": "So.", "system": 3}, "'system' holds int"),
    "messages that Python wrote": (
        {"prompt": "[{'content': 'a', 'role': 'user'}]", "completion": "a"},
        "text that is not JSON",
    ),
    "a weight between 0 and 1": (
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "weight": 0.5}]},
        "the weight of message 2 of 'messages' is 0.5; allowed: 0",
    ),
    "arguments that are no object": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "now"}}]}]},
        "arguments of f in message 1 of 'messages' are not a JSON object",
    ),
}


def test_what_is_no_text_beside_named_columns_is_not_read(encoder):
    named = encoder(prompt_column="question", response_column="answer")
    nothing = {"question": "Why?", "answer": "So.", "context": float("nan"), "system": None}
    rows = [{**nothing, "context": 5, "system": ["a"]}, nothing]
    odd, plain = named.encode([Record(f"row {number}", row) for number, row in enumerate(rows)])
    assert odd.read.not_used == ("context", "system") and odd.input_ids.tolist() == plain.input_ids.tolist()
    with pytest.raises(BadRow, match="'context' holds int"):
        read_content({**rows[0], "system": None}, Columns(system="system"))
    with pytest.raises(BadRow, match=r"'system' holds list, not text$"):
        read_content(rows[0], named.columns._replace(system="system"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused(prepared, jsonl, case):
    row, words = REFUSED[case]
    with pytest.raises(DataError, match=words):
        prepared(jsonl([row] * 3))


def test_rows_without_a_template_are_plain_text(prepared, jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    data = prepared(jsonl(GSM8K), packing=False, validation_split_percentage=0.0)
    assert sorted(tokenizer.decode(row["input_ids"]) for row in data.train) == [
        "<|bos|>1 + 1?\n\n#### 2<|eos|>",
        "<|bos|>2 + 3?\n\n2 + 3 = 5\n#### 5<|eos|>",
    ]
    assert list(data.statistics.formats) == [
        "question and answer (question, answer) as plain text, because there is no chat template"
    ]


def test_the_rows_of_the_page_are_read_as_they_stand(prepared, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    lines = page.partition("<!-- rows -->")[2].partition("```json\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 9
    for number, line in enumerate(lines):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line + "\n")
        statistics = prepared(path, packing=False, block_size=512, validation_split_percentage=0.0).statistics
        assert statistics.documents == 1 and not statistics.rows_dropped and not statistics.rendered_away
        assert list(statistics.columns_not_used) == (["category"] if "category" in line else [])


def test_columns_of_a_saved_dataset_that_are_not_read_are_named(prepared, tmp_path):
    import datasets

    rows = [{**row, "source": "x", "embedding": [0.1, 0.2]} for row in GSM8K]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    statistics = prepared(tmp_path / "saved", packing=False, validation_split_percentage=0.0).statistics
    assert statistics.columns_not_used == {"source": 2, "embedding": 2}
    assert any(line == "unused columns: source (2 rows), embedding (2 rows)" for line in statistics.lines())


def test_what_is_missing_is_named(prepared, jsonl):
    assert prepared(jsonl([*GSM8K, {"question": "Why?", "answer": " "}])).statistics.rows_dropped == {"empty answer": 1}
