"""The environment of every test: offline, private caches, one thread, no card; set before anything is imported."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import ipaddress
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests import warm

ROOT = Path(__file__).parents[1]
PRIVATE = Path(tempfile.mkdtemp(prefix="scu_trainer_tests_"))

MOST_OPEN_FILES = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 500)
"""Of a process of tests; many systems allow 1,024, or 256."""

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(PRIVATE / "huggingface")
os.environ["SCU_TRAINER_CACHE"] = str(PRIVATE / "scu_trainer")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Results are held against those of a CPU to the last digit, and children are forked, which a card in use forbids.
# tests/gpu, which needs one, says so itself: make test-gpu.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Tiny models are fastest on one thread, and sums come out the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class NetworkForbidden(BaseException):
    """A test tried to leave this machine. No subclass of Exception: code under test must not catch it."""


def _is_local(host: object) -> bool:
    """Whether ``host`` (name or address; None and "" mean this machine) is this machine."""
    name = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _forbid_network(event: str, arguments: tuple) -> None:
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path or None: a local or a connected socket
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if not _is_local(host):
        raise NetworkForbidden(f"{event} to {host!r}: tests run without network; use a server on 127.0.0.1")


sys.addaudithook(_forbid_network)


# Collecting imports every file of tests and all that they import: garbage collections on the way would walk through it
# again and again, a quarter of the time that collecting takes.
gc.disable()


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        warm.make_once_what_stays_the_same()
    gc.enable()


_begun: Counter[Path] = Counter()
"""Tests, by their file."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every training ends in a full garbage collection, which need not walk over all that imports have left behind:
    0.3 s each. Once more for each file of tests, and after its first test, which imports what it takes. What was in use
    then may be garbage by now, with files that it holds open: before there are many of these, all is looked at."""
    _begun[item.path] += 1
    if _begun[item.path] > 2:
        return
    if len(os.listdir("/dev/fd")) > MOST_OPEN_FILES:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    gc.collect()  # what the last tests left open is found
    gc.freeze()  # once: pytest collects ten times more
    atexit.register(gc.unfreeze)  # the end of the interpreter takes it all away in its own order


def pytest_unconfigure() -> None:
    shutil.rmtree(PRIVATE, ignore_errors=True)


@pytest.fixture(scope="session")
def tables() -> ModuleType:
    """docs/write_tables.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "docs" / "write_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
