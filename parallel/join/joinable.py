"""What takes part in a ``Join``: something whose calls other ranks can make in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from meshlib import ProcessGroup

if TYPE_CHECKING:
    from parallel.join.context import Join


class JoinHook:
    """What a rank that is out of inputs does on behalf of one joinable."""

    def main_hook(self, phase: int) -> None:
        """Make the collectives that the joinable makes, on the others, in ``phase``."""

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        """Bring the ranks together again, once all are out of inputs; called on every rank.

        ``is_last_joiner`` says whether this rank still had inputs at the last announced phase;
        ``source`` is a group rank, the same on all ranks, for which that is true.
        """


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
