"""Texts with categories -> rows of words: what is a word, what is counted, what is refused; memory stays flat."""

from __future__ import annotations

import csv
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from scu_trainer.data.words.data import prepare_words
from scu_trainer.data.words.embedded import embedded_sections, sections_of
from scu_trainer.errors import DataError, SettingsError
from scu_trainer.settings import DataSettings
from scu_trainer.settings.words import DEFAULTS, MODES, WordSettings

TABLE = [
    {"text": f"the {animal} number {n} says {sound} to you", "category": animal}
    for n in range(20)
    for animal, sound in (("cow", "moo"), ("dog", "woof"))
]


@pytest.fixture
def words(tmp_path):
    """``words(path, own={}, **settings)`` -> PreparedWords, with a cache of the test's own."""

    def run(dataset, own=None, seed=0, known=None, **settings):
        settings = {"block_size": 16, "validation_split_percentage": 25, **settings}
        return prepare_words(
            DataSettings(dataset=str(dataset), **settings),
            WordSettings(**{"min_word_count": 1, **(own or {})}),
            seed=seed,
            cache_dir=tmp_path / "cache",
            **(known or {}),
        )

    return run


def as_csv(folder: Path) -> Path:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, TABLE[0])
        writer.writeheader()
        writer.writerows(TABLE)
    return folder / "rows.csv"


def as_jsonl(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE))
    return folder / "rows.jsonl"


def as_parquet(folder: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(TABLE), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_folder(folder: Path) -> Path:
    (folder / "several").mkdir()
    for start in (0, 20):
        (folder / "several" / f"{start:02}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in TABLE[start : start + 20])
        )
    return folder / "several"


def as_saved(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list([{**row, "else": 1} for row in TABLE]).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def texts_of(rows, data) -> list[tuple[str, str]]:
    read = data.tokenizer.decode
    return sorted(
        (read(row["input_ids"], skip_special_tokens=True), data.category_names[row["category_ids"]]) for row in rows
    )


@pytest.mark.parametrize("write", [as_csv, as_jsonl, as_parquet, as_folder, as_saved])
def test_every_kind_of_source_gives_every_text_once_with_its_category(words, tmp_path, write):
    path = write(tmp_path)
    whole = words(path, validation_split_percentage=0)
    assert texts_of(whole.train, whole) == sorted((row["text"], row["category"]) for row in TABLE)
    data = words(path)
    assert len(data.train) == 30 and len(data.eval) == 10
    assert sorted(data.category_names) == ["<unknown>", "cow", "dog"]
    for row in data.train:
        assert row["input_ids"][0] == data.tokenizer.bos_token_id and row["length"] == len(row["input_ids"])
        assert row["input_ids"][-1] == data.tokenizer.eos_token_id and row["labels"][1:] == row["input_ids"][1:]


def test_long_texts_go_on_in_rows_that_predict_each_word_once(words, jsonl):
    text = " ".join(f"w{n}" for n in range(40))
    data = words(jsonl([{"text": text, "category": "long"}] * 2), block_size=16)
    (document,) = data.eval_documents
    assert document.tokens == 42 and document.utf8_bytes == len(text) and data.statistics.documents_cut == 1
    predicted = [label for row in data.eval for label in row["labels"] if label != -100]
    assert predicted == data.tokenizer(text)["input_ids"][1:] + [data.tokenizer.eos_token_id]
    assert {row["category_ids"] for row in data.eval} == {1} and max(data.eval["length"]) == 16


def test_words_come_from_the_training_texts_only(words, jsonl):
    rows = [{"text": f"common words and rare{n}", "category": f"kind{n}"} for n in range(40)]
    data = words(jsonl(rows))
    trained = {row["documents"][0] for row in data.train}
    vocabulary = data.tokenizer.get_vocab()
    for n in range(40):
        assert (f"rare{n}" in vocabulary) is (n in trained), n
        assert (f"kind{n}" in data.category_names) is (n in trained), n
    assert data.statistics.eval_unknown_words == 10 and data.statistics.eval_words == 40
    assert data.statistics.unknown_categories == 10 and data.statistics.unknown_words == 0
    lines = "\n".join(data.statistics.lines())
    assert "<unk>: 0.00% of the training words, 25.00% of the held-out ones" in lines
    assert "10 texts have a category that no training text has" in lines


def test_the_cap_keeps_the_most_frequent_words(words, jsonl):
    texts = ["often often often often", "often some some", "some rare", "often some unique"] * 4
    path = jsonl([{"text": text, "category": "x"} for text in texts])
    data = words(path, {"vocabulary_size": 6}, validation_split_percentage=0)
    assert set(data.tokenizer.get_vocab()) == {"<pad>", "<unk>", "<bos>", "<eos>", "often", "some"}
    assert (data.statistics.words, data.statistics.unknown_words, data.eval) == (48, 8, None)
    few = words(path, {"min_word_count": 5}, validation_split_percentage=0)
    assert "rare" not in few.tokenizer.get_vocab() and "some" in few.tokenizer.get_vocab()


def test_case_matters_if_asked(words, jsonl):
    path = jsonl([{"text": "Word word WORD", "category": "x"}] * 4)
    assert words(path).statistics.vocabulary == 5
    assert words(path, {"lowercase": False}).statistics.vocabulary == 7


def test_special_words_in_a_text_are_text(words, jsonl):
    data = words(jsonl([{"text": "a <eos> b <pad> <unk>", "category": "x"}] * 4))
    ids = data.train[0]["input_ids"]
    assert [ids.count(n) for n in data.tokenizer.convert_tokens_to_ids(["<pad>", "<unk>", "<bos>", "<eos>"])] == [
        *(0, 0, 1, 1)
    ]


def test_rows_without_a_category_are_counted(words, jsonl):
    rows = [*TABLE[:8], {"text": "nobody says so", "category": None}, {"text": "nor so", "category": " "}]
    data = words(jsonl(rows), validation_split_percentage=0)
    assert data.statistics.without_category == 2
    assert sorted(row["category_ids"] for row in data.train)[:3] == [0, 0, 1]
    assert "2 texts have no category; they count as <unknown>" in "\n".join(data.statistics.lines())


def test_without_a_category_column_nothing_is_asked(words, jsonl):
    data = words(jsonl([{"text": "only words here"}] * 4), {"category_column": ""})
    assert data.category_names == ("<unknown>",) and data.statistics.without_category == 0
    assert {row["category_ids"] for row in data.train} == {0}


BAD = {
    "no category column": ({"text": "a b c", "kategory": "x"}, "has no column 'category'; its columns: text, kategory"),
    "no text column": ({"words": "a b", "category": "x"}, "has no column 'text'; its columns: words, category"),
    "category of another type": ({"text": "a b", "category": ["x"]}, "column 'category' holds list"),
    "text of another type": ({"text": 5, "category": "x"}, "column 'text' holds int, not text"),
    "torn": ('{"text": "a b c", "categ', "not readable as JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_or_counted(words, jsonl, name):
    row, message = BAD[name]
    path = jsonl([*TABLE[:3], row, *TABLE[3:]])
    with pytest.raises(DataError) as error:
        words(path)
    assert "rows.jsonl row 4: " in str(error.value) and message in str(error.value)
    assert "--skip_bad_rows true" in str(error.value)
    statistics = words(path, skip_bad_rows=True).statistics
    assert (
        statistics.rows_dropped == {"unreadable row": 1} and statistics.rows_read == 41 and statistics.documents == 30
    )
    assert message in statistics.examples["unreadable row"][0]


def test_empty_texts_are_counted_and_nothing_left_is_an_error(words, jsonl):
    data = words(jsonl([*TABLE[:4], {"text": " \n", "category": "x"}]))
    assert data.statistics.rows_dropped == {"empty text": 1}
    with pytest.raises(DataError, match=r"has no text to learn from\. 1 rows read, dropped: 1 × empty text"):
        words(jsonl([{"text": "", "category": "x"}], "empty.jsonl"))


def test_held_out_data_of_their_own_and_a_trained_vocabulary(words, jsonl):
    train = jsonl(TABLE)
    test = jsonl([{"text": "the cow says quack", "category": "duck"}, TABLE[0]], "test.jsonl")
    data = words(train, eval_dataset=str(test))
    assert len(data.train) == 40 and len(data.eval) == 2 and data.statistics.heldout_duplicates == 1
    assert data.statistics.eval_unknown_words == 1 and data.statistics.unknown_categories == 1
    known = {"tokenizer": data.tokenizer, "category_names": data.category_names}
    again = words(test, known=known, validation_split_percentage=50)
    assert again.tokenizer.get_vocab() == data.tokenizer.get_vocab() and again.category_names == data.category_names
    assert again.fingerprint != words(test, validation_split_percentage=50).fingerprint
    assert words(train, eval_dataset=str(test), known=known).fingerprint == data.fingerprint


def test_the_same_settings_give_the_same_rows_and_another_seed_others(words, jsonl):
    path = jsonl(TABLE)
    first, same, other = words(path), words(path), words(path, seed=1)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.train.cache_files == same.train.cache_files and first.statistics == same.statistics
    assert [d.document for d in first.eval_documents] != [d.document for d in other.eval_documents]


def peak_bytes(prepare) -> int:
    """Of Python's objects and of arrow's."""
    pool, before = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        prepare()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(before)


def test_memory_stays_flat_however_large_the_file(words, jsonl):
    """Five times the rows, of the same words; a few bytes per text remain (its number, its category)."""
    row = {"text": "some " + "long" * 5000 + " words", "category": "x"}
    small, large = jsonl([row] * 120, "small.jsonl"), jsonl([row] * 600, "large.jsonl")
    words(jsonl([row] * 4, "first.jsonl"))  # imports
    small_bytes, large_bytes = (peak_bytes(lambda path=path: words(path)) for path in (small, large))
    assert large.stat().st_size > 12e6
    assert large_bytes < 1.2 * small_bytes, (small_bytes, large_bytes)


def test_the_embedded_sections_are_worth_a_language_model(embedded_cache):
    records = list(embedded_sections(embedded_cache, "text", "category").read())
    texts = [record.value["text"] for record in records]
    categories = {record.value["category"] for record in records}
    assert sum(len(text.split()) for text in texts) > 50_000 and len(set(texts)) == len(texts)
    assert {"lambda", "asyncio", "argparse"} <= categories and len(categories) > 100
    assert [record.value for record in embedded_sections(embedded_cache, "text", "category").read()] == [
        record.value for record in records
    ]
    assert all("category" not in r.value for r in embedded_sections(embedded_cache, "text", None).read())


def test_sections_begin_with_their_titles():
    text = "Title\n*****\n\nfirst\n\nA part\n======\n\nsecond\n\na -- b\n\nAn end\n~~~~~~\n"
    assert list(sections_of(text)) == ["Title\n\nfirst", "A part\n\nsecond\n\na -- b", "An end"]
    assert list(sections_of("no title\nat all")) == ["no title\nat all"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary_size": 4}, "vocabulary_size is 4; it must be above 4, such as 10000"),
        ({"gru_hidden_size": 0}, "gru_hidden_size is 0; it must be 1 or more"),
        ({"gru_dropout": 1.0}, "gru_dropout is 1.0; it must be below 1"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        WordSettings(**changes)


def test_each_mode_is_a_step_up():
    sizes = ("vocabulary_size", "embedding_size", "category_embedding_size", "gru_hidden_size", "block_size")
    modes = [MODES[name] for name in ("tiny", "standard", "extended")]
    for smaller, larger in pairwise(modes):
        assert all(smaller[name] < larger[name] for name in (*sizes, "num_train_epochs"))
    own = set(WordSettings.__dataclass_fields__)
    assert all(WordSettings(**{k: v for k, v in mode.items() if k in own}) for mode in modes)
    assert DEFAULTS["dataset"] == "python_doc_sections" and DEFAULTS["tuning"] == "full"
