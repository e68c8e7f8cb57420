"""Run the tests on each row of the table of tested versions in docs/reference/compatibility.md.

``python -m tests.versions`` gives each row whose Python is here an environment of its own in
``.pythons``. ``--json`` prints the rows as the matrix of a CI service. Arguments choose rows by
their Python and their JAX: ``3.11 0.8.2``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.wheels.build import python_here

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/compatibility.md"
HEADER = "| Python | NumPy | JAX | PyTorch | Tests | Passed on |"
XDIST = ("--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal")


@dataclass(frozen=True)
class Row:
    """One environment: its Python, its packages and the tests that run in it.

    A package is a release, ``newest`` or ``-``: not installed.
    """

    python: str
    numpy: str
    jax: str
    torch: str
    tests: str

    @property
    def packages(self) -> list[str]:
        """What pip is asked for: ``numpy==1.26.0``, ``torch``."""
        releases = {"numpy": self.numpy, "jax": self.jax, "torch": self.torch}
        return [
            name if release == "newest" else f"{name}=={release}"
            for name, release in releases.items()
            if release != "-"
        ]

    @property
    def name(self) -> str:
        """The folder of the environment, such as ``3.11-numpy-jax==0.8.2``."""
        return "-".join([self.python, *self.packages])

    @property
    def requirements(self) -> list[str]:
        """The packages, meshlib with the extras that the tests need, and the test tools."""
        extra = "dev" if self.jax != "-" else "torch" if self.torch != "-" else "notebook"
        tools = [
            "expecttest",
            "hypothesis",
            "ml_dtypes",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
        ]
        return ["--editable", f".[{extra}]", *self.packages, *tools]


def rows_of(page: str) -> list[Row]:
    """Return the rows of the table below ``HEADER``. Raises ValueError if there is none."""
    _, found, rest = page.partition(HEADER + "\n")
    if not found:
        raise ValueError(f"{PAGE} has no table that begins with {HEADER!r}")
    lines = rest.splitlines()[1:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]
    cells = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in table]
    return [Row(*row[:5]) for row in cells]


def run(row: Row) -> bool:
    """Install the environment of ``row`` and run its tests; return whether they passed."""
    here = python_here(row.python)
    if here is None:
        print(f"{row.name}: not run, no python{row.python} is here", flush=True)
        return True
    folder = ROOT / ".pythons" / row.name
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([here, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--upgrade", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *row.requirements], cwd=ROOT, check=True)
    paths = [] if row.tests == "all" else row.tests.split()
    done = subprocess.run([python, "-m", "pytest", *XDIST, *paths], cwd=ROOT, check=False)
    print(f"{row.name}: {'passed' if done.returncode == 0 else 'failed'}", flush=True)
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    """Print the matrix, or run the chosen rows; return the exit status."""
    rows = rows_of(PAGE.read_text())
    if arguments == ["--json"]:
        print(json.dumps({"include": [asdict(row) for row in rows]}, indent=1))
        return 0
    python, jax = [*arguments, None, None][:2]
    chosen = [row for row in rows if python in (None, row.python) and jax in (None, row.jax)]
    if not chosen:
        raise SystemExit(f"{PAGE} has no row for {' '.join(arguments)!r}")
    passed = [run(row) for row in chosen]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
