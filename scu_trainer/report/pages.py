"""Run directories, or a comparison -> the page about them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from scu_trainer.figures import before_and_after, scored_on
from scu_trainer.report import samples
from scu_trainer.report.ablation import Comparison, comparison_plots, or_dash, result_rows
from scu_trainer.report.drawing import Plot
from scu_trainer.report.files import RunFiles
from scu_trainer.report.page import Drawing, Page, Section, Table, Text
from scu_trainer.report.render import TOLD_APART
from scu_trainer.report.run_plots import run_plots
from scu_trainer.report.settings_table import as_rows, changed, differences, hardware, repeat_command, repeat_yaml, show
from scu_trainer.report.words import key_figures, notes, warnings

MOODS = {
    "finished": "good",
    "running": "live",
    "starting": "live",
    "stopping": "live",
    "queued": "calm",
    "stopped": "calm",
    "copied": "calm",
    "not there yet": "calm",
    "unknown": "calm",
}
"""Every other state is a bad end."""

NOTICES = "Warnings and notices"


def plots_of(subject: Sequence[RunFiles] | Comparison) -> list[Plot]:
    return comparison_plots(subject) if isinstance(subject, Comparison) else run_plots(subject)


def page_of(
    subject: Sequence[RunFiles] | Comparison, drawings: Sequence[Drawing], written: str, files: Sequence[Path],
    reload_s: Optional[float] = None,
) -> Page:  # fmt: skip
    """``written``: when, for the foot of the page. ``files``: the configuration of each run as a file, to repeat it."""
    if isinstance(subject, Comparison):
        return _comparison_page(subject, drawings, written, reload_s)
    many = len(subject) > 1
    title = " and ".join(run.name for run in subject) if len(subject) < 4 else f"{len(subject)} runs"
    pills = [(f"{run.name}: {run.state}" if many else run.state, MOODS.get(run.state, "bad")) for run in subject]
    sections = [
        Section("Key figures", [*_changes(subject), *_not_alike(subject), Table(*_figures(subject))]),
        *samples.sections(subject),
        *(Section(item.plot.title, [item]) for item in drawings),
        Section(NOTICES, _warnings(subject)),
        Section("Settings", _settings(subject)),
        Section("Hardware and versions", _hardware(subject)),
        Section("Repeat it", _repeat(subject, files)),
    ]
    return Page(title, _lead(subject), pills, sections, written, reload_s)


def _lead(runs: Sequence[RunFiles]) -> str:
    if len(runs) > TOLD_APART:
        return f"Only {TOLD_APART} runs can be told apart by colour and line style, so the plots name none; give fewer."
    if len(runs) > 1:
        return "A run has the same colour and line style in all plots."
    return runs[0].detail


def _head(runs: Sequence[RunFiles], first: str) -> list[str]:
    return [first, *(run.name if len(runs) > 1 else "value" for run in runs)]


def _figures(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]]]:
    """Without what the table before it says; runs beside each other have it here once more, to be compared."""
    said = {row.what.strip() for row in before_and_after(runs[0].metrics)} if len(runs) == 1 else set()
    rows = as_rows([{k: v for k, v in key_figures(run) if k not in said} for run in runs])
    return _head(runs, "figure"), [row for row in rows if set(row[1:]) != {"-"}]


def _changes(runs: Sequence[RunFiles]) -> list[Table]:
    """Before and after training, as the table at the end of a run has it."""
    many = len(runs) > 1
    rows = [[*([run.name] if many else []), *row] for run in runs for row in before_and_after(run.metrics)]
    head = [*(["run"] if many else []), "figure", "before", "after", "change (95 % interval)"]
    return [Table(head, rows)] if rows else []


def _not_alike(runs: Sequence[RunFiles]) -> list[Text]:
    """Scores beside each other are read as a comparison, which they are only on the same documents."""
    scored = [run for run in runs if "held_out_tokens" in run.metrics]
    if len({scored_on(run.metrics) for run in scored}) < 2:
        return []
    first, *others = (str(run.folder) for run in scored)
    command = shlex.join(["scu-trainer", "eval", first, "--against", *others, "--eval_dataset", "FILE"])
    return [
        Text(
            "These runs were not scored on the same held-out data (or not on the same tokens of them), so their scores "
            f"cannot be compared. With data that none of them has learned: {command}"
        )
    ]


def _warnings(runs: Sequence[RunFiles]) -> list[Table | Text]:
    many, blocks = len(runs) > 1, []
    rows = [[run.name, *row] if many else list(row) for run in runs for row in warnings(run)]
    if rows:
        blocks.append(Table([*(["run"] if many else []), "where", "what"], rows))
    else:
        blocks.append(Text("None: no errors, no notices, no micro-batch changes, and preflight found nothing."))
    said = [f"{run.name}: {text}" if many else text for run in runs for text in notes(run)]
    return [*blocks, Text("\n".join(said), True, "preflight notes")] if said else blocks


def _settings(runs: Sequence[RunFiles]) -> list[Table | Text]:
    if len(runs) > 1:
        rows = differences(runs)
        if not rows:
            return [Text("The runs have the same settings, data, code and versions.")]
        return [Table(_head(runs, "setting"), rows, "what differs between the runs")]
    run = runs[0]
    if not run.settings:
        return [Text("The run has no training_config.json: its settings are not known.")]
    everything = Text("\n".join(f"{name}: {show(value)}" for name, value in run.settings.items()), True, "all settings")
    rows = [list(row) for row in changed(run)]
    if not rows:
        return [Text("Its files do not say which defaults its version had."), everything]
    return [Table(["setting", "value", "default"], rows, "what differs from the defaults"), everything]


def _hardware(runs: Sequence[RunFiles]) -> list[Table | Text]:
    rows = as_rows([dict(hardware(run)) for run in runs])
    if not rows:
        return [Text("The files do not say what it ran on.")]
    return [Table(_head(runs, "part"), rows)]


def _repeat(runs: Sequence[RunFiles], files: Sequence[Path]) -> list[Table | Text]:
    blocks: list[Table | Text] = []
    for run, path in zip(runs, files, strict=True):
        text = repeat_yaml(run)
        if not text:
            blocks.append(Text(f"{run.name} has no training_config.json, so it is not known how to repeat it."))
            continue
        blocks += [
            Text(repeat_command(run, path), is_code=True),
            Text(text, True, f"{path.name}: the settings of {run.name}"),
        ]
    return blocks


# -- comparisons -------------------------------------------------------------------------------------------------------


def _comparison_page(found: Comparison, drawings: Sequence[Drawing], written: str, reload_s: Optional[float]) -> Page:
    content = found.content
    ended = [run for run in content["runs"] if run["status"] == "finished"]
    failed = [run for run in content["runs"] if run["status"] == "failed"]
    pills = [
        (
            f"{len(ended)} of {len(content['runs'])} runs finished",
            "good" if len(ended) == len(content["runs"]) else "calm",
        )
    ]
    pills += [(f"{len(failed)} failed", "bad")] if failed else []
    sections = [
        Section("Results", [Table(*result_rows(found)), *(Text(text) for text in content["notes"])]),
        *(Section(item.plot.title, [item]) for item in drawings),
        Section("Arms", [_arms(found)]),
        Section("Runs", [_runs(found)]),
        Section("Repeat it", [Text(content["command"] or "comparison.json holds no command", is_code=True)]),
    ]
    return Page(f"Comparison {found.folder.name}", content["verdict"], pills, sections, written, reload_s)


def _arms(found: Comparison) -> Table:
    rows = [
        [
            arm["name"],
            arm["what"] or "-",
            ", ".join(f"{name}: {show(value)}" for name, value in arm["settings"].items()) or "-",
        ]
        for arm in found.content["arms"]
    ]
    return Table(["arm", "what it is", "settings"], rows)


def _runs(found: Comparison) -> Table:
    rows = []
    for run in found.content["runs"]:
        bits = or_dash(run["metrics"].get("held_out_bpt"), ".4f")
        rows.append([f"{run['arm']}, seed {run['seed']}", run["status"], bits, run["error"] or "-"])
    return Table(["run", "status", f"held-out bits per {found.unit}", "error"], rows)
