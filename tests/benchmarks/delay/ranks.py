"""One rank of ``tests.benchmarks.delay``: the same calls by turns, of meshlib, Gloo, and sockets.

All ranks are on one machine and share its clock: a call begins at a moment that rank 0 sets, and
ends when the last rank has returned.
"""

import json
import os
import selectors
import socket
import statistics
import sys
import time
from collections import Counter
from datetime import timedelta

import numpy as np

import meshlib as dist

plan = json.loads(sys.argv[1])
rank, size, addresses = plan["rank"], plan["size"], plan["addresses"]
round_trip = plan["round_trip"]


def pinned(nbytes):
    return np.ones(max(1, nbytes // 4), np.float32)


class Meshlib:
    compress = None

    def __init__(self):
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=addresses[0], MASTER_PORT="29400",
            MESHLIB_HOST=addresses[rank], MESHLIB_SECRET="0123456789abcdef" * 4,
        )  # fmt: skip
        if not dist.is_initialized():
            dist.init_process_group(plan["backend"], timeout=timedelta(seconds=60))
        compress = {0: self.compress} if self.compress else None
        self.group = dist.init_device_mesh("cpu", (size,), compress=compress).process_group
        self.group.barrier()

    def call(self, name, nbytes):
        x = pinned(nbytes)
        part = x.size // size
        match name:
            case "all_reduce":
                return lambda: self.group.all_reduce(x)
            case "broadcast":
                return lambda: self.group.broadcast(x, 0)
            case "all_gather":
                own = np.ones(part, np.float32)
                out = np.ones(part * size, np.float32)
                return lambda: self.group.all_gather_into_tensor(out, own)
            case "reduce_scatter":
                own = np.ones(part, np.float32)
                return lambda: self.group.reduce_scatter_tensor(own, x[: part * size])
            case "all_to_all":
                out, inputs = np.ones(part * size, np.float32), x[: part * size]
                return lambda: self.group.all_to_all_single(out, inputs)
            case "barrier":
                return self.group.barrier
        raise ValueError(name)


class Gloo:
    def __init__(self):
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{addresses[0]}:29501", rank=rank, world_size=size
        )

    def call(self, name, nbytes):
        gloo, torch = self.torch.distributed, self.torch
        x = torch.ones(max(1, nbytes // 4))
        part = x.numel() // size
        match name:
            case "all_reduce":
                return lambda: gloo.all_reduce(x)
            case "broadcast":
                return lambda: gloo.broadcast(x, 0)
            case "all_gather":
                own, out = torch.ones(part), torch.ones(part * size)
                return lambda: gloo.all_gather_into_tensor(out, own)
            case "reduce_scatter":
                own, inputs = torch.ones(part), x[: part * size]
                return lambda: gloo.reduce_scatter_tensor(own, inputs)
            case "all_to_all":
                out, inputs = torch.ones(part * size), x[: part * size]
                return lambda: gloo.all_to_all_single(out, inputs)
            case "barrier":
                return gloo.barrier
        raise ValueError(name)


class Wire:
    """Plain sockets between all ranks, each of which sends as many bytes as the call has to: to all
    others at once, or for a broadcast the root's to the next one.
    """

    def __init__(self):
        self.socks = {}
        with socket.create_server((addresses[rank], 29502), backlog=size) as listener:
            for peer in range(rank):
                while True:
                    try:
                        sock = socket.create_connection((addresses[peer], 29502))
                        break
                    except ConnectionRefusedError:
                        time.sleep(0.05)
                sock.sendall(bytes([rank]))
                self.socks[peer] = sock
            for _ in range(rank + 1, size):
                sock = listener.accept()[0]
                self.socks[sock.recv(1)[0]] = sock
        for sock in self.socks.values():
            sock.setblocking(False)

    def call(self, name, nbytes):
        shares = {"all_reduce": 2, "barrier": 0}.get(name, 1) * nbytes // size
        pairs = dict.fromkeys(self.socks, (shares, shares))
        if name == "broadcast":
            pairs = {1 - rank: (nbytes, 0)[:: 1 - 2 * rank]} if rank < 2 else {}
        memory = {
            peer: [memoryview(bytearray(out)), memoryview(bytearray(into))]
            for peer, (out, into) in pairs.items()
        }

        def both():
            with selectors.DefaultSelector() as selector:
                left = {}
                for peer, (out, into) in memory.items():
                    left[peer] = [out, into]
                    events = (selectors.EVENT_WRITE if out else 0) | (
                        selectors.EVENT_READ if into else 0
                    )
                    if events:
                        selector.register(self.socks[peer], events, peer)
                while selector.get_map():
                    for key, events in selector.select():
                        parts = left[key.data]
                        if events & selectors.EVENT_WRITE:
                            parts[0] = parts[0][key.fileobj.send(parts[0][: 1 << 20]) :]
                        if events & selectors.EVENT_READ:
                            parts[1] = parts[1][key.fileobj.recv_into(parts[1][: 1 << 20]) :]
                        wanted = (selectors.EVENT_WRITE if parts[0] else 0) | (
                            selectors.EVENT_READ if parts[1] else 0
                        )
                        if not wanted:
                            selector.unregister(key.fileobj)
                        elif wanted != key.events:
                            selector.modify(key.fileobj, wanted, key.data)

        return both


class Sited(Meshlib):
    """The same in a group whose members have said at which site they are."""

    name, value = "MESHLIB_SITE", f"site {rank * plan['sites'] // size}"

    def __init__(self):
        former = os.environ.pop(self.name, None)
        os.environ[self.name] = self.value
        self.group = dist.new_group(list(range(size)))
        self.group.barrier()
        del os.environ[self.name]
        if former is not None:
            os.environ[self.name] = former


def compressing(form):
    return type(form, (Meshlib,), {"compress": form})()


libraries = {"meshlib": Meshlib()}
if plan["sites"] > 1:
    libraries |= {"sites": Sited()}
libraries |= {form: compressing(form) for form in plan["compress"]}
x = pinned(4 << 20)
dist.monitored_barrier()
begin = time.monotonic()
dist.all_reduce(x)
if rank == 0:
    print(f"first all_reduce of 4 MiB: {1e3 * (time.monotonic() - begin):.1f} ms", flush=True)
if plan["gloo"]:
    libraries["gloo"] = Gloo()
if plan["wire"] and size > 1:
    libraries["wire"] = Wire()


def wires_seconds():
    """Return how long the program that pretends the wire has had a processor."""
    with open(f"/proc/{plan['wire_pid']}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def measure(call):
    """Return how many seconds ``call`` took, from a common moment to the last rank's return, and
    for how many it had processors: all ranks together, and whoever pretends the wire.
    """
    begin = np.array([time.monotonic() + 2 * round_trip + 0.005])
    dist.broadcast(begin, 0)
    while (left := begin[0] - time.monotonic()) > 0:
        if left > 0.002:
            time.sleep(left - 0.001)
    worked, wire_worked = time.process_time(), wires_seconds()
    call()
    end = np.array([time.monotonic()])
    worked = np.array([time.process_time() - worked])
    dist.all_reduce(end, dist.ReduceOp.MAX)
    wire_worked = wires_seconds() - wire_worked  # rank 0's counts
    dist.all_reduce(worked)
    return float(end[0] - begin[0]), float(worked[0]), wire_worked


COUNTERS = (
    "RetransSegs", "TCPTimeouts", "TCPLossProbes", "TCPBacklogDrop", "TCPRcvQDrop",
    "RcvPruned", "TCPOFODrop", "TCPDSACKRecv",
)  # fmt: skip


def counted():
    """Return what this rank's kernel has had to do over again, and why."""
    found = Counter()
    for path in ("/proc/net/snmp", "/proc/net/netstat"):
        with open(path) as file:
            lines = [line.split() for line in file if line.startswith(("Tcp:", "TcpExt:"))]
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            found.update({n: int(v) for n, v in zip(names, values, strict=True) if n in COUNTERS})
    return found


results = []
for name, nbytes in plan["cells"]:
    calls = {library: made.call(name, nbytes) for library, made in libraries.items()}
    times, worked = ({library: [] for library in calls} for _ in range(2))
    lost = {library: Counter() for library in calls}
    for turn in range(plan["rounds"] + plan["warm"]):
        for library, call in calls.items():
            before = counted()
            seconds, *processors = measure(call)
            if turn >= plan["warm"]:
                times[library].append(seconds)
                worked[library].append(processors)
                lost[library] += counted() - before
    if plan["verbose"] and rank == 0:
        print(
            "sent again",
            {library: dict(found) for library, found in lost.items()},
            {k: [round(1e3 * x) for x in v] for k, v in times.items()},
            flush=True,
        )
    row = {}
    for library, found in times.items():
        columns = found, *zip(*worked[library], strict=True)
        row[library] = [1e3 * statistics.median(column) for column in columns]
    results.append([name, nbytes, row])
    if rank == 0:
        print(json.dumps(results[-1]), flush=True)
dist.barrier()
dist.destroy_process_group()
