"""``meshlib bench --between``: measures the network between hosts, and predicts calls on it.

Each rank of a job on these hosts runs it; rank 0 prints. The hosts' clocks are compared first. A
call then begins at a moment that rank 0 sets, and ends when the last rank has returned. A barrier
before each call would not suffice, because ranks leave it half a round trip apart.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from meshlib._bench.cases import CASES, Bound, Case
from meshlib._bench.jobs.job import BenchmarkError
from meshlib._bench.libraries.c10d import TorchGloo, bind_c10d
from meshlib._bench.network import HostNetwork, Path, levels_in_words
from meshlib._bench.predict import KINDS, cost_of
from meshlib._bench.sizes import format_size
from transport import _environment as environment
from transport._choosing.cost import Cost, work_of
from transport._choosing.tuning import from_environment
from transport._net import LOOPBACK
from transport._net.sockets import local_address_towards

_START = "meshrun --nnodes 2 ... --nproc-per-node 1 -m meshlib bench --between"
_MOST_HOSTS = 8
_PINGS = 20
_RATE_BYTES = 32 << 20
_WARMUP = 2
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Row:
    """One collective at one size: the slowest rank's seconds in each turn, by library."""

    case: str
    nbytes: int
    seconds: dict[str, list[float]]


def run_between(args: argparse.Namespace) -> None:
    """Run the measurement of ``args`` (of ``meshlib bench``) on the ranks of this job.

    Raises ValueError when this process is not a rank of a job, and for peers other than Gloo.
    Raises BenchmarkError for a wrong result.
    """
    if environment.RANK not in os.environ:
        raise ValueError(f"--between needs the ranks of a job, but there is no job; start {_START}")
    strange = [peer for peer in args.vs if peer != "gloo"]
    if strange:
        raise ValueError(f"--vs {strange[0]} with --between; only gloo can be measured there")
    import meshlib as dist

    dist.init_process_group(args.backend[0] if args.backend else None)
    try:
        Between(dist, args, os.environ.get(environment.GROUP_RANK) or socket.gethostname()).run()
    finally:
        dist.destroy_process_group()


class Between:
    """One rank's part of the measurement; ``host`` identifies its host."""

    def __init__(self, dist: Any, args: argparse.Namespace, host: str) -> None:
        self._dist = dist
        self._args = args
        self._host = host
        self._rank: int = dist.get_rank()
        self._size: int = dist.get_world_size()
        self._ahead = 0.0
        """Rank 0's clock minus this rank's, in seconds."""
        self._margin = 0.005
        """The seconds from the announcement of a call to its start; must exceed the latency."""

    def run(self) -> None:
        """Measure, and print the results."""
        hosts = self._hosts()
        self._print(f"{self._size} ranks on {len(hosts)} hosts, {self._dist.get_backend()}")
        network = self._network(hosts)
        paths = list(network.paths.values())
        self._compare_clocks()
        binds: dict[str, Callable[[Case], Bound]] = {
            "meshlib": lambda case: bind_c10d(self._dist, case, np.asarray)
        }
        gloo = self._gloo() if "gloo" in self._args.vs else None
        if gloo is not None:
            binds["gloo"] = gloo.bind
        alone = all(len(ranks) == 1 for ranks in hosts)
        model = _model_of(paths, self._size) if paths and alone else None
        self._print("\n" + header(list(binds), model is not None))
        for name in self._args.collectives:
            for nbytes in self._args.sizes if CASES[name].is_sized else [0]:
                row = self._measure(name, nbytes, binds)
                self._print(line(row, model(row) if model else None))
        if model is None and not alone:
            self._print("(the model needs hosts with one rank each: --nproc-per-node 1)")
        if gloo is not None:
            gloo.leave()

    def _network(self, hosts: Sequence[Sequence[int]]) -> HostNetwork:
        """Return the measured network; print its levels, and write it to a file if requested."""
        sites = self._of_all(os.environ.get(environment.SITE, ""))
        paths = self._paths([ranks[0] for ranks in hosts])
        found = HostNetwork(
            tuple(tuple(ranks) for ranks in hosts),
            tuple(sites[ranks[0]] for ranks in hosts),
            dict(zip(combinations(range(min(len(hosts), _MOST_HOSTS)), 2), paths, strict=True)),
        )
        levels = levels_in_words(found.placement(range(self._size)))
        self._print(f"with auto: {levels}")
        if self._rank == 0 and self._args.write_network is not None:
            self._args.write_network.write_text(found.encode())
        return found

    def _print(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)

    def _of_all(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        values: list[Any] = [None] * self._size
        self._dist.all_gather_object(values, value)
        return values

    def _hosts(self) -> list[list[int]]:
        """Return the ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(self._of_all(self._host)):
            found.setdefault(name, []).append(rank)
        return list(found.values())

    # ------------------------------------------------------------------ the network

    def _paths(self, speakers: Sequence[int]) -> list[Path]:
        """Measure the path of each pair of hosts, one at a time; print them, return them on all."""
        shown = speakers[:_MOST_HOSTS]
        if len(shown) < len(speakers):
            self._print(f"(only paths between the first {_MOST_HOSTS} hosts are measured)")
        found: list[Path] = []
        for one, other in combinations(shown, 2):
            figures = np.zeros(2)
            if self._rank in (one, other):
                figures[:] = self._path(one, other)
            self._dist.broadcast(figures, one)
            path = Path(float(figures[0]), float(figures[1]))
            found.append(path)
            self._print(
                f"rank {one} to rank {other}: round trip {1e3 * path.round_trip:.3f} ms,"
                f" {8e-9 * path.rate:.2f} Gb/s"
            )
        return found

    def _path(self, one: int, other: int) -> tuple[float, float]:
        ping, much = np.zeros(1), np.zeros(_RATE_BYTES // 8)
        first = self._rank == one
        peer = other if first else one
        turns = list[float]()

        def there_and_back(data: Any) -> float:
            begun = time.perf_counter()
            if first:
                self._dist.send(data, peer)
                self._dist.recv(ping, peer)
            else:
                self._dist.recv(data, peer)
                self._dist.send(ping, peer)
            return time.perf_counter() - begun

        for _ in range(_PINGS):
            turns.append(there_and_back(ping))
        round_trip = statistics.median(turns)
        # The first transfer opens TCP's windows.
        rates = [_RATE_BYTES / max(there_and_back(much) - round_trip, 1e-9) for _ in range(3)]
        return round_trip, max(rates[1:])

    def _compare_clocks(self) -> None:
        """Measure the difference of the clocks, from the quickest of several exchanges."""
        own, answer = np.zeros(1), np.zeros(1)
        longest = np.zeros(1)
        for other in range(1, self._size):
            if self._rank == 0:
                for _ in range(_PINGS):
                    self._dist.recv(answer, other)
                    own[0] = time.perf_counter()
                    self._dist.send(own, other)
            elif self._rank == other:
                found: list[tuple[float, float]] = []
                for _ in range(_PINGS):
                    sent = time.perf_counter()
                    self._dist.send(own, 0)
                    self._dist.recv(answer, 0)
                    received = time.perf_counter()
                    found.append((received - sent, float(answer[0]) - (sent + received) / 2))
                quickest, self._ahead = min(found)
                longest[0] = quickest
        self._dist.all_reduce(longest, self._dist.ReduceOp.MAX)
        self._margin += 2 * float(longest[0])

    # ------------------------------------------------------------------ the calls

    def _timed(self, call: Callable[[], object]) -> float:
        """Make ``call`` at a common moment; return the seconds until the last rank returns."""
        begin = np.array([time.perf_counter() + self._margin])
        self._dist.broadcast(begin, 0)
        while (left := float(begin[0]) - self._ahead - time.perf_counter()) > 0:
            if left > 0.002:
                time.sleep(left - 0.001)
        call()
        took = np.array([time.perf_counter() + self._ahead - float(begin[0])])
        self._dist.all_reduce(took, self._dist.ReduceOp.MAX)
        return float(took[0])

    def _measure(self, name: str, nbytes: int, binds: dict[str, Callable[[Case], Bound]]) -> Row:
        case = CASES[name](
            nbytes, self._rank, self._size, lambda count, _: np.empty(count, np.float32)
        )
        calls = {library: bind(case) for library, bind in binds.items()}
        seconds: dict[str, list[float]] = {library: [] for library in calls}
        for turn in range(-_WARMUP, self._args.rounds):
            for library, call in calls.items():
                case.clear()
                took = self._timed(call)
                wrong = np.array([not case.is_right(case.output)])
                self._dist.all_reduce(wrong, self._dist.ReduceOp.MAX)
                if wrong[0]:
                    raise BenchmarkError(f"{library}: {name} of {nbytes} bytes is wrong")
                if turn >= 0:
                    seconds[library].append(took)
        return Row(name, nbytes, seconds)

    def _gloo(self) -> TorchGloo | None:
        """Return Gloo among all ranks; print a note and return None if a rank lacks torch."""
        try:
            gloo, missing = TorchGloo(), None
        except ImportError as error:
            gloo, missing = None, str(error)
        without = {rank: answer for rank, answer in enumerate(self._of_all(missing)) if answer}
        if without:
            rank, answer = next(iter(without.items()))
            self._print(f"without gloo: rank {rank}: {answer}")
        if without or gloo is None:
            return None
        address = own_address()
        interface = interface_of(address)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        place: list[Any] = [None]
        if self._rank == 0:
            place = [(address, gloo.host(self._size, address))]
        self._dist.broadcast_object_list(place, 0)
        host, port = place[0]
        gloo.join(port, self._rank, self._size, host)
        return gloo


def _model_of(paths: Sequence[Path], size: int) -> Callable[[Row], float | None]:
    """Return a function that predicts the seconds of a row, None for an unknown collective.

    The cost model is that of links over TCP, with the worst path's delay and rate.
    """
    tuning = from_environment()
    near, table = cost_of(tuning, "tcp"), tuning.thresholds("tcp", size)
    cost = Cost(near.alpha, 1 / min(path.rate for path in paths), near.gamma, float(size))
    delay = max(path.round_trip for path in paths) / 2

    def seconds(row: Row) -> float | None:
        kind = KINDS.get(row.case)
        return None if kind is None else cost.seconds(work_of(kind, row.nbytes, size, table), delay)

    return seconds


def header(libraries: Sequence[str], predicted: bool) -> str:
    """Return the head of the table whose lines ``line`` makes."""
    columns = "".join(f"{name + ' ms':>14}" for name in libraries)
    ratios = "".join(f"{'/ ' + name:>9}" for name in libraries[1:])
    model = f"{'model ms':>12}{'ratio':>8}" if predicted else ""
    return f"{'collective':15}{'size':>10}{columns}{ratios}{model}"


def line(row: Row, predicted: float | None) -> str:
    """Return a line of the table: medians, meshlib's ratio to each peer, the model's figures."""
    medians = [statistics.median(seconds) for seconds in row.seconds.values()]
    columns = "".join(f"{1e3 * median:>14.3f}" for median in medians)
    ratios = "".join(f"{medians[0] / other:>9.2f}" for other in medians[1:])
    model = "" if predicted is None else f"{1e3 * predicted:>12.3f}{predicted / medians[0]:>8.2f}"
    return f"{row.case:15}{format_size(row.nbytes):>10}{columns}{ratios}{model}"


def own_address() -> str:
    """Return the address at which other hosts reach this one.

    It is ``MESHLIB_HOST``, or the address of the interface towards the job's store.
    """
    given = os.environ.get(environment.HOST)
    if given:
        return socket.gethostbyname(given)
    return local_address_towards(os.environ.get(environment.MASTER_ADDR, LOOPBACK), 0)


def interface_of(address: str) -> str | None:
    """Return the name of the interface with the IPv4 ``address``, None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
