"""Objects whose own code fails, or would end the thread: each call is answered all the same."""

import threading

import pytest

from meshlib import rpc
from meshlib.rpc._worker import current_worker
from tests.support.meshlib.rpc_workers import agents, until, workers
from transport._channel.threads import ThreadPool


class WithoutText(Exception):
    """Has neither a text nor a representation."""

    def __str__(self):
        raise KeyError("no text")

    __repr__ = __str__


class Ends(SystemExit):
    """Would end the process, and cannot be shown."""

    def __repr__(self):
        raise SystemExit("no representation")


class NeverPickled(Exception):
    """Ends the thread that pickles it."""

    def __reduce__(self):
        raise SystemExit("not to be pickled")


class NeverCopied(Exception):
    """Ends the thread that copies it."""

    def __copy__(self):
        raise KeyboardInterrupt


def leave(rank=None):
    if rank is None or current_worker().rank == rank:
        raise SystemExit(7)
    return ValueError("read")


class EndsTheReader(Exception):
    """Ends the thread that unpickles it, on one worker or on all."""

    def __init__(self, rank=None):
        self.rank = rank

    def __reduce__(self):
        return leave, (self.rank,)


class BecomesText(Exception):
    """Is no exception any more when it has travelled."""

    def __reduce__(self):
        return str, ("only text",)


class Stubborn(Exception):
    """Takes no cause."""

    def __setattr__(self, name, value):
        raise SystemExit(name)


class NamelessType(type):
    """Its classes do not say what they are called."""

    def __getattribute__(cls, name):
        if name in ("__name__", "__qualname__"):
            raise SystemExit("no name")
        return type.__getattribute__(cls, name)


class Nameless(Exception, metaclass=NamelessType):
    """Pickled by name, which it has not."""


class Silent:
    """Callable, and nothing can be learned of it."""

    def __call__(self):
        return "called"

    def __repr__(self):
        raise SystemExit("no representation")

    def __getattr__(self, name):
        raise SystemExit(name) if name.startswith("__") else AttributeError(name)

    def __reduce__(self):
        return Silent, ()


def fail(kind, *arguments):
    raise globals()[kind](*arguments)


def give(kind, *arguments):
    return globals()[kind](*arguments)


HOSTILE = {
    "no text": "WithoutText",
    "ends the process": "Ends",
    "ends its pickler": "NeverPickled",
    "ends its copier": "NeverCopied",
    "ends its reader": "EndsTheReader",
    "becomes text": "BecomesText",
    "takes no cause": "Stubborn",
    "has no name": "Nameless",
}


def serves_on():
    """True if all threads of worker 1 run calls at once: none has ended, and none is missed."""
    threads, gate = agents[1].execution.threads, threading.Barrier(3)
    calls = [rpc.rpc_async(1, meet, (gate_number(gate),)) for _ in range(2)]
    gate.wait(60)
    rpc.wait_all(calls)
    until(lambda: threads.running == 0)
    return rpc.rpc_sync(1, int, ("3",)) == 3


_gates = []


def gate_number(gate):
    _gates.append(gate)
    return len(_gates) - 1


def meet(number):
    _gates[number].wait(60)


@pytest.mark.parametrize("kind", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("to", [0, 1])
def test_an_error_that_cannot_be_shown_or_sent_is_answered(kind, to):
    def program():
        for _ in range(3):
            with pytest.raises(Exception) as caught:
                rpc.rpc_sync(to, fail, (kind,), timeout=30)
            assert not isinstance(caught.value, rpc.RpcTimeoutError)
            made = rpc.remote(to, fail, (kind,), timeout=30)
            with pytest.raises(Exception) as caught:
                made.to_here(timeout=30)
            assert not isinstance(caught.value, rpc.RpcTimeoutError)
            del made, caught
        assert serves_on()

    workers(2, program, threads=2)


def test_what_ends_the_reader_is_the_callers_error():
    """In a request, in a result, in an error that only the caller cannot read."""

    def program():
        for _ in range(3):
            with pytest.raises(rpc.RemoteError, match=r"SystemExit\(7\)"):
                rpc.rpc_sync(1, str, (EndsTheReader(),), timeout=30)
            with pytest.raises(rpc.RemoteError, match=r"SystemExit\(7\)"):
                rpc.rpc_sync(1, give, ("EndsTheReader", 0), timeout=30)
            with pytest.raises(rpc.RemoteError, match=r"SystemExit\(7\)"):
                rpc.rpc_async(1, give, ("EndsTheReader", 0), timeout=30).wait()
            with pytest.raises(rpc.RemoteError, match=r"SystemExit\(7\)"):
                rpc.rpc_sync(1, fail, ("EndsTheReader", 0), timeout=30)
            with pytest.raises(rpc.RemoteError, match="not to be pickled"):
                rpc.rpc_sync(1, give, ("NeverPickled",), timeout=30)
        assert serves_on()

    workers(2, program, threads=2)


def test_an_answer_that_ends_its_callback_is_the_callers_error():
    def program():
        for _ in range(3):
            with pytest.raises(rpc.RemoteError, match=r"SystemExit\(7\)"):
                rpc.rpc_sync(1, answer_later, timeout=30)
        assert serves_on()

    workers(2, program, threads=2)


@rpc.functions.async_execution
def answer_later():
    return rpc.rpc_async(1, int).then(leave_after)


def leave_after(done):
    leave()


def test_a_function_that_cannot_be_shown_is_called():
    def program():
        for to in (0, 1):
            assert rpc.rpc_sync(to, Silent(), timeout=30) == "called"
        assert agents[1].recorder.records()[-1].kind == "Silent"
        assert serves_on()

    workers(2, program, threads=2)


def test_a_job_that_raises_leaves_its_thread_in_service():
    def program():
        for _ in range(3):
            agents[1].execution.threads.submit(leave)
        assert serves_on()

    workers(2, program, threads=2)


def test_a_job_is_run_though_no_further_thread_can_be_started(monkeypatch):
    """The process has all the threads that it may have, for a while."""
    start, full = threading.Thread.start, threading.Event()

    def refuse(thread):
        if full.is_set() and "meshlib-rpc-1-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def program():
        monkeypatch.setattr(threading.Thread, "start", refuse)
        full.set()
        for i in range(5):
            assert rpc.rpc_sync(1, int, (i,), timeout=30) == i
        full.clear()
        assert serves_on()

    workers(2, program, threads=2)


def test_threads_count_those_that_serve_and_no_others():
    threads = ThreadPool("count", 2, lambda: None, lambda error: None)
    try:
        done = threading.Event()
        for _ in range(4):
            threads.submit(leave)
        threads.submit(done.set)
        assert done.wait(60)
        until(lambda: threads.busy == 0)
        assert threads.running == 0
    finally:
        threads.close()
