"""Remote calls beside torch.distributed.rpc (TensorPipe over TCP) and multiprocessing.managers.

    python -m tests.benchmarks.remote_calls.beside_peers \
        [--torch-python PYTHON] [--rounds 5] [--libraries meshlib,torch]

Every library has one process that is called and ten that call, which live through the whole run; a
round measures each case in each library, one after the other, and the table has medians over the
rounds: wall time, and processor time of all processes of that library together. Without a Python
that has torch, torch is left out; so is Ray, unless ``--ray-python`` names one that has it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLERS = 10
ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """``calls`` calls of ``nbytes`` in an argument, by ``callers``; ``burst``: all at once."""

    name: str
    calls: int
    nbytes: int = 0
    callers: int = 1
    burst: bool = False


CASES = (
    Case("no-op", 1000),
    Case("1 MiB", 60, MIB),
    Case("64 MiB", 4, 64 * MIB),
    Case("10,000 calls", 10_000, burst=True),
    Case("ten callers", 200, callers=CALLERS),
)


# ---------------------------------------------------------------------- in the processes


def nothing(*_: object) -> None:
    """Do what is measured."""


Call = Callable[[object], object]
Burst = Callable[[int], object]


def join_meshlib(rank: int, port: int) -> tuple[Call, Burst, Callable[[int], Any]]:
    """Become a worker of meshlib's."""
    import numpy as np

    from meshlib import rpc

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(CALLERS + 1)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rpc.init_rpc(f"worker{rank}")

    def burst(count: int) -> None:
        rpc.wait_all([rpc.rpc_async(0, nothing) for _ in range(count)])

    return (
        lambda argument: rpc.rpc_sync(0, nothing, () if argument is None else (argument,)),
        burst,
        lambda nbytes: np.ones(nbytes, np.uint8),
    )


def join_torch(rank: int, port: int) -> tuple[Call, Burst, Callable[[int], Any]]:
    """Become a worker of torch's."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"]
    )
    rpc.init_rpc(f"worker{rank}", None, rank, CALLERS + 1, options)

    def burst(count: int) -> None:
        torch.futures.wait_all([rpc.rpc_async("worker0", nothing) for _ in range(count)])

    return (
        lambda argument: rpc.rpc_sync("worker0", nothing, () if argument is None else (argument,)),
        burst,
        lambda nbytes: torch.ones(nbytes, dtype=torch.uint8),
    )


class _Served:
    def nothing(self, *_: object) -> None:
        """Do what is measured."""


def join_managers(rank: int, port: int) -> tuple[Call, Burst, Callable[[int], Any]]:
    """Become a server, or a client, of multiprocessing.managers, over TCP."""
    import threading
    from multiprocessing.managers import BaseManager

    import numpy as np

    class Manager(BaseManager):
        pass

    served = _Served()
    Manager.register("served", lambda: served)
    manager = Manager(("127.0.0.1", port), b"benchmark")
    if rank == 0:
        server = manager.get_server()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return nothing, nothing, lambda _: None
    until = time.monotonic() + 60
    while True:
        try:
            manager.connect()
            break
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    proxy: Any = manager.served()  # pyright: ignore[reportAttributeAccessIssue]

    def burst(count: int) -> None:  # it has no calls that do not wait
        for _ in range(count):
            proxy.nothing()

    return (
        lambda argument: proxy.nothing() if argument is None else proxy.nothing(argument),
        burst,
        lambda nbytes: np.ones(nbytes, np.uint8),
    )


def join_ray(rank: int, port: int) -> tuple[Call, Burst, Callable[[int], Any]]:
    """Become a driver of Ray's; the callee is an actor that the first caller's Ray has."""
    import numpy as np
    import ray

    address = None if rank == 0 else "auto"
    ray.init(address, namespace="benchmark", log_to_driver=False, include_dashboard=False)
    if rank == 0:
        made = ray.remote(_Served).options(name="served", lifetime="detached").remote()
        ray.get(made.nothing.remote())
        return nothing, nothing, lambda _: None
    served = ray.get_actor("served")

    def call(argument: object) -> object:
        return ray.get(served.nothing.remote(*(() if argument is None else (argument,))))

    def burst(count: int) -> None:
        ray.get([served.nothing.remote() for _ in range(count)])

    return call, burst, lambda nbytes: np.ones(nbytes, np.uint8)


LIBRARIES = {
    "meshlib": join_meshlib,
    "torch": join_torch,
    "managers": join_managers,
    "ray": join_ray,
}


def run_process(library: str, rank: int, port: int) -> None:
    """Join, then measure whatever the parent asks for."""
    call, burst, make = LIBRARIES[library](rank, port)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case = Case(**json.loads(line))
        argument = make(case.nbytes) if case.nbytes else None
        begin = time.perf_counter()
        if case.burst:
            burst(case.calls)
        else:
            for _ in range(case.calls):
                call(argument)
        print(json.dumps(time.perf_counter() - begin), flush=True)
    os._exit(0)


# ---------------------------------------------------------------------- the parent


class Fleet:
    """The processes of one library; the first is the callee."""

    def __init__(self, library: str, python: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(CALLERS + 1):
            command = [python, __file__, "--process", library, str(rank), str(port)]
            pipe = subprocess.PIPE
            self._processes.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            )
            if library == "ray" and rank == 0:
                self._read(0)
        for rank in range(library == "ray", CALLERS + 1):
            self._read(rank)

    def run(self, case: Case) -> tuple[float, float]:
        """Return the wall and the processor seconds of a call."""
        callers = range(1, case.callers + 1)
        before = self._processor_seconds()
        for rank in callers:
            stream = self._processes[rank].stdin
            assert stream is not None
            stream.write(json.dumps(vars(case)) + "\n")
            stream.flush()
        wall = max(float(self._read(rank)) for rank in callers)
        used = self._processor_seconds() - before
        calls = case.calls * case.callers
        return wall / calls, used / calls

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _read(self, rank: int) -> Any:
        stream = self._processes[rank].stdout
        assert stream is not None
        line = stream.readline()
        while line and not line.startswith(('"', *"0123456789")):
            line = stream.readline()  # what a library has to say
        if not line:
            raise RuntimeError(f"process {rank} ended with {self._processes[rank].wait()}")
        return json.loads(line)

    def _processor_seconds(self) -> float:
        # The clock of another process: clock_getcpuclockid(3).
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self._processes)


def measure(
    pythons: dict[str, str], rounds: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return wall and processor seconds by case and library, one pair a round."""
    fleets: dict[str, Fleet] = {}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    try:
        for library, python in pythons.items():
            fleets[library] = Fleet(library, python)
        for round_ in range(rounds + 1):
            for case in CASES:
                for library, fleet in fleets.items():
                    result = fleet.run(case)
                    if round_:  # the first one warms up
                        by_library = found.setdefault(case.name, {})
                        by_library.setdefault(library, []).append(result)
            print(f"round {round_} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for fleet in fleets.values():
            fleet.close()
    return found


def table(found: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    """Return the medians, and the ratios of meshlib's to each peer's, as a table."""
    libraries = list(next(iter(found.values())))
    lines = [f"| a call of | {' | '.join(libraries)} | meshlib ÷ each |"]
    lines.append("| --- |" + " --- |" * (len(libraries) + 1))
    for name, by_library in found.items():
        medians = {
            library: [statistics.median(column) * 1e6 for column in zip(*pairs, strict=True)]
            for library, pairs in by_library.items()
        }
        cells = [f"{wall:.0f} µs, {used:.0f} µs" for wall, used in medians.values()]
        ratios = [
            f"{library} {medians['meshlib'][0] / wall:.2f}, {medians['meshlib'][1] / used:.2f}"
            for library, (wall, used) in medians.items()
            if library != "meshlib" and "meshlib" in medians
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(ratios)} |")
    return "\n".join(lines) + "\n\n(wall time, processor time of all processes)\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, or be one of its processes."""
    import argparse

    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="a Python that has torch")
    parser.add_argument("--ray-python", help="a Python that has Ray")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--libraries", default="meshlib,torch,managers,ray")
    given = parser.parse_args(argv)
    pythons = {"meshlib": sys.executable, "managers": sys.executable}
    pythons |= {"torch": given.torch_python} if given.torch_python else {}
    pythons |= {"ray": given.ray_python} if given.ray_python else {}
    chosen = [name for name in given.libraries.split(",") if name in pythons]
    print(table(measure({name: pythons[name] for name in chosen}, given.rounds)))


if __name__ == "__main__":
    # Functions travel by name: what is called must not be in __main__ for torch's callee.
    sys.path.insert(0, str(ROOT))
    from tests.benchmarks.remote_calls import beside_peers as here

    here.main()
