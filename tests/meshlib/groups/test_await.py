"""Works and futures in coroutines of asyncio."""

import asyncio
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib import rpc
from meshlib._calls.future import Future
from meshlib.testing import run_ranks
from tests.support.meshlib.rpc_workers import workers

WAIT = 60.0


def run(coroutine):
    """Run ``coroutine`` in an event loop of this thread, with a deadline."""

    async def bounded():
        return await asyncio.wait_for(coroutine, WAIT)

    return asyncio.run(bounded())


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _known_threads():
    """Other tests of this process may have left the threads of an executor."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def threads_that_wait():
    here = threading.enumerate()
    return [t.name for t in here if t.name.startswith("asyncio") and t not in BEFORE]


@pytest.mark.parametrize("backend", ["inproc", "shm", "tcp"])
def test_the_loop_goes_on_while_calls_are_awaited(backend):
    """The second rank makes its calls only when a task beside the awaiting ones has run."""
    ticked = threading.Event()

    def program():
        me = dist.get_rank()

        async def tick():
            for _ in range(3):
                await asyncio.sleep(0)
            ticked.set()

        async def main():
            works = [dist.all_reduce(np.full(3, x + me), async_op=True) for x in (1.0, 2.0)]
            message = dist.irecv(np.zeros(1), 1)
            results = await asyncio.gather(tick(), *works, message)
            assert message.source_rank() == 1
            assert not threads_that_wait()
            return [float(one[0]) for one in results[1:]]

        if me == 0:
            return run(main())
        assert ticked.wait(WAIT)
        works = [dist.all_reduce(np.full(3, x + me), async_op=True) for x in (1.0, 2.0)]
        dist.send(np.ones(1), 0)
        return [float(work.result()[0]) for work in works]

    assert run_ranks(program, 2, backend=backend) == [[3.0, 5.0, 1.0], [3.0, 5.0]]


def test_an_error_is_raised_in_the_task():
    def program():
        async def main():
            work = dist.all_reduce(np.ones(2 + dist.get_rank()), async_op=True)
            with pytest.raises(dist.CollectiveMismatchError, match="all_reduce"):
                await work
            with pytest.raises(dist.CollectiveMismatchError):  # again, when it is over
                await work.get_future()

        run(main())

    run_ranks(program, 2, backend="shm")


def test_a_cancelled_task_leaves_the_call_alone():
    cancelled = threading.Event()

    def program():
        async def main():
            work = dist.all_reduce(np.ones(2), async_op=True)
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(work, 0.01)
            assert not work.is_completed()
            cancelled.set()
            return await work

        if dist.get_rank() == 0:
            return run(main()).tolist()
        assert cancelled.wait(WAIT)
        return dist.all_reduce(np.ones(2)).tolist()

    assert run_ranks(program, 2, backend="tcp") == [[2.0, 2.0]] * 2


def test_a_call_that_ends_after_its_loop_has_no_one_to_tell():
    future = Future()

    async def leave():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(leave())
    future.set_result(3)  # the loop is closed
    assert run(_value(future)) == 3


async def _value(awaitable):
    return await awaitable


def test_each_loop_that_awaits_a_future_is_told():
    future, waiting, results = Future(), threading.Barrier(3, timeout=WAIT), []

    async def wait():
        asyncio.get_running_loop().call_soon(waiting.wait)
        results.append(await future)

    threads = [threading.Thread(target=run, args=(wait(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    waiting.wait()
    future.set_result("both")
    for thread in threads:
        thread.join(WAIT)
    assert results == ["both", "both"]


def test_a_callback_that_awaits_what_comes_after_it_is_refused():
    def program():
        first = dist.all_reduce(np.ones(1), async_op=True).get_future()
        resumed = Future()
        second = first.then(lambda done: resumed.wait(WAIT) and run(_value(third)))
        third = second.then(lambda done: done.value())
        resumed.set_result(True)
        with pytest.raises(RuntimeError, match=r"a callback waits for .* expected then\(\)"):
            second.wait(WAIT)

    run_ranks(program, 1)


def test_outside_of_a_loop_it_says_so():
    with pytest.raises(RuntimeError, match="no running event loop"):
        _value(Future()).send(None)


def test_remote_calls_are_awaited():
    def program():
        async def main():
            first, second = await asyncio.gather(
                rpc.rpc_async(1, abs, (-3,)),
                rpc.rpc_async(1, abs, (-4,)).then(lambda done: done.value() + 1),
            )
            assert not threads_that_wait()
            with pytest.raises(ZeroDivisionError):
                await rpc.rpc_async(1, divmod, (1, 0))
            return first, second

        return run(main())

    assert workers(2, program) == (3, 5)
