"""Files of runs -> what is drawn: every figure where it belongs, every absence said, whatever is torn or missing."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from scu_trainer.report.ablation import Comparison, comparison_plots, read_comparison, result_rows
from scu_trainer.report.drawing import DASHES, Line, Panel, Plot, thinned
from scu_trainer.report.files import RunFiles, has_begun, is_run, read_run
from scu_trainer.report.page import Drawing, Table
from scu_trainer.report.pages import page_of
from scu_trainer.report.render import (
    AS_IT_STANDS,
    COLORS,
    HELD_PLACES,
    MOST_DISTINCT_LINES,
    NAMES,
    NARROW_IN,
    THEMES,
    WIDE_IN,
    figure,
    in_theme,
    png,
    svg,
)
from scu_trainer.report.run_plots import run_plots
from scu_trainer.report.settings_table import changed, differences, hardware, repeat_command, repeat_yaml
from scu_trainer.report.words import duration, key_figures, warnings
from scu_trainer.run_files import read_json, write_json
from tests.report.made_runs import make_comparison, make_run, make_two_and_a_study


def plots(*folders):
    runs = [read_run(folder, folder.name, "finished") for folder in folders]
    return {plot.key: plot for plot in run_plots(runs)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_two_and_a_study(folder)
    return folder


def lines(plot) -> dict:
    return {line.label: line for panel in plot.panels for line in panel.lines}


# -- plots -------------------------------------------------------------------------------------------------------------


def test_one_run_has_every_plot_with_its_own_figures(made):
    found = plots(made / "one")
    assert list(found) == ["loss", "s", "memory", "throughput", "curriculum", "rate"]
    assert all(plot.panels and not plot.notes for plot in found.values())
    held_out = found["loss"].panels[1].lines[0]
    assert held_out.x == [0, 20, 40, 60, 60] and held_out.y[0] == 7.48, "the score before training is the first point"
    assert held_out.y[-1] == 6.8, "that of the model that was kept is the last"
    logged = lines(found["loss"])["mean since the last log"]
    assert logged.y[-1] == pytest.approx(4.7 / 0.6931472), "nats as bits"
    assert found["s"].panels[0].levels[0].y == 0.1
    assert lines(found["memory"])["peak since the last point"].y[-1] == pytest.approx(3 + 60 / 1024)
    assert found["memory"].panels[0].levels[0].y == 4.0
    rows = lines(found["curriculum"])
    assert rows["rows trained"].y == [254, 250] and rows["skipped"].y == [4, 8]


def test_every_out_of_memory_is_marked(made):
    marks = lines(plots(made / "one")["memory"])["out of memory"]
    assert (marks.x, marks.y, marks.marker, marks.is_joined) == ([7, 9], [1024, 512], "x", False)


def test_runs_over_each_other_differ_in_colour_and_dash_and_keep_both(made):
    found = plots(made / "one", made / "off")
    for plot in found.values():
        for panel in plot.panels:
            looks = {line.label: (line.color, line.dash) for line in panel.lines if line.label}
            assert set(looks.items()) <= {("one", (0, 0)), ("off", (1, 1))}
    places = [(place % COLORS, place % len(DASHES)) for place in range(COLORS * len(DASHES))]
    assert len(set(places)) == len(places) == MOST_DISTINCT_LINES, "28 runs are distinguished"
    for count, named in ((MOST_DISTINCT_LINES, True), (MOST_DISTINCT_LINES + 1, False)):
        runs = [read_run(made / "one", f"run {number}") for number in range(count)]
        found = run_plots(runs)
        for plot in found:
            assert all(any(line.label for line in panel.lines) is named for panel in plot.panels)
        assert ("the plots name none" in page_of(runs, [*map(Drawing, found)], "", [made] * count).lead) is not named


def test_a_loop_that_was_off_says_so_in_place_of_its_plot(made):
    alone = plots(made / "off")
    assert alone["s"].panels == [] and alone["s"].notes == ["regularization was off (scu: false)"]
    assert alone["memory"].notes == ["the memory loop was off (memory_control: false)"]
    both = plots(made / "one", made / "off")
    assert both["s"].notes == ["off: regularization was off (scu: false)"] and both["s"].panels


def test_the_most_that_is_allowed_holds_to_the_end(made):
    allowed = lines(plots(made / "one")["memory"])["largest allowed"]
    assert (allowed.x, allowed.y) == ([7, 9, 30, 60], [1024, 512, 1024, 1024])


def test_runs_too_short_to_log_a_step_say_so(tmp_path):
    run = make_run(tmp_path / "run", logging_steps=100, scu=False, memory_control=True)
    (run / "memory_history.json").unlink()
    (run / "log_history.json").write_text('[{"step": 60, "train_runtime": 3.0}]')
    found = plots(run)
    for key in ("loss", "memory", "throughput", "rate"):
        assert found[key].notes == ["no training step was logged (logging_steps: 100)"], key


def test_a_run_that_was_never_evaluated_says_so(made, tmp_path):
    run = make_run(tmp_path / "run", eval_strategy="no")
    rows = [row for row in json.loads((run / "log_history.json").read_text()) if "loss" in row]
    (run / "log_history.json").write_text(json.dumps(rows))
    assert plots(run)["loss"].notes == [
        "scores of intermediate steps, because there was no evaluation during training (eval_strategy: no)"
    ]
    (run / "scu_metrics.json").unlink()  # with the scores before and after, which are drawn
    assert plots(run)["loss"].notes == ["no evaluation during training (eval_strategy: no)"]
    assert plots(made / "one", run)["loss"].notes == ["run: no evaluation during training (eval_strategy: no)"]
    names = [f"copy-{number}" for number in range(10)]
    copies = [shutil.copytree(run, tmp_path / name) for name in names]
    assert plots(*copies)["loss"].notes == [
        f"{', '.join(names[:8])} and 2 more: no evaluation during training (eval_strategy: no)"
    ]
    (run / "scu_history.json").unlink()
    (run / "log_history.json").write_text('[{"step": 20, "eval_bpt": 7.0}]')
    assert plots(run)["loss"].notes == ["no training step was logged"]


def test_units_of_different_tasks_are_all_named(made, tmp_path):
    pictures = make_run(tmp_path / "pictures", task="image-classification")
    (pictures / "scu_metrics.json").unlink()
    panels = plots(made / "one", pictures)["loss"].panels
    assert [panel.y_label for panel in panels] == ["bits per token or label"] * 2
    assert panels[1].title.startswith("Held-out documents and samples: a dot for each score")


def test_a_run_of_the_command_has_bits_also_without_scores_and_s(tmp_path):
    run = make_run(tmp_path / "run", scu=False)
    write_json(run / "log_history.json", [{"step": 5, "loss": 5.0}])
    assert plots(run)["loss"].panels[0].y_label == "loss", "a trainer in a script of one's own, with any loss"
    write_json(run / "run.json", {**read_json(run / "run.json"), "unit": "token"})
    assert plots(run)["loss"].panels[0].y_label == "bits per token"
    assert dict(key_figures(read_run(run, "run")))["training loss, last logged"] == "7.213 bits per token"


def test_an_image_is_a_row_and_its_model_is_no_base_of_ours(tmp_path):
    pictures = make_run(tmp_path / "pictures", task="image-classification", architecture="resnet18")
    log = pictures / "log_history.json"
    log.write_text(
        log.read_text().replace('"memory/tokens_per_chunk"', '"memory/rows_per_chunk": 1024, "memory/tokens_per_chunk"')
    )
    assert plots(pictures)["memory"].panels[1].y_label == "rows per micro-batch"
    assert dict(key_figures(read_run(pictures, "run")))["model"] == "resnet18, from scratch"


def test_a_limit_far_above_is_told_in_the_title(made, tmp_path):
    run = make_run(tmp_path / "run")
    rows = json.loads((run / "log_history.json").read_text())
    for row in rows:
        row.update({"memory/limit_bytes": 100 * 2**30} if "loss" in row else {})
    (run / "log_history.json").write_text(json.dumps(rows))
    panel = plots(run)["memory"].panels[0]
    assert panel.levels == []
    assert panel.title == "Memory in use, all programs (limit 100.0 GiB, far above)", "on a CPU, unlike peak memory"
    limited = make_run(tmp_path / "limited", memory_limit_gb=1.0)
    assert plots(limited)["memory"].panels[0].title == "Memory in use", "that limit is on the process alone"
    panel = plots(made / "one", run)["memory"].panels[0]
    assert [level.label for level in panel.levels] == ["limit 4.0 GiB"] and "limit 100.0 GiB, far" in panel.title


def test_rows_without_a_number_leave_a_gap_and_no_crash(tmp_path):
    run = make_run(tmp_path / "run")
    rows = json.loads((run / "log_history.json").read_text())
    rows[0]["loss"] = None  # what NaN becomes
    rows[-1]["loss"] = math.inf  # in a file of the stock Trainer
    (run / "log_history.json").write_text(json.dumps(rows))
    drawn = lines(plots(run)["loss"])["mean since the last log"]
    assert drawn.x[0] == 10 and max(drawn.y) < math.inf
    for last in (math.inf, math.nan, None):
        rows[-1]["loss"] = last
        (run / "log_history.json").write_text(json.dumps(rows))
        assert dict(key_figures(read_run(run, "run")))["training loss, last logged"] == "not finite"


@pytest.mark.parametrize("bad", [math.nan, None])
def test_figures_that_are_all_not_finite_are_said_to_be(tmp_path, bad):
    run = make_run(tmp_path / "run")
    rows = json.loads((run / "log_history.json").read_text())
    (run / "log_history.json").write_text(json.dumps([{**row, "loss": bad} for row in rows if "loss" in row]))
    assert plots(run)["loss"].notes == ["no training loss in its logs is finite"]
    scores = [{name: bad if name.startswith("eval_") else row[name] for name in row} for row in rows]
    (run / "log_history.json").write_text(json.dumps(scores))
    assert plots(run)["loss"].notes == ["no score of an evaluation in its logs is finite"]


@pytest.mark.parametrize(
    "name", ["log_history.json", "scu_history.json", "memory_history.json", "curriculum.json", "scu_metrics.json",
             "training_config.json", "run.json"]
)  # fmt: skip
@pytest.mark.parametrize("harm", ["gone", "torn", "other"])
def test_any_file_may_be_gone_torn_or_something_else(tmp_path, name, harm):
    run = make_run(tmp_path / "run")
    if harm == "gone":
        (run / name).unlink()
    elif harm == "torn":
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) * 2 // 3])
    else:
        (run / name).write_text('"something else"')
    found = read_run(run, "run", "finished")
    drawn = run_plots([found])
    assert len(drawn) == 6 and all(plot.panels or plot.notes for plot in drawn)
    key_figures(found), hardware(found), repeat_yaml(found), changed(found)
    said = [text for where, text in warnings(found) if where == "this report"]
    is_torn_row = harm == "torn" and name in ("log_history.json", "scu_history.json", "memory_history.json",
                                              "curriculum.json")  # fmt: skip
    assert len(said) == (0 if harm == "gone" or is_torn_row else 1), "what cannot be read is named, whole rows are kept"


def test_a_status_that_another_program_wrote_is_named_and_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "run.json").write_text(json.dumps({"status": "finished", "notices": 3}))
    assert "run.json holds 3 as its notices, which no run writes" in str(warnings(read_run(run, "run")))
    (run / "run.json").write_text(json.dumps({"status": "finished", "step": "30"}))
    found = read_run(run, "run", "unreadable")
    assert dict(key_figures(found))["steps"] == "60"
    assert "run.json holds '30' as its step, which no run writes" in str(warnings(found))


@pytest.mark.parametrize("name", ["training_config.json", "scu_metrics.json", "curriculum.json"])
def test_a_value_that_somebody_has_edited_is_named_and_left_out(made, tmp_path, name):
    """Every value in the file, one after the other, is gone or has become something else."""
    run = Path(shutil.copytree(made / "one", tmp_path / "run"))
    whole = read_json(run / name)
    if name == "scu_metrics.json":
        whole |= {"held_out_documents": 6, "held_out_tokens": 68}
    for path in _paths(whole):
        for other in ("GONE", "text", [1], None):
            (run / name).write_text(json.dumps(_with(whole, path, other)))
            found = read_run(run, "run", "finished")
            page = page_of([found], [Drawing(plot) for plot in run_plots([found])], "now", [Path("it.yaml")])
            tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
            assert all(isinstance(cell, str) for table in tables for row in table.rows for cell in row), (path, other)
    edited = {"scu_metrics.json": ("steps",), "training_config.json": ("hardware", "cores")}.get(
        name, (1, "difficulty")
    )
    (run / name).write_text(json.dumps(_with(whole, edited, "text")))
    said = [text for where, text in warnings(read_run(run, "run")) if where == "this report"]
    path = ".".join(str(part) for part in edited if part != 1)
    assert len(said) == 1 and f"{name} holds 'text' as its {path}, which no run writes; it is left out" in said[0]


def _paths(value, path=()):
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inside:
        yield (*path, name)
        yield from _paths(item, (*path, name))


def _with(value, path, other):
    value = copy.copy(value)
    if len(path) > 1:
        value[path[0]] = _with(value[path[0]], path[1:], other)
    elif other == "GONE":
        del value[path[0]]
    else:
        value[path[0]] = other
    return value


def test_rows_of_the_stock_trainer_stand_in_for_those_that_are_not_there(tmp_path):
    for step in (9, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": step, "loss": 1.0}]}))
    assert is_run(tmp_path) and has_begun(tmp_path)
    found = read_run(tmp_path, "stock")
    assert [row["step"] for row in found.logs] == [100], "of the newest by number, not by name"
    panel = run_plots([found])[0].panels[0]
    assert panel.y_label == "loss" and panel.lines[0].y == [1.0], "a loss of no known unit is not called bits"


def test_logs_without_a_whole_row_are_called_torn_and_those_of_the_stock_trainer_taken(tmp_path):
    run = make_run(tmp_path / "run", scu=False, memory_control=False)
    (run / "log_history.json").write_text('[\n{"step": 1, "lo')
    plots = {plot.key: plot for plot in run_plots([read_run(run, "run", "killed")])}
    for key in ("loss", "throughput", "rate"):
        assert "log_history.json holds no complete row: it is torn" in " ".join(plots[key].notes), key
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 9, "loss": 1.0}]}))
    found = read_run(run, "run", "killed")
    assert [row["step"] for row in found.logs] == [9]
    assert "log_history.json holds no complete row" in str(warnings(found)), "and said"
    (run / "log_history.json").write_text("[\n]\n")
    assert read_run(run, "run", "running").logs == [], "a run that has logged nothing yet has no rows of an earlier one"


def test_logs_that_cannot_be_read_are_no_traceback(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "log_history.json").unlink()
    (run / "log_history.json").symlink_to("/proc/self/mem")  # a file whose first byte is an error of the disk
    found = read_run(run, "run", "killed")
    assert any(plot.panels or plot.notes for plot in run_plots([found]))
    assert "Input/output error" in str(warnings(found))


def test_thinning_keeps_ends_and_peaks():
    y = [0.0] * 100_000
    y[54_321] = 9.0
    x, kept = thinned(range(100_000), y)
    assert len(x) <= 700 and 9.0 in kept and (x[0], x[-1]) == (0, 99_999)
    assert thinned([1, 2], [3, 4]) == ([1, 2], [3, 4])


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_a_drawing_names_its_colours_and_its_own_ids(made):
    found = plots(made / "one")["memory"]
    text = svg(found, WIDE_IN)
    ElementTree.fromstring(text)
    assert not any(color in text for color in HELD_PLACES.values()), "every colour has become a name"
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(NAMES)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and all(name.startswith("memory-10-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert "<text" in text and "tokens per micro-batch" in text
    assert svg(found, WIDE_IN) == text, "the same files give the same drawing"


LONG = "an-experiment-with-a-very-long-name-lr-0.00005-rank-16-seed-1234-on-the-large-set"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["_first", "lr$1e-3$x_$\\frac$", LONG])
def test_any_name_of_a_run_is_in_the_legend_and_leaves_the_axes_their_room(name):
    panel = Panel("Rate", "rate", lines=[Line(name, [0, 1], [1e-5, 4e-5]), Line("b", [0, 1], [0, 2e-5])])
    with matplotlib.rc_context(AS_IT_STANDS):
        drawn = figure(Plot("rate", "Rate", [panel]), NARROW_IN, THEMES["light"], False)
        drawn.draw_without_rendering()
    (axes,) = drawn.axes
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [text.replace("\n", "") for text in shown] == [name, "b"]
    place, legend = axes.get_position(), axes.get_legend().get_window_extent()
    assert place.width > 0.7 and place.height > 0.3 and legend.x1 < drawn.bbox.x1
    assert axes.yaxis.get_offset_text().get_text() == "", "it would stand in the legend"
    assert "4e\N{MINUS SIGN}05" in [text.get_text() for text in axes.get_yticklabels()]


@pytest.mark.parametrize("whole_x", [True, False])
def test_one_epoch_or_step_is_not_cut_into_parts(whole_x):
    panel = Panel("Rows", "rows", "epoch", [Line("", [1], [250], marker="o")], whole_x=whole_x)
    (axes,) = figure(Plot("rows", "Rows", [panel]), NARROW_IN, THEMES["light"], False).axes
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown == [1]


@pytest.mark.parametrize("theme", THEMES)
def test_files_hold_the_colours_of_their_theme(made, theme):
    found = plots(made / "one")["loss"]
    text = in_theme(svg(found, WIDE_IN), theme, found)
    ElementTree.fromstring(text.encode())
    assert "var(--" not in text and THEMES[theme]["c0"] in text and THEMES[theme]["ground"] in text
    assert png(found, theme).startswith(b"\x89PNG")


def contrast(first: str, second: str) -> float:
    """As WCAG 2 defines it, 1 to 21."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_contrast(theme):
    colors = THEMES[theme]
    assert contrast(colors["ink"], colors["ground"]) > 12 and contrast(colors["muted"], colors["ground"]) > 4.5
    assert contrast(colors["c0"], colors["ground"]) > 4.5, "links"


# -- words -------------------------------------------------------------------------------------------------------------


def test_figures_and_warnings_of_a_run(made):
    run = read_run(made / "one", "one", "finished")
    found = dict(key_figures(run))
    assert found["held-out bits per token"].startswith("6.800")
    assert found["held-out perplexity"] == "111.4" and found["training loss, last logged"].endswith("bits per token")
    assert found["S"] == "0.0993 against 0.1: on target" and found["out of memory, recovered"] == "2"
    assert found["peak memory"] == "3.0 GiB (this process)" and found["training time"] == "1 min 10 s"
    said = [text for _, text in warnings(run)]
    for words in ("S was measured late", "1 step was skipped", "few-steps: only 60 steps; raise max_steps",
                  "rows that look wrong, worst first: 2", "step 7: out of memory at 8 rows x 256"):  # fmt: skip
        assert any(words in text for text in said), words


def test_scores_on_different_documents_are_not_left_to_be_compared(made, tmp_path):
    runs = []
    for name, documents in (("a few", 2), ("more", 6), ("again", 6)):
        folder = make_run(tmp_path / name)
        metrics = json.loads((folder / "scu_metrics.json").read_text())
        metrics |= {"held_out_documents": documents, "held_out_tokens": 10 * documents}
        (folder / "scu_metrics.json").write_text(json.dumps(metrics))
        runs.append(read_run(folder, name, "finished"))
    few, more, again = runs
    assert [dict(key_figures(run))["held out"] for run in (few, more)] == [
        "2 documents, 20 tokens",
        "6 documents, 60 tokens",
    ]

    def said(*runs):
        key_figures_of = page_of(runs, [], "", [Path("repeat.yaml")] * len(runs)).sections[0]
        return [block.text for block in key_figures_of.blocks if block.kind == "text"]

    assert said(few) == said(more, again) == said(read_run(made / "one", "one"), few) == []
    assert f"scu-trainer eval '{few.folder}' --against {more.folder} --eval_dataset FILE" in said(few, more)[0]


def test_figures_of_a_run_without_a_finite_loss(tmp_path):
    """Infinity is null in the files of a run."""
    folder = make_run(tmp_path / "diverged")
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    for when in ("after", "change"):
        metrics[f"held_out_bpt_{when}"] = dict.fromkeys(("value", "low", "high"))
    (folder / "scu_metrics.json").write_text(json.dumps(metrics))
    found = dict(key_figures(read_run(folder, "diverged", "finished")))
    assert found["held-out bits per token"] == found["held-out perplexity"] == "not finite"


def test_speeds_without_a_mean_are_a_dash(tmp_path):
    folder = make_run(tmp_path / "run")
    logs = [{"step": step, "throughput/tokens_per_second": speed} for step, speed in ((1, math.inf), (2, -math.inf))]
    (folder / "log_history.json").write_text(json.dumps(logs))
    assert dict(key_figures(read_run(folder, "run")))["tokens per second, mean"] == "-"


def test_nothing_counted_is_a_dash_and_no_zero(made, tmp_path):
    off = make_run(tmp_path / "off", memory_control=False)
    (off / "scu_metrics.json").unlink()
    for folder, count in ((off, "-"), (made / "one", "2")):
        assert dict(key_figures(read_run(folder, "run")))["out of memory, recovered"] == count


def test_durations():
    assert [duration(s) for s in (None, 59.4, 61, 7260, 200_000)] == [
        "-",
        "59 s",
        "1 min 01 s",
        "2 h 01 min",
        "2 d 7 h",
    ]


def test_what_distinguishes_runs(made):
    one, off = (read_run(made / name, name) for name in ("one", "off"))
    assert differences([one, off]) == [
        ["scu", "true", "false"],
        ["memory_control", "true", "false"],
        ["learning_rate", "0.004", "0.002"],
    ]
    assert changed(one) == [("learning_rate", "0.004", "5e-05"), ("max_steps", "60", "-1")]
    assert differences([one, one]) == []


def test_the_command_of_several_processes(made):
    run = read_run(made / "one", "one")
    assert repeat_command(run, made / "a b.yaml").startswith("scu-trainer train --config ")
    run.config["world_size"] = 2
    assert repeat_command(run, made / "r.yaml").startswith("torchrun --nproc_per_node 2 scripts/train.py --config ")


def test_repeating_a_resumed_run_begins_again_and_not_in_the_checkpoint(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", resume_from_checkpoint="run/checkpoint-20")
    assert "resume_from_checkpoint" not in repeat_yaml(read_run(run, "run"))
    monkeypatch.chdir(run)
    assert repeat_command(read_run(Path("."), "run"), Path("r.yaml")).endswith(f"--output_dir {run}-again")


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_a_comparison_keeps_every_arm(made):
    found = read_comparison(made / "study")
    arms, differences_plot, s, curves = comparison_plots(found)
    rows = {row.label: row for row in arms.panels[0].intervals}
    assert list(rows) == found.arms and rows["original"].note == "0 of 3 runs" and rows["original"].value is None
    assert rows["model"].points == pytest.approx([6.79, 6.80, 6.81])
    changes = {row.label: row for row in differences_plot.panels[0].intervals}
    assert "none" not in changes and changes["model"].points == pytest.approx([-0.07] * 3)
    assert differences_plot.panels[0].zero_line
    assert [line.label for line in s.panels[0].lines] == ["model"] and "fixed-1" in s.notes[0]
    assert [line.label for line in curves.panels[0].lines] == ["none", "fixed-1", "weight_decay-10", "model"]
    assert "original, schedule-cosine: no evaluation" in curves.notes[0]
    found.content["table"][1]["verdict"] = "lower than none by 0.109 (0.006 to 0.212); seed 2 failed: no room"
    found.content["table"][0] |= {"settling_step": 17.2, "settled": 1}
    found.content["table"][1] |= {"settled": 0}
    head, table = result_rows(found)
    place = head.index("settled at step")
    assert [row[place] for row in table[:3]] == ["17 (1/3)", "never", "-"], "as on the screen and in comparison.md"
    assert len(table) == 6 and all(len(row) == len(head) for row in table)
    assert table[1][-1] == "lower than none; seed 2 failed: no room", "its figures have a column"


def test_arms_of_a_comparison_are_told_apart_and_have_their_targets():
    arms = [f"arm-{number}" for number in range(COLORS * len(DASHES))]
    targets = {(arm, 0): 0.01 if arm == "arm-3" else 0.1 for arm in arms}
    runs = {
        key: RunFiles("", Path(), control=[{"step": 1, "s_ema": 0.1, "s_target": target}])
        for key, target in targets.items()
    }
    content = {"arms": [{"name": arm} for arm in arms], "runs": [], "table": [], "seeds": [0]}
    content |= {"reference": "arm-0", "confidence": 0.95}
    (panel,) = comparison_plots(Comparison(Path(), content, runs))[2].panels
    looks = {(line.color % COLORS, line.dash % len(DASHES)) for line in panel.lines}
    assert len(looks) == len(arms)
    assert [level.label for level in panel.levels] == ["target 0.01 of arm-3", "target 0.1"]


def test_several_seeds_of_one_job_have_no_differences():
    job = {"arm": "job", "held_out_bpt": {"value": 6.8}}
    content = {"arms": [{"name": "job"}], "runs": [], "table": [job], "seeds": [0, 1], "reference": "job"}
    content |= {"confidence": 0.95}
    arms, paired, *_ = comparison_plots(Comparison(Path(), content, {}))
    assert arms.panels and not paired.panels
    assert paired.notes == ("there is one arm, and nothing to compare it with",)


def test_a_run_that_the_comparison_left_out_is_no_point(made, tmp_path):
    folder = make_comparison(tmp_path / "study")
    content = json.loads((folder / "comparison.json").read_text())
    content["runs"][0]["error"] = "other tokens"
    (folder / "comparison.json").write_text(json.dumps(content))
    rows = comparison_plots(read_comparison(folder))[0].panels[0].intervals
    assert rows[0].points == pytest.approx([6.87, 6.88])


def test_a_comparison_without_results_yet(tmp_path):
    folder = make_comparison(tmp_path / "study")
    content = json.loads((folder / "comparison.json").read_text())
    for run in content["runs"]:
        run.update(status="missing", metrics={}, folder=None)
    for row in content["table"]:
        row.update(held_out_bpt=None, difference=None, finished=0)
    (folder / "comparison.json").write_text(json.dumps(content))
    found = comparison_plots(read_comparison(folder))
    assert all(not plot.panels and plot.notes for plot in found)


def test_a_run_that_only_measured_has_s_and_neither_target_nor_lambda(tmp_path):
    folder = make_run(tmp_path / "measured", scu_target_s=None)
    path = folder / "scu_history.json"
    rows = json.loads(path.read_text())
    path.write_text("[\n" + ",\n".join(json.dumps({**row, "s_target": None, "lambda": 0.0}) for row in rows) + "\n]")
    run = read_run(folder, "measured", "finished")
    (panel,) = plots(folder)["s"].panels
    assert panel.title == "Information ratio S" and panel.levels == [] and len(panel.lines) == 1
    found = dict(key_figures(run))
    assert found["S"].endswith(", measured, not steered") and found["lambda, newest"] == "-"
