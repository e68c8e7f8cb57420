"""The options of several nodes: the rendezvous, and this node's number.

The command line has priority over torchrun's ``PET_`` variables, and these over the engine that
started meshrun. The node's number and the address must have the same source, because node 0 is at
that address.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshlib._launcher.options.launch import NodeOptions
from transport import _environment as environment
from transport._launch_environments import (
    DEFAULT_PORT,
    LaunchEnvironmentError,
    NodePlace,
    Slurm,
    detect_nodes,
    engine_restarts,
    number_in,
)
from transport._net.secret_file import read_secret, secret_from_environment
from transport._store.etcd.address import EtcdAddress
from transport._waiting.deadline import read_duration

_LOCAL_NAMES = ("localhost", "::1")
_BACKENDS = ("static", "store", "c10d")
_CONFIG = ("join_timeout", "last_call_timeout", "heartbeat_timeout", "is_host")
"""The fields of ``NodeOptions`` that ``--rdzv-conf`` may set."""


def node_options(given: argparse.Namespace) -> NodeOptions:
    """Return the node options of the parsed command line.

    Raises ValueError for contradictory options.
    """
    least, most = _node_counts(given.nnodes)
    etcd = _etcd(given)
    address = _endpoint(given) if etcd is None else etcd.members[0]
    if given.standalone or most == 1:
        _refuse_unused(given)
        return NodeOptions(port=address[1] if address else 0)
    if address is None or not address[0]:
        raise ValueError(
            f"--nnodes {given.nnodes} needs the address of the first node:"
            " expected --master-addr HOST or --rdzv-endpoint HOST:PORT; or, for a store that"
            " outlives every node, --rdzv etcd://HOST:PORT/PREFIX"
        )
    rank: int | None = given.node_rank
    backend = given.rdzv_backend or ("store" if rank is None else "static")
    if backend not in _BACKENDS:
        hint = "; for a store in etcd: --rdzv etcd://HOST:PORT/PREFIX" if "etcd" in backend else ""
        raise ValueError(f"--rdzv-backend: expected static or store, got {backend!r}{hint}")
    if backend == "static" and (rank is None or least != most):
        raise ValueError(
            f"--rdzv-backend static needs --node-rank and one number of nodes; got --node-rank"
            f" {rank} and --nnodes {given.nnodes}"
        )
    if rank is not None and not 0 <= rank < most:
        raise ValueError(f"--node-rank must be from 0 to {most - 1} (--nnodes - 1), got {rank}")
    host, port = address
    secret = _secret(given.secret_file)
    hosts = [host] if etcd is None else [host for host, _ in etcd.members]
    if secret is None and not all(map(is_loopback, hosts)):
        raise ValueError(
            f"nodes that meet at {host} need a common secret. Run `meshlib secret` once if they"
            f" share a home. Otherwise give all of them the same {environment.SECRET}, or"
            " --secret-file FILE"
        )
    meeting = NodeOptions(
        least=least,
        most=most,
        rank=rank,
        host=host,
        port=port or DEFAULT_PORT,
        job=given.rdzv_id,
        local_address=given.local_addr,
        secret=secret,
        etcd="" if etcd is None else etcd.url,
    )
    config = _config(given.rdzv_conf or "")
    if etcd is not None and "is_host" in config:
        raise ValueError("--rdzv-conf is_host: no node serves the store of --rdzv etcd://...")
    return replace(meeting, **config)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` always means this machine."""
    return host in _LOCAL_NAMES or host.startswith("127.")


def _node_counts(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    try:
        counts = int(least), int(most if colon else least)
    except ValueError:
        counts = 0, 0
    if not 1 <= counts[0] <= counts[1]:
        raise ValueError(f"--nnodes: expected a number >= 1 or MIN:MAX, got {text!r}")
    return counts


def _endpoint(given: argparse.Namespace) -> tuple[str, int] | None:
    """Return the address of the rendezvous; the host is empty or the port 0 if not given."""
    port: int = given.master_port or 0
    if not 0 <= port <= 65535:
        raise ValueError(f"--master-port must be from 1 to 65535, got {port}")
    if not given.rdzv_endpoint:
        return (given.master_addr or "", port) if given.master_addr or port else None
    if given.master_addr:
        raise ValueError("--rdzv-endpoint and --master-addr were both given: expected one")
    text: str = given.rdzv_endpoint
    host, _, digits = text.rpartition(":")
    if not host or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, digits = text, ""
    if digits and not (digits.isdigit() and int(digits) <= 65535):
        raise ValueError(f"--rdzv-endpoint: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(digits) if digits else port


def _etcd(given: argparse.Namespace) -> EtcdAddress | None:
    """Return the address of the etcd of the rendezvous, or None."""
    if not given.rdzv:
        return None
    for name in ("rdzv_endpoint", "rdzv_backend", "master_addr", "master_port"):
        if getattr(given, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"--rdzv is the address of the rendezvous: expected no {option}")
    try:
        address = EtcdAddress.parse(given.rdzv)
    except ValueError as error:
        raise ValueError(f"--rdzv: {error}") from None
    if address.lease:
        raise ValueError(f"--rdzv: the job has a lease of its own; expected {address.shown}")
    return address


def _refuse_unused(given: argparse.Namespace) -> None:
    if given.rdzv:
        raise ValueError("--rdzv is for several nodes: expected --nnodes with it")
    if given.standalone and (given.nnodes != "1" or given.rdzv_endpoint or given.master_addr):
        raise ValueError(
            "--standalone is for a single node: expected no --nnodes, --master-addr or"
            " --rdzv-endpoint with it"
        )
    if given.node_rank not in (None, 0):
        raise ValueError(f"--node-rank {given.node_rank} needs --nnodes above 1, got 1")


def _config(text: str) -> dict[str, float]:
    """Read ``--rdzv-conf``: ``join_timeout=60,last_call_timeout=1``."""
    config: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        value = {"true": "1", "false": "0"}.get(value.lower(), value)
        try:
            number = float(value if (read := read_duration(value)) is None else read)
        except ValueError:
            number = -1.0
        if key not in _CONFIG:
            raise ValueError(f"--rdzv-conf: {key!r} is unknown; expected {', '.join(_CONFIG)}")
        if not 0 <= number < float("inf"):
            raise ValueError(f"--rdzv-conf: expected {key}=NUMBER, got {item!r}")
        config[key] = number
    return config


def _secret(file: Path | None) -> str | None:
    """Return the secret of the job in hexadecimal, from ``file`` or the environment."""
    secret = secret_from_environment() if file is None else read_secret(file)
    if secret is None:
        return None
    if len(secret) < 16:
        where = f"--secret-file {file}" if file else environment.SECRET
        raise ValueError(
            f"{where}: expected at least 32 hexadecimal digits, such as `meshlib secret --print`"
            " prints"
        )
    return secret.hex()


NO_JOB = "none"
_TEXTS = {"rdzv_backend": "PET_RDZV_BACKEND", "rdzv_conf": "PET_RDZV_CONF"}


def fill_from_engine(given: argparse.Namespace, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Set options that are not on the command line from the engine's variables.

    Returns notes about these options and their sources. Raises LaunchEnvironmentError (a
    ValueError) if an engine announces several nodes without an address, and for inconsistent
    values.
    """
    notes: list[str] = []
    inside = bool(variables.get(environment.RUN_ID))
    if not inside and not given.standalone and given.nnodes != "1" and not _has_address(given):
        given.rdzv = variables.get(environment.RDZV)
    if not given.standalone and not inside:
        _use_torchrun_options(given, variables)
        if not _complete(given):
            for place in detect_nodes(variables):
                notes += _use_engine(given, place)
                if _complete(given):
                    break
    if given.nnodes is None:
        given.nnodes = "1"
        given.rdzv = None if given.rdzv == variables.get(environment.RDZV) else given.rdzv
    # If ranks continue without a lost node, the restarted node joins them again.
    alone = inside or given.on_failure == "continue" or given.replace or given.spares
    restarts = 0 if alone else engine_restarts(variables)
    given.rdzv_id = given.rdzv_id or NO_JOB
    if restarts and given.nnodes != "1":
        given.rdzv_id += f"~{restarts}"
        name = given.rdzv_id
        notes.append(f"the engine has restarted this job {restarts} times: its name is {name}")
    return tuple(notes)


def gets_engine_signals(variables: Mapping[str, str]) -> bool:
    """Return whether the engine (Slurm) signals ranks itself."""
    try:
        return Slurm.in_step(variables)
    except LaunchEnvironmentError:
        return False


def _use_torchrun_options(given: argparse.Namespace, variables: Mapping[str, str]) -> None:
    for name, variable in _TEXTS.items():
        setattr(given, name, getattr(given, name) or variables.get(variable) or None)
    if given.max_restarts is None:
        given.max_restarts = number_in(variables, "PET_MAX_RESTARTS")


def _has_address(given: argparse.Namespace) -> bool:
    return bool(given.rdzv or given.rdzv_endpoint or given.master_addr)


def _complete(given: argparse.Namespace) -> bool:
    """Return whether the options of nodes are complete."""
    return given.nnodes is not None and (given.nnodes == "1" or _has_address(given))


def _use_engine(given: argparse.Namespace, place: NodePlace) -> list[str]:
    """Set missing options from an engine's ``place``; return a note about the used ones."""
    taken: list[str] = []

    def take(option: str, value: object) -> None:
        if value is not None and getattr(given, option) in (None, ""):
            setattr(given, option, value)
            taken.append(f"--{option.replace('_', '-')} {value}")

    if given.nnodes is None and place.nodes is None and place.node is not None:
        raise LaunchEnvironmentError(
            f"{place.launcher} says that this is node {place.node}, but not of how many:"
            " expected --nnodes N, or --standalone for a job on this node alone"
        )
    take("nnodes", place.nodes)
    if given.mesh is None:
        take("nproc_per_node", place.ranks)
    if given.nnodes not in (None, "1"):
        take("rdzv_id", place.job)
        if not _has_address(given):
            if place.host is None:
                raise LaunchEnvironmentError(
                    f"{place.launcher} announces {given.nnodes} nodes, but not their rendezvous:"
                    " expected --master-addr HOST, the address of node 0, or --rdzv-endpoint"
                    " HOST:PORT"
                )
            take("master_addr", place.host)
            take("master_port", place.port)
            if ":" not in given.nnodes and given.rdzv_backend in (None, "static"):
                take("node_rank", place.node)
    return [f"options from {place.launcher}: {' '.join(taken)}"] if taken else []
