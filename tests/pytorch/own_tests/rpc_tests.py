"""PyTorch's own tests of RPC, from the installed wheel, over meshlib's: ``make test-torch``.

They are run with ``torch.distributed.rpc`` and ``torch.futures`` replaced by names of meshlib; what
travels are tensors, as any objects that can be pickled. ``passing_rpc.txt`` has the names that must
pass. Those of torch's profiler, its autograd, its pickler and its agent's insides cannot.

    python tests/pytorch/own_tests/rpc_tests.py  the names in passing_rpc.txt
    python tests/pytorch/own_tests/rpc_tests.py --all  every test; --write lists them
    python tests/pytorch/own_tests/rpc_tests.py NAME ...  these
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
import types
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from distributed_tests import Ranks

RANKS = 4
PASSING = Path(__file__).with_name("passing_rpc.txt")
WORDS = {
    "Functions decorated with @rpc": "is marked with async_execution, and returned",
    "Can not pickle torch.futures.Future": "a future cannot be pickled",
    "Future can only be marked completed once": "the future has an outcome already",
    "Cannot call to_here": "RPC was shut down on this worker",
    "Can not pickle rref in python pickler": "can only be pickled as part of a remote call",
    "is already initialized": "is already initialised",
    "is not unique": "expected different names",
    "RPC has not been initialized": "not initialised",
    "can't call localValue": "expected on its owner",
    "my\\_function": "my_function",
    "incompatible function arguments": "callback must be callable",
    "RPC pickler does not serialize": "Can't get attribute",
}
"""Texts that torch's tests expect, and meshlib's texts instead."""
MODULE = "torch.testing._internal.distributed.rpc.rpc_test"


def replace_rpc() -> types.ModuleType:
    """Put meshlib's names where PyTorch's tests look for them; return their module."""
    import torch
    import torch.distributed.rpc as real
    import torch.futures

    import meshlib as dist
    from meshlib import rpc
    from meshlib.rpc._worker import current_worker

    shim = types.ModuleType(real.__name__)
    shim.__dict__.update(real.__dict__)
    for name in rpc.__all__:
        setattr(shim, name, getattr(rpc, name))

    def in_torchs_words(call):
        """Turn meshlib's ValueError into c10d's RuntimeError."""

        def called(*args, **kwargs):
            timeout = kwargs.get("timeout")
            if timeout is not None and timeout < 0:
                del kwargs["timeout"]
            try:
                result = call(*args, **kwargs)
                if hasattr(real.api._thread_local_var, "future_list") and call is rpc.rpc_async:
                    real.api._thread_local_var.future_list.append(result)
                return result
            except ValueError as error:
                if "no worker has that name" in str(error) or "expected a rank" in str(error):
                    raise RuntimeError(f"could not find destination: {error}") from error
                raise

        return called

    def all_gather(value, worker_names=None, timeout=-1):
        names = sorted(worker_names or [info.name for info in rpc.get_worker_infos()])
        ranks = sorted(rpc.get_worker_info(name).id for name in names)
        group = current_worker().world.registry.group_for(ranks)
        found = [None] * len(ranks)
        dist.all_gather_object(found, value, group)
        return {
            rpc.get_worker_infos()[rank].name: it for rank, it in zip(ranks, found, strict=True)
        }

    def type_of_rref(rref, timeout=-1, blocking=True):
        future = rref._worker.caller.call(
            rref._owner, type_of, (rref,), {}, None if timeout < 0 else timeout
        )
        return future.wait() if blocking else future

    real.api._all_gather, real.api._barrier = all_gather, lambda names: all_gather(None, names)
    shim._all_gather, shim._barrier = real.api._all_gather, real.api._barrier
    rpc.RRef._get_type, rpc.RRef._get_future = type_of_rref, rpc.RRef.creation
    for name in ("rpc_sync", "rpc_async", "remote", "get_worker_info"):
        setattr(shim, name, in_torchs_words(getattr(rpc, name)))

    def init_rpc(name, backend=None, rank=-1, world_size=None, rpc_backend_options=None):
        rpc.init_rpc(name, None, rank, world_size, rpc_backend_options)

    def shutdown(graceful=True, timeout=0):
        rpc.shutdown(graceful, timeout)
        if dist.is_initialized():
            dist.destroy_process_group()

    def set_timeout(seconds):
        current_worker().caller.timeout = seconds

    class Options(rpc.RpcBackendOptions):
        def __init__(self, *, num_worker_threads=16, rpc_timeout=60.0, init_method=None, **_others):
            # torch's process group may be made at the same file.
            file = init_method is not None and init_method.startswith("file:")
            place = f"{init_method}.meshlib" if file else init_method
            super().__init__(num_worker_threads, rpc_timeout, place)

    shim.init_rpc, shim.shutdown = init_rpc, shutdown
    shim.TensorPipeRpcBackendOptions = shim.RpcBackendOptions = Options
    shim._set_rpc_timeout = set_timeout
    shim.PyRRef = rpc.RRef
    real.api._get_current_rpc_agent = lambda: types.SimpleNamespace(
        get_worker_infos=rpc.get_worker_infos
    )
    shim._get_current_rpc_agent = real.api._get_current_rpc_agent
    real.api.get_worker_info = shim.get_worker_info
    shim.api = real.api
    torch.distributed.rpc = sys.modules[real.__name__] = shim
    for name, value in (
        ("Future", rpc.Future),
        ("wait_all", rpc.wait_all),
        ("collect_all", dist.collect_all),
    ):
        setattr(torch.futures, name, value)
    return shim


def type_of(rref):
    """On the owner of an object: return its type."""
    return type(rref.local_value())


def load_tests() -> types.ModuleType:
    """Import PyTorch's tests, with meshlib's names in place."""
    replace_rpc()
    return importlib.import_module(MODULE)


def test_names() -> list[str]:
    module = load_tests()
    bases = module.RpcTest, module.RpcTestCommon
    return sorted({name for base in bases for name in dir(base) if name.startswith("test_")})


def run_rank(rank: int, folder: str, environment: dict[str, str], orders) -> None:
    """Run test after test, as one of the ranks."""
    os.environ.update(environment)
    module = load_tests()

    import torch
    from torch.testing._internal.common_utils import TestCase

    import meshlib as dist
    from meshlib import rpc

    class Tests(module.RpcTest, TestCase):
        rpc_backend = None

        def setUp(self):
            pass

        def assertRaisesRegex(self, kind, expected, *args, **kwargs):
            for theirs, ours in WORDS.items():
                if theirs in expected:
                    # c10d raises RuntimeError for everything.
                    kind = (kind, ValueError, TypeError, AttributeError)
                    expected = ours
            return super().assertRaisesRegex(kind, expected, *args, **kwargs)  # noqa: PT027

        @property
        def rpc_backend_options(self):
            return module.rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)

        def get_shutdown_error_regex(self):
            return ".*"

        def get_timeout_error_regex(self):
            return "passed its deadline"

    as_imported = dict(vars(module))
    while True:
        name, number = orders.recv()
        try:
            test = Tests(name)
            test.rank = rank
            test.file_name = f"{folder}/meet{number}"
            getattr(test, name)()
            result = "pass", ""
        except unittest.SkipTest as skip:
            result = "skip", str(skip)
        except BaseException:  # noqa: BLE001 (the test's outcome)
            result = "fail", traceback.format_exc()
        with contextlib.suppress(ValueError, RuntimeError):
            rpc.shutdown(graceful=False)
        if dist.is_initialized():
            dist.destroy_process_group()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # In PyTorch's own runs each test has processes of its own.
        vars(module).update(as_imported)
        for name in ("VALUE_FUTURE", "DONE_FUTURE"):
            setattr(module, name, concurrent.futures.Future())
        orders.send(result)


def main() -> int:
    """Run the tests; 1 if one of the list did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="meshlib-torch-rpc-")
    os.environ.update(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    listed = PASSING.read_text().split() if PASSING.exists() else []
    names = options.names or (test_names() if options.all else listed)
    ended: dict[str, list[str]] = {"pass": [], "skip": [], "fail": []}
    ranks = None
    try:
        for number, name in enumerate(names):
            ranks = ranks or Ranks(f"{folder}/work", "rpc", run_rank, RANKS)
            begin = time.monotonic()
            kind, message = ranks.run(name, number)
            print(f"{kind} {name} {time.monotonic() - begin:.1f} s", flush=True)
            ended[kind].append(name)
            if kind == "fail":
                print(message, flush=True)
            if len(ranks.answered) < RANKS:  # the others hang, or are dead
                ranks.end()
                ranks = None
    finally:
        if ranks is not None:
            ranks.end()
        shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{len(found)} {kind}" for kind, found in ended.items()))
    if options.write:
        PASSING.write_text("".join(f"{name}\n" for name in ended["pass"]))
    missing = [] if options.all else sorted({*names} - {*ended["pass"]})
    for name in missing:
        print(f"expected to pass: {name}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
