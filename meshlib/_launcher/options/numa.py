"""``--numa``: binding each local rank to the CPUs of a NUMA node."""

from __future__ import annotations

import os
import re
from pathlib import Path

from meshlib._launcher.options.launch import NumaNode

_NODES = Path("/sys/devices/system/node")
_NODE = re.compile(r"node(\d+)")


def cpus_of_ranks(ranks: int, nodes: Path = _NODES) -> tuple[NumaNode, ...]:
    """Return the NUMA node of each local rank. Neighbouring ranks share a node.

    CPUs that this process may not use are skipped, as are nodes without usable CPUs. Raises
    ValueError if the kernel does not list its nodes.
    """
    allowed = os.sched_getaffinity(0)
    found: list[NumaNode] = []
    for path in nodes.glob("node*"):
        named = _NODE.fullmatch(path.name)
        if named is None:
            continue
        try:
            cpus = read_cpus((path / "cpulist").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        usable = tuple(sorted(allowed.intersection(cpus)))
        if usable:
            found.append(NumaNode(int(named[1]), usable))
    if not found:
        raise ValueError(
            f"--numa: {nodes} lists no NUMA node with CPUs that this process may use; expected a"
            " Linux kernel that lists its nodes there"
        )
    found.sort(key=lambda node: node.number)
    return tuple(found[rank * len(found) // max(ranks, len(found))] for rank in range(ranks))


def read_cpus(text: str) -> list[int]:
    """Return the CPUs in the kernel's list: ``0-3,8``. Raises ValueError for anything else."""
    cpus: list[int] = []
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def list_cpus(cpus: tuple[int, ...]) -> str:
    """Return ascending ``cpus`` in the kernel's format."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(str(end) for end in run) for run in runs)


def describe(nodes: tuple[NumaNode, ...], first_rank: int) -> str:
    """Return the bindings of the ranks from ``first_rank`` on, on one line."""
    bound = (
        f"rank {first_rank + i} to node {node.number} (CPUs {list_cpus(node.cpus)})"
        for i, node in enumerate(nodes)
    )
    return f"NUMA: {', '.join(bound)}"
