"""``Step``: one step of a loop, which all members commit, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshlib import DeviceMesh, DistError
from parallel.elastic.batches import Share
from parallel.elastic.state import ManagedState

if TYPE_CHECKING:
    from parallel.elastic.mesh import ElasticMesh


class Step:
    """One try at a step: ``with step as mesh:`` computes it on the ranks that are there.

    Until the block ends, nothing that lasts may be changed: gradients are dropped when the step
    does not count, parameters would not be. What changes them is left to ``on_commit``.
    """

    def __init__(self, elastic: ElasticMesh, number: int, share: Share | None) -> None:
        self.number = number
        """How many steps were committed before it: the same when a step is tried again."""
        self.committed: bool = False
        """Whether all members have committed it; so after the block."""
        self.entered: bool = False
        self.voted: int = 0
        self._elastic = elastic
        self._share = share
        self._then: list[Callable[[], object]] = []

    @property
    def share(self) -> Share:
        """This rank's share of the step's batch. Raises ValueError without ``batches``."""
        if self._share is None:
            raise ValueError("steps() was given no batches; expected batches=ElasticBatches(...)")
        return self._share

    def on_commit(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call ``function`` once all members have voted for the step, here and on each of them.

        In the order of the calls of this; at the end of the block, or, where a rank was lost during
        the vote, when the others have found out how it went. It must not communicate, and not fail:
        the other members have taken the step by then. What it raises ends the loop on this rank,
        as a RuntimeError where it is a DistError.
        """
        self._then.append(lambda: function(*args, **kwargs))

    def commit(self) -> None:
        """Take the step, for which all members have voted."""
        self.committed = True
        try:
            for function in self._then:
                function()
        except DistError as error:
            # It is not the loss of a rank that another try makes good.
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
        return self._elastic.mesh

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        """Vote for the step, or find out who is left; True for the error of a lost rank."""
        return self._elastic.end_of(self, error)
