"""What a run says that it cost: the highest memory of its optimizer steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from scu_trainer.hardware.heap import release_freed_memory
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step.costs import StepPeaks, _peak_gauge, step_peaks
from scu_trainer.train.step.recovery.memory import CpuGauge
from tests import tiny
from tests.faults import FakeGauge, touch

MIB = 2**20


def one_step(peaks: StepPeaks) -> None:
    peaks.on_step_begin(None, None, None)
    peaks.on_step_end(None, None, None)


def test_the_highest_of_all_steps_counts():
    gauge = FakeGauge(limit_bytes=100, used_bytes=10, peak_bytes=lambda resets: [0, 30, 50, 40][resets])
    peaks = StepPeaks(gauge)
    assert peaks.peak_bytes is None
    for _ in range(3):
        one_step(peaks)
    assert peaks.peak_bytes == 50
    assert gauge.exact_resets == 0  # giving memory back would cost time


def test_a_loop_restarts_the_peak_itself_and_has_seen_the_first_part_of_the_step():
    gauge = FakeGauge(limit_bytes=100, used_bytes=10, peak_bytes=30)
    loop = SimpleNamespace(statistics=SimpleNamespace(peak_bytes=0))
    peaks = StepPeaks(gauge, loop)
    one_step(peaks)
    assert gauge.resets == 0
    assert peaks.peak_bytes == 30
    loop.statistics.peak_bytes = 70
    assert peaks.peak_bytes == 70


def test_nothing_is_known_without_a_gauge():
    peaks = StepPeaks(None)
    one_step(peaks)
    assert peaks.peak_bytes is None


class Taking(TrainerCallback):
    """Takes memory and frees it: ``inside`` MiB in an optimizer step, ``between`` MiB after it."""

    def __init__(self, inside: int, between: int = 0) -> None:
        self.inside, self.between = inside, between

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        touch(self.inside)

    def on_evaluate(self, args, state, control, **kwargs):
        touch(self.between)


def peak_of(folder, memory: MemorySettings, *taking: TrainerCallback, **changes) -> int:
    """Bytes above what was held when training began."""
    found = {}

    def prepare(trainer) -> None:
        for callback in taking:
            trainer.add_callback(callback)
        found["peaks"] = step_peaks(trainer)
        trainer.add_callback(found["peaks"])
        release_freed_memory()  # what earlier tests left behind, which memory control would release during the run
        found["held"] = CpuGauge().read().own_bytes

    tiny.trained(tiny.llama(), folder, max_steps=2, memory=memory, prepare=prepare, **changes)
    return found["peaks"].peak_bytes - found["held"]


OFF, CAPPED, CONTROLLED = (
    MemorySettings(memory_control=False),
    MemorySettings(memory_control=False, token_cap=64),
    MemorySettings(),
)


@pytest.mark.parametrize("memory", [OFF, CAPPED, CONTROLLED], ids=["off", "capped", "controlled"])
def test_every_run_knows_the_peak_of_its_steps(tmp_path, memory):
    assert peak_of(tmp_path, memory, Taking(inside=96)) == pytest.approx(96 * MIB, abs=16 * MIB)


def test_what_an_evaluation_takes_is_no_part_of_a_step(tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tiny.Rows(4)}
    found = peak_of(tmp_path, OFF, Taking(inside=32, between=192), **evaluated)
    assert found == pytest.approx(32 * MIB, abs=16 * MIB)


def test_a_device_that_keeps_no_peak_is_unknown():
    trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device("meta")), micro_batches=None)
    assert step_peaks(trainer).peak_bytes is None


def test_main_memory_is_unknown_where_its_peak_cannot_be_restarted(tmp_path):
    cpu = torch.device("cpu")
    assert _peak_gauge(cpu) is not None
    assert _peak_gauge(cpu, str(tmp_path / "clear_refs")) is None
