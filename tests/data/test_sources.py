"""Names, files and folders -> records."""

from __future__ import annotations

import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from scu_trainer.data.sources import held_out_source, training_source
from scu_trainer.errors import DataError
from scu_trainer.settings import DataSettings

ROWS = [{"text": f"Cup number {number}."} for number in range(6)]
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture
def source(tmp_path):
    def make(dataset, **settings):
        return training_source(DataSettings(dataset=str(dataset), **settings), tmp_path / "cache")

    return make


def texts(source):
    return [record.value["text"] for record in source.read()]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", "list.json"])
def test_every_kind_of_table(source, tmp_path, suffix, jsonl):
    path = tmp_path / f"rows{suffix}"
    rows = datasets.Dataset.from_list(ROWS)
    if suffix in (".jsonl", ".json"):
        jsonl(ROWS, path.name)
    elif suffix == "list.json":
        path.write_text(json.dumps(ROWS))
    else:
        getattr(rows, f"to_{suffix[1:]}")(path)
    result = source(path)
    assert texts(result) == TEXTS == texts(result)
    assert [record.place for record in result.read()][2] == f"{path.name} row 3"


def test_a_missing_file_in_a_folder_that_may_not_be_listed(source, tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(DataError, match=r"rows\.jsonl does not exist; looked at"):
        source(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("rows_per_group", [4_000, 80_000])
def test_memory_does_not_grow_with_a_parquet_file(source, tmp_path, rows_per_group):
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"text": [f"{number:>400}" for number in range(80_000)]})
    parquet.write_table(table, path, row_group_size=rows_per_group, use_dictionary=False, compression="none")
    del table
    pool, most_bytes = pyarrow.default_memory_pool(), 0
    before_bytes = pool.bytes_allocated()
    for record in source(path).read():
        most_bytes, last = max(most_bytes, pool.bytes_allocated() - before_bytes), record.place
    assert last == "rows.parquet row 80000"
    assert most_bytes < path.stat().st_size / 4


def test_text_file_is_cut_where_it_is_blank_twice(source, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("\ufeff\n\nfirst\n\nstill first\n \n\n\nsecond\n  indented\n\n\n", encoding="utf-8")
    assert texts(source(path)) == ["first\n\nstill first", "second\n  indented"]


def test_text_file_of_one_document_gives_paragraphs_so_that_some_can_be_held_out(source, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("first\n\nsecond\nline\n\nthird")
    result = source(path)
    assert texts(result) == ["first", "second\nline", "third"]
    assert "paragraphs count as documents" in result.notes[0]
    whole = source(path, validation_split_percentage=0)
    assert texts(whole) == ["first\n\nsecond\nline\n\nthird"]
    assert not whole.notes and whole.identity != result.identity


def test_folder_reads_each_text_file_as_one_document(source, tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("b\n\n\n\nstill b")
    (folder / "deep" / "c.jsonl").write_text('{"text": "c"}\n')
    (folder / "a.txt").write_text("a")
    (folder / "picture.png").touch()
    (folder / ".hidden.txt").write_text("hidden")
    result = source(folder)
    assert texts(result) == ["a", "b\n\n\n\nstill b", "c"]
    assert result.notes == (f"1 file of other kinds in {folder}, not read: .png",)


def test_files_that_describe_the_data_are_no_data(source, tmp_path, jsonl):
    """As they lie in a folder that was downloaded from the Hub. Alone they are what was asked for."""
    (tmp_path / "folder").mkdir()
    jsonl([{"text": "a"}], "folder/rows.jsonl")
    for name in ("dataset_infos.json", "LICENSE.txt", "sha256sums.txt"):
        (tmp_path / "folder" / name).write_text('{"default": {"splits": {}}}')
    result = source(tmp_path / "folder")
    assert texts(result) == ["a"]
    [note] = result.notes
    assert note.endswith("not read: LICENSE.txt, dataset_infos.json, sha256sums.txt")
    (tmp_path / "folder" / "rows.jsonl").unlink()
    (tmp_path / "folder" / "dataset_infos.json").unlink()
    assert len(texts(source(tmp_path / "folder"))) == 2


def test_rows_of_files_of_one_name_are_told_apart(source, tmp_path, jsonl):
    for folder in ("data/a/x", "data/b/x"):
        (tmp_path / folder).mkdir(parents=True)
        jsonl([{"text": folder}], f"{folder}/rows.jsonl")
    jsonl([{"text": "alone"}], "data/b/more.jsonl")
    places = [record.place for record in source(tmp_path / "data").read()]
    assert places == ["a/x/rows.jsonl row 1", "more.jsonl row 1", "b/x/rows.jsonl row 1"]


def test_links_that_a_folder_does_not_follow_are_named(source, tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for made, text in ((folder, "a"), (elsewhere, "b")):
        made.mkdir()
        (made / f"{text}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (folder / "c.jsonl").symlink_to(elsewhere / "b.jsonl")
    (folder / "gone.jsonl").symlink_to("nowhere.jsonl")
    (folder / "more").symlink_to(elsewhere)
    result = source(folder)
    assert texts(result) == ["a", "b"]
    assert result.notes == (
        f"2 links in {folder}, not followed; what they point to is not read: gone.jsonl (a link to "
        f"nowhere.jsonl), more (a link to {elsewhere})",
    )
    (folder / "a.jsonl").unlink(), (folder / "c.jsonl").unlink()
    with pytest.raises(DataError, match=r"holds gone\.jsonl \(a link to nowhere\.jsonl\), more \(a link"):
        source(folder)


def test_what_is_not_read_of_an_evaluation_folder_is_named(prepared, tmp_path, jsonl):
    train = jsonl([{"text": f"one {number} two"} for number in range(6)])
    folder = tmp_path / "held out"
    folder.mkdir()
    jsonl([{"text": "three four"}], "held out/a.jsonl")
    (folder / "b.xlsx").write_text("x")
    (folder / "more").symlink_to(tmp_path)
    for settings in ({}, {"streaming": True}):
        notes = "\n".join(prepared(train, eval_dataset=str(folder), **settings).statistics.lines())
        assert notes.count("1 file of other kinds") == notes.count("1 link in") == 1


def test_folder_with_files_named_by_split(source, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train-0", "train-1", "val", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    result = source(folder)
    assert texts(result) == ["train-0", "train-1"]
    assert texts(result.held_out) == ["val"]
    assert texts(source(folder, dataset_split="test")) == ["test"]
    with pytest.raises(DataError, match="has the splits test, train, validation, but none of the requested: tain"):
        source(folder, dataset_split="tain")


def test_folder_of_save_to_disk(source, tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    assert texts(source(tmp_path / "one")) == TEXTS
    parts = datasets.DatasetDict({"train": rows.select(range(4)), "test": rows.select([4, 5])})
    parts.save_to_disk(tmp_path / "dict")
    both = source(tmp_path / "dict")
    assert (texts(both), texts(both.held_out)) == (TEXTS[:4], TEXTS[4:])
    assert source(tmp_path / "dict", eval_dataset="python_docs").held_out is None


def test_eval_dataset_prefers_its_held_out_split(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([3])}).save_to_disk(tmp_path / "dict")
    settings = DataSettings(dataset="hub/with-splits", dataset_split="x", eval_dataset=str(tmp_path / "dict"))
    held_out = held_out_source(settings, tmp_path)
    assert texts(held_out) == TEXTS[3:4]
    assert held_out.held_out is None


@pytest.mark.parametrize("word", ["dev", "val", "valid", "eval", "Validation"])
def test_a_held_out_split_by_another_word(source, tmp_path, word):
    rows = datasets.Dataset.from_list(ROWS)
    saved = tmp_path / "dict"
    datasets.DatasetDict(
        {"train": rows.select(range(4)), "test": rows.select([4]), word: rows.select([5])}
    ).save_to_disk(saved)
    assert texts(source(saved).held_out) == TEXTS[5:]
    scored = held_out_source(DataSettings(dataset="python_docs", eval_dataset=str(saved)), tmp_path)
    assert texts(scored) == TEXTS[5:], "and not the rows to train on"


@pytest.mark.parametrize("change", ["content", "name"])
def test_identity_follows_the_files(source, jsonl, change):
    before = source(jsonl(ROWS)).identity
    assert source(jsonl(ROWS)).identity == before
    after = jsonl(ROWS[:-1]) if change == "content" else jsonl(ROWS, "other.jsonl")
    assert source(after).identity != before


def test_large_files_are_known_by_size_and_time(source, jsonl, monkeypatch):
    monkeypatch.setattr("scu_trainer.data.sources.WHOLE_HASH_BYTES", 10)
    path = jsonl(ROWS)
    state = path.stat()
    assert source(path).identity == ["files", [[str(path), state.st_size, state.st_mtime_ns]]]


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing-here", "rowz.jsonl", "some/deep/folder"])
def test_a_path_that_does_not_exist_is_refused_without_asking_the_hub(source, monkeypatch, name):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(DataError, match="does not exist"):
        source(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("https://example.org/rows.jsonl", "is an address, but data are downloaded only from the Hub"),
        ("data/*.jsonl", "dataset takes a list"),
        ("a.jsonl,b", "dataset takes a list"),
    ],
)
def test_what_is_neither_a_path_nor_an_id_says_what_to_give(source, monkeypatch, name, words):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(DataError, match=words):
        source(name)


def test_a_mistyped_path_with_a_comma_names_its_neighbour_or_where_its_link_leads(source, jsonl):
    path = jsonl(ROWS, "notes, part 1.jsonl")
    with pytest.raises(DataError, match=r"did you mean 'notes, part 1.jsonl'"):
        source(str(path).replace("part", "prt"))
    (path.parent / "x,y").symlink_to("gone")
    with pytest.raises(DataError, match=r"\(a link to gone\) does not exist"):
        source(path.parent / "x,y")


def test_a_mistyped_path_names_its_neighbour(source, jsonl):
    path = jsonl(ROWS, "notes.jsonl")
    with pytest.raises(DataError, match=r"did you mean 'notes.jsonl'"):
        source(path.with_name("note.jsonl"))


def test_an_unknown_name_offers_the_nearest_embedded_one(source):
    with pytest.raises(
        DataError, match=r"'python_doc' is not an embedded name .*did you mean 'python_docs'.* from the Hub"
    ):
        source("python_doc")


def test_a_folder_without_usable_files_says_what_it_holds(source, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "paper.pdf").touch()
    with pytest.raises(DataError, match=r"holds \.pdf; it needs files of the kinds \.txt \.jsonl"):
        source(tmp_path / "folder")


@pytest.mark.parametrize("settings", [{"dataset_split": "test"}, {"dataset_config_name": "en"}])
def test_settings_of_the_hub_are_refused_elsewhere(source, jsonl, settings):
    for dataset in ("python_docs", jsonl(ROWS)):
        with pytest.raises(DataError, match=f"{next(iter(settings))} is .*leave"):
            source(dataset, **settings)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", b'text,id\n"torn', "not readable as UTF-8 CSV"),
        ("rows.csv", b"text\n\xff\n", "not readable as UTF-8 CSV"),
        ("rows.parquet", b"torn", "not readable as parquet"),
        ("rows.json", b'[{"text": "a"}, ', "name the file .jsonl"),
        ("notes.txt", b"caf\xe9", "not UTF-8 text"),
    ],
)
def test_unreadable_files_are_named(source, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        list(source(tmp_path / name).read())
    assert str(tmp_path / name) in str(error.value)


def test_rows_that_cannot_be_read_carry_their_number(source, tmp_path, jsonl):
    path = jsonl([ROWS[0], "", '{"text": ', [1]])
    problems = {record.place: record.problem for record in source(path).read() if record.problem}
    assert "not readable as JSON" in problems["rows.jsonl row 3"]
    assert "holds list, not an object" in problems["rows.jsonl row 4"]
    (tmp_path / "rows.csv").write_text("text,id\na,1\nb\nc,3,4\n")
    problems = {record.place: record.problem for record in source(tmp_path / "rows.csv").read() if record.problem}
    assert problems == {
        "rows.csv row 2": "has no field for the columns id",
        "rows.csv row 3": "has 1 more fields than the header line",
    }


def test_csv_fields_may_be_long(source, tmp_path):
    (tmp_path / "rows.csv").write_text("text\n" + "a" * 200_000 + "\n")
    assert len(texts(source(tmp_path / "rows.csv"))[0]) == 200_000


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset(source, tmp_path, monkeypatch, streaming):
    asked = []

    def load(name, config, **options):
        asked.append((name, config, options))
        rows = datasets.Dataset.from_list([{**row, "unused": 1} for row in ROWS])
        parts = {"train": rows, "validation": rows.select([0])}
        if streaming:
            return datasets.IterableDatasetDict({name: part.to_iterable_dataset() for name, part in parts.items()})
        return datasets.DatasetDict(parts)

    monkeypatch.setattr(datasets, "load_dataset", load)
    result = source("owner/name", dataset_config_name="en", streaming=streaming)
    options = {"split": None, "streaming": streaming, "cache_dir": str(tmp_path / "cache" / "datasets")}
    assert asked == [("owner/name", "en", options)]
    assert texts(result) == TEXTS
    assert texts(result.held_out) == TEXTS[:1]
    assert set(next(iter(result.read())).value) == {"text"}


def test_slice_of_a_hub_split(source, monkeypatch):
    def load(name, config, split, **_):
        assert split == "train[:2]"
        return datasets.Dataset.from_list(ROWS[:2])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts(source("owner/name", dataset_split="train[:2]")) == TEXTS[:2]
