"""``scu-trainer eval`` on long documents, against base and merged side by side, and on tasks of the harness."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scu_trainer.cli import train
from scu_trainer.cli.evaluation.report import tasks_report
from scu_trainer.cli.evaluation.scoring import EvaluationResult
from scu_trainer.cli.evaluation.screen import as_text
from scu_trainer.cli.publishing import merge
from scu_trainer.models.loading.load import load_for_evaluation, load_tokenizer
from scu_trainer.settings import ModelSettings
from scu_trainer.train.evaluation.harness import TaskMetric, _generated_token_limit, paired_difference
from tests import tiny
from tests.cli.test_eval import write_documents

QUESTIONS = 40

TASK = """\
task: first_or_second
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [list, function]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""

SURPRISE = """\
task: surprise
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " list"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
metadata: {{version: 1}}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> SimpleNamespace:
    """A model folder, long documents, a LoRA and a QLoRA run on them, and a task."""
    folder = tmp_path_factory.mktemp("against")
    documents = write_documents(folder / "documents.jsonl", 24, words_each=70)
    model = with_opinions(tiny.saved_llama(folder / "model"))
    words = f"--model_name_or_path {model} --dataset {documents} --block_size 64 --validation_split_percentage 50"
    words += " --max_steps 2 --save_strategy no --eval_strategy no --report_to none --use_cpu true --seed 5"
    words += " --predict_memory false --sample_prompts 0"
    words += f" --per_device_train_batch_size 4 --learning_rate 0.02 --cache_dir {folder / 'cache'}"
    for tuning in ("lora", "qlora"):
        assert train.main([*words.split(), "--output_dir", str(folder / tuning), "--tuning", tuning]) == 0
    questions = write_task(folder / "tasks")
    found = {"documents": documents, "model": model, "lora": folder / "lora", "qlora": folder / "qlora"}
    return SimpleNamespace(folder=folder, tasks=folder / "tasks", questions=questions, **found)


def with_opinions(model: Path) -> Path:
    """Token vectors of their own: those of a resized vocabulary are all alike, and no context would matter."""
    weights, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = 0.2 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def write_task(folder: Path) -> Path:
    """``first_or_second``, whose answer is which of two words ends the next sentence."""
    folder.mkdir()
    questions = folder / "questions.jsonl"
    rows = [
        {"text": f"the file of a {'list' if number % 3 else 'value'}", "answer": number % 2}
        for number in range(QUESTIONS)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK.format(questions=questions))
    (folder / "surprise.yaml").write_text(SURPRISE.format(questions=questions))
    broken = TASK.format(questions=folder / "gone.jsonl").replace("first_or_second", "without_data")
    (folder / "broken.yaml").write_text(broken)
    return questions


# -- windows -----------------------------------------------------------------------------------------------------------


def test_overlap_adds_context_and_keeps_what_is_counted(evaluate, work):
    plain, same, overlapping = (
        evaluate(work.lora, "--mixed_precision", "no", *words)
        for words in ((), ("--stride", 64), ("--stride", 16, "--batch_tokens", 256))
    )
    assert plain["windows"] == {"max_length": 64, "stride": 64, "least_context": 1}
    assert overlapping["windows"] == {"max_length": 64, "stride": 16, "least_context": 48}
    assert plain["tokens"] == same["tokens"] == overlapping["tokens"]
    assert same["model"] == plain["model"], "a stride of max_length is no overlap"
    assert abs(overlapping["model"]["bpt"]["value"] - plain["model"]["bpt"]["value"]) > 1e-4
    assert overlapping["fingerprint"] == plain["fingerprint"] and overlapping["notes"] == []
    assert "in windows of 64 with stride 16\n" in as_text(overlapping)


def test_windows_of_a_model_without_a_run_fit_its_positions(evaluate, work):
    """512 tokens, the default of block_size, are more than its 128 positions."""
    found = evaluate(work.model, "--eval_dataset", work.documents, "--stride", 32)
    assert found["windows"] == {"max_length": 128, "stride": 32, "least_context": 96}
    shorter = evaluate(work.lora, "--max_length", 32)
    assert shorter["windows"]["stride"] == 32, "no overlap, unless a stride asks for it"
    assert shorter["tokens"] == evaluate(work.lora)["tokens"]


def test_documents_that_stream_slide_too(evaluate, work):
    words = (work.model, "--eval_dataset", work.documents, "--dataset", work.documents, "--stride", 32)
    assert evaluate(*words, "--streaming", "true")["model"] == evaluate(*words)["model"]


# -- base, adapter, merged ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_base_and_merged_beside_the_adapter(evaluate, work, kind):
    report = evaluate(getattr(work, kind), "--against", "base", "merged", "--mixed_precision", "no")
    base, merged = report["against"]
    assert [model["word"] for model in (report["model"], base, merged)] == [None, "base", "merged"]
    assert base["difference"]["verdict"] == "lower" and "merge" not in base
    assert (
        merged["merge"]["is_within_tolerance"] and merged["merge"]["logit_difference"] <= merged["merge"]["tolerance"]
    )
    value = report["model"]["bpt"]["value"]
    assert merged["bpt"]["value"] == pytest.approx(value, abs=2e-3) != base["bpt"]["value"]
    assert merged["difference"]["value"] == pytest.approx(value - merged["bpt"]["value"], abs=1e-9)


def test_merged_in_float32_is_the_adapter_to_four_digits(evaluate, work):
    report = evaluate(work.lora, "--against", "merged", "--mixed_precision", "no", "--max_eval_documents", 10)
    (merged,) = report["against"]
    assert merged["merge"]["dtype"] == "float32" and merged["merge"]["tolerance"] == 1e-5
    assert merged["difference"]["verdict"] == "equal to four digits"
    text = as_text(report)
    assert "merged in float32: its logits differ from the adapter's by" in text and "within the tolerance of" in text
    assert report["notes"] == []


def test_a_merge_is_neither_better_nor_worse_than_its_adapter(evaluate, work):
    """In bf16 its bits are apart from the adapter's: the interval of one document after the other is not around 0."""
    merge.main([str(work.lora), "--dtype", "bfloat16", "--output", str(work.folder / "merged")])
    words = ("--mixed_precision", "no", "--confidence", 0.01)
    report = evaluate(work.lora, "--against", "merged", work.folder / "merged", "--merge_dtype", "bfloat16", *words)
    in_memory, on_disk = (model["difference"] for model in report["against"])
    assert in_memory["verdict"] == on_disk["verdict"] in ("lower by rounding", "higher by rounding")
    back = evaluate(work.folder / "merged", "--against", work.lora, work.model, *words)["against"]
    assert back[0]["difference"]["verdict"].endswith("by rounding")
    assert back[1]["difference"]["verdict"] == "lower"


def test_a_merge_without_numbers_is_refused(refused, work, monkeypatch):
    monkeypatch.setattr("scu_trainer.cli.evaluation.scoring.check_merge", lambda *models: math.nan)
    message = refused(work.lora, "--against", "merged", "--merge_dtype", "float16")
    assert message == "merged in float16 the model gives logits that are not finite; use --merge_dtype float32"


def test_a_merge_outside_of_its_tolerance_is_pointed_out(evaluate, work, monkeypatch):
    monkeypatch.setattr("scu_trainer.models.merge.MERGE_TOLERANCE", {"float32": 0.0, "bfloat16": 1e-9})
    words = ("--against", "merged", "--merge_dtype", "bfloat16", "--mixed_precision", "no")
    report = evaluate(work.lora, *words)
    assert report["against"][0]["merge"]["dtype"] == "bfloat16"
    assert not report["against"][0]["merge"]["is_within_tolerance"]
    assert "farther from the adapter's than the tolerance" in report["notes"][0]
    assert "ABOVE the tolerance of 1e-09" in as_text(report)


# -- tasks of lm-evaluation-harness ------------------------------------------------------------------------------------


def test_tasks_of_base_adapter_and_merged_side_by_side(evaluate, work):
    tasks = ("--tasks", "first_or_second", "--include_path", work.tasks, "--mixed_precision", "no")
    report = evaluate(work.lora, "--against", "base", "merged", *tasks)
    adapter, base, merged = report["tasks"]["results"]
    assert [row["word"] for row in (adapter, base, merged)] == [None, "base", "merged"]
    for row in (adapter, base, merged):
        assert (row["task"], row["metric"], row["questions"], row["num_fewshot"]) == ("first_or_second", "acc", 40, 0)
        share = row["value"]
        assert row["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (QUESTIONS - 1)))
        assert row["stderr_method"] == "standard deviation / sqrt(questions)"
        assert row["high"] - row["value"] == pytest.approx(1.959964 * row["stderr"], rel=1e-6)
    assert merged["value"] == adapter["value"] == pytest.approx(right_answers(work.lora, work.questions) / QUESTIONS)
    assert base["difference"]["value"] == pytest.approx(adapter["value"] - base["value"])
    assert merged["difference"]["verdict"] == "equal to four digits" and report["tasks"]["harness"] == "lm_eval 0.4.13"
    text = as_text(report).splitlines()
    assert "first_or_second: acc, 40 questions, 0-shot" in text
    assert report["documents"] == 12 and report["model"]["bpt"]["value"] > 0


def right_answers(run: Path, questions: Path) -> int:
    """Questions whose right answer has the larger log-likelihood after the text and a blank, one at a time."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    likely = {answer: likelihoods(run, [row["text"] for row in rows], answer) for answer in ("list", "function")}
    said = [int(second > first) for first, second in zip(likely["list"], likely["function"], strict=True)]
    return sum(answer == row["answer"] for answer, row in zip(said, rows, strict=True))


def likelihoods(run: Path, texts: list[str], answer: str, dtype=None) -> list[float]:
    """Nats of ``answer`` after each text; dtype: of autocast."""
    settings = ModelSettings(model_name_or_path=str(run))
    model, tokenizer = load_for_evaluation(str(run), settings), load_tokenizer(settings)
    found = []
    for text in texts:
        start, ids = len(tokenizer(text)["input_ids"]), tokenizer(f"{text} {answer}", return_tensors="pt")["input_ids"]
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(ids[:, :-1]).logits[0].float().log_softmax(-1)
        found.append(float(logits[range(start - 1, ids.shape[1] - 1), ids[0, start:]].sum()))
    return found


def test_half_precision_is_for_the_model_not_for_its_likelihoods(evaluate, work):
    """Logarithms of probabilities in bfloat16 have two to three digits."""
    words = ("--tasks", "surprise", "--include_path", work.tasks, "--mixed_precision", "bf16", "--batch_size", 1)
    (row,) = evaluate(work.model, *words, "--resamples", 200)["tasks"]["results"]
    texts = [json.loads(line)["text"] for line in work.questions.read_text().splitlines()]
    nats = np.array(likelihoods(work.model, texts, "list", torch.bfloat16))
    assert row["value"] == pytest.approx(math.exp(-nats.mean()), rel=1e-4)
    assert row["stderr_method"] == "bootstrap over questions" and row["is_higher_better"] is False
    assert row["stderr"] == pytest.approx(row["value"] * nats.std() / math.sqrt(QUESTIONS), rel=0.2)


def test_a_model_without_documents_is_asked_its_tasks_only(evaluate, work):
    words = ("--tasks", "first_or_second", "--include_path", work.tasks, "--limit", 4, "--num_fewshot", 2)
    report = evaluate(work.model, *words)
    (row,) = report["tasks"]["results"]
    assert (row["questions"], row["num_fewshot"], report["tasks"]["limit"]) == (4, 2, 4.0)
    assert report["documents"] is None and report["model"] == {"name": str(work.model), "word": None}
    assert report["notes"] == ["first_or_second asked 4 questions: too few to trust an interval"]
    assert "limit 4: only a part of the questions" in as_text(report)


def test_questions_that_the_harness_cuts_are_named(evaluate, work):
    words = ("--tasks", "first_or_second", "--include_path", work.tasks, "--limit", 4, "--max_length", 2)
    notes = evaluate(work.model, *words)["notes"]
    assert re.search(
        "was given at most 2 tokens at once: lm_eval cut off the beginning of longer texts, [1-9]", notes[0]
    )


def test_an_adapter_without_its_run_is_asked_its_tasks_beside_base_and_merged(evaluate, work, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(work.lora / name, tmp_path)
    words = ("--tasks", "first_or_second", "--include_path", work.tasks, "--limit", 0.25, "--batch_size", 1)
    report = evaluate(tmp_path, "--against", "base", "merged", *words)
    assert [row["questions"] for row in report["tasks"]["results"]] == [QUESTIONS // 4] * 3
    merge = report["against"][1]["merge"]
    assert 0.0 < merge["logit_difference"] <= merge["tolerance"] and "bpt" not in report["against"][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "first_or_secund"], "has no task 'first_or_secund'; did you mean first_or_second"),
        (["--tasks", "first_or_second first_or_secund"], "has no task 'first_or_secund'; did you mean"),
        (["--tasks", "without_data"], "the data of task without_data cannot be read: "),
        (["--tasks", ","], "tasks is empty"),
        (["--limit", "3"], "limit is for tasks of lm-evaluation-harness; add --tasks NAME"),
        (["--limit", "3"], "max_eval_documents limits the held-out documents"),
        (["--batch_size", "3"], "batch_tokens is the size of a forward pass over held-out data"),
        (["--tasks", "first_or_second", "--limit", "2.5"], "limit is 2.5; give a whole number of questions"),
        (
            ["--tasks", "first_or_second", "--stride", "9"],
            "stride is for held-out documents, but you asked only for tasks",
        ),
        (["--tasks", "first_or_second", "--include_path", "/gone"], "include_path '/gone' is not a folder"),
    ],
)
def test_tasks_that_cannot_be_asked(refused, work, words, message, monkeypatch):
    only_own_tasks(monkeypatch)
    included = [] if "--include_path" in words or "--tasks" not in words else ["--include_path", work.tasks]
    assert message in refused(work.model, *words, *included)


@pytest.mark.parametrize(
    ("part", "other", "message"),
    [
        (
            "{{{{text}}}}",
            "{{{{gone}}}}",
            "lm_eval cannot load task first_or_second: UndefinedError: 'gone' is undefined;",
        ),
        ("test_split: test", "test_split: gone", "lm_eval cannot load task first_or_second: KeyError: 'gone'; if"),
        ("aggregation: mean", "aggregation: gone", "does not know the aggregation of acc in task first_or_second"),
        (
            "output_type: multiple_choice",
            "output_type: generate_until",
            "first_or_second generates up to 256 tokens, but the model has room for 128 including the question; lower "
            "max_gen_toks",
        ),
    ],
)
def test_a_task_file_with_a_slip_is_no_traceback(refused, work, tmp_path, part, other, message):
    assert part in TASK
    (tmp_path / "task.yaml").write_text(TASK.replace(part, other).format(questions=work.questions))
    assert message in refused(work.model, "--tasks", "first_or_second", "--include_path", tmp_path)


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 256), ({"max_completion_tokens": 64}, 64), ({"max_gen_toks": None, "max_new_tokens": 9, "max_tokens": 5}, 9)],
)
def test_tokens_that_a_task_generates_are_read_as_the_harness_reads_them(options, most):
    utils = pytest.importorskip("lm_eval.models.utils")
    assert utils.normalize_gen_kwargs(options)["max_gen_toks"] == most
    config = SimpleNamespace(generation_kwargs=options)
    task = SimpleNamespace(OUTPUT_TYPE="generate_until", task_name="told", config=config)
    assert _generated_token_limit(task) == {"told": most}


def only_own_tasks(monkeypatch) -> None:
    """Reading the many thousand tasks that come with the package takes seconds."""
    from lm_eval import tasks

    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: whole(**{**options, "include_defaults": False}))


def test_a_chat_template_that_is_not_there(refused, work, tmp_path):
    model = Path(shutil.copytree(work.model, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    words = ("--tasks", "first_or_second", "--include_path", work.tasks, "--apply_chat_template", "true")
    assert f"the tokenizer of {model} has no chat template" in refused(model, *words)


def test_questions_in_the_chat_template(evaluate, work):
    words = (work.model, "--tasks", "first_or_second", "--include_path", work.tasks, "--batch_size", 3)
    plain, chat = evaluate(*words), evaluate(*words, "--apply_chat_template", "true")
    assert chat["tasks"]["apply_chat_template"] and not plain["tasks"]["apply_chat_template"]
    assert chat["tasks"]["results"][0]["questions"] == QUESTIONS


def test_the_package_is_named_where_it_is_missing(refused, work, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert "pip install 'scu-trainer[lm-eval]'" in refused(work.model, "--tasks", "arc_easy")


def figure(values: list[float]) -> TaskMetric:
    mean = float(np.mean(values)) if values else 0.5
    return TaskMetric("t", "acc", "none", mean, 0.1, "sd", len(values), 0, 1, True, np.array(values))


def test_two_models_are_compared_question_by_question():
    """Each has half of the questions right, and the second one just the others: a paired interval knows how far the
    difference of two such shares can be from nothing."""
    first, second = figure([1.0, 0.0] * 50), figure([0.0, 1.0] * 50)
    how = {"resamples": 500, "confidence": 0.95, "seed": 0}
    difference = paired_difference(first, second, how)
    assert difference.value == 0.0 and 0.3 < difference.high - difference.low < 0.5, "2 * 1.96 * 2 * 0.5 / 10 is 0.39"
    same = paired_difference(first, first, how)
    assert (same.low, same.high) == (0.0, 0.0)
    assert paired_difference(first, figure([]), how) is None, "a metric that is no mean"


def test_a_task_tells_rounding_from_learning_too():
    """Of a merge within its tolerance; beyond it the merge is another model."""
    answers = [EvaluationResult(figures=(figure([1.0, 0.0] * 10),))]
    answers += [
        EvaluationResult(merge={"is_within_tolerance": it}, figures=(figure([1.0] * 20),)) for it in (True, False)
    ]
    subjects = [SimpleNamespace(name="run", word=None, source="run")] * 3
    options = SimpleNamespace(confidence=0.95, how={"resamples": 200, "confidence": 0.95, "seed": 0})
    asked = SimpleNamespace(names="t", limit=None, apply_chat_template=False)
    rows = tasks_report(subjects, answers, asked, options)["results"]
    assert [row["difference"]["verdict"] for row in rows[1:]] == ["lower by rounding", "lower"]


def test_one_question_gives_no_interval_of_a_difference():
    answers = [EvaluationResult(figures=(figure([value]),)) for value in (1.0, 0.0)]
    options = SimpleNamespace(confidence=0.95, how={"resamples": 200, "confidence": 0.95, "seed": 0})
    asked = SimpleNamespace(names="t", limit=1, apply_chat_template=False)
    subjects = [SimpleNamespace(name="run", word=None, source="run")] * 2
    found = tasks_report(subjects, answers, asked, options)["results"][1]["difference"]
    assert (found["value"], found["low"], found["high"]) == (1.0, None, None)
    assert found["verdict"] == "one question cannot tell"


def test_questions_that_all_came_out_alike_give_no_interval():
    """A standard error of 0 would claim that no other question could come out otherwise."""
    assert figure([1.0, 0.0]).interval(0.95).low == pytest.approx(0.5 - 1.959964 * 0.1)
    assert replace(figure([1.0, 1.0]), stderr=0.0).interval(0.95) is None
    assert replace(figure([1.0, 1.0]), stderr=None).interval(0.95) is None
