"""Imports with the collector at rest: it is as it was afterwards, also where an import fails."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from scu_trainer.imports import without_collector


def test_the_collector_rests_inside_only():
    with pytest.raises(ZeroDivisionError), without_collector():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_had_switched_it_off_keeps_it_off():
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("freeze", [False, True])
def test_only_a_process_of_ours_is_frozen(freeze):
    program = (
        "import gc\nfrom scu_trainer.imports import without_collector\n"
        f"with without_collector(freeze={freeze}):\n    kept = [[] for _ in range(100)]\nprint(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 100) is freeze
