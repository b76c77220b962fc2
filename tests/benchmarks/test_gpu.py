"""The GPU benchmark, tried out on the CPU: equal work, what becomes of contenders that cannot run, the arithmetic
shown."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")

from benchmarks.gpu import gpu, gpu_shapes, gpu_table, gpu_window, gpu_work, loss_kernels
from benchmarks.gpu.gpu_work import Point, result_of
from benchmarks.lib import common, text_job
from scu_trainer.control.splitting import rounded_up_size

TINY = Point("tiny", "lora", "stock", device="cpu", **gpu.TINY)
H100 = "NVIDIA H100 80GB HBM3"


def result(contender: str, repeat: int = 1, **numbers) -> dict:
    """A measured point of 1000 tokens in two seconds."""
    given = {"seconds": 2.0, "tokens": 1000, "step_tokens": [500, 500], "processed": 1500, "held_out_bits": 8.0}
    given |= {"peak_bytes": 2 * 2**30, "reserved_bytes": 3 * 2**30, "host_syncs": 4, "attention": "sdpa", "card": H100}
    point = Point("1b", "lora", contender, repeat)
    return {**vars(point), "work": point.work(), "status": "measured", **given, **numbers}


def cannot(contender: str, status: str = "cannot run", reason: str = "needs nothing, which is not installed") -> dict:
    point = Point("1b", "lora", contender)
    return {**vars(point), "work": point.work(), "card": "", "status": status, "reason": reason}


@pytest.fixture
def few_objects():
    """What was imported is not collected again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


# -- the test run -----------------------------------------------------------------------------------------------------


def test_a_part_of_the_quick_run(monkeypatch, capfd, few_objects):
    """4 bits, the stock Trainer, ours and TRL, whose adapters are float32 again."""
    seen = []
    monkeypatch.setattr(text_job, "HELD_OUT_ROWS", 8)
    monkeypatch.setattr(gpu, "in_own_process", lambda point, seconds: result_of(point))
    monkeypatch.setattr(gpu_table, "show", lambda results, peak: seen.extend(results))
    contenders = ("stock", "ours", "trl, padding-free", "unsloth")
    assert gpu.run(gpu.options(["--quick", "--tuning", "qlora", "--contenders", *contenders])) == 0
    assert "test run: nothing is written" in capfd.readouterr().out
    stock, ours, trl, unsloth = seen
    assert stock["step_tokens"] == ours["step_tokens"] == trl["step_tokens"]
    assert stock["tokens"] == sum(stock["step_tokens"][gpu_window.WARM_UP_STEPS : -gpu_window.EXTRA_STEPS])
    # Both without padding; ours with what makes it one of few sizes in half precision on a CPU.
    assert trl["processed"] <= ours["processed"] <= rounded_up_size(trl["processed"]) < stock["processed"]
    assert unsloth["status"] == "cannot run"
    assert gpu_table.differences(seen) == []


def race_of_loss_kernels(monkeypatch):
    """What a test run on tiny tensors hands to ``finish``: the table, the figures, and all else by name."""
    monkeypatch.setattr(loss_kernels, "QUICK", {"tokens": 48, "words": 300, "hidden": [16], "rounds": 1})
    monkeypatch.setattr(sys, "argv", ["loss_kernels.py", "--quick"])
    seen = []
    monkeypatch.setattr(loss_kernels, "finish", lambda name, title, *made, **given: seen.append((*made, given)))
    loss_kernels.main()
    ((grid, figures, given),) = seen
    return grid, figures, given


def test_loss_kernels_compute_one_gradient_and_the_missing_say_why(monkeypatch):
    grid, _, given = race_of_loss_kernels(monkeypatch)
    assert given["quick"] and len(grid.rows) == 2 * len(loss_kernels.CONTENDERS)
    for name, _, _, ms, *_, distance in grid.rows:
        if distance:
            assert float(distance) < 0.01, name
        else:
            assert "No module" in ms and name in ("liger", "cut-cross-entropy")


@pytest.mark.parametrize("missing", [loss_kernels.STOCK, loss_kernels.OURS])
def test_loss_kernels_without_a_contender_give_the_times_of_the_others(missing, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    timed = {name: loss_kernels.CONTENDERS[name] for name in (loss_kernels.STOCK, "ours, by torch", loss_kernels.OURS)}
    monkeypatch.setattr(loss_kernels, "CONTENDERS", timed | {missing: full})
    grid, figures, _ = race_of_loss_kernels(monkeypatch)
    assert not figures
    for name, _, _, ms, ratio, *_ in grid.rows:
        if name == missing:
            assert "out of memory" in ms
        else:
            assert float(ms) > 0 and (ratio == "-") == (missing == loss_kernels.STOCK)


def test_the_models(monkeypatch):
    """Types of weights as the module says them; a step moves the adapters over 4 bits."""
    window = gpu_window.Window("cpu", 1)
    point = replace(TINY, tuning="qlora")
    model = gpu_work.job_of(point, None, window).model()
    kinds = {(p.dtype, p.requires_grad) for p in model.parameters()}
    assert kinds == {(torch.uint8, False), (torch.bfloat16, False), (torch.float32, True)}
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.bfloat16()
    window.begin()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in replace(TINY, tuning="full").model_shape().model().parameters()} == {torch.float32}
    half = replace(TINY, tuning="full", full_dtype="bfloat16").model_shape()
    assert {p.dtype for p in half.model().parameters()} == {torch.bfloat16}


def test_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    for more in ([], ["--one_process"]):
        with pytest.raises(SystemExit, match="2"):
            gpu.options(["--device", "cpu", *more])


# -- points ------------------------------------------------------------------------------------------------------------


def test_axolotl_finds_the_plugin_that_has_the_window(monkeypatch, tmp_path):
    """Axolotl imports it by name, which must not be that of a second copy of its module."""
    for name in ("cli.args", "cli.config", "common.datasets", "integrations.base", "train"):
        monkeypatch.setitem(sys.modules, f"axolotl.{name}", Mock(BasePlugin=object))
    monkeypatch.setitem(sys.modules, ours := "benchmarks.gpu.gpu_axolotl", None)
    del sys.modules[ours]  # after the test, the module with the stand-ins is forgotten
    module = importlib.import_module(ours)
    plugin = module._axolotl_settings(Mock(token_rows=list, lora_rank=None), "model", str(tmp_path))["plugins"][0]
    assert plugin == f"{module.Watching.__module__}.{module.Watching.__qualname__}"


def test_the_order_is_that_of_importance():
    given = gpu.options(
        ["--shapes", "3b", "1b", "--tuning", "full", "lora", "--contenders", "ours", "stock", "--repeats", "2"]
    )
    names = [(one.repeat, one.shape, one.tuning, one.contender) for one in gpu.points_of(given)]
    assert names[:3] == [(1, "3b", "full", "ours"), (1, "3b", "full", "stock"), (1, "3b", "lora", "ours")]
    assert names[4:5] == [(1, "1b", "full", "ours")] and names[8] == (2, "3b", "full", "ours") and len(names) == 16


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("CUDA out of memory"), "out of memory"), (KeyError("x"), "failed")]
)
def test_what_a_contender_raises_is_its_result(monkeypatch, capsys, error, status):
    def work(job, window):
        raise error

    monkeypatch.setitem(gpu_work.CONTENDERS, "stock", gpu_work.CardContender(work))
    found = result_of(TINY)
    assert found["status"] == status and type(error).__name__ in found["reason"]
    assert ("Traceback" in capsys.readouterr().err) == (status == "failed")


@pytest.mark.parametrize(("body", "status"), [("exit 3", "failed"), ("exec sleep 600", "not run")])
def test_a_process_that_dies_or_takes_too_long(monkeypatch, tmp_path, body, status):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    begun_s = time.monotonic()
    found = gpu.in_own_process(TINY, 0.5 if status == "not run" else 60)
    assert found["status"] == status and time.monotonic() - begun_s < 300
    assert status != "failed" or "ended with 3" in found["reason"]


def test_what_the_time_does_not_reach_is_listed(monkeypatch):
    monkeypatch.setattr(gpu, "in_own_process", lambda point, seconds: pytest.fail("the time was over"))
    found = list(gpu.measured([TINY, replace(TINY, contender="axolotl")], seconds=0))
    assert [one["status"] for one in found] == ["not run", "cannot run"]
    assert any("not run for lack of time: 1 points" in note for note in gpu_table.notes_of(found))


def test_attention(monkeypatch):
    monkeypatch.setattr(gpu_work, "best_attention", lambda wanted, device, half_precision: "flash_attention_2")
    chosen = {contender: gpu_work.attention_of(Point("1b", "lora", contender)) for contender in gpu_work.CONTENDERS}
    assert chosen["stock"] is None and chosen["trl"] is None
    assert chosen["ours"] == chosen["trl, packing"] == chosen["trl, padding-free"] == "flash_attention_2"
    assert gpu_work.attention_of(Point("1b", "lora", "trl, packing", flash="sdpa")) == "sdpa"
    assert gpu_work.attention_of(replace(TINY, contender="trl, packing")) is None


# -- the window --------------------------------------------------------------------------------------------------------


def test_the_window_is_open_for_the_measured_steps_only():
    window = gpu_window.Window("cpu", steps=2)
    model = window.watch(TINY.model_shape().model())
    window.begin()
    for _ in range(gpu_window.WARM_UP_STEPS + 2):
        with pytest.raises(RuntimeError, match="before the last measured"):
            window.end()
        model(input_ids=torch.zeros(2, 8, dtype=torch.long))
        window.step()
    model(input_ids=torch.zeros(2, 8, dtype=torch.long))
    window.end()
    assert window.processed == 2 * 16 and window.seconds > 0 and window.syncs is None


def test_peaks_survive_restarts(monkeypatch):
    peak = {"bytes": 5}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *device: peak.update(bytes=1))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak["bytes"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * peak["bytes"])
    with gpu_window.Peaks("cuda") as peaks:
        peaks.start()
        peak["bytes"] = 7
        torch.cuda.reset_peak_memory_stats(0)
        peaks.read()
    assert (peaks.allocated, peaks.reserved, peak["bytes"]) == (7, 14, 1)


def test_waits_of_the_host(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    syncs = gpu_window._Syncs()
    syncs.start()
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("of something else", stacklevel=1)
    syncs.stop()
    assert syncs.count == 3 and modes == ["warn", "default"]


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_operations_of_many_layers_and_lengths(tuning):
    job = gpu_work.job_of(replace(TINY, tuning=tuning), None, gpu_window.Window("cpu", 1))
    shape = replace(job.shape, layers=5)
    found = gpu_shapes.model_flops(shape, job.adapted, [48, 20])
    assert found == sum(gpu_shapes._counted(shape, job.adapted, 5, length) for length in (48, 20))


def test_six_operations_per_weight_and_token():
    """Of all weights but the input embeddings, with rows so short that attention hardly counts."""
    shape = replace(gpu_shapes.SHAPES["8b"], tuning="full")
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 4096 * 128_256
    assert gpu_shapes.model_flops(shape, lambda model: model, [64]) == pytest.approx(6 * weights * 64, rel=0.01)


def test_a_row_of_the_table(monkeypatch):
    monkeypatch.setattr(gpu_table, "_flops_per_token", lambda point: 1e12)
    rows = gpu_table.grid_of([result("stock"), result("ours", seconds=1.0), cannot("unsloth")], None).rows
    assert rows[0][:9] == ["1b lora", "stock", "500", "1.00", "1.50", "2.0", "3.0", "51%", "8.000"]
    assert rows[1][2:4] == ["1,000", "2.00"]
    assert rows[2][1:] == ["unsloth", *["-"] * 8, "needs nothing"]
    assert gpu_table.utilization(result("stock"), 500, 1000) == 0.5
    assert gpu_table.utilization(result("stock", card="a card of tomorrow"), 500, None) is None


def test_figures_are_paired_by_repeat():
    slow = [result("ours", repeat, seconds=2.0 * repeat, peak_bytes=4 * 2**30) for repeat in (1, 2)]
    others = [result("trl", repeat, seconds=1.0 * repeat) for repeat in (1, 2)]
    figures = gpu_table.figures_of([*slow, *others, result("stock", seconds=9.0)])
    assert figures["1b lora: tokens per second, ours / fastest other"].value == 0.5
    assert figures["1b lora: tokens per second, ours / fastest other"].spread == 0
    assert figures["1b lora: peak memory, ours / leanest other"].value == 2
    assert gpu_table.figures_of([result("ours"), cannot("stock")]) == {}


def test_unequal_work_is_said():
    other_bits, other_rows = result("ours", held_out_bits=8.5), result("trl", step_tokens=[500, 501])
    found = gpu_table.differences([result("stock"), other_bits, other_rows, result("trl, packing", step_tokens=[1])])
    assert found == [
        "1b lora, ours: held-out loss 8.500 bits, stock 8.000",
        "1b lora, trl: tokens of its steps are not those of stock",
    ]


def test_the_file_keeps_what_an_earlier_run_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_table, "_flops_per_token", lambda point: 1e9)
    given = gpu.options(["--repeats", "1"])
    elsewhere = result("axolotl", card="another card")
    gpu._write_results([result("stock"), result("trl"), elsewhere, cannot("unsloth")], 0, given)
    now = [result("stock", seconds=1.0), cannot("ours", "not run", "the time was over")]
    gpu._write_results(now, 3, given)
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert [(one["contender"], one["seconds"]) for one in record["results"]] == [("stock", 1.0), ("trl", 2.0)]
    assert record["not_run"] == 4
    assert [row[1] for row in record["table"]["rows"]] == ["stock", "ours", "trl"]
