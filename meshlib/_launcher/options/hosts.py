"""The options of a job that is started over ssh: ``--hosts`` and related ones."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from meshlib._launcher.options.launch import HostOptions
from transport import _environment as environment
from transport._launch_environments import DEFAULT_PORT
from transport._net.secret_file import read_secret, secret_from_environment

_OURS = ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "standalone", "local_addr")
"""Options that ``--hosts`` decides."""
_NOT_HERE = ("monitor",)
_FORWARDED = ("PYTHONPATH",)
_PREFIXES = ("MESHLIB_",)
_SSH = "ssh -o BatchMode=yes"


def host_options(given: argparse.Namespace, words: Sequence[str]) -> HostOptions:
    """Return the host options of the parsed command line ``words``.

    Raises ValueError for contradictory options.
    """
    for name in (*_OURS, *_NOT_HERE):
        if getattr(given, name):
            raise ValueError(
                f"--hosts and --{name.replace('_', '-')} were both given; expected one of them:"
                " --hosts determines the nodes"
            )
    hosts = _hosts(given.hosts)
    if given.nproc_per_node is None and given.mesh is None and hosts[0][1] is None:
        given.nproc_per_node = "1"
    ssh = tuple(shlex.split(given.ssh_command or _SSH))
    if not ssh:
        raise ValueError("--ssh-command is empty; expected a command such as ssh -p 2222")
    secret = read_secret(given.secret_file) if given.secret_file else secret_from_environment()
    return HostOptions(
        hosts=hosts,
        arguments=tuple(words),
        address=given.master_addr,
        port=given.master_port or DEFAULT_PORT,
        job=given.rdzv_id or os.urandom(8).hex(),
        secret=secret.hex() if secret else os.urandom(32).hex(),
        variables=_variables(given.env or []),
        ssh=ssh,
        python=given.remote_python or sys.executable,
        continues=bool(given.on_failure == "continue" or given.replace or given.spares),
    )


def refuse_without_hosts(given: argparse.Namespace, decided: Mapping[str, object] | None) -> None:
    """Raise ValueError for an option that needs ``--hosts``, unless ``decided`` has hosts."""
    if decided is not None and "hosts" in decided:
        return
    for name in ("ssh_command", "remote_python", "env"):
        if getattr(given, name):
            raise ValueError(f"--{name.replace('_', '-')} needs --hosts")


def _hosts(text: str) -> tuple[tuple[str, str | None], ...]:
    found: list[tuple[str, str | None]] = []
    for item in text.split(","):
        name, colon, count = item.strip().partition(":")
        if not name or name.startswith("-") or (colon and not (count.isdecimal() and int(count))):
            raise ValueError(f"--hosts: expected HOST or HOST:RANKS, as a,b,c:4; got {item!r}")
        found.append((name, count if colon else None))
    names = [name for name, _ in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--hosts: {twice[0]!r} is given twice; expected {twice[0]}:RANKS, once")
    return tuple(found)


def _variables(chosen: Sequence[str]) -> dict[str, str]:
    """Return the variables to forward: those ``chosen`` (NAME or NAME=VALUE), and meshlib's."""
    inside = (environment.RUN_ID, environment.SECRET, environment.SECRET_FILE)
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in _FORWARDED or (name.startswith(_PREFIXES) and name not in inside)
    }
    for item in chosen:
        name, equals, value = item.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ValueError(f"--env {item}: the variable does not exist; expected NAME=VALUE")
        variables[name] = value if equals else os.environ[name]
    return variables
