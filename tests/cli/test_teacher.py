"""``--teacher``: what a run with one says and writes, and which teachers are refused before anything is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scu_trainer.cli import main as cli
from scu_trainer.cli import train
from tests import tiny
from tests.cli.test_train import documents, flags, model_dir, refused

__all__ = ["documents", "flags", "model_dir"]  # fixtures


@pytest.fixture
def teacher(tmp_path) -> Path:
    return tiny.saved_llama(tmp_path / "teacher", seed=5)


def test_a_student_learns_from_a_run(flags, tmp_path, capsys):
    assert train.main(flags) == 0
    student = [*flags, "--output_dir", str(tmp_path / "student"), "--teacher", str(tmp_path / "run")]
    student += ["--tuning", "full", "--predict_memory", "true", "--teacher_weight", "0.25"]
    capsys.readouterr()
    assert train.main(student) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "loss = 0.75 of the task's + 0.25 of the distance to the teacher at temperature 2" in printed
    rows = [row for row in json.loads((tmp_path / "student" / "log_history.json").read_text()) if "loss" in row]
    for row in rows:
        parts = row["distillation/task_loss"], row["distillation/teacher_distance"]
        assert 0.75 * parts[0] + 0.25 * parts[1] == pytest.approx(row["loss"], rel=1e-3)
    predicted = json.loads((tmp_path / "student" / "scu_metrics.json").read_text())["memory_estimate"]
    assert predicted["predicted_parts"]["teacher"] > 0
    saved = load_file(tmp_path / "student" / "model.safetensors")
    assert sorted(saved) == sorted(load_file(Path(flags[1]) / "model.safetensors"))


def test_a_plan_counts_the_teacher(flags, teacher, capsys):
    found = []
    for more in ([], ["--teacher", str(teacher)]):
        capsys.readouterr()
        cli.main(["plan", "--json", *flags, *more])
        found.append(json.loads(capsys.readouterr().out)["predicted"]["parts"]["teacher"])
    assert found[0] == 0 < found[1]


def test_a_teacher_of_other_tokens_is_refused(flags, teacher, capsys):
    path = teacher / "tokenizer.json"
    content = json.loads(path.read_text())
    first = next(iter(content["model"]["vocab"]))
    content["model"]["vocab"]["another"] = content["model"]["vocab"].pop(first)
    content["model"]["merges"] = []
    path.write_text(json.dumps(content))
    message = refused(capsys, [*flags, "--teacher", str(teacher)])
    assert "does not have the same tokens as the student" in message and str(teacher) in message


def test_a_teacher_and_a_base_that_were_trained_again_are_named(flags, teacher, tmp_path, capsys):
    """Under their paths of before: the checkpoint holds the adapter alone."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(flags[1], base)
    words = [flags[0], str(base), *flags[2:], "--teacher", str(teacher), "--save_steps", "2"]
    assert train.main(words) == 0
    checkpoint = ["--resume_from_checkpoint", str(run / "checkpoint-2")]
    assert train.main([*words, *checkpoint]) == 0
    assert "fingerprint of the" not in capsys.readouterr().out
    tiny.saved_llama(base, seed=6)
    tiny.saved_llama(teacher, seed=7)
    assert train.main([*words, *checkpoint]) == 0
    said = capsys.readouterr().out
    for name in ("base", "teacher"):
        assert f"changed since checkpoint-2: fingerprint of the {name} was" in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--teacher", "/nowhere/at/all"], "teacher '/nowhere/at/all' does not exist"),
        (["--teacher_weight", "0.3"], "teacher_weight needs a teacher; add teacher: RUN"),
        (["--teacher", "TEACHER", "--teacher_weight", "1.5"], "it must be 1 or less"),
        (["--teacher", "TEACHER", "--teacher_temperature", "0"], "it must be above 0"),
        (["--teacher", "TEACHER", "--chunked_loss", "always"], "chunked_loss: always makes no logits"),
        (["--teacher", "TEACHER", "--curriculum", "infobatch", "--num_train_epochs", "5"], "infobatch weights"),
        (["--teacher", "TEACHER", "--label_smoothing_factor", "0.1"], "label_smoothing_factor changes the loss"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused(flags, teacher, tmp_path, capsys, more, expected):
    words = [str(teacher) if word == "TEACHER" else word for word in more]
    assert expected in refused(capsys, [*flags, *words])
    assert not (tmp_path / "run").exists()


IMAGES = "--task image-classification --dataset digits --dataset_size 40 --image_size 32 --max_steps 1 --use_cpu true"


def test_a_classifier_of_other_classes_is_refused(tmp_path, capsys):
    tiny.vit().save_pretrained(tmp_path / "teacher")
    words = [*IMAGES.split(), "--teacher", str(tmp_path / "teacher"), "--output_dir", str(tmp_path / "run")]
    message = refused(capsys, [*words, "--cache_dir", str(tmp_path / "cache")])
    assert "does not have the same classes as the student" in message


WORDS = "--task word-generation --dataset_size 60 --max_steps 2 --use_cpu true"


def test_a_new_model_of_words_has_those_of_its_teacher(tmp_path, capsys):
    shared = [*WORDS.split(), "--predict_memory", "false"]
    sizes = ["--gru_hidden_size", "32", "--vocabulary_size", "300"]
    assert train.main([*shared, *sizes, "--output_dir", str(tmp_path / "teacher")]) == 0
    student = ["--gru_hidden_size", "16", "--teacher", str(tmp_path / "teacher")]
    assert train.main([*shared, *student, "--output_dir", str(tmp_path / "student")]) == 0
    sizes = [json.loads((tmp_path / run / "config.json").read_text())["vocab_size"] for run in ("teacher", "student")]
    assert sizes[0] == sizes[1] <= 300
