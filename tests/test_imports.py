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


@pytest.mark.parametrize(("words", "freeze"), [("[]", True), ("", False), ("", True)])
def test_only_a_process_of_ours_is_frozen(words, freeze):
    """A command that is called with words, as in a notebook, must not keep models for ever that it did not make."""
    program = (
        "import gc, sys\nfrom scu_trainer.cli.main import main\nfrom scu_trainer.imports import without_collector\n"
        f"sys.stdout, out = sys.stderr, sys.stdout\nmain({words})\n"
        f"with without_collector(freeze={freeze}):\n    kept = [[] for _ in range(100)]\n"
        "print(gc.get_freeze_count(), file=out)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 100) is (freeze and not words)


@pytest.mark.parametrize("name", ["triton._C.libtriton", "tritium"])
def test_what_counts_its_objects_at_the_end_finds_none_left(name):
    """Triton's bindings, which no CPU build of torch brings, list what the interpreter has not collected then."""
    program = (
        "import atexit, gc, sys\nfrom scu_trainer.cli.main import main\n"
        "from scu_trainer.imports import without_collector\n"
        "sys.stdout, out = sys.stderr, sys.stdout\nmain()\n"
        "atexit.register(lambda: print(gc.get_freeze_count(), file=out))  # after those of later\n"
        f"sys.modules[{name!r}] = sys\n"
        "with without_collector(freeze=True):\n    pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 0) is (name == "tritium")
