"""``CallReport``: the description of a call for other ranks, monitors and flight records.

Launchers and monitors read reports, so this module must not import NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshlib._recording.recorder import COLLECTIVE, Record
from transport._calls.header import CallHeader, Kind, kind_name


@dataclass(frozen=True, slots=True)
class CallReport:
    """One call of one rank.

    ``group`` is an id, ``peer`` a group rank, ``COLLECTIVE`` or ``ANY_SOURCE``, and ``site`` the
    user's line, ``file:line in function``. ``label`` is the name from ``record_comm``, or the
    function of a remote call.

    A ``blocking`` call blocks its thread. ``waiting_for`` is the global rank that the call waits
    for, None if unknown. The times ``issued``, ``started`` and ``ended`` are seconds since 1970 on
    the rank's host, or 0. A failed call has the message ``error``.
    """

    group: str
    header: CallHeader
    peer: int
    nbytes: int
    site: str
    label: str | None = None
    blocking: bool = True
    issued: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    error: str | None = None
    waiting_for: int | None = None

    @property
    def sequence(self) -> int:
        """The call's number in its group."""
        return self.header.sequence

    @property
    def collective(self) -> bool:
        """True for a collective, False for a point-to-point or remote call."""
        return self.peer == COLLECTIVE

    @property
    def remote(self) -> bool:
        """True for a remote call, made or served."""
        return self.header.kind in (Kind.CALL, Kind.SERVE)

    @property
    def kind(self) -> str:
        """The call's name: ``all_reduce``, or the function of a remote call."""
        return self.label or "?" if self.remote else kind_name(self.header.kind)

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done`` or ``failed``."""
        if self.ended:
            return "failed" if self.error else "done"
        return "running" if self.started else "queued"

    def __str__(self) -> str:
        """The call in messages: ``call #7 all_reduce dtype=float32 count=8 op=SUM``."""
        if not self.remote:
            return str(self.header)
        way = "on" if self.header.kind == Kind.CALL else "for"
        return f"call #{self.sequence} {self.kind} {way} rank {self.peer}"


def report_calls(
    records: Iterable[Record], ranks: Mapping[str, Sequence[int]] | None = None
) -> list[CallReport]:
    """Return the reports of ``records``; ``ranks`` has the global ranks of groups by their ids."""
    offset = time.time() - time.monotonic()
    known = ranks or {}

    def moment(monotonic: float) -> float:
        return monotonic + offset if monotonic else 0.0

    found: list[CallReport] = []
    for record in records:
        awaited = record.waiting_for
        peer = -1 if record.ended or awaited is None else awaited
        members = known.get(record.group, ())
        found.append(
            CallReport(
                group=record.group,
                header=record.header,
                peer=record.peer,
                nbytes=record.nbytes,
                site=record.site,
                label=record.label,
                blocking=record.sync,
                issued=moment(record.issued),
                started=moment(record.started),
                ended=moment(record.ended),
                error=record.error,
                waiting_for=members[peer] if 0 <= peer < len(members) else None,
            )
        )
    return found
