"""The interpreters of the other libraries, each of which has its own environment."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(".bench")
"""The folder of the environments, relative to the benchmark's working folder."""

ENVIRONMENTS = {"gloo": "torch", "openmpi": "openmpi", "mpich": "mpich", "jax": "jax"}
"""The name of each peer's environment."""

_STAMP = "installed.txt"


def python_of(peer: str) -> str:
    """Return the interpreter of a peer's environment; raise ValueError when it is not set up."""
    folder = folder_of(peer)
    if not is_set_up(peer):
        raise ValueError(
            f"peer {peer!r} is not installed in {folder}; to install it, run"
            f" python -m tests.benchmarks.setup_peers {peer} in a clone of the project"
        )
    return str(folder / "bin" / "python")


def is_set_up(peer: str) -> bool:
    """Return whether the peer's environment is complete."""
    return stamp_of(peer).exists()


def folder_of(peer: str) -> Path:
    """Return the folder of the peer's environment, which need not exist."""
    return FOLDER.absolute() / ENVIRONMENTS[peer]


def stamp_of(peer: str) -> Path:
    """Return the file that lists the contents of a complete environment, written last."""
    return folder_of(peer) / _STAMP
