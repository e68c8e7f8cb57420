"""PyTorch's own tests of a backend, from the installed wheel, over meshlib: ``make test-torch``.

The ranks are processes that run one test after the other (PyTorch starts new ones for each, which
takes ten times as long); after a failure, new ones. ``passing.txt`` has the names that must pass.

Each test asks the environment which backend it is for, and many skip those they do not know; so a
test runs as ``meshlib`` or, if it does not pass then, as ``mpi``, whose tensors are the CPU's.
The groups are meshlib's all the same: PyTorch's wheel has no MPI that could take its place.

    python tests/pytorch/own_tests/distributed_tests.py  the names in passing.txt
    python tests/pytorch/own_tests/distributed_tests.py --all  every test; --write lists them
    python tests/pytorch/own_tests/distributed_tests.py NAME ...  these; mpi/NAME: as mpi
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

RANKS = 3
LIMIT_SECONDS = 120.0
START_SECONDS = 300.0
"""For four processes to import PyTorch, on a machine that does something else as well."""
PASSING = Path(__file__).with_name("passing.txt")
BACKEND = "meshlib"
GUISES = (BACKEND, "mpi")
DIED = "the process died"
MODULE = "torch.testing._internal.distributed.distributed_test"


def load_tests():
    """Import PyTorch's tests, for which the environment says what they are run with."""
    import importlib

    import torch

    import meshlib.torch  # noqa: F401

    torch.manual_seed(0)  # its module makes models, which are to be the same on all ranks
    return importlib.import_module(MODULE)


def test_names() -> list[str]:
    base = load_tests().DistributedTest._DistTestBase
    return sorted(name for name in dir(base) if name.startswith("test_"))


def run_rank(rank: int, folder: str, environment: dict[str, str], orders) -> None:
    os.environ.update(environment)
    os.environ["MESHLIB_DEBUG"] = "OFF"
    import torch.distributed as dist

    module = load_tests()
    from torch.testing._internal.common_distributed import TEST_SKIPS

    codes = {skip.exit_code for skip in TEST_SKIPS.values()}

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            pass

        def tearDown(self):
            pass

    while True:
        name, number = orders.recv()
        message = io.StringIO()
        try:
            test = Tests(name)
            test.rank = rank
            test.file_name = f"{folder}/meet{number}"
            # Those that every test begins with, as TestDistBackend._run has it.
            limit = module.CUSTOM_PG_TIMEOUT.get(name, 60)
            with contextlib.redirect_stdout(message):
                dist.init_process_group(
                    BACKEND,
                    init_method=f"file://{test.file_name}",
                    world_size=RANKS,
                    rank=rank,
                    timeout=timedelta(seconds=limit),
                )
                test._barrier()
                getattr(test, name)()
                test._barrier()
                if dist.is_initialized():
                    dist.destroy_process_group()
        except unittest.SkipTest as skip:
            result = "skip", str(skip)
        except SystemExit as end:
            result = ("skip" if end.code in codes else "fail"), f"exit {end.code}"
        except BaseException:  # noqa: BLE001 (the test's outcome)
            result = "fail", traceback.format_exc()
        else:
            result = "pass", ""
        if result[0] == "skip":
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        orders.send(result)


def run_below_parent(target, folder: str, *arguments) -> None:
    """Run ``target`` in this process, which ends when its parent is killed, and leaves nothing."""
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        shutil.rmtree(Path(folder).parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    target(*arguments)


class Ranks:
    """The processes of one set of ranks."""

    def __init__(self, folder: str, guise: str, target=run_rank, count: int = RANKS):
        self.guise = guise
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("barrier", "test_dir", "init_dir"):
            os.makedirs(f"{folder}/{part}")
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        self.answered: set[int] = set()  # who said how the last test ended
        for rank in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=run_below_parent,
                args=(target, folder, rank, folder, {"BACKEND": guise}, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, name: str, number: int) -> tuple[str, str]:
        """Run one test; return how it ended, "pass", "skip" or "fail", and what was said."""
        for pipe in self.pipes:
            pipe.send((name, number))
        results: dict[int, tuple[str, str]] = {}
        limit = LIMIT_SECONDS if self.answered else START_SECONDS
        deadline = time.monotonic() + limit
        while len(results) < len(self.pipes):
            left = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            # Once a rank has failed, the others get a moment to say what they saw.
            grace = 10.0 if any(kind == "fail" for kind, _ in results.values()) else None
            timeout = grace if grace is not None else deadline - time.monotonic()
            ready = wait(left, max(timeout, 0.0))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    results[rank] = "fail", DIED
        self.answered = {rank for rank, (_, text) in results.items() if text != DIED}
        kinds = (
            {kind for kind, _ in results.values()} if len(results) == len(self.pipes) else {"fail"}
        )
        kind = kinds.pop() if len(kinds) == 1 else "fail"
        message = (f"rank {rank}: {kind}\n{text}" for rank, (kind, text) in sorted(results.items()))
        return kind, "\n".join(message)

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="meshlib-torch-")
    os.environ.update(
        BACKEND=BACKEND,
        WORLD_SIZE=str(RANKS),
        TEMP_DIR=f"{folder}/work",
        MASTER_ADDR="127.0.0.1",
        PYTHONWARNINGS="ignore",
        OMP_NUM_THREADS="1",
    )
    listed = PASSING.read_text().split() if PASSING.exists() else []
    names = options.names or (test_names() if options.all else listed)
    guises = GUISES if options.all else GUISES[:1]
    ended: dict[str, list[str]] = {"pass": [], "skip": [], "fail": []}
    passed: set[str] = set()
    ranks = None
    try:
        for guise in guises:
            for name in (name for name in names if name not in passed):
                wanted, _, test = name.rpartition("/")
                wanted = wanted or guise
                if ranks is not None and ranks.guise != wanted:
                    ranks.end()
                    ranks = None
                ranks = ranks or Ranks(f"{folder}/work", wanted)
                begin = time.monotonic()
                kind, message = ranks.run(test, int(begin * 1000))
                full = test if wanted == BACKEND else f"{wanted}/{test}"
                print(f"{kind} {full} {time.monotonic() - begin:.1f} s", flush=True)
                ended[kind].append(full)
                if kind == "pass":
                    passed.add(name)
                else:
                    print(message, flush=True)
                if kind == "fail":  # a test that was left in the middle leaves its group behind
                    ranks.end()
                    ranks = None
    finally:
        if ranks is not None:
            ranks.end()
        shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{len(found)} {kind}" for kind, found in ended.items()))
    if options.write:
        PASSING.write_text("".join(f"{name}\n" for name in ended["pass"]))
    missing = [] if options.all else sorted({*names} - passed)
    for name in missing:
        print(f"expected to pass: {name}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
