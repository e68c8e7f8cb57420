"""``Step``: one step of a loop, which all members commit, or none; and what ends its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from meshlib import DeviceMesh, DistError, ProcessGroup
from meshlib.extend import Job, fail, is_idle, is_usable, on_failure
from parallel.elastic._batches import Share
from parallel.elastic._transfer import ManagedState

_PAUSE_SECONDS = 0.01


class Interrupter:
    """Ends the calls of this rank, on whatever group, once the group ``members`` has broken.

    A rank may wait in a call on a smaller group that has lost no member. But other members of that
    group may have left the step, and will never come. It works until ``end``, when the rank itself
    has left the step. Groups without a call under way stay intact.
    """

    def __init__(self, job: Job, members: ProcessGroup) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        on_failure(members, self._begin)

    def end(self) -> None:
        """Stop; nothing is ended any more when this returns."""
        with self._lock:
            self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, error: DistError) -> None:
        with self._lock:
            if self._over.is_set() or self._thread is not None:
                return
            if not any(is_usable(group) for group in self._job.groups()):
                return
            self._thread = threading.Thread(
                target=self._run, args=(error,), name="meshlib-interrupter", daemon=True
            )
            self._thread.start()

    def _run(self, error: DistError) -> None:
        while True:
            for group in self._job.groups():
                if is_usable(group) and not is_idle(group):
                    fail(group, error)
            if self._over.wait(_PAUSE_SECONDS):
                return


class StepLoop(Protocol):
    """The loop that a step belongs to: an ``ElasticMesh``."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the present members."""
        ...

    def end_of(self, step: Step, error: BaseException | None) -> bool:
        """Vote for ``step``, whose block ended with ``error``; True if the error is dealt with."""
        ...


class Step:
    """One try at a step: ``with step as mesh:`` computes it on the present members.

    The block must not change parameters: only its gradients are dropped when the step does not
    count. ``on_commit`` takes the functions that change parameters.
    """

    def __init__(self, loop: StepLoop, number: int, share: Share | None) -> None:
        self.number = number
        """The number of steps committed before it: the same when a step is tried again."""
        self.committed: bool = False
        """True if all members have committed it; known after the block."""
        self.entered: bool = False
        self.voted: int = 0
        self._loop = loop
        self._share = share
        self._then: list[Callable[[], object]] = []

    @property
    def share(self) -> Share:
        """This rank's share of the step's batch. Raises ValueError without ``batches``."""
        if self._share is None:
            raise ValueError("steps() was given no batches; expected batches=ElasticBatches(...)")
        return self._share

    def on_commit(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call ``function`` on each member once all members have voted for the step.

        Functions run in the order in which they were given, at the end of the block. If a rank was
        lost during the vote, they run when the others have found its result. They must neither
        communicate nor fail: the other members have taken the step by then. An exception ends the
        loop on this rank; a DistError is raised as a RuntimeError.
        """
        self._then.append(lambda: function(*args, **kwargs))

    def commit(self) -> None:
        """Take the step, for which all members have voted."""
        self.committed = True
        try:
            for function in self._then:
                function()
        except DistError as error:
            # Another try would not help: no rank was lost.
            raise RuntimeError(
                f"a function that was given to on_commit of step {self.number} has failed:"
                f" {error}; expected one that does not communicate"
            ) from error

    def drop(self, state: ManagedState) -> None:
        """Forget the step, which has not been committed."""
        self._then.clear()
        state.drop_gradients()

    def __enter__(self) -> DeviceMesh:
        self.entered = True
        return self._loop.mesh

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        """Vote for the step, or find the remaining members; True for the error of a lost rank."""
        return self._loop.end_of(self, error)
