"""Bind a run to one NUMA node, so that a run on one GPU uses the cores and the memory next to that GPU.

Like ``numactl --cpunodebind``, this sets the CPU affinity of the process. Linux allocates a page on the node of the
core that first writes to it, so tensors are placed on that node as well. A run on CPUs keeps all cores unless the user
names a node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from scu_trainer.errors import RequirementError
from scu_trainer.hardware.probe import ask_driver
from scu_trainer.runs.room import GPU, Ask

SYS = Path("/sys")
AUTO, OFF = "auto", "off"


def nodes(sys: Path = SYS) -> dict[int, set[int]]:
    """Return the cores of each NUMA node that has any, or {} if the system does not report nodes."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        cores = _parse_cores((folder / "cpulist").read_text())
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def node_of(device: str, ask: Ask = ask_driver, sys: Path = SYS) -> Optional[int]:
    """Return the NUMA node of a GPU, named as its queue is, such as "gpu-0"; None if it is not known."""
    if not device.startswith(GPU):
        return None
    words = ["-i", device.removeprefix(GPU), "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    address = re.fullmatch(r"([0-9a-f]+)(:[0-9a-f]+:[0-9a-f]+\.[0-9a-f])", (ask(words) or "").strip().lower())
    if address is None:
        return None
    file = sys / "bus/pci/devices" / f"{int(address[1], 16):04x}{address[2]}" / "numa_node"
    number = int(file.read_text()) if file.is_file() else -1  # the kernel writes -1 if the firmware names no node
    return None if number < 0 else number


def bind_to_numa_node(wanted: str, devices: Sequence[str], ask: Ask = ask_driver, sys: Path = SYS) -> Optional[str]:
    """Bind this process, and all that it starts, to one node. ``wanted``: "auto", "off", or the number of a node.

    Returns a description for the log, or None if nothing was changed. Raises RequirementError if the node does not
    exist.
    """
    found = nodes(sys) if wanted != OFF and hasattr(os, "sched_setaffinity") else {}
    if wanted == AUTO:
        near = {node_of(device, ask, sys) for device in devices} if len(found) > 1 else set()
        node = near.pop() if len(near) == 1 else None
    else:
        node = None if wanted == OFF else int(wanted)
        if node is not None and node not in found:
            there = ", ".join(map(str, found)) or "none that the system reports"
            raise RequirementError(f"there is no NUMA node {node} here; nodes: {there}; or give auto, or off")
    cores = found.get(node, set()) & os.sched_getaffinity(0) if found else set()
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return f"bound to NUMA node {node}, {len(cores)} cores" + (f", next to {devices[0]}" if wanted == AUTO else "")


def _parse_cores(listed: str) -> set[int]:
    """Return the cores in a list such as 0-3,8."""
    parts = [part.partition("-") for part in listed.strip().split(",") if part]
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
