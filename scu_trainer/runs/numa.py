"""Machines whose memory lies in several places: a run on one GPU stays on the cores beside that GPU.

What ``numactl --cpunodebind`` does, by the affinity of the process: Linux gives a page to the node of the core that
first writes it, so tensors then lie there, too. A run on CPUs keeps all cores unless a node is asked for.
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
    """Cores of each node that has some; {} where the system does not tell."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        cores = _cores((folder / "cpulist").read_text())
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def node_of(device: str, ask: Ask = ask_driver, sys: Path = SYS) -> Optional[int]:
    """Of a GPU by the name of its line, such as "gpu-0"; None where nobody tells."""
    if not device.startswith(GPU):
        return None
    words = ["-i", device.removeprefix(GPU), "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    address = re.fullmatch(r"([0-9a-f]+)(:[0-9a-f]+:[0-9a-f]+\.[0-9a-f])", (ask(words) or "").strip().lower())
    if address is None:
        return None
    file = sys / "bus/pci/devices" / f"{int(address[1], 16):04x}{address[2]}" / "numa_node"
    number = int(file.read_text()) if file.is_file() else -1  # -1: the firmware does not say
    return None if number < 0 else number


def bind(wanted: str, devices: Sequence[str], ask: Ask = ask_driver, sys: Path = SYS) -> Optional[str]:
    """Keep this process, and all that it starts, on one node. ``wanted``: "auto", "off", or the node's number.

    Returns what was done, in words; None for nothing. Raises RequirementError for a node that is not there.
    """
    found = nodes(sys) if wanted != OFF and hasattr(os, "sched_setaffinity") else {}
    if wanted == AUTO:
        near = {node_of(device, ask, sys) for device in devices} if len(found) > 1 else set()
        node = near.pop() if len(near) == 1 else None
    else:
        node = None if wanted == OFF else int(wanted)
        if node is not None and node not in found:
            there = ", ".join(map(str, found)) or "none that the system tells"
            raise RequirementError(f"there is no NUMA node {node} here; there: {there}; or auto, or off")
    cores = found.get(node, set()) & os.sched_getaffinity(0) if found else set()
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return f"bound to NUMA node {node}, {len(cores)} cores" + (f", beside {devices[0]}" if wanted == AUTO else "")


def _cores(listed: str) -> set[int]:
    """Of a list such as 0-3,8."""
    parts = [part.partition("-") for part in listed.strip().split(",") if part]
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
