"""log_history.json: every logged row, at any moment, and the same rows in the real TensorBoard and W&B."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from scu_trainer.run_files import read_json, read_rows
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from scu_trainer.train.loops.throughput import Throughput
from scu_trainer.train.run_directory.log_history import LOG_FILE, LogHistoryCallback, plain
from scu_trainer.train.step.micro_batch_sizer import MicroBatchSizer
from scu_trainer.train.step.recovery.memory import MemoryReading
from scu_trainer.train.trainer import SCUTrainer
from tests.tiny import Rows, UnevenRows, arguments, llama, pad, same, trained, weights_of

STEPS = 6
SCALARS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""What W&B has as the summary of a run, not as points."""


def loops() -> dict:
    return {
        "regularization": RegularizationSettings(target_s=0.1),
        "memory": MemorySettings(),
        "curriculum": CurriculumSettings("none"),
        "data_collator": pad,
    }


def with_logs(trainer: SCUTrainer) -> None:
    """As a session does."""
    trainer.add_callback(Throughput(counts_flops=False))
    trainer.add_callback(LogHistoryCallback())


def run(folder: Path, prepare=with_logs, resume=None, **changes) -> SCUTrainer:
    options = {"max_steps": STEPS, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, **loops(), **changes}
    rows = UnevenRows(count=16)
    return trained(llama(), folder, dataset=rows, eval_dataset=rows, prepare=prepare, resume=resume, **options)


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Path:
    """A run whose rows go to all three: its folder."""
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        for name, value in {"MODE": "offline", "DIR": folder, "SILENT": "true", "CACHE_DIR": folder / "cache"}.items():
            patch.setenv(f"WANDB_{name}", str(value))
        patch.setenv("HOME", str(folder))
        run(folder, report_to=["tensorboard", "wandb"], logging_steps=1)
        import wandb

        wandb.finish()
        wandb.teardown()
    return folder


# -- the file ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_row_is_there_with_what_the_loops_add(watched):
    rows = read_rows(watched / LOG_FILE)
    losses = [row for row in rows if "loss" in row]
    assert [row["step"] for row in losses] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6]
    assert rows[-1]["train_runtime"] > 0 and rows[-1]["step"] == STEPS
    for row in losses:
        assert {"epoch", "grad_norm", "learning_rate", "scu/s", "scu/lambda", "memory/tokens_per_chunk"} <= set(row)
        assert row["memory/used_bytes"] <= row["memory/peak_bytes"] <= row["memory/limit_bytes"]
        assert row["memory/out_of_memory"] == 0 and row["memory/chunks"] >= 1
    epochs = [row for row in rows if "curriculum/rows" in row]
    assert [row["curriculum/epoch"] for row in epochs] == [1, 2], "each epoch once"
    assert [row["curriculum/rows"] for row in epochs] == [16, 8]


def test_throughput_counts_real_tokens(tmp_path):
    """Every look at the clock is a second, so the rate is the tokens of a step."""
    from scu_trainer.train.loops import throughput

    class Clock:
        now_s = 0.0

        def perf_counter(self) -> float:
            self.now_s += 1.0
            return self.now_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", Clock())
        run(tmp_path, max_steps=3, logging_steps=1, eval_strategy="no")
    rows = [row for row in read_rows(tmp_path / LOG_FILE) if "loss" in row]
    assert "throughput/tokens_per_second" not in rows[0], "the first step is not timed"
    lengths = [4 + 7 * index % 13 for index in range(16)]
    assert all(row["throughput/samples_per_second"] == 4 for row in rows[1:])
    assert all(4 * min(lengths) <= row["throughput/tokens_per_second"] <= 4 * max(lengths) for row in rows[1:])
    assert len({row["throughput/tokens_per_second"] for row in rows[1:]}) == 2, "padding would make them equal"
    assert "throughput/mfu" not in rows[1], "operations are not counted unasked"


def test_the_peak_of_memory_is_the_most_since_the_last_row():
    readings = iter(
        [MemoryReading(100, 10, 10), MemoryReading(100, 20, 70), MemoryReading(100, 30, 30), MemoryReading(100, 25, 25)]
    )

    class Readings:
        def read(self) -> MemoryReading:
            return next(readings)

    loop, rows = MicroBatchSizer(MemorySettings(), Readings(), torch.device("cpu")), []
    for looks in (2, 1, 1):
        for _ in range(looks):
            loop.stepped()
        rows.append(loop.scalars())
    assert [row["memory/peak_bytes"] for row in rows] == [70, 30, 25]
    assert [row["memory/used_bytes"] for row in rows] == [20, 30, 25]


def test_the_device_is_waited_for_only_where_a_row_is_written(tmp_path, monkeypatch):
    from scu_trainer.train.loops import throughput

    steps = []
    monkeypatch.setattr(throughput, "wait_for", lambda device: steps.append(None))
    run(tmp_path, max_steps=6, logging_steps=3, eval_strategy="no", save_strategy="no")
    assert len(steps) == 3, "after the first step, which is not timed, and at two logs"


class Dies(TrainerCallback):
    """The process ends within the evaluation's own event, before anything is saved or closed."""

    def on_evaluate(self, args, state, control, **kwargs):
        os._exit(9)


def test_the_row_of_an_evaluation_outlives_a_kill_right_after_it(tmp_path):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            run(tmp_path, prepare=lambda trainer: (with_logs(trainer), trainer.add_callback(Dies())))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    last = read_rows(tmp_path / LOG_FILE)[-1]
    assert last["step"] == 3 and math.isfinite(last["eval_loss"])


def test_a_resumed_run_writes_the_rows_after_its_checkpoint_again(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 4, "eval_steps": 2}
    run(tmp_path, **saves)
    whole = [row for row in read_rows(tmp_path / LOG_FILE) if "loss" in row]
    run(tmp_path, resume=str(tmp_path / "checkpoint-4"), **saves)
    rows = [row for row in read_rows(tmp_path / LOG_FILE) if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6], "neither lost nor twice"
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    assert [row["step"] for row in read_rows(tmp_path / LOG_FILE) if "eval_loss" in row] == [2, 4, 6]


def test_a_run_that_begins_again_keeps_no_row_from_before_its_first_step(tmp_path):
    for _ in range(2):
        run(tmp_path, eval_on_start=True, max_steps=2)
    assert [row["step"] for row in read_rows(tmp_path / LOG_FILE)].count(0) == 1


@pytest.mark.parametrize(("steps", "rows"), [(4, [4, 6]), (500, [6])])
def test_the_last_step_is_logged_too(tmp_path, steps, rows):
    trainer = run(tmp_path, logging_steps=steps, eval_strategy="no")
    losses = [row for row in read_rows(tmp_path / LOG_FILE) if "loss" in row]
    assert [row["step"] for row in losses] == rows
    of_all = sum(row["loss"] * done for row, done in zip(losses, (rows[0], 6 - rows[0]), strict=False)) / 6
    assert of_all == pytest.approx(trainer.state.log_history[-1]["train_loss"], rel=1e-4)
    run(tmp_path / "none", logging_strategy="no", eval_strategy="no")
    assert not [row for row in read_rows(tmp_path / "none" / LOG_FILE) if "loss" in row]


def test_logging_changes_no_weight_and_off_is_stock(tmp_path):
    quiet, loud = run(tmp_path / "quiet", prepare=None), run(tmp_path / "loud")
    assert same(weights_of(quiet.model), weights_of(loud.model))
    assert not (tmp_path / "quiet" / LOG_FILE).exists()
    off = trained(llama(), tmp_path / "off", dataset=Rows(), logging_steps=2)
    assert set(off.state.log_history[0]) == {"loss", "grad_norm", "learning_rate", "epoch", "step"}


def test_only_the_leading_process_writes(tmp_path):
    callback, args = LogHistoryCallback(), arguments(tmp_path / "other")

    class Progressed:
        is_world_process_zero, global_step = False, 0

    callback.on_train_begin(args, Progressed, None)
    callback.on_log(args, Progressed, None, logs={"loss": 1.0})
    callback.on_train_end(args, Progressed, None)
    assert not (tmp_path / "other").exists()


def test_values_that_metrics_return_are_written_as_json_has_them():
    import numpy

    assert plain(numpy.float32(0.5)) == 0.5 and plain(torch.tensor([2])) == 2 and plain(None) is None
    assert plain(numpy.arange(2)) == "[0 1]" and plain("word") == "word"


# -- a run directory ---------------------------------------------------------------------------------------------------


def test_the_command_writes_what_a_report_needs_also_with_every_loop_off(tmp_path):
    from scu_trainer.cli import train
    from scu_trainer.report.files import read_run
    from scu_trainer.report.run_plots import run_plots
    from tests.tiny import saved_llama

    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"Row {i} says a few words more. " * 8}) + "\n" for i in range(16)))
    options = {
        "model_name_or_path": saved_llama(tmp_path / "model"), "dataset": texts, "block_size": 64, "max_steps": 4,
        "validation_split_percentage": 25, "per_device_train_batch_size": 2, "logging_steps": 2, "use_cpu": True,
        "eval_strategy": "steps", "eval_steps": 2, "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run",
        "predict_memory": False, "scu": False, "memory_control": False,
    }  # fmt: skip
    assert train.main([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
    rows = read_rows(tmp_path / "run" / LOG_FILE)
    assert [row["step"] for row in rows if "loss" in row] == [2, 4] and rows[2]["throughput/tokens_per_second"] > 0
    described = read_json(tmp_path / "run" / "training_config.json")
    assert described["hardware"]["device"] == "cpu" and described["hardware"]["ram_bytes"] > 2**28
    assert described["changed_from"]["max_steps"] == -1 and "weight_decay" not in described["changed_from"]
    assert {"plan-of-steps", "few-steps"} & {finding["check"] for finding in described["preflight"]}
    drawn = {plot.key: plot for plot in run_plots([read_run(tmp_path / "run", "run", "finished")])}
    assert drawn["s"].notes == ["regularization was off (scu: false)"] and not drawn["s"].panels
    assert [len(drawn[key].panels) for key in ("loss", "throughput", "curriculum", "rate")] == [2, 2, 3, 2]


# -- TensorBoard and W&B -----------------------------------------------------------------------------------------------


def renamed(name: str) -> str:
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"


def points_of(rows: list[dict], without=("step",)) -> dict[tuple[str, int], float]:
    """(name, step) -> value, as reporters call them."""
    return {
        (renamed(name), row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in without and value is not None
    }


def test_tensorboard_has_the_same_numbers(watched):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(watched / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    found = {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}
    expected = points_of(read_rows(watched / LOG_FILE))
    assert set(found) == set(expected)
    assert {"train/scu/lambda", "train/memory/peak_bytes", "train/curriculum/rows"} <= set(tags)
    assert all(found[place] == pytest.approx(value, rel=1e-6) for place, value in expected.items()), "float32"


def wandb_records(path: Path):
    """Records of a W&B file, which is a log of LevelDB: blocks of 32 KiB, pieces with crc, length and kind."""
    from wandb.proto import wandb_internal_pb2

    content, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            yield record


def test_wandb_offline_has_the_same_numbers(watched):
    (path,) = watched.glob("wandb/offline-run-*/*.wandb")
    found = {}
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = items.pop("train/global_step")
            found |= {(name, step): value for name, value in items.items() if not name.startswith("_")}
    assert found == points_of(read_rows(watched / LOG_FILE), without=("step", *SCALARS))
