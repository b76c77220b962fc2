"""What a person sees while a run goes on: the first step at once, losses in bits, no bar where it would be noise."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings

import pytest
from rich.console import Console

from scu_trainer.figures import bits_of
from scu_trainer.settings import MemorySettings, RegularizationSettings
from scu_trainer.train.run_directory.console import ConsoleCallback
from scu_trainer.train.run_directory.logs import run_log
from scu_trainer.train.session.session import console_of_run
from tests.tiny import llama, same, trained, weights_of


def seen(folder, settings=None, terminal=False, **changes):
    """What is printed by a training of 4 steps, and the training."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, highlight=False)
    changes = {"max_steps": 4, "logging_steps": 2, **changes}
    run = trained(llama(), folder, settings, callbacks=[ConsoleCallback(console, "token")], **changes)
    return text.getvalue(), run


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2, "memory": MemorySettings()}],
    ids=["plain", "accumulated", "micro-batches"],
)
def test_the_first_step_has_a_line_with_its_figures_and_the_logs_are_as_without(tmp_path, changes):
    changes = {**changes, "lr_scheduler_type": "linear", "warmup_steps": 3}
    printed, run = seen(tmp_path / "seen", **changes)
    each = trained(llama(), tmp_path / "each", max_steps=4, logging_steps=1, **changes).state.log_history
    unseen = trained(llama(), tmp_path / "unseen", max_steps=4, logging_steps=2, **changes)
    first = printed.splitlines()[0]
    rate = f"rate {each[0]['learning_rate']:.2e}  left "
    assert first.startswith(f"step 1/4  loss {bits_of(each[0]['loss']):.3f} bits per token  {rate}")
    assert "(the first step took " in first and printed.count("step 1/4") == 1
    logged = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (run, unseen)]
    assert logged[0] == logged[1] and len(logged[0]) == 2
    assert same(weights_of(run.model), weights_of(unseen.model))


@pytest.mark.parametrize("changes", [{"logging_steps": 1}, {"logging_first_step": True}])
def test_a_first_step_that_is_logged_has_one_line(tmp_path, changes):
    printed, _ = seen(tmp_path, **changes)
    assert printed.count("step 1/4") == 1 and "the first step took" not in printed


def test_without_a_terminal_there_are_lines_and_no_control_characters(tmp_path):
    printed, _ = seen(tmp_path)
    assert "\x1b" not in printed and "\r" not in printed and "training" not in printed


@pytest.mark.parametrize("off", [False, True])
def test_disable_tqdm_leaves_out_the_bar_of_a_terminal(tmp_path, off):
    printed, _ = seen(tmp_path, terminal=True, disable_tqdm=off)
    assert ("training" in printed) == (not off) and "step 2/4" in printed


def test_s_that_is_measured_has_no_target_and_no_lambda(tmp_path):
    measured, _ = seen(tmp_path / "measured", RegularizationSettings())
    steered, _ = seen(tmp_path / "steered", RegularizationSettings(target_s=0.1))
    assert "  S 0." in measured and "lambda" not in measured and " of 0.1" not in measured and "free" not in measured
    assert " of 0.1  lambda " in steered


@pytest.mark.parametrize(
    ("level", "ours", "theirs"), [(None, True, False), ("error", False, False), ("info", True, True)]
)
def test_log_level_is_of_the_console(capsys, level, ours, theirs):
    with run_log() as log:
        if level is not None:
            log.show(getattr(logging, level.upper()))
            logging.getLogger("transformers").setLevel(level.upper())
        logging.getLogger("scu_trainer").warning("a warning of ours")
        logging.getLogger("transformers").info("what transformers says")
    printed = capsys.readouterr().err
    assert ("a warning of ours" in printed, "what transformers says" in printed) == (ours, theirs)


@pytest.mark.parametrize("captured", [False, True])
def test_warnings_go_where_they_went_before(captured):
    with warnings.catch_warnings():
        logging.captureWarnings(captured)
        before = warnings.showwarning
        with run_log():
            assert warnings.showwarning is logging._showwarning
        assert warnings.showwarning is before
        logging.captureWarnings(False)


def test_a_run_goes_on_where_nobody_reads_what_it_prints(monkeypatch, caplog):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        screen = console_of_run()
        screen.print("step 1")
        screen.print("step 2")
        print("trained", flush=True)
    assert caplog.text.count("the run continues without it") == 1
