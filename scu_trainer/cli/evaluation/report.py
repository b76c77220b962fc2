"""Builds the report of an evaluation, as JSON values: figures with intervals, paired differences, and verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.evaluation.options import EvalOptions, HarnessOptions
from scu_trainer.cli.evaluation.scoring import EvaluationRequest, EvaluationResult
from scu_trainer.cli.origin import is_merged_from, lost_run_message
from scu_trainer.cli.subjects import Subject, may_have_learned, own_split
from scu_trainer.figures import count_text, perplexity
from scu_trainer.hardware.probe import installed_version

if TYPE_CHECKING:
    from scu_trainer.train.evaluation.harness import TaskMetric
    from scu_trainer.train.evaluation.scoring import BootstrapInterval, DocumentScores

MAY_HAVE_LEARNED = "it may have learned some of these documents"

FEW_DOCUMENTS = 10
"""With fewer documents, the interval of a percentile bootstrap is clearly too narrow."""

FEW_QUESTIONS = 30
"""With fewer questions, the normal approximation of an accuracy is poor."""

ROUNDING = 5e-5
"""Half a unit of the last digit that is printed."""

EQUAL = "equal to four digits"


def verdict(difference: BootstrapInterval, count: int, item: str = "document") -> str:
    """Return the verdict on the model. ``difference``: model minus other, over ``count`` documents or questions."""
    if count < 2:
        return f"one {item} cannot tell"
    if max(abs(difference.low), abs(difference.high)) < ROUNDING:
        return EQUAL
    if difference.high < 0:
        return "lower"
    return "higher" if difference.low > 0 else "no difference found"


# -- held-out documents ------------------------------------------------------------------------------------------------


def held_out_report(request: EvaluationRequest, scores: DocumentScores) -> dict[str, Any]:
    """Return what was scored, and how. ``scores``: the scores of any one of the models."""
    settings = request.settings
    return {
        "item": request.task.item,
        "unit": request.task.unit,
        "dataset": settings.eval_dataset or settings.shown_dataset,
        "fingerprint": request.data.fingerprint,
        "split_seed": request.seed,
        "documents": len(scores.tokens),
        "tokens": int(scores.tokens.sum()),
        "windows": _windows(request),
    }


def _windows(request: EvaluationRequest) -> Optional[dict[str, int]]:
    """Return the windows that were scored; None for rows that are not text."""
    from scu_trainer.train.evaluation.sliding import Windows

    if request.task.unit == "label":
        return None
    size = request.settings.block_size
    windows = request.windows or Windows(size, size)
    return {**asdict(windows), "least_context": windows.least_context}


def models_report(
    subjects: list[Subject], outcomes: list[EvaluationResult], options: EvalOptions, data: Any
) -> dict[str, Any]:
    """Return the figures of the first subject under ``model``, and those of the others under ``against``, each with its
    difference, model minus other. ``data``: the held-out rows; for a mixture, each model also has figures by source."""
    rows = [_model_row(subject, result, options, data) for subject, result in zip(subjects, outcomes, strict=True)]
    for row, subject, result in zip(rows[1:], subjects[1:], outcomes[1:], strict=True):
        if result.scores is not None:
            row["difference"] = _difference(result.scores, outcomes[0].scores, options)
            _mark_rounding([row], subjects[0], subject, result)
    return {"model": rows[0], "against": rows[1:]}


def _mark_rounding(rows: list[dict[str, Any]], model: Subject, other: Subject, result: EvaluationResult) -> None:
    """Mark verdicts of ``rows`` that come from rounding. A merged model has the update of its adapter, so a difference
    between these two is due to rounding, and neither is better trained. ``result``: the result of ``other``."""
    differing = [row["difference"] for row in rows if row.get("difference", {}).get("verdict") in ("lower", "higher")]
    if not differing:
        return
    if result.merge is not None:  # measured just now
        is_rounding = result.merge["is_within_tolerance"]
    else:
        first, second = Path(model.source), Path(other.source)
        is_rounding = is_merged_from(second, first) or is_merged_from(first, second)
    for difference in differing if is_rounding else ():
        difference["verdict"] += " by rounding"


def _model_row(subject: Subject, result: EvaluationResult, options: EvalOptions, data: Any) -> dict[str, Any]:
    from scu_trainer.train.evaluation.scoring import bootstrap_accuracy, bootstrap_bpt, bootstrap_exact

    scores, row = result.scores, {"name": subject.name, "word": subject.word}
    if result.merge is not None:
        row["merge"] = result.merge
    if scores is None:
        return row
    row["bpt"] = bootstrap_bpt(scores, **options.how).over(scores)
    if scores.correct is not None:
        row["accuracy"] = bootstrap_accuracy(scores, **options.how).over(scores)
        if scores.reports is not None:
            row["report_exact"] = bootstrap_exact(scores.reports, **options.how).over(scores.reports)
            row["report_bpt"] = bootstrap_bpt(scores.reports, **options.how).over(scores.reports)
        return row
    bits = row["bpt"]
    powers = {name: perplexity(bits[name]) for name in ("value", "low", "high")}
    sources = _by_source(scores, options, data)
    return {**row, "perplexity": {**powers, "confidence": options.confidence}, **sources}


def _by_source(scores: DocumentScores, options: EvalOptions, data: Any) -> dict[str, Any]:
    """Return the figures of each source of a mixture; an empty dict for a single dataset."""
    from scu_trainer.train.evaluation.by_source import scores_by_source
    from scu_trainer.train.evaluation.scoring import bootstrap_bpt

    sources = {
        name: {
            "documents": len(part.tokens),
            "tokens": int(part.tokens.sum()),
            "bpt": bootstrap_bpt(part, **options.how).over(part),
        }
        for name, part in scores_by_source(scores, data).items()
    }
    return {"sources": sources} if sources else {}


def _difference(other: DocumentScores, model: DocumentScores, options: EvalOptions) -> dict[str, Any]:
    from scu_trainer.train.evaluation.scoring import bootstrap_accuracy_difference, bootstrap_difference

    is_classifier = model.correct is not None
    interval = (bootstrap_accuracy_difference if is_classifier else bootstrap_difference)(other, model, **options.how)
    return {**interval.over(model), "verdict": verdict(interval, len(model.tokens))}


# -- tasks of lm-evaluation-harness ------------------------------------------------------------------------------------


def tasks_report(
    subjects: list[Subject], outcomes: list[EvaluationResult], harness_options: HarnessOptions, options: EvalOptions
) -> Any:
    """Return the options of the harness, and a row per task, metric and model."""
    first = {figure.key: figure for figure in outcomes[0].figures}
    results = []
    for number, (subject, result) in enumerate(zip(subjects, outcomes, strict=True)):
        others = {} if number == 0 else first
        rows = [_task_row(subject, figure, others.get(figure.key), options) for figure in result.figures]
        _mark_rounding(rows, subjects[0], subject, result)
        results += rows
    return {
        "harness": f"lm_eval {installed_version('lm_eval')}",
        "names": harness_options.names,
        "limit": harness_options.limit,
        "apply_chat_template": harness_options.apply_chat_template,
        "interval": "value +- normal quantile x stderr of lm_eval",
        "results": results,
    }


def _task_row(
    subject: Subject, figure: TaskMetric, model: Optional[TaskMetric], options: EvalOptions
) -> dict[str, Any]:
    """Return a row for a figure. ``model``: the figure of RUN_OR_MODEL to compare with; None for its own row."""
    from scu_trainer.train.evaluation.harness import paired_difference

    interval = figure.interval(options.confidence)
    names = ("task", "metric", "filter", "value", "stderr", "stderr_method")
    row = {"name": subject.name, "word": subject.word, **{name: getattr(figure, name) for name in names}}
    row |= {"low": None, "high": None} if interval is None else {"low": interval.low, "high": interval.high}
    row["confidence"] = options.confidence
    row |= {name: getattr(figure, name) for name in ("questions", "num_fewshot", "version", "is_higher_better")}
    difference = None if model is None else paired_difference(figure, model, options.how)
    if difference is not None:
        bounds = {"low": None, "high": None} if len(figure.per_question) < 2 else {}
        conclusion = verdict(difference, len(figure.per_question), "question")
        row["difference"] = {**asdict(difference), **bounds, "verdict": conclusion}
    return row


# -- notes -------------------------------------------------------------------------------------------------------------


def notes_of(
    request: EvaluationRequest, subjects: list[Subject], outcomes: list[EvaluationResult], typed: dict[str, Any]
) -> list[str]:
    """Return what a reader must know in addition to the figures."""
    notes = [
        f"{subject.name}: its logits are farther from the adapter's than the tolerance; do not use it unchecked"
        for subject, result in zip(subjects, outcomes, strict=True)
        if result.merge is not None and not result.merge["is_within_tolerance"]
    ]
    if request.settings is not None:
        notes += [*_notes_on_data(request.data, request.task.item), *_notes_on_training(subjects, request)]
        owner = request.owner
        if owner.run and not typed and request.data.fingerprint != owner.run["data"]["fingerprint"]:
            notes.append(
                f"the data have a different fingerprint than when {owner.name} was trained: {MAY_HAVE_LEARNED}"
            )
    return [*notes, *dict.fromkeys(_notes_on_figures(subjects, outcomes))]


def _notes_on_figures(subjects: list[Subject], outcomes: list[EvaluationResult]) -> Iterator[str]:
    for subject, result in zip(subjects, outcomes, strict=True):
        shown_name, (count, tokens) = subject.word or subject.name, result.cuts
        if count:
            times = count_text(count, "time")
            yield (
                f"{shown_name} was given at most {tokens} tokens at once: lm_eval cut off the beginning of longer "
                f"texts, {times}"
            )
        for figure in result.figures:
            if figure.questions is not None and figure.questions < FEW_QUESTIONS:
                yield f"{figure.task} asked {count_text(figure.questions, 'question')}: too few to trust an interval"
            if figure.stderr == 0.0:
                yield f"{figure.task}: every question gave {shown_name} the same {figure.metric}, so it has no interval"


def _notes_on_data(data: Any, item: str) -> list[str]:
    count, statistics = len(data.eval_documents) if item == "document" else len(data.eval), data.statistics
    notes = [] if count >= FEW_DOCUMENTS else [f"{count_text(count, item)} held out: too few to trust an interval"]
    if statistics.dropped:
        notes.append(f"left out while reading: {statistics.describe_dropped()}")
    return notes


def _notes_on_training(subjects: list[Subject], request: EvaluationRequest) -> list[str]:
    named = [subject for subject in subjects if subject.word is None]
    split = request.settings, request.seed, own_split(request.owner)
    suspects = [subject for subject in named if may_have_learned(subject, *split)]
    return [
        *(f"{s.name} was trained on another split: {MAY_HAVE_LEARNED}" for s in suspects),
        *(f"{lost}: {MAY_HAVE_LEARNED}" for lost in map(lost_run_message, named) if lost is not None),
        *(f"{s.name}: its weights are scored, not their moving averages ({s.averages})" for s in named if s.averages),
    ]
