"""Ranks for which there is no memory: killed by the kernel, or told so in time."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

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


ALLOCATING = (PROGRAMS / "ask_for_memory.py").read_text()

SMALL = """
    import fcntl, os, sys, types
    from transport._shm import segment

    # Files of a small file system stand in for memory of which there is no more.
    os.memfd_create = lambda *_: os.open(sys.argv[2], os.O_TMPFILE | os.O_RDWR)
    names = {name: getattr(fcntl, name) for name in ("F_ADD_SEALS", "F_GET_SEALS")}
    segment.fcntl = types.SimpleNamespace(fcntl=lambda *_: segment._SEALS, **names)
"""


def test_a_symmetric_array_over_the_limit_is_an_error_on_every_rank(meshrun, limited):
    enter = f'echo $$ > {limited}/cgroup.procs && exec "$0" "$@"'
    command = ("sh", "-c", enter, *meshrun.COMMAND)
    script = meshrun.script(ALLOCATING)
    result = meshrun.run("--nproc-per-node", "2", script, "array", command=command)
    assert result.code == 0, result.err
    assert result.out.count("cannot allocate 268435456 bytes of shared memory") == 2, result.out
    assert result.out.count("the limit of its cgroup is 256 MiB") == 2, result.out


@pytest.mark.parametrize("what", ["array", "reduction", "message"])
def test_pages_that_cannot_be_had_are_an_error_on_every_rank(meshrun, tmp_path, what):
    """Where nobody asks for them before they are used, this is a SIGBUS."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=128k small {folder} && exec "$0" "$@"'
    own = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount)
    if shutil.which(own[0]) is None or subprocess.run([*own, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = meshrun.script(textwrap.dedent(SMALL) + textwrap.dedent(ALLOCATING))
    arguments = ("--nproc-per-node", "2", script, what, str(folder))
    result = meshrun.run(*arguments, command=(*own, *meshrun.COMMAND))
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "the kernel has no page for it" in line]
    assert len(lines) == 2, result.out
    assert all(re.search(r"rank [01] cannot allocate \d+ bytes", line) for line in lines)
