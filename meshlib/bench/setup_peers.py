"""Environments for the libraries to compare with: each has its own, beside the project's."""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(".bench")
"""Where the environments are, seen from the folder in which the benchmark is run."""

_STAMP = "installed.txt"
_REQUIREMENTS = {"gloo": ("torch", ["torch==2.13.0", "numpy"])}
"""By peer: its environment's name, and what goes into it."""


def python_of(peer: str) -> str:
    """Return the interpreter of a peer's environment; raise ValueError when it is not set up."""
    python = _folder(peer) / "bin" / "python"
    if not (_folder(peer) / _STAMP).exists():
        raise ValueError(
            f"peer {peer!r} is not installed in {_folder(peer)};"
            f" python -m meshlib.bench.setup_peers {peer} does that"
        )
    return str(python)


def _folder(peer: str) -> Path:
    return FOLDER.absolute() / _REQUIREMENTS[peer][0]


def set_up(peer: str) -> None:
    """Make the peer's environment, unless it is there."""
    folder, requirements = _folder(peer), _REQUIREMENTS[peer][1]
    stamp = folder / _STAMP
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    sys.stderr.write(f"installing {', '.join(requirements)} into {folder}\n")
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *requirements], check=True)
    stamp.write_text(wanted)


def main() -> None:
    """Set up the peers that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(_REQUIREMENTS))
    peers = parser.parse_args().peers or list(_REQUIREMENTS)
    unknown = set(peers) - set(_REQUIREMENTS)
    if unknown:
        parser.error(f"unknown peers {sorted(unknown)}; expected {', '.join(_REQUIREMENTS)}")
    for peer in peers:
        set_up(peer)


if __name__ == "__main__":
    main()
