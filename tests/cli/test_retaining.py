"""``retain`` through the command: the recipe, a run that is stopped and goes on, and what is refused before a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from scu_trainer.cli import train
from scu_trainer.cli.configuration import read_values
from scu_trainer.data.text.anchor import read_anchor
from scu_trainer.errors import SettingsError
from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import DataSettings, RetentionSettings
from scu_trainer.train.retention.loop import BASE_FILE, Retention
from tests import tiny

ROOT = Path(__file__).parents[2]
STEPS = 8
DEFAULTS = dataclasses.asdict(RetentionSettings())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"), layers=1)


def written(path: Path, count: int, text: str) -> Path:
    rows = [{"text": f"{text} Number {i} of {i * 7919 % 1000}. " * 8} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "dataset": written(folder / "new.jsonl", 24, "A list is a sequence that can be changed in place."),
        "retain": written(folder / "old.jsonl", 40, "The weather of the north is cold, and its ships are old."),
        "few": written(folder / "few.jsonl", 11, "Too little of it."),
    }


def begun(capsys, model_dir, files, tmp_path, **changes) -> tuple[int, str]:
    """Exit code, and all that was said."""
    fields = {
        "config": ROOT / "recipes" / "retain.yaml",
        "model_name_or_path": model_dir,
        "dataset": files["dataset"],
        "retain": files["retain"],
        "block_size": 64,
        "max_steps": STEPS,
        "save_steps": 4,
        "learning_rate": 1e-2,
        "retain_frequency": 2,
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "use_cpu": "true",
        "sample_prompts": 0,
        "predict_memory": "false",
        **changes,
    }
    code = train.main([word for key, value in fields.items() for word in (f"--{key}", str(value))])
    shown = capsys.readouterr()
    return code, " ".join((shown.out + shown.err).split())


def test_the_recipe_replays_and_judges(model_dir, files, tmp_path, capsys):
    code, said = begun(capsys, model_dir, files, tmp_path)
    assert code == 0, said
    assert "8 of its documents are measured, 24 may be replayed, 8 give the verdict" in said
    metrics = read_json(tmp_path / "run" / "scu_metrics.json")
    found = metrics["retention"]
    assert found["actuator"] == "replay" and found["replayed_rows"] > 0 and "lost_bits" in found
    assert [row["step"] for row in read_rows(tmp_path / "run" / "retain_history.json")] == [1, 2, 4, 5, 7, 8]
    assert read_json(tmp_path / "run" / "training_config.json")["configuration"]["retain"] == str(files["retain"])
    assert read_json(tmp_path / "run" / "run.json")["notices"] == found["notices"]
    assert {"retain_state.json", BASE_FILE} <= {path.name for path in (tmp_path / "run" / "checkpoint-8").iterdir()}
    assert "lost on old" in said


def test_an_adapter_below_home_goes_on_with_its_beginning_at_hand(model_dir, files, tmp_path, capsys, monkeypatch):
    """Without it, the update would be scaled toward the base of the adapter."""
    monkeypatch.setenv("HOME", str(tmp_path))
    base = LlamaForCausalLM.from_pretrained(model_dir)
    tiny.lora(base).save_pretrained(tmp_path / "adapter")
    attach, begins = Retention.attach, []
    monkeypatch.setattr(Retention, "attach", lambda self, trainer: begins.append(self.base) or attach(self, trainer))
    code, said = begun(capsys, "~/adapter", files, tmp_path, max_steps=1)
    assert code == 0, said
    assert hasattr(begins[0](), "peft_config")


def test_lambda_where_there_is_too_little_to_train_on(model_dir, files, tmp_path, capsys):
    code, said = begun(capsys, model_dir, files, tmp_path, retain_documents=16)
    assert code == 0, said
    assert "by lambda (no rows are left to train on); 8 of its documents are measured, 0 may be replayed" in said
    assert read_json(tmp_path / "run" / "scu_metrics.json")["retention"]["actuator"] == "lambda"
    assert read_rows(tmp_path / "run" / "retain_history.json")[-1]["lambda"] > 0


def test_text_that_the_model_writes_itself(model_dir, files, tmp_path, capsys):
    """Nobody has given any: it is written before training, and a run that goes on finds it."""
    given = {"retain": "sampled", "retain_documents": 40}
    code, said = begun(capsys, model_dir, files, tmp_path, **given)
    assert code == 0, said
    assert "lost on text that the model wrote, by replay" in said and "a source of the data" not in said
    assert "24 may be replayed, 8 give the verdict" in said
    (path,) = (tmp_path / "cache" / "sampled").glob("*/text.jsonl")
    assert len({row["text"] for row in read_lines(path)}) == 40
    whole, before = read_json(tmp_path / "run" / "scu_metrics.json")["retention"], path.stat().st_mtime_ns
    again = {"output_dir": tmp_path / "again", "resume_from_checkpoint": tmp_path / "run" / "checkpoint-4"}
    code, said = begun(capsys, model_dir, files, tmp_path, **given, **again)
    assert code == 0 and path.stat().st_mtime_ns == before, said
    found = read_json(tmp_path / "again" / "scu_metrics.json")["retention"]
    assert [found[name] for name in ("lost_bits", "scale")] == [whole[name] for name in ("lost_bits", "scale")]


def mixed(files, **of_old) -> str:
    return json.dumps([str(files["dataset"]), {"dataset": str(files["retain"]), "name": "general", **of_old}])


def test_a_source_is_meant_by_its_name_or_as_its_dataset(files, monkeypatch):
    monkeypatch.chdir(files["retain"].parent)
    data = DataSettings(dataset=[str(files["dataset"]), {"dataset": str(files["retain"]), "name": "general"}])
    names = ["general", str(files["retain"]), "old.jsonl", "./old.jsonl", "new", "old", "few.jsonl", "python_docs"]
    assert [data.index_of_source(name) for name in names] == [1, 1, 1, 1, 0, None, None, None]
    assert DataSettings(dataset="old.jsonl").index_of_source("old.jsonl") is None


def test_a_source_of_a_mixture_is_kept_by_what_it_holds_out(model_dir, files, tmp_path, capsys, monkeypatch):
    """What judges is trained on nowhere; what is replayed is trained on anyway; what is learned is the other one."""
    from scu_trainer.train.session import building
    from scu_trainer.train.tasks import text

    found, loops = [], []
    monkeypatch.setattr(text, "read_anchor", lambda *given, **how: found.append(read_anchor(*given, **how)) or found[0])
    monkeypatch.setattr(building, "Retention", lambda *given: loops.append(Retention(*given)) or loops[0])
    given = {"dataset": mixed(files), "retain": "general", "validation_split_percentage": 40}
    code, said = begun(capsys, model_dir, files, tmp_path, **given)
    assert code == 0, said
    assert "8 of its documents are measured, 24 may be replayed, 8 give the verdict" in said
    (anchor,) = found
    parts = [{number for of_row in anchor.replayed["documents"] for number in of_row}]
    parts += [set(anchor.measured["document"]), set(anchor.unseen["document"])]
    assert [len(part) for part in parts] == [24, 8, 8] and set.union(*parts) == set(range(40))
    metrics = read_json(tmp_path / "run" / "scu_metrics.json")
    assert metrics["retention"]["replayed_rows"] > 0 and "lost_bits" in metrics["retention"]
    assert {number % 2 for number in loops[0].own_rows["document"]} == {0}  # of the first source alone
    assert len(metrics["held_out_sources"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "general holds out 4 different documents of 4, but 16 are needed: 8 to measure on and 8 for the verdict; "
             "hold out more (validation_split_percentage, max_eval_documents"),
        ({"eval_dataset": "few"}, "general is a source of the data, but with an eval_dataset no source has held-out"),
        ({"streaming": "true"}, "general is trained on, but the held-out documents of streamed data are not known"),
        ({"retain": "elsewhere.jsonl"}, "elsewhere.jsonl does not exist"),
        ({"retain": "few"}, "has 11 different documents of 11, but 16 are needed"),
        ({"retain": "few"}, "in a .txt file). To retain a source of the data, give its name: new, general"),
        (
            {"retain": "sampled", "dataset": "sampled"},
            "sampled means text that the model generates, but a source of the data has",
        ),
        ({"retain": "retain", "dataset": "twice"}, "dataset of several sources; name one: general, again"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_kept_is_refused_before_a_model_is_loaded(
    model_dir, files, tmp_path, changes, message, capsys, monkeypatch
):
    from scu_trainer.train.tasks import text

    monkeypatch.setattr(text, "load_model", lambda *given, **how: pytest.fail("a model was loaded"))
    twice = [{"dataset": str(files["retain"]), "name": name, "text_column": "text"} for name in ("general", "again")]
    given = {"dataset": mixed(files), "retain": "general", **{name: files.get(v, v) for name, v in changes.items()}}
    sampled = [{"dataset": str(files["retain"]), "name": "sampled"}]
    others = {"twice": json.dumps(twice), "sampled": json.dumps(sampled)}
    given["dataset"] = others.get(given["dataset"], given["dataset"])
    code, said = begun(capsys, model_dir, files, tmp_path, **given)
    assert code == 2 and message in said, said


@pytest.mark.parametrize("kind", ["one", "list"])
def test_what_is_held_out_is_not_replayed(model_dir, files, tmp_path, capsys, kind):
    """Held-out text, of eval_dataset here, is in no part of another text."""
    rows = files["retain"].read_text().splitlines(keepends=True)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(rows[:10]))
    dataset = {"one": files["dataset"], "list": json.dumps([str(files[name]) for name in ("dataset", "few")])}[kind]
    code, said = begun(capsys, model_dir, files, tmp_path, dataset=dataset, eval_dataset=held_out, max_steps=1)
    assert code == 0, said
    assert "8 of its documents are measured, 14 may be replayed, 8 give the verdict; 10 are in the" in said, said


@pytest.mark.parametrize("kind", ["one", "list"])
def test_of_a_stream_nothing_is_kept_that_it_trains_on(model_dir, files, tmp_path, capsys, kind):
    dataset = {"one": files["retain"], "list": mixed(files)}[kind]
    changes = {"dataset": dataset, "retain": files["retain"].parent / "." / "old.jsonl", "streaming": "true"}
    code, said = begun(capsys, model_dir, files, tmp_path, **changes)
    assert code == 2 and "is trained on, but the held-out documents of streamed data" in said, said


def test_copies_of_what_is_trained_on_do_not_judge(model_dir, files, tmp_path, capsys):
    """Half of what a source holds out is in another source as well, which trains on it."""
    rows = files["retain"].read_text().splitlines(keepends=True)
    both = tmp_path / "both.jsonl"
    both.write_text(files["dataset"].read_text() + "".join(rows[::2]))
    given = {"dataset": mixed({**files, "dataset": both}), "retain": "general", "validation_split_percentage": 40}
    code, said = begun(capsys, model_dir, files, tmp_path, **given)
    assert code == 2 and "more are also in the training data), but 16 are needed" in said, said


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retain": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"retain": "dataset"}, "has 0 different documents of 24 (24 more are also in the training data), but 16"),
        ({"retain": "few"}, "has 11 different documents of 11, but 16 are needed"),
        ({"retain_budget_bits": 0}, "retain_budget_bits is 0.0; it must be above 0, such as 0.02"),
        ({"retain_max_share": 0.95}, "retain_max_share is 0.95; it must be 0.9 or less, such as 0.5"),
        ({"retain_documents": 15}, "retain_documents is 15; it must be 16 or more"),
        ({"retain_actuator": "replays"}, "did you mean 'replay'"),
        ({"retain_actuator": "lambda", "scu_target_s": 0.1}, "which scu_target_s or scu_law already control"),
        ({"retain_actuator": "lambda", "scu": "false"}, "which scu: false switches off"),
        ({"curriculum": "acmds"}, "curriculum: acmds plans every batch, but replay adds rows to it"),
        ({"batch_mode": "logical"}, "batch_mode: logical gives each step as many rows as memory allows"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_a_model_is_loaded(
    model_dir, files, tmp_path, changes, message, capsys, monkeypatch
):
    from scu_trainer.train.tasks import text

    monkeypatch.setattr(text, "load_model", lambda *given, **how: pytest.fail("a model was loaded"))
    changes = {name: files.get(value, value) if name == "retain" else value for name, value in changes.items()}
    code, said = begun(capsys, model_dir, files, tmp_path, **changes)
    assert code == 2 and message in said, said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("entries", "flags", "expected"),
    [
        ({}, ["--retain_budget_bits", "0.02"], "sampled"),
        ({"retain_budget_bits": 0.02}, [], "sampled"),  # a file that a person wrote
        ({"retain_budget_bits": 0.02, "retain_max_share": 0.5}, [], "sampled"),
        ({"retain_budget_bits": None}, [], None),
        (DEFAULTS, ["--retain_budget_bits=0.05"], "sampled"),
        (DEFAULTS, [], None),  # one that a run wrote
        ({name: value for name, value in DEFAULTS.items() if value is not None}, [], None),  # that a comparison wrote
        ({"retain": "a.txt"}, ["--retain_budget_bits", "0.05"], "a.txt"),
        ({"retain_budget_bits": 0.05}, ["--retain", "a.txt"], "a.txt"),
        ({}, [], None),
    ],
)
def test_a_budget_that_names_no_text_is_about_what_the_model_writes(tmp_path, entries, flags, expected):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"max_steps": 1, **entries}))
    assert read_values(str(path), flags)["retain"] == expected


def test_in_python_a_budget_without_a_text_is_refused():
    with pytest.raises(SettingsError, match="retain_budget_bits has an effect only with retain"):
        RetentionSettings(retain_budget_bits=0.1)


def test_another_task_has_no_text_to_keep(tmp_path, capsys):
    code = train.main(["--task", "image-classification", "--retain", "a.txt", "--output_dir", str(tmp_path / "run")])
    assert code == 2 and "retain has no effect on task: image-classification" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["retain", "eval_dataset"])
def test_a_file_that_is_not_there_is_missed_before_any_is_read(model_dir, files, tmp_path, capsys, monkeypatch, field):
    from scu_trainer.train.tasks import text

    monkeypatch.setattr(text, "prepare", lambda *given, **how: pytest.fail("data were read"))
    code, said = begun(capsys, model_dir, files, tmp_path, **{field: "nowhere.jsonl"})
    assert code == 2 and "nowhere.jsonl does not exist" in said
