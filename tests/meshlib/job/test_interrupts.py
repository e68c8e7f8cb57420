"""Whose Ctrl-C is deferred, and for how long."""

import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import meshlib as dist
from tests.support.transport.interrupts import SOON, at_random, in_thread
from transport._errors import DistStoreError
from transport._store.hash_store import HashStore
from transport._waiting.interrupts import InterruptHandler


@pytest.fixture
def job():
    dist.init_process_group(init_method="solo://")
    yield
    dist.destroy_process_group()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_from_init_to_destroy(job):
    assert isinstance(signal.getsignal(signal.SIGINT), InterruptHandler)


def test_not_after_an_init_that_failed():
    with pytest.raises(DistStoreError):
        dist.init_process_group("inproc", store=HashStore(), rank=0, world_size=2, timeout=0.01)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_not_where_the_program_handles_it():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGINT, mine)
    try:
        dist.init_process_group(init_method="solo://")
        assert signal.getsignal(signal.SIGINT) is mine
        dist.destroy_process_group()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_not_in_another_thread():
    def program():
        dist.init_process_group(init_method="solo://")
        handler = signal.getsignal(signal.SIGINT)
        dist.destroy_process_group()
        return handler

    assert in_thread(program).result(SOON) is signal.default_int_handler


def test_a_notebooks_kernel_sets_its_own_handler_before_each_cell(monkeypatch):
    on_cell = []
    events = SimpleNamespace(
        register=lambda name, function: on_cell.append((name, function)),
        unregister=lambda name, function: on_cell.remove((name, function)),
    )
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    dist.init_process_group(init_method="solo://")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ((name, function),) = on_cell
    assert name == "pre_run_cell"
    function(SimpleNamespace())  # what a cell is
    assert isinstance(signal.getsignal(signal.SIGINT), InterruptHandler)
    dist.destroy_process_group()
    assert not on_cell
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_calls_at_random_moments(job):
    """Those that were interrupted where nothing waits were made, and the group goes on."""
    x, made = np.ones(3), []

    def calls():
        made.append(dist.all_reduce(np.ones(3), async_op=True))
        made[-1].wait()
        dist.send(x, 0)
        assert dist.recv(np.zeros(3), 0) == 0

    def check():
        assert dist.get_world_size() == 1

    assert threading.current_thread() is threading.main_thread()
    at_random(calls, check, times=100)
    dist.barrier()
