"""``Step``, which either all members of an elastic loop commit or none, and its interrupter."""

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
    """Fails this rank's pending calls on all groups after the group ``members`` has failed.

    A rank may wait in a call on a smaller group that has not lost a member, but whose other members
    have left the step. The interrupter runs until ``end``, when this rank itself has left the step.
    It does not fail groups without a pending call.
    """

    def __init__(self, job: Job, members: ProcessGroup) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        on_failure(members, self._begin)

    def end(self) -> None:
        """Stop the thread and wait for it."""
        with self._lock:
            self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, error: DistError) -> None:
        with self._lock:
            if self._ended.is_set() or self._thread is not None:
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
            if self._ended.wait(_PAUSE_SECONDS):
                return


class StepLoop(Protocol):
    """The loop of a step, an ``ElasticMesh``."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the current members."""
        ...

    def end_of(self, step: Step, error: BaseException | None) -> bool:
        """Vote for ``step``, whose block ended with ``error``; return True if it was handled."""
        ...


class Step:
    """One attempt at a step, which the block ``with step as mesh:`` computes.

    The block must not change parameters: if the step is not committed, only its gradients are
    dropped. Pass functions that change parameters to ``on_commit``.
    """

    def __init__(self, loop: StepLoop, number: int, share: Share | None) -> None:
        self.number = number
        """The number of steps committed before, which is the same in another attempt."""
        self.committed: bool = False
        """True if all members have committed the step; known after the block."""
        self.entered: bool = False
        self.voted: int = 0
        self._loop = loop
        self._share = share
        self._on_commit: list[Callable[[], object]] = []

    @property
    def share(self) -> Share:
        """This rank's share of the step's batch. Raises ValueError without ``batches``."""
        if self._share is None:
            raise ValueError("steps() has no batches; expected batches=ElasticBatches(...)")
        return self._share

    def on_commit(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call ``function`` on each member after all members have voted for the step.

        Functions run in the order of registration, at the end of the block. If a rank is lost
        during the vote, they run after the remaining members have determined the result. They must
        neither communicate nor fail, because other members commit the step as well. An exception
        ends the loop on this rank; a DistError is raised as a RuntimeError.
        """
        self._on_commit.append(lambda: function(*args, **kwargs))

    def commit(self) -> None:
        """Commit the step, for which all members have voted."""
        self.committed = True
        try:
            for function in self._on_commit:
                function()
        except DistError as error:
            # The loop handles a DistError as a loss, but another attempt would not help here.
            raise RuntimeError(
                f"a function in on_commit of step {self.number} failed: {error}; expected one"
                " that does not communicate"
            ) from error

    def drop(self, state: ManagedState) -> None:
        """Drop the functions and the gradients of a step that is not committed."""
        self._on_commit.clear()
        state.drop_gradients()

    def __enter__(self) -> DeviceMesh:
        self.entered = True
        return self._loop.mesh

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        """Vote for the step, or recover; return True if the error came from a lost rank."""
        return self._loop.end_of(self, error)
