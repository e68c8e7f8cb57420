"""Seeing, changing and making the calls of a group."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from meshlib._calls.context import Observer
from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._recording.recorder import Record


@contextmanager
def observe(group: ProcessGroup, observer: Observer) -> Generator[None]:
    """Return a context in which ``observer`` sees this rank's collectives before they begin.

    Args:
        group: The group on whose behalf the observer looks. Each group has one observer at most.
        observer: Called as ``observer(members, header, device, run)`` before each collective that
            this rank issues, on any group. It returns the function to run: ``run`` itself, or one
            around it. The header has no sequence number yet. The observer may make collectives
            itself, and is then called for them, too.

    Raises:
        RuntimeError: At the beginning, when ``group`` has an observer already.
    """
    observers = call_queue_of(group).context.observers
    if group.id in observers:
        raise RuntimeError(f"the calls of {group} are observed already; only one can do so")
    observers[group.id] = observer
    try:
        yield
    finally:
        del observers[group.id]


def issue(group: ProcessGroup, call: CallSpec) -> None:
    """Make ``call`` on ``group`` at its turn, and wait for its end.

    Its kind, elements, root, dtype, op and extra must be equal on all members. Raises the errors of
    collectives.
    """
    call_queue_of(group).issue(call)


@contextmanager
def recorded(group: ProcessGroup) -> Generator[list[Record]]:
    """Record the calls on ``group`` that this rank issues inside the block.

    Gives a list, which is filled at the end of the block, in the order of issue.
    """
    recorder = call_queue_of(group).context.recorder
    found: list[Record] = []
    followed = recorder.follow()
    try:
        yield found
    finally:
        recorder.unfollow(followed)
        found += [record for record in followed if record.group == group.id]
