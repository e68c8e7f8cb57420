"""Observing, replacing and issuing the calls of a group."""

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
    """Return a context in which ``observer`` is called before each collective of this rank.

    Args:
        group: The group that registers the observer. A group has at most one observer.
        observer: Called as ``observer(members, header, device, run)`` before each collective that
            this rank issues, on any group. It returns the function to run: ``run``, or a wrapper
            of it. The header has no sequence number yet. The observer is also called for
            collectives that it issues itself.

    Raises:
        RuntimeError: On entry, if ``group`` already has an observer.
    """
    observers = call_queue_of(group).context.observers
    if group.id in observers:
        raise RuntimeError(f"{group} already has an observer; expected at most one")
    observers[group.id] = observer
    try:
        yield
    finally:
        del observers[group.id]


def issue(group: ProcessGroup, call: CallSpec) -> None:
    """Issue ``call`` on ``group`` in order, and wait for it.

    Its kind, elements, root, dtype, op and extra must be equal on all members. Raises the errors of
    collectives.
    """
    call_queue_of(group).issue(call)


@contextmanager
def recorded(group: ProcessGroup) -> Generator[list[Record]]:
    """Record the calls on ``group`` that this rank issues inside the block.

    Yields a list, which is filled at the end of the block, in the order of issue.
    """
    recorder = call_queue_of(group).context.recorder
    found: list[Record] = []
    followed = recorder.follow()
    try:
        yield found
    finally:
        recorder.unfollow(followed)
        found += [record for record in followed if record.group == group.id]
