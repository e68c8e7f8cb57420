"""A rank that the kernel kills for want of memory, in a cgroup with a limit if one can be made."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

LIMIT = 256 << 20
HUNGRY = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        held = [bytearray(os.urandom(1 << 20) * 16) for _ in range(64)]
    time.sleep(30)
"""


@pytest.fixture
def limited():
    """A memory cgroup for the processes of one test."""
    root = Path("/sys/fs/cgroup")
    first = root / "memory" if (root / "memory/memory.limit_in_bytes").exists() else root
    folder = first / f"meshlib-test-{secrets.token_hex(4)}"
    limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        done = 0
        for name in limits:
            with contextlib.suppress(OSError):
                if (folder / name).exists():
                    (folder / name).write_text(str(LIMIT))
                    done += 1
        if not done:
            pytest.skip("no memory limit can be set here")
        yield folder
    finally:
        folder.rmdir()


def test_the_report_names_the_likely_cause(meshrun, limited):
    enter = f'echo $$ > {limited}/cgroup.procs && exec "$0" "$@"'
    command = ("sh", "-c", enter, *meshrun.COMMAND)
    result = meshrun.run("--nproc-per-node", "2", meshrun.script(HUNGRY), command=command)
    assert result.code == 137, result.err
    assert "rank 1 on" in result.err
    assert "was killed by SIGKILL (probably the kernel's out-of-memory killer" in result.err
    assert os.path.isdir(limited)
