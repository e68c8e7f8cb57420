"""The frames that workers exchange over the channel."""

from __future__ import annotations

import enum

from transport._channel.frames import FIRST_KIND


class FrameKind(enum.IntEnum):
    """The kind of a frame. The frame's number is that of a call."""

    REQUEST = FIRST_KIND
    REPLY = FIRST_KIND + 1
    ERROR = FIRST_KIND + 2
    QUERY = FIRST_KIND + 3
    """A question that the worker answers without the user's code."""
    CANCEL = FIRST_KIND + 4
    """The caller no longer waits for this call."""


CREATES = 1
"""The flag of a request whose result becomes an object of the callee."""
UNREAD = 1
"""The flag of an error reply to a request that could not be unpickled."""
