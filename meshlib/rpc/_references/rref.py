"""``RRef``: a reference to an object on a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from meshlib._calls.future import Future, block
from meshlib.rpc._calling.futures import OutgoingCall, polled, seconds_of
from meshlib.rpc._calling.serving import Later
from meshlib.rpc._errors import RemoteTraceback, describe, without_frames
from meshlib.rpc._membership.directory import WorkerInfo
from meshlib.rpc._references.counting import ObjectId
from meshlib.rpc._worker import LocalWorker, current_worker
from meshlib.rpc.functions import future_of, is_async
from transport._waiting.deadline import Timeout

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to an object that lives on one worker, its owner.

    ``RRef(value)`` refers to an object of this worker, and ``remote`` returns a reference to a
    function's result on another worker. A reference may be passed to any worker, in an argument or
    a result of a call; pickling it for any other purpose raises RuntimeError. The object lives
    until the last reference is dropped. ``type_hint`` is accepted for compatibility with c10d.
    """

    _worker: LocalWorker
    _owner: int
    _oid: ObjectId
    _giver: int
    _made: Future[Any] | None = None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        worker = current_worker()
        oid = worker.rank, worker.caller.next_number()
        future = worker.references.create(oid)
        self._set(worker, worker.rank, oid, worker.rank)
        future.set_result(value)

    def _set(self, worker: LocalWorker, owner: int, oid: ObjectId, giver: int) -> None:
        self._worker, self._owner, self._oid, self._giver = worker, owner, oid, giver

    def __reduce__(self) -> tuple[Any, ...]:
        giver = self._worker.references.pass_on(self._owner, self._oid)
        return _received, (self._owner, self._oid, giver)

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.references.drop(self._owner, self._oid, self._giver)

    def __repr__(self) -> str:
        return f"<RRef to object {self._oid} of {self._worker.directory.describe(self._owner)}>"

    def owner(self) -> WorkerInfo:
        """Return the worker on which the object lives."""
        return self._worker.workers[self._owner]

    def owner_name(self) -> str:
        """Return the name of the worker on which the object lives."""
        return self._worker.directory.name_of(self._owner)

    def is_owner(self) -> bool:
        """Return whether the object lives on this worker."""
        return self._owner == self._worker.rank

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to have the object.

        False only on the worker that called ``remote``, until the function has returned, and
        afterwards if it failed.
        """
        return self._made is None or (self._made.done() and self._made.exception() is None)

    def local_value(self) -> T:
        """Return the object itself, on its owner; wait until it is created.

        Raises RuntimeError on any other worker, the error of creating the object, and
        ``RRefLostError``.
        """
        if not self.is_owner():
            here = self._worker.directory.describe(self._worker.rank)
            raise RuntimeError(
                f"local_value() of {self!r} was called on {here};"
                " expected on its owner (to_here() returns a copy on any worker)"
            )
        return _local(self._worker, self._oid)

    def to_here(self, timeout: Timeout | None = None) -> T:
        """Return the object on its owner, or a copy on other workers; wait until it is created.

        ``timeout`` limits the wait: seconds, None or -1 for the default of calls, 0 for no limit.
        Raises the error of creating the object, ``RpcTimeoutError``, ``WorkerLostError`` and
        ``RRefLostError``.
        """
        self._check_made()
        if self.is_owner():
            return _local(self._worker, self._oid, _bound(self._worker, timeout))
        seconds = seconds_of(timeout)
        call = self._worker.caller.call(
            self._owner, _fetch, (self._oid,), {}, seconds, kept=self, what="RRef.to_here"
        )
        return call.wait()

    def rpc_sync(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy: ``rref.rpc_sync().method(...)`` calls the object's method on its owner
        and waits for the result.
        """
        return _Proxy(self, timeout, lambda *a, **named: _call(*a, **named).wait())

    def rpc_async(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy whose methods are called on the owner, and return futures."""
        return _Proxy(self, timeout, lambda *a, **named: polled(_call(*a, **named)))

    def remote(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy whose methods are called on the owner, and return RRefs to the results."""
        return _Proxy(self, timeout, create)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass on the owner, from the object, which recorded calls computed.

        This runs ``dist_autograd.backward(context_id, [value], retain_graph)`` of ``parallel.rpc``
        on the owner. ``dist_autograd_ctx_id`` -1 is the calling thread's context. With
        ``retain_graph``, another pass may follow.

        Raises RuntimeError outside a context, ValueError for an unknown context, the error of
        creating the object, and the errors of ``backward``.
        """
        gradients = self._worker.carriers.gradients
        current = None if gradients is None else gradients.current()
        context_id = current if dist_autograd_ctx_id == -1 else dist_autograd_ctx_id
        if gradients is None or context_id is None:
            raise RuntimeError(
                f"backward() of {self!r} was called outside any autograd context; expected it"
                " inside `with dist_autograd.context()` (parallel.rpc), or with a context's id"
            )
        if self.is_owner():
            gradients.backward(context_id, self.local_value(), retain_graph)
            return
        self._check_made()
        sent = (self._oid, context_id, retain_graph)
        self._worker.caller.call(
            self._owner, _backward, sent, {}, kept=self, what="RRef.backward"
        ).wait()

    def creation(self) -> Future[Any]:
        """Return the future of the call that creates the object; done if another worker made it."""
        if self._made is not None:
            return self._made
        done = Future()
        done.set_result(None)
        return done

    def _check_made(self) -> None:
        """Raise the error of creating the object, if it is known."""
        if self._made is not None and self._made.done():
            self._made.wait()


class _Proxy:
    """A proxy with the methods of an RRef's object; ``begin`` issues a call."""

    def __init__(self, rref: RRef[Any], timeout: Timeout | None, begin: Callable[..., Any]) -> None:
        self._rref = rref
        self._seconds = seconds_of(timeout)
        self._begin = begin

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        rref = self._rref

        def method(*args: Any, **kwargs: Any) -> Any:
            worker, owner, oid = rref._worker, rref._owner, rref._oid  # pyright: ignore[reportPrivateUsage]
            sent = (oid, name, args, kwargs)
            what = f"RRef.{name}"
            return self._begin(
                worker, owner, _invoke, sent, {}, self._seconds, kept=rref, what=what
            )

        return method


def _call(worker: LocalWorker, *request: Any, kept: RRef[Any], what: str) -> OutgoingCall:
    kept._check_made()  # pyright: ignore[reportPrivateUsage]
    return worker.caller.call(*request, kept=kept, what=what)


def create(
    worker: LocalWorker, owner: int, *call: Any, kept: object = None, what: str = ""
) -> RRef[Any]:
    """Call a function on ``owner``, and return a reference to the result.

    ``call`` has the function, its arguments and the timeout, as for ``Caller.call``.
    """
    number = worker.caller.next_number()
    oid = worker.rank, number
    rref: RRef[Any] = RRef.__new__(RRef)
    made = worker.caller.call(owner, *call, kept=kept, number=number, what=what)
    rref._set(worker, owner, oid, worker.rank)  # pyright: ignore[reportPrivateUsage]
    rref._made = made  # pyright: ignore[reportPrivateUsage]
    polled(made)

    def note(done: Future[Any]) -> None:
        error = done.exception()
        # The owner knows its function's errors, but not lost or timed-out requests.
        if error is not None and not isinstance(error.__cause__, RemoteTraceback):
            who = worker.directory.describe(worker.rank)
            worker.references.give_up(owner, oid, f"{who} gave up its creation: {describe(error)}")

    made.add_done_callback(note)
    return rref


def _received(owner: int, oid: ObjectId, giver: int) -> RRef[Any]:
    """Return the reference that arrived with a message."""
    worker, rref = current_worker(), RRef[Any].__new__(RRef)
    worker.references.take(owner, oid, giver)
    rref._set(worker, owner, oid, giver)  # pyright: ignore[reportPrivateUsage]
    return rref


def _bound(worker: LocalWorker, timeout: Timeout | None) -> float | None:
    seconds = seconds_of(timeout)
    return (worker.caller.timeout if seconds is None else seconds) or None


def _local(worker: LocalWorker, oid: ObjectId, seconds: float | None = None) -> Any:
    """Return the object, on its owner, when it is created. Raises the error of creating it."""
    value = worker.references.value_of(oid)
    block(value, seconds, lambda: f"the object {oid}")
    if (failure := value.exception()) is not None:
        raise without_frames(failure)
    return value.wait()


def _fetch(oid: ObjectId) -> Later:
    """Reply with the object, on its owner, when it is created."""
    return Later(current_worker().references.value_of(oid))


def _backward(oid: ObjectId, context_id: int, retain_graph: bool) -> None:
    """Run the backward pass from the object, on its owner, when it is created."""
    worker = current_worker()
    value = _local(worker, oid)
    if worker.carriers.gradients is None:
        raise ValueError(f"there is no autograd context {context_id} on this worker")
    worker.carriers.gradients.backward(context_id, value, retain_graph)


def _invoke(oid: ObjectId, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the object, on its owner, when it is created."""
    worker = current_worker()
    method = getattr(_local(worker, oid), name)
    call = worker.execution.current
    if call is not None:
        call.func = method
    result = method(*args, **kwargs)
    return Later(future_of(method, result)) if is_async(method) else result
