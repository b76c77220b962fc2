"""A list in the place of one dataset: exact shares, numbers that are its own, everything left out is counted."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from fractions import Fraction

import datasets
import numpy
import pytest

from scu_trainer.cli.configuration import as_yaml, read_job
from scu_trainer.data import prepare
from scu_trainer.data.text.encode import NOT_LEARNED
from scu_trainer.data.text.mixture import whole_held_out
from scu_trainer.data.text.shares import (
    apportioned,
    chosen_rows,
    evenly_chosen,
    interleaved,
    mix_by_shares,
    rows_per_epoch,
)
from scu_trainer.errors import DataError, SettingsError
from scu_trainer.settings import DataSettings

SIZES = {"web": 400, "code": 90, "chat": 30}


@pytest.fixture
def files(jsonl):
    """Paths of three files of different sizes whose documents say where they are from."""
    return {
        name: str(jsonl([{"text": f"{name} says number {n} of many things."} for n in range(size)], f"{name}.jsonl"))
        for name, size in SIZES.items()
    }


@pytest.fixture
def mixed(tmp_path, tokenizer):
    """``mixed(entries, **settings)`` -> PreparedData."""

    def run(entries, seed=0, **changes):
        settings = DataSettings(dataset=entries, **{"block_size": 32, **changes})
        return prepare(settings, tokenizer, seed=seed, cache_dir=tmp_path / "cache", model_name="tiny")

    return run


def weighted(files, **weights):
    return [{"dataset": files[name], "weight": weight} for name, weight in weights.items()]


def sources_of_rows(data) -> list[int]:
    count = len(data.statistics.sources)
    found = [{number % count for number in row["documents"]} for row in data.train]
    assert all(len(sources) == 1 for sources in found)
    return [sources.pop() for sources in found]


def test_notes_of_a_mixture_from_the_cache_are_of_today(mixed, files, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "rows.jsonl").symlink_to(files["chat"])
    assert not mixed([files["code"], str(folder)]).statistics.notes
    (folder / "read.me").touch()
    [note] = mixed([files["code"], str(folder)]).statistics.notes
    assert note == f"folder: 1 file of other kinds in {folder}, not read: .me"


# -- arithmetic --------------------------------------------------------------------------------------------------------


def some_shares(generator: random.Random) -> list[Fraction]:
    weights = [Fraction(generator.choice([generator.random(), 1e-3, 3, 7])) for _ in range(generator.randint(1, 8))]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("seed", range(40))
def test_rows_per_epoch_hold_the_shares_and_their_promise(seed):
    generator = random.Random(seed)
    shares = some_shares(generator)
    rows = [generator.randint(1, 5000) for _ in shares]
    for strategy in ("first_exhausted", "all_exhausted"):
        counts = rows_per_epoch(rows, shares, strategy)
        assert all(abs(count - sum(counts) * share) < 1 for count, share in zip(counts, shares, strict=True))
        pairs = list(zip(counts, rows, strict=True))
        if strategy == "first_exhausted":
            assert all(count <= available for count, available in pairs)
            assert any(count + 1 + available * 0.002 >= available for count, available in pairs), "no longer one fits"
        else:
            assert all(count >= available for count, available in pairs)
    assert sum(apportioned(1001, shares)) == 1001


def test_an_epoch_that_no_memory_holds_is_refused():
    shares = [Fraction(1, 10**6), 1 - Fraction(1, 10**6)]
    with pytest.raises(DataError, match=r"would have 1,000,000,000 rows.*first_exhausted"):
        rows_per_epoch([1000, 1000], shares, "all_exhausted")


def test_repeated_rows_are_whole_passes_and_the_beginning_of_a_permutation():
    found = chosen_rows(25, 10, numpy.random.default_rng(3))
    assert Counter(found[:20].tolist()) == dict.fromkeys(range(10), 2)
    assert found[20:].tolist() == numpy.random.default_rng(3).permutation(10)[:5].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_has_the_shares_within_one_row(seed):
    shares = some_shares(random.Random(seed))
    taken = [0] * len(shares)
    for row, chosen in zip(range(1, 300), evenly_chosen(shares), strict=False):
        taken[chosen] += 1
        assert all(abs(count - share * row) < 1 for count, share in zip(taken, shares, strict=True))


def test_interleaved_rows_are_spread_evenly():
    found = interleaved([6, 3, 1])
    assert Counter(found.tolist()) == {0: 6, 1: 3, 2: 1}
    assert numpy.bincount(found[:5], minlength=3).tolist() in ([3, 2, 0], [3, 1, 1])


def test_when_streams_end():
    def start(source):
        return iter(range([3, 2][source]))

    halves = [Fraction(1, 2)] * 2
    first = list(mix_by_shares(halves, start, "first_exhausted"))
    assert first == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    every = list(mix_by_shares(halves, start, "all_exhausted"))
    assert every == [*first, (1, 0)]
    assert list(mix_by_shares(halves, lambda source: iter([1] * source), "all_exhausted")) == []


# -- rows --------------------------------------------------------------------------------------------------------------


def test_without_weights_every_row_comes_once(mixed, files, prepared):
    data = mixed(list(files.values()))
    alone = [prepared(path) for path in files.values()]
    assert [row["input_ids"] for row in data.train] == [row["input_ids"] for part in alone for row in part.train]
    statistics = data.statistics
    assert statistics.blocks == len(data.train)
    assert statistics.supervised_tokens == sum(part.statistics.supervised_tokens for part in alone)
    assert [source["rows_left_out"] for source in statistics.sources] == [0, 0, 0]
    assert [source["asked_share"] for source in statistics.sources] == [None] * 3


def test_what_is_not_read_of_an_evaluation_folder_is_named_once(mixed, files, tmp_path, jsonl):
    (tmp_path / "held out").mkdir()
    jsonl([{"text": "three four"}], "held out/a.jsonl")
    (tmp_path / "held out" / "b.xlsx").write_text("x")
    for streaming in (False, True):
        settings = {"eval_dataset": str(tmp_path / "held out"), "system_column": "sys", "streaming": streaming}
        lines = mixed(weighted(files, web=1, code=1), **settings).statistics.lines()
        assert "\n".join(lines).count("1 file of other kinds") == 1
        assert len(lines) == len(set(lines))


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
def test_weights_are_shares_of_rows(mixed, files, strategy):
    data = mixed(weighted(files, web=3, code=1.5, chat=0.5), stopping_strategy=strategy)
    sources = sources_of_rows(data)
    statistics = data.statistics
    assert statistics.blocks == len(sources)
    for number, (source, share) in enumerate(zip(statistics.sources, (0.6, 0.3, 0.1), strict=True)):
        assert source["rows"] == sources.count(number)
        assert source["asked_share"] == pytest.approx(share)
        assert source["row_share"] == pytest.approx(share, abs=1 / len(sources))
    rows = Counter(str(row["documents"]) + str(row["input_ids"]) for row in data.train)
    if strategy == "first_exhausted":
        assert max(rows.values()) == 1
        assert any(source["rows_left_out"] for source in statistics.sources)
    else:
        assert len(rows) == sum(source["available_rows"] for source in statistics.sources)
        assert all(source["rows_left_out"] == 0 for source in statistics.sources)
        assert max(source["passes"] for source in statistics.sources) > 1


def test_a_long_mixture_is_within_half_a_percent(mixed, jsonl):
    paths = [jsonl([{"text": f"{name} {n}"} for n in range(700)], f"{name}.jsonl") for name in "ab"]
    entries = [{"dataset": str(path), "weight": weight} for path, weight in zip(paths, (0.7, 0.3), strict=True)]
    for strategy in ("first_exhausted", "all_exhausted"):
        sources = mixed(entries, packing=False, stopping_strategy=strategy).statistics.sources
        assert all(abs(source["row_share"] - source["asked_share"]) < 0.005 for source in sources)


def test_counts_of_tokens_are_those_of_the_rows(mixed, files):
    data = mixed(weighted(files, web=1, chat=4), stopping_strategy="all_exhausted")
    learned, tokens, sources = Counter(), 0, sources_of_rows(data)
    for source, row in zip(sources, data.train, strict=True):
        learned[source] += sum(label != NOT_LEARNED for label in row["labels"])
        tokens += row["length"]
    statistics = data.statistics
    assert [source["supervised_tokens"] for source in statistics.sources] == [learned[0], learned[1]]
    assert (statistics.train_tokens, statistics.supervised_tokens) == (tokens, learned.total())
    assert [source["token_share"] for source in statistics.sources] == [learned[n] / learned.total() for n in (0, 1)]


def test_documents_of_different_sources_do_not_collide(mixed, files, tokenizer):
    data = mixed([files["web"], files["chat"]])
    names = data.sources
    assert names == ("web", "chat")
    for row in data.train:
        text = tokenizer.decode(row["input_ids"])
        for number in row["documents"]:
            assert names[number % 2] in text and names[1 - number % 2] not in text
    trained = {number for row in data.train for number in row["documents"]}
    held_out = data.eval["document"][:]
    assert sorted(held_out) == sorted(item.document for item in data.eval_documents)
    assert not trained & {*held_out} and len(trained | {*held_out}) == 430
    for item in data.eval_documents:
        assert item.name.startswith(names[item.document % 2])


def test_each_source_is_split_as_it_is_alone(mixed, files, prepared):
    data = mixed([files["web"], {"dataset": files["chat"], "dataset_size": 20}], validation_split_percentage=10)
    assert [source["eval_documents"] for source in data.statistics.sources] == [40, 2]
    alone = prepared(files["chat"], validation_split_percentage=10, dataset_size=20)
    held_out = [row["input_ids"] for row in data.eval if row["document"] % 2 == 1]
    assert held_out == [row["input_ids"] for row in alone.eval]


def test_an_entry_goes_before_what_stands_beside_the_list(mixed, jsonl):
    first = jsonl([{"body": f"first {n}"} for n in range(30)], "first.jsonl")
    second = jsonl([{"text": f"second {n}"} for n in range(30)], "second.jsonl")
    data = mixed([{"dataset": str(first), "text_column": "body"}, str(second)], dataset_size=10)
    assert [source["documents"] + source["eval_documents"] for source in data.statistics.sources] == [10, 10]


def test_held_out_data_of_its_own(mixed, files, jsonl):
    others = jsonl([{"text": "Tea."}, {"text": "web says number 3 of many things."}, {"text": ""}], "other.jsonl")
    data = mixed(weighted(files, web=1, chat=1), eval_dataset=str(others))
    statistics = data.statistics
    assert [item.name for item in data.eval_documents] == ["other.jsonl row 1", "other.jsonl row 2"]
    assert (statistics.documents, statistics.eval_documents, statistics.heldout_duplicates) == (430, 2, 1)
    assert statistics.rows_read == 433 and sum(statistics.rows_dropped.values()) == 1
    assert data.sources == (), "they belong to no source"


def test_a_held_out_document_that_another_source_trains_on_is_counted(mixed, jsonl, prepared):
    rows = [{"text": f"the same {n}"} for n in range(40)]
    first, second = jsonl(rows, "first.jsonl"), jsonl([*rows, {"text": "one more"}], "second.jsonl")
    assert prepared(first).statistics.heldout_duplicates == prepared(second).statistics.heldout_duplicates == 0
    data = mixed([str(first), str(second)], packing=False)
    trained = {tuple(row["input_ids"]) for row in data.train}
    repeated = sum(tuple(row["input_ids"]) in trained for row in data.eval)
    assert data.statistics.heldout_duplicates == repeated > 0


def test_the_sources_own_validation_split_is_used(mixed, files, tmp_path):
    rows = [{"text": f"cup {n}"} for n in range(30)]
    parts = {"train": datasets.Dataset.from_list(rows), "validation": datasets.Dataset.from_list(rows[:2])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dict")
    data = mixed([str(tmp_path / "dict"), files["chat"]])
    assert [source["eval_documents"] for source in data.statistics.sources] == [2, 2]
    assert "dict: held-out documents come from the split 'validation'" in "\n".join(data.statistics.lines())


def test_the_order_depends_on_the_seed_and_on_nothing_else(mixed, files):
    entries = weighted(files, web=1, code=1)
    first, second, other = mixed(entries), mixed(entries), mixed(entries, seed=1)
    assert first.train.to_list() == second.train.to_list() and first.statistics == second.statistics
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert first.train.to_list() != other.train.to_list()
    assert len({mixed(weighted(files, web=w, code=1)).fingerprint for w in (1, 2)} | {first.fingerprint}) == 2


def test_rows_stay_in_the_files_of_their_sources(mixed, files, tmp_path):
    data = mixed(weighted(files, web=1, code=1))
    names = {item["filename"] for item in data.train.cache_files}
    assert len(names) == 4 and all(str(tmp_path / "cache") in name for name in names)
    assert pickle.loads(pickle.dumps(data.train)).to_list() == data.train.to_list(), "loader workers get such a copy"


def test_lines_say_what_was_asked_and_what_is_so(mixed, files):
    lines = "\n".join(mixed(weighted(files, web=1, chat=1)).statistics.lines())
    assert "source web: 400 rows read, 380 documents for training, 20 held out; 50.00% asked, " in lines
    assert "an epoch leaves out" in lines
    repeated = mixed(weighted(files, web=1, chat=1), stopping_strategy="all_exhausted").statistics
    assert any("times on average" in line for line in repeated.lines() if line.startswith("source chat"))


def test_a_share_without_a_row_is_refused(mixed, files):
    with pytest.raises(DataError, match=r"source web has no row in an epoch.*larger weight.*more data for chat"):
        mixed(weighted(files, web=0.001, chat=1))


def test_isolated_and_unpacked_rows(mixed, files):
    entries = weighted(files, web=1, code=1)
    assert "position_ids" in mixed(entries, isolate_documents=True).train[0]
    assert all(len(row["documents"]) == 1 for row in mixed(entries, packing=False).train)


def test_whole_held_out_documents_have_the_same_numbers(files, tokenizer, tmp_path, mixed):
    data = mixed(list(files.values()), block_size=8)
    settings = DataSettings(dataset=list(files.values()), block_size=8)
    whole = whole_held_out(settings, tokenizer, seed=0, cache_dir=tmp_path / "cache", model_name="tiny")
    assert sorted(whole["document"][:]) == sorted({*data.eval["document"][:]})
    assert len(data.eval) > len(whole) == len(data.eval_documents)


# -- streaming ---------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_shares_in_every_prefix_and_every_pass_is_the_same(mixed, files):
    data = mixed(weighted(files, web=2, code=1, chat=1), streaming=True, max_eval_documents=4)
    rows = list(data.train)
    assert rows == list(data.train)
    assert list(data.train.skip(5)) == rows[5:]
    taken = Counter()
    for number, row in enumerate(rows, start=1):
        taken[row["documents"][0] % 3] += 1
        assert all(abs(taken[source] - share * number) < 1 for source, share in enumerate((0.5, 0.25, 0.25)))
    statistics = data.statistics
    assert [source["rows"] for source in statistics.sources] == [taken[n] for n in range(3)]
    assert statistics.blocks == len(rows) and statistics.eval_documents == 12
    assert statistics.supervised_tokens == sum(label != NOT_LEARNED for row in rows for label in row["labels"])
    assert sorted(data.eval["document"][:]) == list(range(12)) and data.sources == ("web", "code", "chat")


def test_a_stream_that_ends_when_all_have_ended(mixed, files):
    entries = weighted(files, web=1, chat=1)
    data = mixed(entries, streaming=True, stopping_strategy="all_exhausted", max_eval_documents=4)
    rows = list(data.train)
    trained = {number for row in rows for number in row["documents"] if number % 2 == 0}
    assert len(trained) == 396, "all of the larger source but what is held out"
    assert data.statistics.sources[1]["passes"] > 1
    assert data.statistics.documents == sum(source["documents"] for source in data.statistics.sources)


def test_a_stream_without_weights_is_one_source_after_the_other(mixed, files):
    data = mixed([files["code"], files["chat"]], streaming=True, max_eval_documents=4)
    order = [row["documents"][0] % 2 for row in data.train]
    assert order == sorted(order) and {*order} == {0, 1}
    assert any("sources are read in sequence" in line for line in data.statistics.lines())


def test_a_stream_counts_the_rows_of_a_source_once_and_those_of_the_latest_pass(mixed, files):
    data = mixed([files["code"], files["chat"]], streaming=True, max_eval_documents=4)
    list(data.train)
    sources = data.statistics.sources
    assert all(found["rows_read"] == found["documents"] + found["eval_documents"] for found in sources)
    next(iter(data.train))
    assert data.statistics.documents == data.statistics.sources[0]["documents"]


def test_a_stream_with_held_out_data_of_its_own(mixed, files, jsonl):
    others = jsonl([{"text": "Tea."}, {"text": ""}], "other.jsonl")
    data = mixed(weighted(files, code=1, chat=1), streaming=True, eval_dataset=str(others))
    list(data.train)
    assert (data.statistics.eval_documents, len(data.eval), data.sources) == (1, 1, ())
    assert data.statistics.rows_dropped and data.statistics.heldout_duplicates is None


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset is an empty list; give at least one entry"),
        ([{"dataset": "a", "weight": 0}], r"entry 1 of dataset \(a\) has weight: 0; it must be a number above 0"),
        ([{"dataset": "a", "weight": -1.5}], "weight: -1.5"),
        ([{"dataset": "a", "weight": "3"}], "weight: '3'"),
        ([{"dataset": "a", "weight": True}], "weight: True"),
        ([{"dataset": "a", "weight": float("nan")}], "weight: nan"),
        ([{"dataset": "a", "weight": 1}, "b"], "weights for only some of its sources; add a weight to b"),
        (["x/a.jsonl", "y/a.jsonl"], "2 sources with the name 'a'.*name: a_2"),
        ([["a"]], r"entry 1 of dataset is \['a'\]; it must be a name, or a mapping"),
        ([{"dataset": ["a"]}], "as its dataset; it must be an embedded name"),
        ([{"dataset": '["a"]'}], "as its dataset; it must be an embedded name"),
        ([{"weight": 1}], "entry 1 of dataset has None as its dataset"),
        ([{"dataset": "a", "wieght": 1}], r"unknown key 'wieght' \(did you mean 'weight'\?\)"),
        ([{"dataset": "a", "dataset_size": "5"}], "dataset_size: '5'; it must be a whole number"),
        ([{"dataset": "a", "dataset_size": 0}], r"entry 1 of dataset \(a\): dataset_size is 0"),
        ([{"dataset": "a", "text_column": 3}], "text_column: 3; it must be text"),
        ([{"dataset": "a", "name": "a b"}], "the name 'a b'; use only letters"),
        ('[{"dataset": "a"', "starts like a list but is not valid JSON"),
        ("", "dataset is empty"),
    ],
)
def test_refused(dataset, message):
    with pytest.raises(SettingsError, match=message):
        DataSettings(dataset=dataset)


def test_a_strategy_without_weights_is_refused():
    with pytest.raises(SettingsError, match="stopping_strategy all_exhausted has an effect only"):
        DataSettings(dataset=["a", "b"], stopping_strategy="all_exhausted")


def test_names_and_fields_of_sources():
    found = DataSettings(dataset=["org/My-Set", "in/a b.jsonl.gz", {"dataset": "python_docs", "name": "docs"}]).sources
    assert [source.name for source in found] == ["My-Set", "a_b", "docs"]


LIST = [{"dataset": "a.jsonl", "weight": 3, "text_column": "body"}, {"dataset": "b.jsonl", "weight": 1}]


def test_the_command_line_and_a_file_say_the_same(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("dataset:\n- {dataset: a.jsonl, weight: 3, text_column: body}\n- {dataset: b.jsonl, weight: 1}\n")
    typed = read_job(None, ["--dataset", json.dumps(LIST), "--use_cpu"])
    assert read_job(str(path), ["--use_cpu"]).data == typed.data
    assert typed.data.dataset == json.loads(json.dumps(typed.as_dict(), default=str))["dataset"] == LIST
    again = tmp_path / "again.yaml"
    again.write_text(as_yaml(typed))
    assert read_job(str(again), []).data == typed.data


def test_a_long_list_on_the_command_line_is_no_path():
    entries = [{"dataset": f"file_{number}.jsonl", "name": f"source_{number}"} for number in range(60)]
    assert len(read_job(None, ["--dataset", json.dumps(entries), "--use_cpu"]).data.sources) == 60


@pytest.mark.parametrize("task", ["image-classification", "word-generation", "sensor-classification"])
def test_other_tasks_refuse_a_list_by_name(task, tmp_path):
    job = read_job(None, ["--task", task, "--dataset", '["a", "b"]', "--use_cpu", "--output_dir", str(tmp_path / "o")])
    with pytest.raises(SettingsError, match=rf"list of 2 sources \(a \+ b\).*task is {task}"):
        job.check()
