"""The engine under sanitizers: ``python tests/transport/native/sanitize.py [--extension]``.

The C protocol runs without an interpreter, its members as threads over one mapping
(``protocol.c``): under the thread sanitizer, under those of addresses and undefined behaviour, and
with damage. Then each memory order of ``engine/words.h`` is weakened, which must be found.
``--extension`` builds both compiled modules with the sanitizers of addresses and undefined
behaviour, and runs the tests of shared memory and of compiled calls. ``--quick`` makes fewer calls.

A machine of x86-64 seldom or never shows what a weaker order allows in the handshake between a
member that publishes and one that falls asleep, and the thread sanitizer does not look for it. So
all orders in which its four steps can be seen are tried instead (``can_miss``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import hatch_build  # noqa: E402

NATIVE = ROOT / "transport/_native"
PROTOCOL = Path(__file__).with_name("protocol.c")
BINARIES = [ROOT / hatch_build.binary(module) for module in hatch_build.MODULES]
SECONDS = 300
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-ffp-contract=off", "-g", "-pthread", "-I", str(NATIVE)]
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
THREADS = ["-O1", "-fsanitize=thread", "-DNO_CLONES"]
RUN = "calls", "3", "400", "5"
MEMORY = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DNO_CLONES"]


TESTS = [
    *("tests/transport/shm", "tests/transport/conformance", "tests/e2e/native"),
    *("tests/meshlib/jit/test_jit_native.py", "tests/meshlib/recording/test_recorder.py"),
    *("-k", "shm or native or recording"),
]
RACES = ["ORDER_OF_LOOK", "ORDER_OF_PUBLISH"]
"""What the thread sanitizer finds where it is relaxed."""

HANDSHAKE = ["ORDER_OF_PUBLISH", "ORDER_OF_CHECK", "ORDER_OF_SLEEP", "ORDER_OF_LAST_LOOK"]
"""The steps of a publisher, then those of a sleeper."""


def orders() -> dict[str, str]:
    """Return the memory orders that ``engine/words.h`` has, by name."""
    text = (NATIVE / "engine/words.h").read_text()
    return dict(re.findall(r"#define (ORDER_OF_\w+) memory_order_(\w+)", text))


def can_miss(of: dict[str, str]) -> bool:
    """True if a publisher and a sleeper can miss each other: a wake-up is lost then.

    Each writes one word and then reads the other's. Others may see the two steps of a thread in
    either order unless both are sequentially consistent.
    """

    def seen(writes: str, reads: str) -> list[tuple[str, str]]:
        kept = of[writes] == of[reads] == "seq_cst"
        return [(writes, reads)] if kept else [(writes, reads), (reads, writes)]

    publish, check, sleep, last_look = HANDSHAKE
    for one, other in product(seen(publish, check), seen(sleep, last_look)):
        for places in combinations(range(4), 2):  # of the publisher's steps among all
            mine, theirs = iter(one), iter(other)
            order = [next(mine) if place in places else next(theirs) for place in range(4)]
            at = {step: place for place, step in enumerate(order)}
            if at[check] < at[sleep] and at[last_look] < at[publish]:
                return True
    return False


def compile_protocol(target: Path, *flags: str, program: Path = PROTOCOL) -> Path:
    """Compile the engine and ``protocol.c``, or another ``program``."""
    compiler = os.environ.get("CC", "gcc")
    sources = [str(program), *map(str, sorted((NATIVE / "engine").rglob("*.c")))]
    wrapped = "madvise" if program != PROTOCOL else "sleep_on"
    command = [compiler, *FLAGS, *WARNINGS, *flags, f"-Wl,--wrap={wrapped}", *sources]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=SECONDS)
    return target


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program: without the randomised addresses that the thread sanitizer dislikes."""
    command = ["setarch", "-R", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def must_pass(what: str, program: Path, *arguments: str) -> None:
    done = run(program, *arguments)
    print(f"{what}: {' '.join(arguments)}: {done.stdout.strip()}", flush=True)
    if done.returncode:
        raise SystemExit(f"{what} failed with {done.returncode}:\n{done.stderr}")


def check_protocol(folder: Path, calls: int, rounds: int) -> None:
    """Run the protocol as it is: no report, no wrong value, no lost wake-up, no crash."""
    threads = compile_protocol(folder / "threads", *THREADS)
    memory = compile_protocol(folder / "memory", *MEMORY)
    for size in ("2", "3", "4"):
        must_pass("threads", threads, "calls", size, str(calls), size)
        must_pass("memory", memory, "calls", size, str(calls), size)
        must_pass("memory", memory, "damage", size, str(rounds), size)


def relaxed(folder: Path, name: str) -> Path:
    """Compile the protocol for the thread sanitizer with one order relaxed."""
    return compile_protocol(folder / name, *THREADS, f"-D{name}=memory_order_relaxed")


def check_mutations(folder: Path) -> None:
    """See that each weakened order is found."""
    if can_miss(orders()):
        raise SystemExit("a wake-up can be lost")
    missed = [name for name in HANDSHAKE if not can_miss(orders() | {name: "acq_rel"})]
    missed += [name for name in RACES if not run(relaxed(folder, name), *RUN).returncode]
    print(f"weakened orders that were not found: {missed}", flush=True)
    if missed:
        raise SystemExit(1)


@contextmanager
def replaced(built: list[Path]) -> Iterator[None]:
    """Have the modules ``built`` in place of those that are there."""
    before = [target.read_bytes() for target in BINARIES]
    put_in_place([path.read_bytes() for path in built])
    try:
        yield
    finally:
        put_in_place(before)


def put_in_place(contents: list[bytes]) -> None:
    for target, content in zip(BINARIES, contents, strict=True):
        target.unlink()  # not overwritten: a process may have mapped it
        target.write_bytes(content)


def check_extension(folder: Path) -> None:
    """Run the tests of shared memory and of compiled calls on modules built with sanitizers."""
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    os.environ |= {
        "LD_PRELOAD": ":".join(libraries),
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    built = [folder / path.name for path in BINARIES]
    hatch_build.FLAGS += [*MEMORY, "-g"]
    hatch_build.compile_core(ROOT, *built)  # which imports them
    with replaced(built):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *TESTS]
        subprocess.run(command, cwd=ROOT, check=True, timeout=3600)


def main() -> None:
    quick = "--quick" in sys.argv
    with TemporaryDirectory(prefix="meshlib-sanitize-") as scratch:
        folder = Path(scratch)
        check_protocol(folder, 300 if quick else 5000, 5 if quick else 200)
        check_mutations(folder)
        if "--extension" in sys.argv:
            check_extension(folder)
    print("sanitize: nothing found")


if __name__ == "__main__":
    main()
