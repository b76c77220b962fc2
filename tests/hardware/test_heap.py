"""Freed memory that stays, in processes of their own: the switch has no way back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scu_trainer.hardware import heap
from scu_trainer.settings import EfficiencySettings
from scu_trainer.settings.tasks import KINDS
from tests import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's switches")

BLOCKS = """
import resource, sys
from pathlib import Path
from scu_trainer.hardware.heap import release_freed_memory, keep_freed

def resident_mib():  # not of files: their pages come and go with other programs
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024

kept = keep_freed() if sys.argv[1] == "keep" else None
sizes = (1, 5, 20, 33, 50)
before_mib, faults = resident_mib(), []
for _ in range(3):
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mebibytes in sizes:
        block = b"x" * (mebibytes << 20)
        del block
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
held_mib = resident_mib() - before_mib
release_freed_memory()
print(kept, faults[-1], round(held_mib), round(resident_mib() - before_mib))
"""


def blocks(mode: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", BLOCKS, mode], capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_kept_memory_is_used_again_and_can_be_given_back():
    kept, faults, held_mib, left_mib = blocks("keep")
    assert kept == "True"
    assert int(faults) < 100  # of 4 KiB each; all blocks together are 27,904 of them
    assert int(held_mib) >= 50  # the largest block; where no small one lies between, the others lie inside of it
    assert int(left_mib) < 5


def test_without_it_large_blocks_come_again():
    _, faults, held_mib, _ = blocks("stock")
    assert int(faults) > 15_000
    assert int(held_mib) < 80


SMALL = """
import resource, sys
from scu_trainer.hardware import heap

if sys.argv[1] == "settle":
    heap.settle_malloc_thresholds()
for _ in range(4):
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # not tensors: where the C library cannot use an aligned block again, when it settles depends on what lies around
    blocks = [b"x" * (20 << 20) for _ in range(3)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""


@pytest.mark.parametrize(("mode", "zeroes"), [("stock", True), ("settle", False)])
def test_settled_small_blocks_do_not_go_back_and_forth(mode, zeroes):
    ran = subprocess.run([sys.executable, "-c", SMALL, mode], capture_output=True, text=True, check=True)
    assert (int(ran.stdout) > 7_500) == zeroes  # of 4 KiB each; all blocks together are 15,360 of them


def test_nothing_happens_where_a_process_has_no_library_of_no_name(monkeypatch):
    def library(name):
        raise TypeError("argument of type 'NoneType' is not iterable")  # on Windows

    monkeypatch.setattr(heap.ctypes, "CDLL", library)
    heap._c_function.cache_clear()
    try:
        heap.settle_malloc_thresholds()
        heap.release_freed_memory()
        assert not heap.keep_freed() and not heap.UntouchedHeap.is_known()
    finally:
        heap._c_function.cache_clear()


def test_off_by_default_and_on_for_tasks_other_than_text():
    assert not EfficiencySettings().keep_freed_memory
    on = {name for name, kind in KINDS.items() if kind.defaults.get("keep_freed_memory")}
    assert on == set(KINDS) - {"text-generation"}


TRAINER = """
import sys, torch
from scu_trainer.hardware import heap
from scu_trainer.settings import EfficiencySettings
from scu_trainer.train import loops
from scu_trainer.train.trainer import SCUTrainer
from tests import processes
from tests.tiny import llama
from transformers import TrainingArguments

asked = []
loops.keep_freed = lambda: asked.append(heap.keep_freed())
for setting in (False, True):
    arguments = TrainingArguments(sys.argv[1], use_cpu=True, report_to="none")
    SCUTrainer(llama(), arguments, efficiency=EfficiencySettings(keep_freed_memory=setting))
    print(asked)
"""


def test_the_trainer_asks_for_it_where_the_settings_do(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAINER)
    ran = processes.run([program, tmp_path])
    assert ran.stdout.splitlines()[-2:] == ["[]", "[True]"], ran.stderr[-1000:]
