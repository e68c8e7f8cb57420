"""The part of the command line that is about several nodes: where they meet, and which is which."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshlib.launcher.options.launch import NodeOptions
from transport import environment
from transport.deadline import read_duration
from transport.launch_environments import DEFAULT_PORT
from transport.net.auth import secret_from_environment
from transport.net.secret_file import read_secret

_LOCAL_NAMES = ("localhost", "::1")
_BACKENDS = ("static", "store", "c10d")
_CONFIG_DEFAULTS = {
    "join_timeout": 600.0,
    "last_call_timeout": 30.0,
    "heartbeat_timeout": 10.0,
    "is_host": -1.0,
}


def node_options(given: argparse.Namespace) -> NodeOptions:
    """Return what the parsed command line says about nodes.

    Raises ValueError when it does not fit together.
    """
    least, most = _node_counts(given.nnodes)
    address = _endpoint(given)
    if given.standalone or most == 1:
        _refuse_unused(given)
        return NodeOptions(port=address[1] if address else 0)
    if address is None or not address[0]:
        raise ValueError(
            f"--nnodes {given.nnodes} needs the address of the first node:"
            " expected --master-addr HOST or --rdzv-endpoint HOST:PORT"
        )
    rank: int | None = given.node_rank
    backend = given.rdzv_backend or ("store" if rank is None else "static")
    if backend not in _BACKENDS:
        raise ValueError(f"--rdzv-backend: expected static or store, got {backend!r}")
    if backend == "static" and (rank is None or least != most):
        raise ValueError(
            f"--rdzv-backend static needs --node-rank and one number of nodes; got --node-rank"
            f" {rank} and --nnodes {given.nnodes}"
        )
    if rank is not None and not 0 <= rank < most:
        raise ValueError(f"--node-rank must be from 0 to {most - 1} (--nnodes - 1), got {rank}")
    host, port = address
    secret = _secret(given.secret_file)
    if secret is None and not is_loopback(host):
        raise ValueError(
            f"nodes that meet at {host} need a secret that all of them know: run `meshlib secret`"
            " once where they share a home, or give all of them the same"
            f" {environment.SECRET}, or --secret-file FILE"
        )
    return NodeOptions(
        least=least,
        most=most,
        rank=rank,
        host=host,
        port=port or DEFAULT_PORT,
        job=given.rdzv_id,
        config=_config(given.rdzv_conf or ""),
        local_address=given.local_addr,
        secret=secret,
    )


def is_loopback(host: str) -> bool:
    """Return whether ``host`` can only be this machine."""
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
    """Return the address where nodes meet; host empty or port 0 where none is given."""
    port: int = given.master_port or 0
    if not 0 <= port <= 65535:
        raise ValueError(f"--master-port must be from 1 to 65535, got {port}")
    if not given.rdzv_endpoint:
        return (given.master_addr or "", port) if given.master_addr or port else None
    if given.master_addr:
        raise ValueError("--rdzv-endpoint and --master-addr name the same thing: expected one")
    text: str = given.rdzv_endpoint
    host, _, digits = text.rpartition(":")
    if not host or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, digits = text, ""
    if digits and not (digits.isdigit() and int(digits) <= 65535):
        raise ValueError(f"--rdzv-endpoint: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(digits) if digits else port


def _refuse_unused(given: argparse.Namespace) -> None:
    if given.standalone and (given.nnodes != "1" or given.rdzv_endpoint or given.master_addr):
        raise ValueError(
            "--standalone is one node that meets no other: expected no --nnodes, --master-addr or"
            " --rdzv-endpoint with it"
        )
    if given.node_rank not in (None, 0):
        raise ValueError(f"--node-rank {given.node_rank} needs --nnodes above 1, got 1")


def _config(text: str) -> dict[str, float]:
    """Read ``--rdzv-conf``: ``join_timeout=60,last_call_timeout=1``."""
    config = dict(_CONFIG_DEFAULTS)
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        value = {"true": "1", "false": "0"}.get(value.lower(), value)
        try:
            number = float(value if (read := read_duration(value)) is None else read)
        except ValueError:
            number = -1.0
        if key not in config:
            raise ValueError(
                f"--rdzv-conf: {key!r} is unknown; expected {', '.join(_CONFIG_DEFAULTS)}"
            )
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
