"""Settings of all tests."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from tests.support.net.etcd_server import EtcdServer, etcd_of
from tests.support.net.ports import reserved_port

# Ranks that are threads share XLA's threads, and a rank that waits holds one of them: there have
# to be more than ranks. XLA reads this when JAX is first used; ranks that are processes need none.
os.environ.setdefault("NPROC", "16")

# Most time of a small JAX program is its compilation, and what is tested is what it calls, not how
# fast its loops are. XLA ends the process at a flag that it does not know: these, of its CPU
# compiler, are known to the releases named here (a later one compiles as it does by default).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
with suppress(PackageNotFoundError):
    if (0, 7) <= tuple(map(int, version("jaxlib").split(".")[:2])) <= (0, 10):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}".strip()

# No test has an upper limit on a time but its deadline, and none depends on luck: the same
# examples come on each run.
settings.register_profile("meshlib", deadline=None, derandomize=True)
settings.load_profile("meshlib")

# A shell that starts the tests in the background has SIGINT ignored, and ``nohup`` SIGHUP: the
# programs that the tests start and interrupt would inherit it.
ENDINGS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
for number, handler in ENDINGS.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Keep the objects of all tests out of later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two cores: a third of the tests' time is spent waiting for something."""
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Have a test that hangs say on the terminal where each thread is, and end its process.

    pytest-timeout's own words are lost with the worker; nor do they come while C keeps the GIL.
    """
    terminal = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=terminal)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


class Memory:
    """Gives memory back after a test, once the process holds much.

    JAX keeps what it compiled (some 40 MB a test: ranks that are threads each compile their own),
    the collector comes the more rarely the more objects there are, and malloc keeps what hundreds
    of threads have freed. A worker that has run everything held twelve gigabytes without this. With
    it a process holds 1 to 1.5: JAX's programs, arenas of malloc, libraries; nothing shared.
    """

    def __init__(self, much: int = 1 << 30) -> None:
        self.much = self.limit = much

    def resident(self) -> int:
        """Bytes that the process holds; 0 where nobody says."""
        try:
            pages = Path("/proc/self/statm").read_text().split()[1]
        except OSError:
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def pytest_runtest_logfinish(self) -> None:
        if self.resident() < self.limit:
            return
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        # Should that much be in use, then not after each test again.
        self.limit = max(self.much, 2 * self.resident())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Memory())


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Have JAX compute in the dtypes that it is given, as NumPy does."""
    from tests.support.parallel.jax_settings import jax_settings

    with jax_settings(jax_enable_x64=True):
        yield


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which nobody listens but whom the test has listen."""
    with reserved_port() as port:
        yield port


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd of one member, which takes larger values than it does by default."""
    folder = tmp_path_factory.mktemp("etcd")
    with etcd_of(folder, options=("--max-request-bytes", str(16 << 20))) as server:
        yield server
