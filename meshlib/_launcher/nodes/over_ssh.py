"""Starts and controls one meshrun on each of several hosts over ssh.

The launchers form a job of several nodes. This process forwards their output and its own signals,
and ends all launchers if one is lost. If it is killed, ssh closes the launchers' standard input,
which ends them (``controlled``).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time

from meshlib._command_line import print_note
from meshlib._launcher import controlled
from meshlib._launcher.options.launch import FAILURE_GRACE_SECONDS, HostOptions, LaunchOptions
from meshlib._launcher.options.nodes import is_loopback
from meshlib._launcher.ranks.output import OutputPump
from meshlib._launcher.signals import SignalPipe

_SSH_FAILED = 255
_OTHERS_SECONDS = 3.0
"""The time that the other launchers have to notice a failed one."""
_KILL_SECONDS = 5.0
_DRAIN_SECONDS = 2.0
_QUERY_SECONDS = 10.0
_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class _Host:
    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        """The launcher's exit code, as a shell reports it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def send(self, number: signal.Signals) -> None:
        controlled.send(self.process, number)


def launch_on_hosts(options: LaunchOptions) -> int:
    """Run the job on all hosts; return the exit code for the shell.

    It is that of the first failed host in the list, or 1 if only ssh failed. If ranks continue
    after a failure, it is 0 if the first host succeeded.
    """
    for note in options.warnings:
        print_note("meshrun", note)
    assert options.hosts is not None
    try:
        return _launch(options.hosts)
    except (ValueError, OSError) as error:
        print_note("meshrun", str(error))
        return 1


def _launch(options: HostOptions) -> int:
    address = options.address or _address_of(options)
    if options.address is None and len(options.hosts) > 1 and is_loopback(address):
        raise ValueError(
            f"--hosts: the other hosts cannot reach {options.hosts[0][0]} at {address};"
            " expected --master-addr ADDRESS, or that host's name"
        )
    with SignalPipe() as signals:
        pump = OutputPump()
        hosts: list[_Host] = []
        try:
            for node, (name, ranks) in enumerate(options.hosts):
                hosts.append(_start(options, pump, node, name, ranks, address))
            return _watch(hosts, signals, options.continues)
        finally:
            _end(hosts)
            pump.close(_DRAIN_SECONDS)


def _start(
    options: HostOptions, pump: OutputPump, node: int, name: str, ranks: str | None, address: str
) -> _Host:
    decided: dict[str, object] = {
        "hosts": None,
        "nnodes": str(len(options.hosts)),
        "node_rank": node,
        "master_addr": address,
        "master_port": options.port,
        "rdzv_id": options.job,
        "secret_file": None,
    }
    if len(options.hosts) == 1:
        decided |= {"node_rank": None, "master_addr": None, "master_port": None, "standalone": True}
    if ranks is not None:
        decided["nproc_per_node"] = ranks
    order = controlled.LaunchOrder(
        arguments=options.arguments,
        directory=os.getcwd(),
        variables=options.variables | {"MESHLIB_SECRET": options.secret},
        decided=decided,
        quiet=node > 0,
    )
    there = shlex.join(controlled.command(options.python))
    ends: list[int] = []
    for console in (1, 2):
        reader, writer = os.pipe()
        pump.add(reader, console, f"[{name}] ".encode(), None)
        ends.append(writer)
    try:
        return _Host(name, controlled.start([*options.ssh, name, there], order, *ends))
    finally:
        for end in ends:
            os.close(end)


def _address_of(options: HostOptions) -> str:
    """Return the first host's address in ssh's configuration, or otherwise its name."""
    name = options.hosts[0][0]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        completed = subprocess.run(
            [*options.ssh, "-G", name],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_QUERY_SECONDS,
            check=False,
        )
        for line in completed.stdout.splitlines() if completed.returncode == 0 else ():
            key, _, value = line.partition(" ")
            if key == "hostname" and value:
                return value
    return name.rpartition("@")[2]


def _watch(hosts: list[_Host], signals: SignalPipe, continues: bool) -> int:
    """Forward signals until all launchers have ended; return the exit code."""
    failed: _Host | None = None
    due: float | None = None
    while True:
        for host in hosts:
            if not host.running and host.code and failed is None:
                failed = host
                due = None if continues else time.monotonic() + _OTHERS_SECONDS
                if host.code == _SSH_FAILED:
                    print_note("meshrun", f"{host.name}: ssh has failed; see its message above")
        running = [host for host in hosts if host.running]
        if not running:
            break
        if due is not None and time.monotonic() >= due:
            due = None
            for host in running:
                host.send(signal.SIGTERM)
        left = None if due is None else due - time.monotonic()
        for number in signals.wait(left):
            if number in _FORWARDED:
                for host in running:
                    host.send(signal.Signals(number))
    own = [host.code for host in hosts if host.code not in (0, _SSH_FAILED)]
    if continues and hosts[0].code == 0:
        return 0
    return own[0] if own else int(failed is not None)


def _end(hosts: list[_Host]) -> None:
    """End the remaining commands after an error, by closing their input."""
    for host in hosts:
        if host.process.stdin is not None:
            with contextlib.suppress(OSError):
                host.process.stdin.close()
    until = time.monotonic() + FAILURE_GRACE_SECONDS + _KILL_SECONDS
    for host in hosts:
        try:
            host.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()
