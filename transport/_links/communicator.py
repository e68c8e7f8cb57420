"""The base of the transports that move frames between two members."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from transport._algorithms.collectives import LinkCollectives
from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._link import Request, wait_all
from transport._links.mailbox import Mailbox
from transport._links.messaging import MessagingCommunicator
from transport._operands.flat import Scratch


class LinkCommunicator(MessagingCommunicator, LinkCollectives):
    """Implements collectives over ``link``, and point to point over ``post`` and ``mailbox``.

    It needs two members or more. The only member of a group gets an ``AloneCommunicator``.

    A transport implements ``link`` and ``post``, and passes arriving messages to ``mailbox``. Its
    ``abort`` and ``close`` call these ones first, then release the transport's own resources.

    ``table`` chooses the algorithms, and must be equal on all members. By default it is the entry
    ``tuned_as`` of the job's tuning.
    """

    tuned_as: ClassVar[str]

    def __init__(
        self,
        membership: Membership,
        table: Thresholds | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        super().__init__(membership, mailbox)
        if self.size < 2:
            raise ValueError(
                f"expected two members or more, got {self.size}: use AloneCommunicator"
            )
        self.table = table or membership.runtime.tuning.thresholds(self.tuned_as, self.size)
        self.scratch = Scratch()
        self.compression = membership.compression

    def _end(self, call: Call, requests: Sequence[Request]) -> None:
        """Wait for the last frames of a call, or leave that to the owner of ``call.rest``."""
        if call.rest is None:
            wait_all(requests)
        else:
            call.rest.wait = partial(wait_all, requests)
