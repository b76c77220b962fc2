"""Build the report page for runs, or for a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from scu_trainer.figures import before_and_after, held_out_size
from scu_trainer.report.ablation import Comparison, comparison_plots, or_dash, result_rows
from scu_trainer.report.drawing import Plot
from scu_trainer.report.files import RunFiles
from scu_trainer.report.page import Drawing, Page, Section, Table, TextBlock
from scu_trainer.report.render import MOST_DISTINCT_LINES
from scu_trainer.report.run_plots import run_plots
from scu_trainer.report.settings_table import as_rows, changed, differences, hardware, repeat_command, repeat_yaml, show
from scu_trainer.report.words import key_figures, notes, warnings

STATE_STYLES = {
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
"""The style of the label of each state. All other states are bad ends."""

NOTICES = "Warnings and notices"
LONGEST_SAMPLE = 600
"""Most characters of a prompt, an answer or a reference that are shown."""
Sample = dict[str, Any]


def plots_of(subject: Sequence[RunFiles] | Comparison) -> list[Plot]:
    return comparison_plots(subject) if isinstance(subject, Comparison) else run_plots(subject)


def page_of(
    subject: Sequence[RunFiles] | Comparison, drawings: Sequence[Drawing], written: str, files: Sequence[Path],
    reload_s: Optional[float] = None,
) -> Page:  # fmt: skip
    """Build the page. ``written``: the date in the footer. ``files``: the configuration of each run, to repeat it."""
    if isinstance(subject, Comparison):
        return _comparison_page(subject, drawings, written, reload_s)
    many = len(subject) > 1
    title = " and ".join(run.name for run in subject) if len(subject) < 4 else f"{len(subject)} runs"
    pills = [(f"{run.name}: {run.state}" if many else run.state, STATE_STYLES.get(run.state, "bad")) for run in subject]
    sections = [
        Section(
            "Key figures",
            [*_changes_tables(subject), *_different_data_warning(subject), Table(*_figures_table(subject))],
        ),
        *sample_sections(subject),
        *(Section(item.plot.title, [item]) for item in drawings),
        Section(NOTICES, _warning_blocks(subject)),
        Section("Settings", _settings_blocks(subject)),
        Section("Hardware and versions", _hardware_blocks(subject)),
        Section("Repeat it", _repeat_blocks(subject, files)),
    ]
    return Page(title, _lead_text(subject), pills, sections, written, reload_s)


def _lead_text(runs: Sequence[RunFiles]) -> str:
    if len(runs) > MOST_DISTINCT_LINES:
        return (
            f"Only {MOST_DISTINCT_LINES} runs can be told apart by colour and line style, so the plots name none; "
            "give fewer."
        )
    if len(runs) > 1:
        return "A run has the same colour and line style in all plots."
    return runs[0].detail


def _table_head(runs: Sequence[RunFiles], first: str) -> list[str]:
    return [first, *(run.name if len(runs) > 1 else "value" for run in runs)]


def _figures_table(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows of the key figures. For a single run the figures of the table before are left out; for
    several runs they are repeated here, side by side."""
    said = {row.what.strip() for row in before_and_after(runs[0].metrics)} if len(runs) == 1 else set()
    rows = as_rows([{k: v for k, v in key_figures(run) if k not in said} for run in runs])
    return _table_head(runs, "figure"), [row for row in rows if set(row[1:]) != {"-"}]


def _changes_tables(runs: Sequence[RunFiles]) -> list[Table]:
    """Return the table of scores before and after training, as a run prints it at its end."""
    many = len(runs) > 1
    rows = [[*([run.name] if many else []), *row] for run in runs for row in before_and_after(run.metrics)]
    head = [*(["run"] if many else []), "figure", "before", "after", "change (95 % interval)"]
    return [Table(head, rows)] if rows else []


def _different_data_warning(runs: Sequence[RunFiles]) -> list[TextBlock]:
    """Return a warning if runs were scored on different held-out data, because readers compare scores side by side."""
    scored = [run for run in runs if "held_out_tokens" in run.metrics]
    if len({held_out_size(run.metrics) for run in scored}) < 2:
        return []
    first, *others = (str(run.folder) for run in scored)
    command = shlex.join(["scu-trainer", "eval", first, "--against", *others, "--eval_dataset", "FILE"])
    return [
        TextBlock(
            "These runs were not scored on the same held-out data (or not on the same tokens of it), so their scores "
            f"cannot be compared. To compare them on data that none of them was trained on: {command}"
        )
    ]


def _warning_blocks(runs: Sequence[RunFiles]) -> list[Table | TextBlock]:
    many, blocks = len(runs) > 1, []
    rows = [[run.name, *row] if many else list(row) for run in runs for row in warnings(run)]
    if rows:
        blocks.append(Table([*(["run"] if many else []), "where", "what"], rows))
    else:
        blocks.append(TextBlock("None: no errors, no notices, no micro-batch changes, and preflight found nothing."))
    said = [f"{run.name}: {text}" if many else text for run in runs for text in notes(run)]
    return [*blocks, TextBlock("\n".join(said), True, "preflight notes")] if said else blocks


def _settings_blocks(runs: Sequence[RunFiles]) -> list[Table | TextBlock]:
    if len(runs) > 1:
        rows = differences(runs)
        if not rows:
            return [TextBlock("The runs have the same settings, data, code and versions.")]
        return [Table(_table_head(runs, "setting"), rows, "what differs between the runs")]
    run = runs[0]
    if not run.settings:
        return [TextBlock("The run has no training_config.json: its settings are not known.")]
    everything = TextBlock(
        "\n".join(f"{name}: {show(value)}" for name, value in run.settings.items()), True, "all settings"
    )
    rows = [list(row) for row in changed(run)]
    if not rows:
        return [TextBlock("The files of the run do not record the defaults of its version."), everything]
    return [Table(["setting", "value", "default"], rows, "what differs from the defaults"), everything]


def _hardware_blocks(runs: Sequence[RunFiles]) -> list[Table | TextBlock]:
    rows = as_rows([dict(hardware(run)) for run in runs])
    if not rows:
        return [TextBlock("The files do not record the hardware.")]
    return [Table(_table_head(runs, "part"), rows)]


def _repeat_blocks(runs: Sequence[RunFiles], files: Sequence[Path]) -> list[Table | TextBlock]:
    blocks: list[Table | TextBlock] = []
    for run, path in zip(runs, files, strict=True):
        text = repeat_yaml(run)
        if not text:
            blocks.append(TextBlock(f"{run.name} has no training_config.json, so it is not known how to repeat it."))
            continue
        blocks += [
            TextBlock(repeat_command(run, path), is_code=True),
            TextBlock(text, True, f"{path.name}: the settings of {run.name}"),
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
        Section("Results", [Table(*result_rows(found)), *(TextBlock(text) for text in content["notes"])]),
        *(Section(item.plot.title, [item]) for item in drawings),
        Section("Arms", [_arms_table(found)]),
        Section("Runs", [_runs_table(found)]),
        Section("Repeat it", [TextBlock(content["command"] or "comparison.json holds no command", is_code=True)]),
    ]
    return Page(f"Comparison {found.folder.name}", content["verdict"], pills, sections, written, reload_s)


def _arms_table(found: Comparison) -> Table:
    rows = [
        [
            arm["name"],
            arm["what"] or "-",
            ", ".join(f"{name}: {show(value)}" for name, value in arm["settings"].items()) or "-",
        ]
        for arm in found.content["arms"]
    ]
    return Table(["arm", "what it is", "settings"], rows)


def _runs_table(found: Comparison) -> Table:
    rows = []
    for run in found.content["runs"]:
        bits = or_dash(run["metrics"].get("held_out_bpt"), ".4f")
        rows.append([f"{run['arm']}, seed {run['seed']}", run["status"], bits, run["error"] or "-"])
    return Table(["run", "status", f"held-out bits per {found.unit}", "error"], rows)


# -- samples -----------------------------------------------------------------------------------------------------------


def sample_sections(runs: Sequence[RunFiles]) -> list[Section]:
    """Return the section with the samples, or [] if no run has any."""
    with_samples = [run for run in runs if run.samples]
    if not with_samples:
        return []
    blocks = _blocks_of_one_run(with_samples[0]) if len(runs) == 1 else [_table_of_runs(with_samples)]
    return [Section("Samples", blocks)]


def _blocks_of_one_run(run: RunFiles) -> list[Table | TextBlock]:
    first, last = run.samples[0], run.samples[-1]
    first_title = "before" if first.get("step") == 0 else f"step {first.get('step')}"
    last_title = f"step {last.get('step')}" if run.is_alive else f"after, step {last.get('step')}"
    table = _samples_table([first_title, last_title], [_by_prompt(row) for row in (first, last)], _by_prompt(last))
    in_between = run.samples[1:-1]
    if not in_between:
        return [table]
    lines = [f"step {row.get('step')}, {prompt!r}\n{_answer_text(_by_prompt(row), prompt)}\n"
             for prompt in _by_prompt(last) for row in in_between]  # fmt: skip
    return [table, TextBlock("\n".join(lines), True, "during training")]


def _table_of_runs(runs: Sequence[RunFiles]) -> Table:
    """Return a table with the last answers of each run to the prompts of the first run."""
    last = [_by_prompt(run.samples[-1]) for run in runs]
    return _samples_table([run.name for run in runs], last, last[0])


def _samples_table(titles: Sequence[str], answers: Sequence[dict[str, Sample]], asked: dict[str, Sample]) -> Table:
    """Return a table with a row for each prompt in ``asked``, and the answer of each column."""
    rows = [
        [_shortened(prompt), *(_answer_text(found, prompt) for found in answers), _shortened(sample.get("reference"))]
        for prompt, sample in asked.items()
    ]
    return Table(["prompt", *titles, "reference"], rows, keeps_lines=True)


def _by_prompt(row: dict[str, Any]) -> dict[str, Sample]:
    found = row.get("samples")
    if not isinstance(found, list):
        return {}
    return {str(sample.get("prompt")): sample for sample in found if isinstance(sample, dict)}


def _answer_text(found: dict[str, Sample], prompt: str) -> str:
    if prompt not in found:
        return "-"
    text = _shortened(found[prompt].get("answer"))
    return text if text.strip() else "(blank)"


def _shortened(text: Any) -> str:
    """Strip blank lines around a text, and cut a long one to its end, which is what an answer continues."""
    text = "" if text is None else str(text).strip("\n")
    return text if len(text) <= LONGEST_SAMPLE else f"... {text[-LONGEST_SAMPLE:]}"
