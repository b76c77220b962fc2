"""Container limits, read from trees laid out as cgroup v1 and v2 lay them out."""

from __future__ import annotations

import pytest

from scu_trainer.hardware import cgroup

GIB = 2**30
V1_UNLIMITED = "9223372036854771712"


def lay_out(root, files: dict[str, str]):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def v2(tmp_path):
    return lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job",
            "sys/fs/cgroup/user/memory.max": str(8 * GIB),
            "sys/fs/cgroup/user/memory.current": str(7 * GIB),
            "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
            "sys/fs/cgroup/user/cpu.max": "150000 100000",
            "sys/fs/cgroup/user/job/memory.max": "max",
            "sys/fs/cgroup/user/job/memory.current": str(GIB),
            "sys/fs/cgroup/user/job/cpu.max": "max 100000",
        },
    )


@pytest.fixture
def v1(tmp_path):
    return lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/job",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        },
    )


def test_v2_takes_the_tightest_level(v2):
    assert cgroup.memory_limit_bytes(v2) == 8 * GIB
    assert cgroup.memory_available_bytes(v2) == 3 * GIB
    assert cgroup.cpu_quota_cores(v2) == 1.5


def test_v2_counts_the_limit_from_which_on_a_process_is_slowed_down(v2):
    lay_out(v2, {"sys/fs/cgroup/user/memory.high": str(6 * GIB), "sys/fs/cgroup/user/job/memory.high": "max"})
    assert cgroup.memory_limit_bytes(v2) == 6 * GIB
    assert cgroup.memory_available_bytes(v2) == GIB
    lay_out(v2, {"sys/fs/cgroup/user/job/memory.high": str(2 * GIB)})  # beside a memory.max of "max"
    assert cgroup.memory_limit_bytes(v2) == 2 * GIB


def test_v1_takes_the_tightest_level(v1):
    assert cgroup.memory_limit_bytes(v1) == 4 * GIB
    assert cgroup.memory_available_bytes(v1) == 2 * GIB
    assert cgroup.cpu_quota_cores(v1) == 0.5


def test_a_path_from_outside_the_container_still_finds_the_mount(tmp_path):
    """Without a cgroup namespace the path is the host's, and the container sees its own limit at the mount's root."""
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": "0",
        },
    )
    assert cgroup.memory_limit_bytes(root) == GIB
    assert cgroup.memory_available_bytes(root) == GIB


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}])
def test_no_limit(tmp_path, files):
    root = lay_out(tmp_path, files)
    assert cgroup.memory_limit_bytes(root) is None
    assert cgroup.memory_available_bytes(root) is None
    assert cgroup.cpu_quota_cores(root) is None


def test_usage_above_the_limit_leaves_nothing(tmp_path):
    root = lay_out(
        tmp_path,
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "120"},
    )
    assert cgroup.memory_available_bytes(root) == 0
