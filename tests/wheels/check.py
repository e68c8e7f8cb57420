"""Install each wheel of ``dist/`` in a fresh environment; two ranks share memory there.

Where the Python runs here, it gets a virtual environment. Others run under ``tests/foreign.sh``
(Debian, root). Prints for each Python and platform whether its wheel was tested.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from tests.wheels.build import DIST, PYTHONS, ROOT, TARGETS, python_here, run

RANKS = ROOT / "tests/wheels/ranks.py"
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
"""The suites of Debian whose Python that is."""
LAUNCH = "python3 -P -m meshlib._launcher --nproc-per-node 2"


def install(wheel: Path, version: str, site: Path) -> None:
    """Install ``wheel`` and NumPy for another platform than this one's into ``site``."""
    shutil.rmtree(site, ignore_errors=True)
    (platforms,) = re.findall(r"-([^-]+)\.whl", wheel.name)
    (machine,) = re.findall(r"(x86_64|aarch64)$", platforms)
    tags = [*platforms.split("."), *(f"manylinux_2_{one}_{machine}" for one in (28, 27))]
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--target", site, "--python-version", version, "--only-binary=:all:"),
        *(word for tag in tags for word in ("--platform", tag)),
        wheel,
    )


def check(wheel: Path, version: str, platform: str) -> str:
    """Return where two ranks shared memory, or why that was not tested."""
    libc, machine = platform.split()
    here = machine == os.uname().machine
    python = python_here(version)
    if libc == "manylinux" and here and python:
        folder = ROOT / ".pythons/wheel"
        run(python, "-m", "venv", "--clear", folder)
        quiet = ("install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:")
        run(folder / "bin/python", "-m", "pip", *quiet, wheel)
        run("timeout", "100", folder / "bin/meshrun", "--nproc-per-node", "2", RANKS, PYTHONPATH="")
        return "in a virtual environment"
    if libc == "manylinux" and version in SUITES:
        if os.getuid() or not shutil.which("debootstrap"):
            return "not tested: needs root and debootstrap"
        debian = {"x86_64": "amd64", "aarch64": "arm64"}[machine], SUITES[version]
        root = Path(run("tests/foreign.sh", *debian))
        install(wheel, version, root / "wheel/site-packages")
        shutil.copy(RANKS, root / "wheel")
        command = f"PYTHONPATH=/wheel/site-packages {LAUNCH} /wheel/ranks.py"
        run("timeout", "500", "tests/foreign.sh", *debian, command)
        return f"in Debian's {' '.join(debian)}"
    return "not tested: no such Python is here"


def main() -> None:
    """Test each wheel that there is."""
    for version in PYTHONS:
        for platform in TARGETS:
            libc, machine = platform.split()
            tag = f"cp{version.replace('.', '')}"
            wheels = list(DIST.glob(f"*-{tag}-{tag}-{libc}*_{machine}.whl"))
            outcome = check(wheels[0], version, platform) if wheels else "not built"
            print(f"{version} {platform}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
