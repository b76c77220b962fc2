"""Which cores a background run keeps to, on machines that are described by files."""

from __future__ import annotations

import os

import pytest

from scu_trainer.errors import RequirementError
from scu_trainer.runs.numa import bind_to_numa_node, node_of, nodes

CARDS = {"0": "00000000:3B:00.0\n", "1": "00000001:AF:00.0\n", "2": "00000000:5E:00.0\n"}


def driver(words):
    return CARDS.get(words[1])


@pytest.fixture
def sys(tmp_path):
    for node, cores in (("node0", "0\n"), ("node1", "1,64-67\n"), ("node2", "\n")):
        folder = tmp_path / "devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    for address, node in (("0000:3b:00.0", "1"), ("0001:af:00.0", "-1"), ("0000:5e:00.0", "0")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.fixture
def affinity(monkeypatch):
    """Cores 0 and 1 are ours; what is set is noted."""
    found = [{0, 1}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: found[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append(set(cores)))
    return found


def test_nodes_are_read_and_those_of_memory_alone_left_out(sys):
    assert nodes(sys) == {0: {0}, 1: {1, 64, 65, 66, 67}}
    assert nodes(sys / "nowhere") == {}


def test_the_node_of_a_gpu(sys):
    assert [node_of(name, driver, sys) for name in ("gpu-0", "gpu-1", "gpu-2", "gpu-9", "cpu")] == [
        1,
        None,
        0,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("wanted", "devices", "cores"),
    [
        ("auto", ["gpu-0"], {1}),
        ("auto", ["gpu-2"], {0}),
        ("auto", ["gpu-1"], None),
        ("auto", ["gpu-0", "gpu-2"], None),
        ("auto", ["cpu"], None),
        ("1", ["cpu"], {1}),
        ("off", ["gpu-0"], None),
    ],
)
def test_a_run_is_bound_to_one_node_and_only_to_cores_that_are_its_own(sys, affinity, wanted, devices, cores):
    said = bind_to_numa_node(wanted, devices, driver, sys)
    assert affinity[-1] == (cores or {0, 1}) and (said is None) == (cores is None)


def test_a_machine_with_one_node_is_left_as_it_is(sys, affinity):
    (sys / "devices/system/node/node1/cpulist").write_text("\n")
    assert bind_to_numa_node("auto", ["gpu-0"], driver, sys) is None and len(affinity) == 1


def test_a_node_that_is_not_there_is_refused(sys, affinity):
    with pytest.raises(RequirementError, match="no NUMA node 7 here; nodes: 0, 1; or give auto, or off"):
        bind_to_numa_node("7", ["cpu"], driver, sys)
