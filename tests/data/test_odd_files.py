"""Files such as strangers have: compressed, misnamed, torn, endless; and rows that no tokenizer takes."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct

import pyarrow
import pytest
from pyarrow import feather, parquet

from scu_trainer.data import json_files
from scu_trainer.data.json_files import READ_CHARACTERS
from scu_trainer.data.readers import READERS, SUFFIXES, kind_of, read_file
from scu_trainer.data.sources import files_and_links
from scu_trainer.errors import DataError

ROWS = [{"text": "one two three four five"}, {"text": "six seven eight nine ten"}] * 3
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CONTENT = {
    ".jsonl": LINES,
    ".json": json.dumps(ROWS).encode(),
    ".csv": b"text\n" + b"one two three\n" * 6,
    ".txt": LINES,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("suffix", CONTENT)
def test_packed_and_capital_names_give_the_same_rows(tmp_path, suffix, packed):
    plain, odd = tmp_path / f"a{suffix}", tmp_path / f"a{suffix.upper()}{'.GZ' if packed else ''}"
    plain.write_bytes(CONTENT[suffix])
    odd.write_bytes(gzip.compress(CONTENT[suffix]) if packed else CONTENT[suffix])
    rows = [[record.value for record in read_file(path, "text")] for path in (plain, odd)]
    assert rows[0] == rows[1] and rows[0]


@pytest.mark.parametrize("name", ["a", "a.gz", "a.parquet.gz", "a.jsonl.zst", "a.xlsx", ".jsonl.bak"])
def test_a_format_that_is_not_known_is_refused_with_those_that_are(tmp_path, name):
    (tmp_path / name).write_bytes(LINES)
    assert kind_of(tmp_path / name) is None
    with pytest.raises(DataError, match=r"allowed: \.txt \.jsonl") as caught:
        list(read_file(tmp_path / name, "text"))
    assert all(suffix in str(caught.value) for suffix in SUFFIXES)


@pytest.mark.parametrize("suffix", [*READERS, ".txt", ".txt.gz"])
def test_a_file_that_git_lfs_has_yet_to_fetch_is_no_text(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 269060552\n")
    with pytest.raises(DataError, match=r"holds only the address of its content.*git lfs pull in its folder$"):
        list(read_file(path, "text"))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz", ".txt.gz", ".parquet", ".json"])
@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b", gzip.compress(LINES, mtime=0)[:-9], b"PAR1" + bytes(20), b"[" * 5000],
    ids=["start", "cut", "other", "deep"],
)
def test_a_torn_file_is_one_message(tmp_path, suffix, content):
    path = tmp_path / f"torn{suffix}"
    path.write_bytes(content)
    try:
        problems = [record.problem for record in read_file(path, "text")]
    except DataError as error:
        assert "torn" in str(error)
    else:
        assert all(problems)


def test_a_pipe_does_not_keep_anybody_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is a pipe or a device"):
        list(read_file(tmp_path / "pipe.jsonl", "text"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b'{"text": "a\\ud800b"}', "half of a character"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "deeper than 100 levels"),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "deeper than 100 levels"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not readable as JSON"),
        (b'{"text": "caf\xe9"}', "not readable as JSON"),
        (b"3", "holds int"),
    ],
)
def test_a_bad_row_is_skipped_and_counted(tmp_path, prepared, row, problem):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + row + b"\n")
    with pytest.raises(DataError, match=problem):
        prepared(path)
    statistics = prepared(path, skip_bad_rows=True).statistics
    assert statistics.rows_read == len(ROWS) + 1 and sum(statistics.rows_dropped.values()) == 1


def test_half_of_a_character_with_its_other_half_is_a_character(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "\\ud83d\\ude00"}\n')
    assert [record.value for record in read_file(path, "text")] == [{"text": "\N{GRINNING FACE}"}]


def test_a_name_that_is_no_text_is_shown_all_the_same(tmp_path, prepared):
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(LINES)
    assert prepared(tmp_path).statistics.rows_read == len(ROWS)


def test_a_column_without_a_name_and_one_with_spaces_are_named_for_a_shell(tmp_path, prepared):
    """pandas writes its index without a name."""
    (tmp_path / "a.csv").write_text(",text\n" + "".join(f"{n},a b c d {n}\n" for n in range(6)))
    assert "unused columns: without a name (6 rows)" in prepared(tmp_path / "a.csv").statistics.lines()
    (tmp_path / "b.csv").write_text("the text\na b c d\n")
    with pytest.raises(DataError, match="--text_column 'the text';"):
        prepared(tmp_path / "b.csv")


def test_a_column_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="names the column 'text' twice"):
        list(read_file(tmp_path / "a.csv", "text"))


@pytest.mark.parametrize("header", ["text, id", " text ,id", "\ufefftext\t,id"])
def test_spaces_around_the_names_of_columns_are_no_part_of_them(tmp_path, header):
    (tmp_path / "a.csv").write_text(f"{header}\na b, 1\n")
    assert [record.value for record in read_file(tmp_path / "a.csv", "text")] == [{"text": "a b", "id": " 1"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a", "text": "b"}\n'),
        ("a.jsonl", '{"messages": [{"role": "user", "role": "tool"}]}\n'),
        ("a.json", '[{"id": 1}, {"text": "a", "text": "b"}]'),
        ("a.json", '{"data": [\n{"text": "a", "text": "b"}]}'),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    try:
        said = list(read_file(tmp_path / name, "text"))[-1].problem
    except DataError as error:
        said = str(error)
    assert "has the key 'text' twice" in said or "has the key 'role' twice" in said


@pytest.mark.parametrize("behind", [",", "\n[{}]", "\n{}", f"{' ' * READ_CHARACTERS * 2}x"])
def test_what_follows_behind_a_list_is_not_lost(tmp_path, behind):
    """As ``cat a.json b.json`` makes it."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    assert len(list(read_file(path, "text"))) == len(ROWS)
    path.write_text(json.dumps(ROWS) + f"{' ' * READ_CHARACTERS * 2}\n")
    assert len(list(read_file(path, "text"))) == len(ROWS)
    path.write_text(json.dumps(ROWS) + behind)
    with pytest.raises(DataError, match="after 6 rows: more text follows the end of the list"):
        list(read_file(path, "text"))


def test_an_arrow_file_with_a_damaged_offset_is_refused(tmp_path):
    """With other offsets than this one, reading outside of the file ends the process by a signal."""
    path = tmp_path / "a.arrow"
    feather.write_feather(pyarrow.table([["one", "four"]], names=["text"]), path, compression="uncompressed")
    offsets = struct.pack("<3i", 0, 3, 7)
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<3i", 0, -3, 7)))
    with pytest.raises(DataError, match=r"a\.arrow is not readable as an Arrow file: .*offset"):
        list(read_file(path, "text"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_that_stands_twice_in_a_binary_table_is_refused(tmp_path, suffix):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    if suffix == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet")
    else:
        feather.write_feather(table, tmp_path / "a.arrow")
    with pytest.raises(DataError, match="names the column 'text' twice"):
        list(read_file(tmp_path / f"a.{suffix}", "text"))


@pytest.mark.parametrize(
    ("suffix", "encoding"),
    [*((suffix, encoding) for suffix in CONTENT for encoding in ("utf-16", "gzip")), (".jsonl", "utf-16-le")],
)
def test_another_encoding_is_named_as_what_it_is(tmp_path, suffix, encoding):
    path, content = tmp_path / f"a{suffix}", CONTENT[suffix]
    path.write_bytes(gzip.compress(content) if encoding == "gzip" else content.decode().encode(encoding))
    try:
        said = next(iter(read_file(path, "text"))).problem
    except DataError as error:
        said = str(error)
    assert ("append .gz to its name" if encoding == "gzip" else "iconv -f UTF-16") in said


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_zeros_of_a_file_that_was_never_written_are_no_utf_16(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(bytes(100))
    [record] = read_file(path, "text")
    assert "not readable as JSON" in record.problem and "UTF-16" not in record.problem


def test_the_whole_system_is_no_folder_of_data(tmp_path):
    (tmp_path / "all").symlink_to("/")
    with pytest.raises(DataError, match="a folder of the operating system"):
        files_and_links(tmp_path / "all")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "question;answer\na;b\n", "'question;answer': .* by semicolons, not by commas; save it with commas"),
        ("a.csv", "sep=;\nquestion;answer\n", "by semicolons, not by commas"),
        ("a.csv", "question\tanswer\na\tb\n", r"by tabs, not by commas; name the file \.tsv"),
        ("a.tsv", "question,answer\na,b\n", r"by commas, not by tabs; name the file \.csv"),
        ("a.csv", "question|answer\na|b\n", "by vertical bars, not by commas"),
        ("a.csv", '"question";"answer"\n"a, b";"c"\n', r"\(line 1\); if commas do not separate .*save it with commas"),
        ("a.csv", 'text,id\na,1\n"b "c" d",2\n', r"expected after '\"' \(line 3\)$"),
        ("a.csv", "text\ncaf\xe9\n", "not readable as UTF-8 CSV.*iconv -f LATIN1"),
        ("a.txt", "caf\xe9\n", "not UTF-8 text.*iconv -f LATIN1"),
    ],
)
def test_a_table_in_another_dialect_says_what_to_do(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=words):
        list(read_file(tmp_path / name, "text"))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_in_a_file_of_lines_says_how_to_name_it(tmp_path, indent):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS, indent=indent))
    assert "one list of objects, name it .json" in next(read_file(tmp_path / "rows.jsonl", "text")).problem


@pytest.mark.parametrize(
    ("content", "said"),
    [('{\n "text": "a"\n}\n{\n "text": "b"\n}\n', "spans several lines.*jq"), ('{"a": 1}\r{"a": 2}\r', r"tr '\\r'")],
)
def test_rows_that_are_not_lines_say_how_to_make_them_lines(tmp_path, content, said):
    (tmp_path / "rows.jsonl").write_text(content)
    assert re.search(said, next(read_file(tmp_path / "rows.jsonl", "text")).problem)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ({"version": "1", "data": ROWS}, ROWS),
        ({"messages": [{"role": "user", "content": "a"}]}, None),
        ({"text": "a", "links": [{"to": "b"}]}, None),
        ({"turns": [{"from": "a", "value": "b"}]}, None),
        ({"train": ROWS, "test": ROWS}, None),
    ],
)
def test_the_list_in_an_object_of_one_line_is_read_as_in_one_of_several(tmp_path, value, rows):
    """``json.dump`` breaks no lines unasked. What may be a row stays one."""
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert [record.value for record in read_file(tmp_path / "a.json", "text")] == (rows or [value])


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("asked", [{"text_column": "body"}, {"prompt_column": "head", "response_column": "body"}])
def test_an_object_with_a_column_that_is_asked_for_is_a_row_itself(tmp_path, prepared, indent, asked):
    """A folder may have a document per file, and a document comments."""
    for number in range(6):
        row = {"head": "what?", "body": f"a b c d {number}", "comments": [{"head": "no", "body": "document"}]}
        (tmp_path / f"{number}.json").write_text(json.dumps(row, indent=indent))
    assert prepared(tmp_path, **asked).statistics.columns_not_used["comments"] == 6


def test_of_rows_in_an_object_each_is_looked_through_alone(tmp_path, monkeypatch):
    """Not the whole file once per row, which takes minutes from some thousand rows on."""
    looked, checked = [], json_files._object_record
    monkeypatch.setattr(json_files, "_object_record", lambda *row: looked.append(len(row[2])) or checked(*row))
    rows = [{"text": f"a b c d {n}"} for n in range(50)] + [{"text": "a\ud800b"}]
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}, indent=1))
    *whole, half = read_file(tmp_path / "a.json", "text")
    assert [record.value for record in whole] == rows[:50] and "half of a character" in half.problem
    assert sum(looked) < (tmp_path / "a.json").stat().st_size


def test_a_comma_behind_a_row_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"},\n{"text": "b"} x\n{"text": "caf\xe9"}\n')
    comma, other, latin = (record.problem for record in read_file(tmp_path / "rows.jsonl", "text"))
    assert "the line ends with a comma" in comma
    assert "comma" not in other and "iconv" in latin


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.csv", "text\n"), ("a.txt", " ")]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_without_rows_is_called_empty(tmp_path, prepared, name, content, streaming):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"a\.\w+ is empty: it has no rows"):
        prepared(tmp_path / name, streaming=streaming)
