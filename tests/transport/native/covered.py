"""Which lines of the C the tests reach: ``python tests/transport/native/covered.py``.

Builds both modules with gcov's counters, runs the tests of shared memory and of compiled calls on
them, and puts those back that were there. Functions that no machine of ours runs are in
``uncovered.txt``, each with the reason. Ends with 1 if over 5 % of all other lines are not reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.transport.native import sanitize

MOST_UNREACHED = 0.05
EXCUSES = Path(__file__).with_name("uncovered.txt")
COUNTERS = ["--coverage", "-fprofile-update=atomic", "-O1", "-fPIC", "-DNO_CLONES"]
TESTS = [
    *("tests/transport/native", "tests/transport/shm", "tests/transport/test_crc32c.py"),
    *("tests/transport/conformance", "tests/e2e/native", "tests/meshlib/collectives"),
    *(
        "tests/meshlib/recording",
        "tests/meshlib/jit/test_jit_native.py",
        "tests/meshlib/test_records.py",
        "tests/e2e/test_out_of_memory.py",
    ),
]

Lines = dict[str, dict[int, int]]
"""How often each line of each source has run."""


def build(folder: Path, binary: Path) -> Path:
    """Compile a module, each source for itself: counters go by the names of objects."""
    sources = sorted(path.relative_to(sanitize.ROOT) for path in binary.parent.rglob("*.c"))
    folders = [sysconfig.get_path("include"), *sanitize.hatch_build.xla_headers()]
    includes = [word for path in folders for word in ("-I", path)]
    flags = ["gcc", *sanitize.FLAGS, *includes, *COUNTERS]
    objects = [folder / str(source).replace("/", "-") for source in sources]
    for source, target in zip(sources, objects, strict=True):
        command = [*flags, "-c", str(source), "-o", f"{target}.o"]
        subprocess.run(command, cwd=sanitize.ROOT, check=True)
    built = folder / binary.name
    linked = [f"{target}.o" for target in objects]
    subprocess.run(["gcc", "-shared", "--coverage", *linked, "-o", str(built)], check=True)
    return built


def count(folder: Path) -> Lines:
    """Return gcov's report of the counters that processes left in ``folder``."""
    found: Lines = defaultdict(lambda: defaultdict(int))
    excused = excuses()
    for counters in sorted(folder.rglob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", counters.name]
        output = subprocess.check_output(command, cwd=counters.parent, text=True)
        for report in map(json.loads, output.splitlines()):
            for file in report["files"]:
                name = file["file"].removeprefix(f"{sanitize.ROOT}/")
                if name.startswith(("transport/_native/", "meshlib/_native/")):
                    for line in file["lines"]:
                        if f"{name} {line.get('function_name')}" not in excused:
                            found[name][line["line_number"]] += line["count"]
    return found


def excuses() -> set[str]:
    """Return the functions, after their sources, that need not be reached."""
    return {line.split("  # ")[0] for line in EXCUSES.read_text().splitlines() if "  # " in line}


def report(lines: Lines) -> float:
    """Print what is not reached; return its share."""
    total = missing = 0
    for name, counts in sorted(lines.items()):
        texts = (sanitize.ROOT / name).read_text().splitlines()
        gaps = [number for number, runs in sorted(counts.items()) if not runs]
        total, missing = total + len(counts), missing + len(gaps)
        print(f"{name}: {1 - len(gaps) / len(counts):.1%} of {len(counts)} lines reached")
        for number in gaps:
            print(f"    {number}: {texts[number - 1].strip()}")
    print(f"{total - missing} of {total} lines reached: {1 - missing / total:.1%}")
    return missing / total


def main() -> int:
    with TemporaryDirectory(prefix="meshlib-coverage-") as scratch:
        folder = Path(scratch)
        with sanitize.replaced([build(folder, binary) for binary in sanitize.BINARIES]):
            command = [sys.executable, "-m", "pytest", "-q", *sys.argv[1:], *TESTS, "-k", "not tcp"]
            subprocess.run(command, cwd=sanitize.ROOT, env=os.environ, check=False, timeout=3600)
            return 1 if report(count(folder)) > MOST_UNREACHED else 0


if __name__ == "__main__":
    sys.exit(main())
