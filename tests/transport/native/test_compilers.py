"""The C under each compiler that is here: none warns, and what each makes of the engine works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.transport.native import sanitize

pytestmark = pytest.mark.processes

# musl's wrapper has no headers of the kernel: those of the machine come last. Clang dislikes that
# CPython's tables end with {NULL}.
KERNEL = [f"-idirafter{folder}" for folder in ("/usr/include", "/usr/include/x86_64-linux-gnu")]
COMPILERS = {
    "gcc": [],
    "clang": ["-Wno-missing-field-initializers"],
    "musl-gcc": [*KERNEL, "-static"],
}


@pytest.fixture(params=COMPILERS)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} here")
    monkeypatch.setenv("CC", request.param)
    return request.param


def test_no_source_has_a_warning(compiler: str, tmp_path: Path) -> None:
    headers = ["-isystem", sysconfig.get_path("include")]
    flags = [*sanitize.FLAGS, *sanitize.WARNINGS, *COMPILERS[compiler], *headers, "-O2", "-fPIC"]
    sources = sorted(sanitize.NATIVE.rglob("*.c"))
    assert sources

    def warnings(source: Path) -> str:
        command = [compiler, *flags, "-c", str(source), "-o", str(tmp_path / f"{source.name}.o")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [text for text in pool.map(warnings, sources) if text] == []


def test_the_engine_works(compiler: str, tmp_path: Path) -> None:
    program = sanitize.compile_protocol(tmp_path / "protocol", "-O2", *COMPILERS[compiler])
    done = sanitize.run(program, "calls", "3", "300", "7")
    assert done.returncode == 0, done.stderr
