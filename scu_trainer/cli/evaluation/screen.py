"""The report of ``scu-trainer eval`` as text of 80 columns, except for long names, which are on lines of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from scu_trainer.figures import count_text

NAME_COLUMNS = 16
TASK_COLUMNS = 2 + len("minus ") + NAME_COLUMNS


def as_text(report: dict[str, Any]) -> str:
    models = [report["model"], *report["against"]]
    labels = _labels(models)
    lines = [*_header(report)]
    if "bpt" in models[0]:
        lines += ["", *_table(report, models, labels)]
        lines += ["", *_differences(report, labels)] if len(models) > 1 else []
    lines += ["", *_merges(models, labels)]
    if report["tasks"] is not None:
        lines += ["", *_tasks(report["tasks"], labels)]
    lines += ["", *_legend(models, labels), *(f"note: {note}" for note in report["notes"])]
    return "\n".join(line for number, line in enumerate(lines) if line or (number and lines[number - 1])).strip("\n")


def _labels(models: list[dict[str, Any]]) -> list[str]:
    """Return short, distinct names: the words base and merged, or the last parts of a path, numbered if these agree."""
    labels: list[str] = []
    for model in models:
        label = model["word"] or _short_name(model["name"])
        labels.append(label if label not in labels else f"{label[: NAME_COLUMNS - 3]} {len(labels) + 1}")
    return labels


def _legend(models: list[dict[str, Any]], labels: list[str]) -> Iterator[str]:
    home = f"{Path.home()}/"
    for model, label in zip(models, labels, strict=True):
        name = model["name"]
        if label != name and "merge" not in model:
            yield f"{label}: ~/{name.removeprefix(home)}" if name.startswith(home) else f"{label}: {name}"


def _short_name(name: str) -> str:
    if len(name) <= NAME_COLUMNS:
        return name
    *_, parent, last = ["", *name.rstrip("/").split("/")]
    last_two = f"{parent}/{last}"
    return last_two if parent and len(last_two) <= NAME_COLUMNS else last[:NAME_COLUMNS]


# -- held-out documents ------------------------------------------------------------------------------------------------


def _header(report: dict[str, Any]) -> Iterator[str]:
    if report["documents"] is not None:
        yield f"held out: {count_text(report['documents'], report['item'])} of {report['dataset']}"
        windows = report["windows"]
        if windows is not None:
            yield (
                f"{report['tokens']:,} {report['unit']}s predicted, in windows of {windows['max_length']} with stride "
                f"{windows['stride']}"
            )
    if report["mixed_precision"] != "no":
        yield f"computed in {report['mixed_precision']} autocast"


def _table(report: dict[str, Any], models: list[dict[str, Any]], labels: list[str]) -> Iterator[str]:
    figures = [(name, title) for name, title in _column_titles(report).items() if name in models[0]]
    level = f"{100 * models[0]['bpt']['confidence']:g} % interval"
    yield _row("", *(word for _, title in figures for word in (title, level)))
    for model, label in zip(models, labels, strict=True):
        yield _row(label, *(word for name, _ in figures for word in _value_and_range(model[name], name)))
    for model, label in zip(models, labels, strict=True):
        if "report_exact" in model:
            (exact, exact_range), (bits, bits_range) = (
                _value_and_range(model[f"report_{name}"], "") for name in ("exact", "bpt")
            )
            yield f"reports of {label}: {exact} word for word ({exact_range}), {bits} bits/word ({bits_range})"
        if "sources" in model:
            yield from ("", f"{label} by source, bits/{report['unit']}:")
            width = max(NAME_COLUMNS, *map(len, model["sources"]))
            for name, source in model["sources"].items():
                row = _row(name, *_value_and_range(source["bpt"], "bpt"), width=width)
                yield f"{row}  {source['documents']:,} documents, {source['tokens']:,} tokens"


def _column_titles(report: dict[str, Any]) -> dict[str, str]:
    return {"accuracy": "accuracy", "bpt": f"bits/{report['unit']}", "perplexity": "perplexity"}


def _row(label: str, value: str, bounds: str, *second: str, width: int = NAME_COLUMNS) -> str:
    line = f"{label:<{width}} {value:>10}  {bounds:^18}"
    return (line + (f"  {second[0]:>10}  {second[1]:^18}" if second else "")).rstrip()


def _value_and_range(interval: dict[str, Any], name: str) -> tuple[str, str]:
    shown = "#.5g" if name == "perplexity" else ".4f"
    if interval["value"] is None:
        return "too large", _range(interval, shown)
    return f"{interval['value']:{shown}}".rstrip("."), _range(interval, shown)


def _range(interval: dict[str, Any], shown: str = ".4f") -> str:
    if interval["low"] is None or interval["high"] is None:
        return "none"
    return " to ".join(f"{interval[side]:{shown}}".rstrip(".") for side in ("low", "high"))


def _differences(report: dict[str, Any], labels: list[str]) -> Iterator[str]:
    name = "accuracy" if "accuracy" in report["model"] else "bpt"
    level = f"{100 * report['model']['bpt']['confidence']:g} % interval"
    yield f"{labels[0]} minus the other, on the same {report['item']}s:"
    yield f"{_row('', _column_titles(report)[name], level):<{NAME_COLUMNS + 31}}  verdict on {labels[0]}"
    for other, label in zip(report["against"], labels[1:], strict=True):
        difference = other["difference"]
        yield _verdict_row(
            label, difference, _better_or_worse(difference["verdict"], is_higher_better=name == "accuracy")
        )


def _verdict_row(label: str, difference: dict[str, Any], verdict: str, width: int = NAME_COLUMNS) -> str:
    return f"{label:<{width}} {difference['value']:>+10.4f}  {_range(difference, '+.4f'):^18}  {verdict}"


def _better_or_worse(verdict: str, is_higher_better: Optional[bool]) -> str:
    if verdict not in ("lower", "higher") or is_higher_better is None:
        return verdict
    return f"{verdict}: {'better' if (verdict == 'higher') == is_higher_better else 'worse'}"


def _merges(models: list[dict[str, Any]], labels: list[str]) -> list[str]:
    lines = []
    for model, label in zip(models, labels, strict=True):
        if "merge" in model:
            merge = model["merge"]
            relation = "within" if merge["is_within_tolerance"] else "ABOVE"
            lines += [
                f"{label} in {merge['dtype']}: its logits differ from the adapter's by {merge['logit_difference']:.1e}",
                f"of the largest, {relation} the tolerance of {merge['tolerance']:g}",
            ]
    return lines


# -- tasks of lm-evaluation-harness ------------------------------------------------------------------------------------


def _tasks(tasks: dict[str, Any], labels: list[str]) -> Iterator[str]:
    yield f"tasks of {tasks['harness']}; {tasks['interval']}"
    if tasks["limit"] is not None:
        yield f"limit {tasks['limit']:g}: only a part of the questions, so these are not the results of the tasks"
    keys = dict.fromkeys((row["task"], row["metric"], row["filter"]) for row in tasks["results"])
    for key in keys:
        rows = [row for row in tasks["results"] if (row["task"], row["metric"], row["filter"]) == key]
        yield from _task_rows(rows, labels)


def _task_rows(rows: list[dict[str, Any]], labels: list[str]) -> Iterator[str]:
    """Yield a row for each model, in their order."""
    first = rows[0]
    filtered = "" if first["filter"] == "none" else f", filter {first['filter']}"
    questions = "" if first["questions"] is None else f", {count_text(first['questions'], 'question')}"
    shots = "" if first["num_fewshot"] is None else f", {first['num_fewshot']}-shot"
    yield f"{first['task']}: {first['metric']}{filtered}{questions}{shots}"
    if first["stderr_method"] is not None:
        yield f"  stderr: {first['stderr_method']}"
    for row, label in zip(rows, labels, strict=True):
        yield _row(f"  {label}", f"{row['value']:.4f}", _range(row), width=TASK_COLUMNS)
    for row, label in zip(rows[1:], labels[1:], strict=True):
        if "difference" in row:
            verdict = _better_or_worse(row["difference"]["verdict"], row["is_higher_better"])
            yield _verdict_row(f"  minus {label}", row["difference"], verdict, width=TASK_COLUMNS)
