"""The monitor's thread, driven by an injected wait, so that no test sleeps."""

from __future__ import annotations

import threading

import pytest
import torch

from scu_trainer.train.step.recovery.memory import CpuGauge
from scu_trainer.train.step.recovery.memory_monitor import MemoryMonitor
from tests.faults import FakeGauge

SECONDS = 30
"""Until a test gives up on a thread; none ever waits that long."""


def sampled(turns: int, gauge=None, **options) -> tuple[MemoryMonitor, list[float]]:
    """A stopped monitor that has taken exactly ``turns`` samples, and how long it meant to wait after each."""
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == turns

    with MemoryMonitor(gauge or FakeGauge(100, 25), wait=wait, **options) as monitor:
        pass  # leaving joins the thread, which ends by itself
    return monitor, waits


def drained(monitor: MemoryMonitor) -> list[dict[str, float]]:
    return [monitor.metrics_queue.get_nowait() for _ in range(monitor.metrics_queue.qsize())]


def test_samples_say_what_the_gauge_and_the_clock_say():
    times = iter(range(10, 20))
    monitor, waits = sampled(2, FakeGauge(100, 25, 60), clock=lambda: next(times), interval_s=0.5)
    first, second = drained(monitor)
    assert first.pop("process_rss_bytes") > 2**20
    assert first == {
        "time_s": 10,
        "limit_bytes": 100,
        "used_bytes": 25,
        "peak_bytes": 60,
        "free_bytes": 75,
        "used_fraction": 0.25,
    }
    assert second["time_s"] == 11
    assert waits == [0.5, 0.5]


def test_it_never_resets_the_gauge():
    gauge = FakeGauge(100)
    sampled(5, gauge)
    assert gauge.resets == 0


def test_a_full_queue_drops_the_oldest_and_counts():
    times = iter(range(100))
    monitor, _ = sampled(7, queue_size=3, clock=lambda: next(times))
    assert [sample["time_s"] for sample in drained(monitor)] == [4, 5, 6]
    assert monitor.dropped == 4


def test_nothing_is_dropped_while_there_is_room():
    monitor, _ = sampled(3, queue_size=3)
    assert len(drained(monitor)) == 3
    assert monitor.dropped == 0


def test_stop_cuts_an_hours_wait_short_and_ends_the_thread():
    monitor = MemoryMonitor(FakeGauge(100), interval_s=3600)
    monitor.start()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "memory-monitor")
    monitor.metrics_queue.get(timeout=SECONDS)  # the first sample comes at once
    monitor.stop()
    assert not thread.is_alive()
    monitor.stop()  # once more is no error


def test_it_goes_on_sampling_after_a_second_start():
    monitor = MemoryMonitor(FakeGauge(100), interval_s=0.001)
    for _ in range(2):
        drained(monitor)
        with monitor:
            for _ in range(3):
                monitor.metrics_queue.get(timeout=SECONDS)


def test_starting_twice_is_refused():
    with (
        MemoryMonitor(FakeGauge(100), interval_s=3600) as monitor,
        pytest.raises(RuntimeError, match="already running"),
    ):
        monitor.start()


def test_the_thread_does_not_keep_the_process_alive():
    with MemoryMonitor(FakeGauge(100), interval_s=3600) as monitor:
        assert monitor._thread.daemon


class BrokenGauge(FakeGauge):
    def read(self):
        raise OSError("no such device any more")


def ended(monitor: MemoryMonitor) -> MemoryMonitor:
    monitor._thread.join(SECONDS)
    assert not monitor._thread.is_alive()
    return monitor


def test_a_gauge_that_fails_ends_the_thread_and_stop_raises_it_once():
    monitor = MemoryMonitor(BrokenGauge(100))
    monitor.start()
    ended(monitor)
    with pytest.raises(OSError, match="no such device"):
        monitor.stop()
    monitor.stop()
    monitor.start()
    with pytest.raises(OSError, match="no such device"):
        ended(monitor).stop()


def test_the_bodys_error_goes_before_the_gauges():
    with pytest.raises(KeyError) as caught, MemoryMonitor(BrokenGauge(100)) as monitor:
        ended(monitor)
        raise KeyError("training failed")
    assert "no such device" in caught.value.__notes__[0]


def test_leaving_the_context_raises_the_gauges_error():
    with pytest.raises(OSError, match="no such device"), MemoryMonitor(BrokenGauge(100)) as monitor:
        ended(monitor)


@pytest.mark.parametrize("options", [{"interval_s": 0}, {"queue_size": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="queue_size"):
        MemoryMonitor(FakeGauge(100), **options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="asks for a machine without an accelerator")
def test_without_a_gauge_it_watches_main_memory():
    assert isinstance(MemoryMonitor()._gauge, CpuGauge)
