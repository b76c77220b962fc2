"""Settings -> rows, statistics and cache."""

from __future__ import annotations

import json
import os
import re
import shutil

import datasets
import pytest

from scu_trainer.data import prepare
from scu_trainer.data.text import documents
from scu_trainer.data.text.encode import EMPTY, NOTHING_TO_LEARN, UNREADABLE
from scu_trainer.errors import DataError, StorageError
from scu_trainer.settings import DataSettings
from tests import processes

ROWS = [{"text": f"Cup number {number} is {'quite ' * (number % 7)}full."} for number in range(40)]

PREPARE = """
import sys
from pathlib import Path
from scu_trainer.data import embedded_tokenizer
from scu_trainer.data import prepare
from scu_trainer.settings import DataSettings
cache = Path(sys.argv[2])
settings = DataSettings(dataset=sys.argv[1], block_size=32)
print(prepare(settings, embedded_tokenizer(cache), seed=0, cache_dir=cache, model_name="tiny").statistics.as_dict())
"""


def documents_of(rows):
    return {number for row in rows for number in row["documents"]}


def test_rows_have_the_promised_columns(prepared, jsonl):
    data = prepared(jsonl(ROWS))
    assert data.train.column_names == ["input_ids", "labels", "length", "documents"]
    assert data.eval.column_names == ["input_ids", "labels", "length", "document"]
    assert all(len(row["input_ids"]) == row["length"] == 32 for row in data.train.select(range(len(data.train) - 1)))
    assert "position_ids" in prepared(jsonl(ROWS), isolate_documents=True).train.column_names


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"{", b'{"x": 1}', b'{"sources": "x"}', b"\xff", b"[" * 5000],
    ids=lambda content: content[:8],
)
def test_a_damaged_file_of_the_cache_says_which_folder_to_delete(prepared, jsonl, tmp_path, content):
    path = jsonl(ROWS[:4])
    prepared(path)
    for damaged in sorted((tmp_path / "cache").rglob("*.json"), reverse=True):  # tokenized before documents
        whole = damaged.read_bytes()
        damaged.write_bytes(content)
        if damaged.parent.parent.name == "documents":  # read to make the rows, which are there
            shutil.rmtree(tmp_path / "cache" / "tokenized")
        with pytest.raises(StorageError, match=f"{damaged.parent} cannot be read"):
            prepared(path)
        damaged.write_bytes(whole)


def test_rows_survive_save_to_disk(prepared, jsonl, tmp_path):
    train = prepared(jsonl(ROWS), isolate_documents=True).train
    train.save_to_disk(tmp_path / "saved")
    assert datasets.load_from_disk(tmp_path / "saved").to_list() == train.to_list()


def test_rows_of_documents_that_would_be_others_now_are_made_again(prepared, jsonl, monkeypatch):
    before = prepared(jsonl(ROWS)).fingerprint
    monkeypatch.setattr(documents, "DOCUMENTS_VERSION", documents.DOCUMENTS_VERSION + 1)
    assert prepared(jsonl(ROWS)).fingerprint != before


def test_what_lies_beside_the_data_is_named_as_it_is_now(prepared, jsonl, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    jsonl(ROWS, "folder/rows.jsonl")
    before = prepared(folder)
    (folder / "more").symlink_to(tmp_path)
    (folder / os.fsdecode(b"a.\xff")).touch()
    after = prepared(folder)
    assert not before.statistics.notes and after.fingerprint == before.fingerprint
    others, links = after.statistics.notes
    assert others.endswith(", not read: .\N{REPLACEMENT CHARACTER}") and links.endswith(f"more (a link to {tmp_path})")
    (folder / "more").unlink(), (folder / os.fsdecode(b"a.\xff")).unlink()
    assert not prepared(folder).statistics.notes


def test_split_is_by_document_and_complete(prepared, jsonl):
    data = prepared(jsonl(ROWS), validation_split_percentage=20)
    held_out = set(data.eval["document"])
    assert held_out == {item.document for item in data.eval_documents}
    assert len(held_out) == data.statistics.eval_documents == 8
    assert documents_of(data.train) | held_out == set(range(40))
    assert documents_of(data.train).isdisjoint(held_out)


def test_held_out_documents_are_described(prepared, jsonl, tokenizer):
    for item in prepared(jsonl(ROWS)).eval_documents:
        text = ROWS[item.document]["text"]
        assert item.name == f"rows.jsonl row {item.document + 1}"
        assert item.tokens == len(tokenizer(text)["input_ids"]) + 1
        assert item.utf8_bytes == len(text)


def test_seed_decides_split_and_order(prepared, jsonl):
    path = jsonl(ROWS)
    first, again, other = (prepared(path, seed=seed) for seed in (1, 1, 2))
    assert first.train.to_list() == again.train.to_list()
    assert first.train["documents"][:] != other.train["documents"][:]
    assert first.eval["document"][:] != other.eval["document"][:]


def test_rows_hold_the_text_of_their_documents(prepared, jsonl, tokenizer):
    data = prepared(jsonl(ROWS), packing=False, block_size=512)
    for row in data.train:
        [number] = row["documents"]
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == ROWS[number]["text"]


def test_without_packing_long_documents_go_on_in_the_next_rows(prepared, jsonl, tokenizer):
    text = "Cup after cup. " * 30
    data = prepared(jsonl([{"text": text}] * 2), packing=False, validation_split_percentage=50)
    predicted = [token for row in data.train for token in row["labels"] if token != -100]
    assert predicted == [*tokenizer(text)["input_ids"][1:], tokenizer.eos_token_id]
    assert data.statistics.documents_cut == 1


def test_one_is_not_counted_as_many(prepared, jsonl):
    rows = [{"text": "one two three four five six seven eight", "id": 1}, *({"text": "nine"} for _ in range(9))]
    train, held_out = jsonl(rows, "train.jsonl"), jsonl([rows[1]], "eval.jsonl")
    said = "\n".join(prepared(train, eval_dataset=str(held_out), block_size=64).statistics.lines())
    assert "unused columns: id (1 row)" in said and "1 held-out document is also in the training data" in said
    assert not re.search(r"(?<![\d,.])1 (rows|documents|tokens)", said), said


def test_statistics_count_what_the_loss_counts(prepared, jsonl):
    for settings in ({}, {"packing": False}, {"isolate_documents": True}):
        data = prepared(jsonl(ROWS), **settings)
        statistics = data.statistics
        assert statistics.blocks == len(data.train) and statistics.eval_rows == len(data.eval)
        assert statistics.train_tokens == sum(data.train["length"])
        shifted = [label for row in data.train for label in row["labels"][1:]]
        assert statistics.supervised_tokens == sum(label != -100 for label in shifted)
        assert statistics.eval_tokens == sum(item.tokens - 1 for item in data.eval_documents)


def test_every_drop_is_counted_and_named(prepared, jsonl):
    rows = [*ROWS, {"text": ""}, {"text": 3}, "{torn", {"messages": [{"role": "user", "content": "?"}]}]
    data = prepared(jsonl(rows), skip_bad_rows=True)
    statistics = data.statistics
    assert statistics.rows_dropped == {EMPTY: 1, UNREADABLE: 2, NOTHING_TO_LEARN: 1}
    assert (
        statistics.rows_read
        == 44
        == statistics.documents + statistics.eval_documents + sum(statistics.rows_dropped.values())
    )
    assert (
        "dropped: 2 × unreadable row, first: rows.jsonl row 42: column 'text' holds int, not text" in statistics.lines()
    )
    assert json.loads(json.dumps(statistics.as_dict()))["rows_dropped"] == statistics.rows_dropped


def test_rows_without_learned_tokens_are_counted(prepared, jsonl):
    rows = [{"prompt": "Why? " * 40, "completion": "So."}] * 4
    data = prepared(jsonl(rows), packing=False)
    [(reason, count)] = data.statistics.rows_dropped.items()
    assert NOTHING_TO_LEARN in reason and count > 0
    assert all(any(label != -100 for label in row["labels"]) for row in data.train)


def test_a_bad_row_stops_with_its_number(prepared, jsonl):
    with pytest.raises(DataError, match=r"rows\.jsonl row 41: not readable as JSON.*--skip_bad_rows true"):
        prepared(jsonl([*ROWS, "{torn"]))


def test_a_bad_row_after_the_cap_does_not_matter(prepared, jsonl):
    assert prepared(jsonl([*ROWS, "{torn"]), dataset_size=10).statistics.rows_read == 10


def test_caps(prepared, jsonl):
    statistics = prepared(jsonl(ROWS), dataset_size=10, validation_split_percentage=50, max_eval_documents=3).statistics
    assert (statistics.documents, statistics.eval_documents) == (7, 3)


@pytest.mark.parametrize(("rows", "percentage", "held_out"), [(2, 5, 1), (40, 5, 2), (2, 99, 1), (40, 0, 0), (1, 5, 0)])
def test_number_of_held_out_documents(prepared, jsonl, rows, percentage, held_out):
    data = prepared(jsonl(ROWS[:rows]), validation_split_percentage=percentage)
    assert (data.statistics.documents, data.statistics.eval_documents) == (rows - held_out, held_out)
    assert (data.eval is None) == (held_out == 0)
    assert any("only one document" in note for note in data.statistics.notes) == (rows == 1)


def test_eval_dataset_of_its_own(prepared, jsonl):
    others = jsonl([{"text": "Tea."}, {"text": "Tea."}, ROWS[0], {"text": ""}], "other.jsonl")
    data = prepared(jsonl(ROWS), eval_dataset=str(others))
    assert (data.statistics.documents, data.statistics.eval_documents) == (40, 3)
    assert data.statistics.heldout_duplicates == 1
    assert data.statistics.rows_dropped == {EMPTY: 1}
    assert [item.name for item in data.eval_documents] == [f"other.jsonl row {n}" for n in (1, 2, 3)]
    assert prepared(jsonl(ROWS), eval_dataset=str(others), max_eval_documents=2).statistics.eval_documents == 2


def test_the_sources_own_validation_split_is_used(prepared, tmp_path):
    parts = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dict")
    statistics = prepared(tmp_path / "dict").statistics
    assert (statistics.documents, statistics.eval_documents, statistics.heldout_duplicates) == (40, 2, 2)
    assert "held-out documents come from the split 'validation'" in "\n".join(statistics.lines())


def test_nothing_to_learn_says_why(prepared, jsonl):
    with pytest.raises(DataError, match=f"5 rows read, dropped: 5 × {NOTHING_TO_LEARN}.*prompts only"):
        prepared(jsonl([{"messages": [{"role": "user", "content": "?"}]}] * 5))
    with pytest.raises(DataError, match=r"empty\.jsonl is empty: it has no rows"):
        prepared(jsonl([], "empty.jsonl"))


def test_wrong_text_column_names_the_right_one(prepared, jsonl):
    with pytest.raises(DataError, match=r"row 1: has no column 'text'; its columns: body, id.*--text_column body"):
        prepared(jsonl([{"body": "Tea.", "id": 1}]))
    assert prepared(jsonl([{"body": "Tea."}] * 3), text_column="body").statistics.documents == 2


def test_rows_of_tokens_are_named(prepared, jsonl):
    with pytest.raises(DataError, match=r"row 1: holds token ids \(input_ids\).*its columns: input_ids, labels"):
        prepared(jsonl([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]))


def test_a_system_column_that_no_row_has_is_said(prepared, jsonl):
    rows = jsonl([{"question": "a", "answer": "b", "rule": "Be brief."}] * 3)
    assert not prepared(rows, system_column="rule").statistics.notes
    [note] = prepared(rows, system_column="rules").statistics.notes
    assert note.startswith("system_column 'rules' was not read in any of the 3 rows of ")


def test_chat_template_file(prepared, jsonl, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}")
    rows = [{"messages": [{"role": "assistant", "content": "Tea."}]}] * 3
    data = prepared(jsonl(rows), chat_template=str(template))
    assert tokenizer.chat_template == template.read_text()
    assert tokenizer.decode(data.eval[0]["input_ids"]) == "Tea.<|eos|>"
    with pytest.raises(DataError, match="chat_template '/nowhere' cannot be read"):
        prepared(jsonl(rows), chat_template="/nowhere")


# Cache


@pytest.fixture
def count_encoding(monkeypatch):
    """List that grows by one whenever rows are tokenized."""
    from scu_trainer.data.text.encode import Encoder

    calls, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, records: calls.append(len(records)) or encode(self, records))
    return calls


def test_the_second_call_reads_the_cache(prepared, jsonl, count_encoding):
    path = jsonl(ROWS)
    first, second = prepared(path), prepared(path)
    assert len(count_encoding) == 1
    assert first.fingerprint == second.fingerprint
    assert first.train.to_list() == second.train.to_list()
    assert first.statistics == second.statistics and first.eval_documents == second.eval_documents
    assert second.train.cache_files[0]["filename"].endswith(f"{second.fingerprint}/train.arrow")  # memory-mapped


def test_rows_are_remade_without_tokenizing_again(prepared, jsonl, count_encoding):
    path = jsonl(ROWS)
    settings = [{}, {"block_size": 64}, {"packing": False}, {"isolate_documents": True}, {"seed": 5}]
    settings += [{"validation_split_percentage": 50}, {"max_eval_documents": 1}]
    assert len({prepared(path, **change).fingerprint for change in settings}) == len(settings)
    assert len(count_encoding) == 1


def test_changed_content_is_tokenized_again(prepared, jsonl, count_encoding):
    first = prepared(jsonl(ROWS))
    second = prepared(jsonl(ROWS[1:]))
    assert len(count_encoding) == 2
    assert first.fingerprint != second.fingerprint


def test_fingerprint_follows_the_rules_of_tokenizing(prepared, jsonl):
    path = jsonl([{"prompt": "Tea?", "completion": "Yes."}] * 4)
    changes = [{}, {"completion_only_loss": False}, {"skip_bad_rows": True}, {"dataset_size": 3}]
    assert len({prepared(path, **change).fingerprint for change in changes}) == len(changes)


def test_a_failed_preparation_leaves_no_rows(prepared, jsonl, tmp_path):
    with pytest.raises(DataError):
        prepared(jsonl([{"text": ""}]))
    assert [path for path in (tmp_path / "cache" / "tokenized").iterdir() if path.is_dir()] == []


def test_two_processes_prepare_at_once(prepared, jsonl, tmp_path):
    words = ["-c", PREPARE, str(jsonl(ROWS)), str(tmp_path / "cache")]
    outputs = [tmp_path / f"{number}.out" for number in range(2)]
    both = [processes.Started(words, output, os.environ) for output in outputs]
    assert [process.wait(120) for process in both] == [0, 0]
    said = f"{prepared(jsonl(ROWS)).statistics.as_dict()}\n"
    assert [output.read_text() for output in outputs] == [said, said]


def test_embedded_data_need_nothing_else(tokenizer, embedded_cache):
    settings = DataSettings(dataset="python_docs", block_size=128)
    data = prepare(settings, tokenizer, seed=0, cache_dir=embedded_cache, model_name="tiny")
    assert data.statistics.rows_read == 79 and not data.statistics.rows_dropped
    assert data.statistics.eval_documents == 4 and data.statistics.supervised_tokens > 100_000
