"""Read the limits that a container or a service manager sets for this process, from cgroup v1 or v2.

If several levels of the cgroup tree have a limit, the tightest one counts. Every function takes ``root``, the directory
that holds ``proc`` and ``sys``, so that a test can create its own tree. The result is None if a controller is not
mounted or has no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Optional

ROOT = Path("/")

# cgroup v1 writes "no limit" as the largest multiple of the page size, more memory than any machine has
_UNLIMITED_BYTES = 2**60

# above memory.high the kernel kills no process, but slows it down so much that training hardly continues
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")


def memory_limit_bytes(root: Path = ROOT) -> Optional[int]:
    """Return the smallest memory limit on this process, in bytes."""
    limits = [limit for limit, _, _ in _memory_levels(root)]
    return min(limits, default=None)


def memory_available_bytes(root: Path = ROOT) -> Optional[int]:
    """Return the bytes left until the first memory limit; file cache that can be dropped counts as available."""
    rooms = [max(limit - used + droppable, 0) for limit, used, droppable in _memory_levels(root)]
    return min(rooms, default=None)


def cpu_quota_cores(root: Path = ROOT) -> Optional[float]:
    """Return the smallest CPU quota on this process in cores; 1.5 means the time of one and a half cores."""
    quotas = []
    for level in _levels(root, "cpu"):
        quota = _read_words(level / "cpu.max") or (
            _read_words(level / "cpu.cfs_quota_us") + _read_words(level / "cpu.cfs_period_us")
        )
        if len(quota) == 2 and quota[0].isdigit():  # "max" (v2) and "-1" (v1) mean no quota
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def _memory_levels(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (limit, used, droppable file cache) in bytes for each level that has a limit."""
    for level in _levels(root, "memory"):
        words = [word for name in _MEMORY_LIMITS for word in _read_words(level / name)]
        limits = [int(word) for word in words if word.isdigit() and int(word) < _UNLIMITED_BYTES]
        if not limits:
            continue
        used = _read_words(level / "memory.current") or _read_words(level / "memory.usage_in_bytes") or ["0"]
        yield min(limits), int(used[0]), _droppable_bytes(level)


def _droppable_bytes(level: Path) -> int:
    words = _read_words(level / "memory.stat")
    statistics = dict(zip(words[::2], words[1::2], strict=False))
    return int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's cgroup and all its parents for one controller."""
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, own_path = line.split(":", 2)
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        mount = next((mount for mount in mounts if mount.is_dir()), None)
        if mount is None:
            continue
        own = mount / own_path.lstrip("/")
        yield from (level for level in (own, *own.parents) if level.is_relative_to(mount))


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent, or hidden from this container: treated as no limit
        return []


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()
