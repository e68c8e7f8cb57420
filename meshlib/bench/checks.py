"""What the always-on checks cost a small all_reduce, in the same processes, block by block.

    python -m meshlib.bench.checks [BACKEND]

Off means: no flight record (no search for the user's line, no times), and a constant header in
place of the call's own. The comparison of 32 bytes in each frame cannot be taken out; it is part
of both. Blocks alternate; the ratio of each pair of neighbours is taken, and their median printed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import meshlib as dist
from meshlib.recorder import FlightRecorder, Record
from meshlib.world import current_world
from transport.call import Call, CallHeader

CALLS = 400
PAIRS = 40
RANK_FLAG = "--as-a-rank"


class _Unrecorded(Record):
    """A record that notes nothing but the header, which the call needs."""

    def __init__(self, header: CallHeader) -> None:
        self.header = header
        self.peer = -1
        self.call = None

    def start(self, call: Call) -> None:
        """Note nothing."""

    def end(self, error: str | None) -> None:
        """Note nothing."""


class _NoRecorder(FlightRecorder):
    """Keeps nothing."""

    def open(self, group: str, header: CallHeader, *_: Any, **__: Any) -> Record:
        """Return a record that is not kept."""
        return _Unrecorded(header)


def main() -> None:
    """Start two ranks that measure, or be one of them."""
    if RANK_FLAG in sys.argv:
        _measure()
        return
    launcher = [sys.executable, "-m", "meshlib.launcher.cli", "--nproc-per-node", "2"]
    rank = ["-m", "meshlib.bench.checks", RANK_FLAG, *sys.argv[1:]]
    subprocess.run([*launcher, *rank], check=True)


def _measure() -> None:
    backend = sys.argv[-1] if sys.argv[-1] != RANK_FLAG else None
    dist.init_process_group(backend)
    world = current_world()
    with_checks, without = world.recorder, _NoRecorder()
    packed = CallHeader(0, 0, 0, 0, 0, 0).pack()
    own_pack = CallHeader.pack

    def constant(self: CallHeader) -> bytes:
        return packed

    x = np.zeros(2, np.float32)

    def block(recorder: FlightRecorder, pack: Callable[[CallHeader], bytes]) -> float:
        dist.barrier()
        world.recorder = recorder
        setattr(CallHeader, "pack", pack)  # noqa: B010 (a method is not assignable)
        start = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(x)
        seconds = time.perf_counter() - start
        world.recorder = with_checks
        setattr(CallHeader, "pack", own_pack)  # noqa: B010
        return seconds / CALLS

    block(with_checks, own_pack)
    pairs = [(block(with_checks, own_pack), block(without, constant)) for _ in range(PAIRS)]
    if dist.get_rank() == 0:
        on, off = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        sys.stdout.write(
            f"all_reduce of 8 bytes, 2 ranks, {dist.get_backend()}: {on:.1f} us with checks, "
            f"{off:.1f} us without; median ratio {ratio:.3f}\n"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
