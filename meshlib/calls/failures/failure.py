"""``Failure``: how a group breaks, and what its users see of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from meshlib.calls.channels import Channels
from meshlib.calls.context import RankContext
from meshlib.calls.failures.reporter import Reporter
from meshlib.calls.state import Fate
from meshlib.events.events import Abort, Departures
from meshlib.events.log import STORE_SECONDS, publish
from meshlib.recording.recorder import COLLECTIVE, Record
from transport.call import CallHeader, Kind
from transport.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    HeaderMismatchError,
    PeerLostError,
    RankFailedError,
)

# What a call can see of other ranks, which does not tell why they have lost this one.
_OF_OTHERS = (PeerLostError, CommunicatorTimeoutError, HeaderMismatchError, RankFailedError)


class Failure:
    """Writes a group's ``Fate`` and acts on it: on this rank, and by the store on all others.

    ``retire()`` is called when this rank's program was told that the group broke.
    """

    def __init__(
        self,
        context: RankContext,
        fate: Fate,
        channels: Channels,
        retire: Callable[[], None],
    ) -> None:
        self._context = context
        self._fate = fate
        self._members = fate.members
        self._channels = channels
        self._retire = retire
        self.unusual: list[Callable[[], object]] = []
        """Called, with the lock of the ``Fate``, when calls cannot be as usual any more."""
        self.broken: list[Callable[[DistError], object]] = []
        """Called with what broke the group, whenever it is said."""

    # ------------------------------------------------------------------ breaking

    def fail(self, error: DistError) -> None:
        """Break the group here: whoever is in a call of it, and every later call, raises it."""
        fate = self._fate
        with fate.lock:
            communicators = self._channels.open()
            # What was aborted before has its own reason, which others may have told first.
            for communicator in communicators:
                if communicator.abort_reason is not None:
                    error = self._own(CommunicatorAbortedError(communicator.abort_reason), error)
            news = fate.seal(error)
            for end in self.unusual:
                end()
        for tell in self.broken:
            tell(error)
        if news:  # by this rank and by what another one reports it comes twice
            self._context.log.info("%s is broken: %s", self._members, error)
        self._context.note_failure(error)
        for communicator in communicators:
            communicator.abort(str(error))

    def fail_everywhere(self, error: DistError) -> None:
        """Break the group with ``error`` on all members, and here, unless it is broken."""
        if self._fate.error is None:
            context = self._context
            with suppress(DistStoreError):
                # The others learn the reason before they see this rank's channels close.
                publish(
                    context.store.with_patience(STORE_SECONDS), Abort.of(self._members.id, error)
                )
            self.fail(error)

    def note_told(self) -> None:
        """Note that whoever makes the calls was told what broke the group, if it is broken."""
        if self._fate.error is not None:
            self._retire()

    def told(self, record: Record, error: BaseException) -> BaseException:
        """Return ``error``, of which whoever waits for ``record``'s end is told now."""
        if record.sync:
            self.note_told()
        return error

    # ------------------------------------------------------------------ members that leave

    def do_without(self, left: Departures) -> None:
        """See ``ProcessGroup.do_without``."""
        members, fate = self._members, self._fate
        with fate.lock:
            if left in fate.departures:
                return
            absent = members.places_of(left.without(members.id))
            fate.departures = (*fate.departures, left)
            if absent:
                fate.absent = (*fate.absent, *absent)
                for end in self.unusual:
                    end()
            communicators = self._channels.open()
        self._channels.lose(communicators, left.ranks)
        if not absent or fate.destroyed:
            return
        # A call that starts from now on sees for itself who is absent.
        for record in self._context.recorder.records(members.id):
            if record.started and not record.ended:
                self.break_if_deserted(record)

    def break_if_deserted(self, record: Record) -> bool:
        """Break the group if ``record``'s call needs a member that is absent; say whether."""
        absent, members = self._fate.absent, self._members
        for place in absent if record.peer == COLLECTIVE else (record.peer,):
            if place in absent:
                rank = members.ranks[place]
                left = f"rank {rank} has left the job without a call on {members}"
                needs = f"rank {members.global_rank} needs it in {record.header}, {record.site}"
                self.fail_everywhere(RankFailedError(f"{left}; {needs}", rank))
                return True
        return False

    # ------------------------------------------------------------------ what the user sees

    def seen_by_user(self, record: Record, error: BaseException) -> BaseException:
        """Return what the user sees for ``error``; break the group unless it is still whole."""
        fate, members = self._fate, self._members
        if fate.destroyed:
            if known := fate.await_failure(0):  # it was broken, and that is why
                return self._own(error, known) if isinstance(error, DistError) else known
            return DistBackendError(f"{members} was destroyed while {record.header} was under way")
        if record.header.kind == Kind.RECV:
            # Nothing half-done lies on the wire.
            if isinstance(error, HeaderMismatchError):
                return CollectiveMismatchError(f"{error} ({record.header} on {members})")
            if isinstance(error, CommunicatorTimeoutError):
                return CollectiveTimeoutError(f"{error} ({record.header} on {members})")
        if isinstance(error, CommunicatorAbortedError) and (known := fate.await_failure(1.0)):
            return self._own(error, known)
        reporter = Reporter(fate, self._context.store)
        if isinstance(error, DistError):
            explained = reporter.explain(record, error)
            self.fail(explained)
            return self._own(error, explained)
        # KeyboardInterrupt, MemoryError …: the user sees it as it is, but the other members must
        # not wait for a rank that stopped in the middle.
        rank = members.global_rank
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        left = f"rank {rank} left {record.header} on {members}: {why}"
        self.fail(reporter.explain(record, RankFailedError(left, rank)))
        return error

    def _own(self, error: DistError, told: DistError) -> DistError:
        """Return what this rank raises for its ``error`` when the group's members are ``told``.

        The others may have been first to say that they lost this rank. It knows better why.
        """
        rank = self._members.global_rank
        if not isinstance(told, RankFailedError) or told.rank != rank or str(told) in str(error):
            return told
        if isinstance(error, _OF_OTHERS):
            return told
        own = DistBackendError(f"{self._members} failed on rank {rank}: {error}")
        own.__cause__ = told
        return own

    def explain(self, record: Record, error: Exception, at_fault: CallHeader | None) -> Exception:
        """Return what the user sees for the ``error`` of a device's work for ``record``.

        ``at_fault`` is the call that went wrong, if it was another one.
        """
        if known := self._fate.await_failure(0):
            self.note_told()
            return known
        if at_fault is not None and at_fault != record.header:
            mine = self._context.recorder.records(self._members.id)
            record = next((r for r in mine if r.header == at_fault), record)
        seen = self.seen_by_user(record, error)
        self.note_told()
        return seen if isinstance(seen, Exception) else error
