"""Collectives across a network with delay, beside Gloo and plain sockets; as root.

    python -m tests.benchmarks.delay [--ranks 2] [--round-trips 0.1,1,10,50] [--cells ...]

Each rank is in a network namespace of its own; ``wire.py`` holds their frames back. ``wire`` is how
long plain sockets take for the bytes that the ranks must send. Without torch there is no Gloo.
Rows: collective, bytes, round trip; milliseconds, medians of interleaved rounds; in brackets those
in which the ranks had processors, all together, and the program that pretends the wire.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from meshlib._bench.sizes import format_size, parse_size

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# Reads until whoever started it has ended, however that was.
_GUARD = 'cat; for name; do ip netns delete "$name"; done'


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Network:
    """``size`` namespaces on one wire, each with the address ``addresses[i]``; with a round trip of
    ``near`` seconds inside each of ``sites`` equal parts, and TCP's control of ``congestion``, if
    named. Nothing of it outlives this process.
    """

    def __init__(
        self,
        size: int,
        round_trip: float,
        seconds: float = 3600,
        sites: int = 1,
        near: float | None = None,
        congestion: str = "",
    ) -> None:
        self.names = [f"delay-{os.getpid()}-{i}" for i in range(size)]
        self.addresses = [f"10.98.7.{i + 1}" for i in range(size)]
        guard = ["sh", "-c", _GUARD, "guard", *self.names]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        for name in self.names:
            _ip("netns", "add", name)
        command = [*_DIES_WITH_PARENT, sys.executable, str(_HERE / "wire.py")]
        command += [str(round_trip * 500), str(seconds)]
        command += [str(sites), str((round_trip if near is None else near) * 500)]
        self.wire = subprocess.Popen([*command, *self.names], stdout=subprocess.PIPE)
        assert self.wire.stdout is not None
        self.wire.stdout.readline()
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            device = ["-n", name, "link", "set", "eth0"]
            _ip(*device, "address", f"02:00:00:00:00:{i:02x}", "mtu", "9000")
            _ip(*device, "txqueuelen", "10000", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            if congestion:
                route = ["-n", name, "route", "change", "10.98.7.0/24", "dev", "eth0"]
                _ip(*route, "src", address, "congctl", congestion)

    def start(self, rank: int, command: list[str], **options: object) -> subprocess.Popen[str]:
        """Start a command in the namespace of ``rank``."""
        inside = ["ip", "netns", "exec", self.names[rank], *_DIES_WITH_PARENT, *command]
        return subprocess.Popen(inside, text=True, **options)  # pyright: ignore

    def close(self) -> None:
        """Take everything down."""
        self.wire.kill()
        self.wire.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


def _measure(options: argparse.Namespace, round_trip: float, cells: list[list[object]]) -> None:
    near = options.near / 1000 if options.sites > 1 else None
    network = Network(
        options.ranks,
        round_trip,
        sites=options.sites,
        near=near,
        congestion=options.congestion,
    )
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(options.ranks):
            plan = {
                "rank": rank, "size": options.ranks, "addresses": network.addresses,
                "round_trip": round_trip, "rounds": options.rounds, "warm": options.warm,
                "cells": cells, "backend": options.backend, "wire": True,
                "verbose": options.verbose, "sites": options.sites,
                "wire_pid": network.wire.pid,
                "compress": options.compress.split(",") if options.compress else [],
                "gloo": importlib.util.find_spec("torch") is not None,
            }  # fmt: skip
            environment = {**os.environ, "PYTHONPATH": str(options.code or _ROOT)}
            command = [sys.executable, str(_HERE / "ranks.py"), json.dumps(plan)]
            ranks.append(network.start(rank, command, env=environment, stdout=subprocess.PIPE))
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if not line.startswith("["):
                print(line, end="", flush=True)
                continue
            name, nbytes, row = json.loads(line)
            columns = "  ".join(
                f"{library} {ms:9.2f} ({ranks:.0f} + {wire:.0f})"
                for library, (ms, ranks, wire) in row.items()
            )
            print(
                f"{1e3 * round_trip:6.1f} ms  {name:15} {format_size(nbytes):>8}  {columns}",
                flush=True,
            )
        for process in ranks:
            process.wait(60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        network.close()


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--round-trips", default="0.1,1,10,50", help="milliseconds")
    parser.add_argument("--collectives", default="all_reduce,all_gather,reduce_scatter,broadcast")
    parser.add_argument("--sizes", default="8,64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--compress", default="", help="also in these forms: bf16,fp8,int8")
    parser.add_argument("--sites", type=int, default=1, help="cut the ranks into so many, as well")
    parser.add_argument("--near", type=float, default=0.1, help="milliseconds inside a site")
    parser.add_argument("--rate", type=float, default=0, help="MB/s out of a site (0: unlimited)")
    parser.add_argument(
        "--congestion", default="", help="control: cubic, bbr (else this machine's)"
    )
    parser.add_argument("--code", help="measure the meshlib in this folder instead")
    parser.add_argument("--verbose", action="store_true", help="each round, and what was lost")
    options = parser.parse_args()
    if options.rate:
        os.environ["WIRE_RATE"] = str(int(1e6 * options.rate))
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    cells: list[list[object]] = [
        [name, size] for name in options.collectives.split(",") for size in sizes
    ]
    for round_trip in options.round_trips.split(","):
        begin = time.monotonic()
        _measure(options, float(round_trip) / 1000, cells)
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
