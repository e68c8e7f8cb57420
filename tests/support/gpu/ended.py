"""Running a program for so long and no longer, whatever it does and whoever it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMED_OUT = 124


def environment() -> dict[str, str]:
    """What programs need to find the project, from any folder."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run(
    command: Sequence[str],
    seconds: float,
    out: Path,
    env: Mapping[str, str] | None = None,
    *,
    whole_group: bool = False,
) -> int:
    """Run ``command`` in the project's folder; return its exit status, or ``TIMED_OUT``.

    What it says goes to the file ``out``: a pipe would be waited for as long as anybody holds it.
    Past ``seconds`` it is killed; with ``whole_group`` it has a process group of its own, and all
    of that is. (``meshrun``'s ranks, which have others, end with ``meshrun``.)
    """
    with out.open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment() if env is None else env,
            start_new_session=whole_group,
        )
        try:
            return process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            if whole_group:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            return TIMED_OUT
        finally:
            process.kill()
            process.wait()
