"""Chaos over several hosts: ranks and launchers are killed, ranks stopped, wires cut, at random.

    python -m tests.benchmarks.elastic.wires --runs 100 --seed 0        (as root)

As ``chaos``, whose checks these are, with three hosts that are network namespaces, each with a
launcher (``meshrun --replace --nnodes 3``). A wire is cut for a moment, which all must survive, or
for longer than the heartbeat: then the host is lost. A launcher that has ended is started again
after a moment, as an engine would, and its ranks come to the others. The first host stays whole.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.elastic.chaos import GIVE_UP, HERE, Run, check, main, notes_of, signalled
from tests.support.net.networks import Network

HOSTS = 3
KINDS = {"ddp": [(3,), (6,)], "hsdp": [(3, 2)], "jax": [(3,)]}
HEARTBEAT = 2.0
EVENTS = ["kill", "stop", "launcher", "wire", "wire", "blink"]


def plan(seed: int, kinds: list[str]) -> Run:
    """Return what is to happen in the run ``seed``."""
    generator = random.Random(seed)
    kind = generator.choice(kinds)
    shape = generator.choice(KINDS[kind])
    count = generator.randint(1, 3)
    events = sorted((generator.uniform(0.0, 4.0), generator.choice(EVENTS)) for _ in range(count))
    return Run(seed, kind, shape, generator.randint(150, 300), events, 0)


class Hosts:
    """The launchers of a run, each on a host of its own."""

    def __init__(self, run: Run, folder: Path, network: Network) -> None:
        self.network = network
        shape = "x".join(map(str, run.shape))
        self.ranks = 2 if shape in ("6", "3x2") else 1
        self._program = [str(HERE / "program.py"), str(folder), run.kind, shape, str(run.until)]
        self._secret = {"MESHLIB_SECRET": secrets.token_hex(32)}
        self._folder = folder
        self.launchers = [self._start(host) for host in range(HOSTS)]
        self.due: dict[int, float] = {}

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        command = [
            *(*self.network.command(host), sys.executable, "-m", "meshlib._launcher"),
            *(f"--nnodes={HOSTS}", f"--node-rank={host}", f"--nproc-per-node={self.ranks}"),
            *("--replace", "5", "--master-addr", self.network.address(0)),
            *("--rdzv-conf", f"heartbeat_timeout={HEARTBEAT}"),
        ]
        with (self._folder / f"output-{host}").open("ab") as output:
            return subprocess.Popen(
                [*command, *self._program],
                stdout=output,
                stderr=output,
                env={**os.environ, **self._secret},
                start_new_session=True,
            )

    def tend(self, generator: random.Random) -> None:
        """Start a launcher again that has ended a moment ago, though the job goes on."""
        now = time.monotonic()
        for host, launcher in enumerate(self.launchers):
            if host and launcher.poll() is not None:
                due = self.due.setdefault(host, now + generator.uniform(0.2, 1.5))
                if now >= due and self.launchers[0].poll() is None:
                    del self.due[host]
                    self.launchers[host] = self._start(host)

    def end(self) -> None:
        """Leave nothing behind."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGKILL)
            launcher.wait()


def happen(run: Run, folder: Path, hosts: Hosts) -> None:
    """Have happen what is planned, from the moment that the training is under way."""
    generator = random.Random(run.seed + 1)
    later: list[tuple[float, str, int]] = []
    deadline, begun, events = time.monotonic() + GIVE_UP, None, list(run.events)
    while hosts.launchers[0].poll() is None:
        now = time.monotonic()
        if now > deadline:
            run.problems.append(f"was not over after {GIVE_UP:g} s")
            return
        notes = notes_of(folder)
        if begun is None and any(one[0] == "commit" for own in notes.values() for one in own):
            begun = now
        if begun is not None and events and now - begun >= events[0][0]:
            _, what = events.pop(0)
            host = generator.randrange(1, HOSTS)
            pids = {rank: own[0][2] for rank, own in notes.items() if own}
            others = [rank for rank in sorted(pids) if rank >= hosts.ranks]
            rank = generator.choice(others)
            if what == "kill" and signalled(pids[rank], signal.SIGKILL):
                run.done.append(f"kill {rank}")
            elif what == "stop" and signalled(pids[rank], signal.SIGSTOP):
                run.done.append(f"stop {rank}")
                later.append((now + generator.uniform(0.2, 6.0), "go on", pids[rank]))
            elif what == "launcher":
                run.done.append(f"launcher {host}")
                hosts.launchers[host].send_signal(signal.SIGKILL)
            elif what in ("wire", "blink"):
                seconds = generator.uniform(0.1, 0.8) if what == "blink" else 3 * HEARTBEAT
                run.done.append(f"wire {host} for {seconds:.1f} s")
                hosts.network.cut_off(host)
                later.append((now + seconds, "plug in", host))
        for one in [one for one in later if now >= one[0]]:
            later.remove(one)
            if one[1] == "plug in":
                hosts.network.plug_in(one[2])
            else:
                signalled(one[2], signal.SIGCONT)
        hosts.tend(generator)
        time.sleep(0.01)
    for _, what, where in later:
        if what == "plug in":
            hosts.network.plug_in(where)
        else:
            signalled(where, signal.SIGCONT)


def carry_out(run: Run) -> None:
    """Carry the run out and check it."""
    network = Network(HOSTS)
    with tempfile.TemporaryDirectory(prefix="elastic-wires-") as name:
        folder, begun = Path(name), time.monotonic()
        hosts = Hosts(run, folder, network)
        try:
            happen(run, folder, hosts)
            text = "".join(
                f"--- host {host}\n{(folder / f'output-{host}').read_text()[-1500:]}"
                for host in range(HOSTS)
            )
            if run.problems:
                run.problems.append(text)
                run.problems.append(str({r: own[-1][:3] for r, own in notes_of(folder).items()}))
            else:
                check(run, folder, hosts.launchers[0].wait(10), text)
        finally:
            hosts.end()
            network.close()
        run.seconds = time.monotonic() - begun


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no host behind
    sys.exit(main(__doc__, 100, plan, carry_out))
