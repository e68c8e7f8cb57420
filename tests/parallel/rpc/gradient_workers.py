"""Workers that are threads, for programs that use JAX."""

import threading
import time

from meshlib import rpc
from meshlib._job.current import current_world
from parallel.rpc import dist_autograd
from parallel.rpc._contexts import context_store
from tests.support.meshlib.rpc_workers import workers


def in_thread(fn, *args):
    """Begin ``fn(*args)`` in another thread of this worker; return what waits for its result.

    JAX keeps what a rank's own thread compiles from all others; it shares what other threads do.
    """
    world, outcome = current_world(), []

    def run():
        world.adopt_thread()
        try:
            outcome.append((fn(*args), None))
        except BaseException as error:  # noqa: BLE001 (it is raised again)
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(45)
        assert outcome, "the thread has not ended"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result


def over_workers(count, fn, *args):
    """Have ``fn(*args)`` called on worker 0 of ``count``; the others serve. Returns its result."""

    def program():
        return in_thread(fn, *args)()

    return workers(count, program)


def _gradient_of(rref, context_id):
    return dist_autograd.get_gradients(context_id).get(rref.local_value())


def gradient(rref, context_id):
    """Return the gradient of weights, from wherever they live; None if they have none."""
    return rpc.rpc_sync(rref.owner(), _gradient_of, (rref, context_id))


def contexts():
    """Return how many contexts are on this worker."""
    return len(context_store())


def wait_until_forgotten(count):
    """Wait until no worker has a context: their ends are not waited for."""
    until = time.monotonic() + 40
    while any(rpc.rpc_sync(to, contexts) for to in range(count)):
        assert time.monotonic() < until
        time.sleep(0.001)
