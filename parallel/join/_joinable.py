"""What takes part in a ``Join``: something whose calls other ranks can make in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from meshlib import ProcessGroup
from parallel._checks import describe
from parallel._groups import Ranks, resolve

if TYPE_CHECKING:
    from parallel.join._context import Join


class JoinHook:
    """What a rank that is out of inputs does on behalf of one joinable."""

    def main_hook(self, phase: int) -> None:
        """Make the collectives that the joinable makes, on the others, in ``phase``."""

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        """Bring the ranks together again, once all are out of inputs; called on every rank.

        ``is_last_joiner`` says whether this rank still had inputs at the last announced phase;
        ``source`` is a group rank, the same on all ranks, for which that is true.
        """


def _nothing(*_: object) -> None:
    pass


class FunctionsHook(JoinHook):
    """The hook that is made of two functions, which are its ``main_hook`` and ``post_hook``."""

    def __init__(
        self,
        main: Callable[[int], object] = _nothing,
        post: Callable[[bool, int], object] = _nothing,
    ) -> None:
        self._main = main
        self._post = post

    def main_hook(self, phase: int) -> None:
        """Call the first function."""
        self._main(phase)

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        """Call the second function."""
        self._post(is_last_joiner, source)


class Joinable(ABC):
    """Something that makes collectives in each step, and tells ``Join`` before it does.

    Its methods put the collectives into phases:

        with Join.notify_join_context(self, phase):
            ...  # all calls in here are those that ``main_hook(phase)`` makes
    """

    join_context: Join | None = None
    """The context that it takes part in at the moment."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The group over which it communicates."""

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one context; ``kwargs`` are the ones that ``Join`` was given."""

    def phase_name(self, phase: int) -> str:
        """Return what a phase is called in messages."""
        return f"phase {phase}"


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class OptimizerReplica(Joinable):
    """Gives ``optimizer``, on ranks that ran out of inputs, the state of one that did not.

    Such a rank takes fewer steps: its momenta would differ from then on, and the replicas with
    them. Once all are out of inputs the state is broadcast. ``process_group`` is that of the
    wrapped model.

    Raises TypeError for an ``optimizer`` without ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, optimizer: _Stateful, process_group: Ranks | None = None) -> None:
        if not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")):
            raise TypeError(
                f"optimizer must have state_dict() and load_state_dict(), got {describe(optimizer)}"
            )
        self._optimizer = optimizer
        self._group = resolve(process_group, "process_group")

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the replicas."""
        return self._group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that copies the state at the end."""
        return FunctionsHook(post=self._copy_state)

    def _copy_state(self, is_last_joiner: bool, source: int) -> None:
        mine = source == self._group.rank()
        state: list[Any] = [self._optimizer.state_dict() if mine else None]
        self._group.broadcast_object_list(state, group_src=source)
        if not is_last_joiner:
            self._optimizer.load_state_dict(state[0])
