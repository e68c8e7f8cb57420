"""The exceptions of all three floors, under c10d's four names.

They live on the lowest floor because a transport is where most of them begin.
"""

from __future__ import annotations

from collections.abc import Sequence


class DistError(RuntimeError):
    """Base of every error that meshlib raises on purpose about distributed state."""


class DistBackendError(DistError):
    """A collective or point-to-point call failed."""


class DistNetworkError(DistError):
    """A connection could not be made, was refused, or was lost."""


class DistStoreError(DistError):
    """A store could not be reached, or a key did not come in time."""


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A wait on a store passed its deadline; the message names the keys and the store.

    ``missing`` are the keys that had not arrived, with all their prefixes, where that is known.
    """

    def __init__(self, message: str = "", missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class StoreSilentError(DistStoreError):
    """A store's server does not answer, or there is no way to it: it may live all the same.

    ``seconds`` is how long an answer was waited for, None if the kernel knows no way.
    """

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class QueueEmptyError(DistStoreError):
    """A queue of a store has no value, and it was asked not to wait for one."""


class StorePlaceError(DistStoreError):
    """A store cannot be where it was asked to be, and waiting would not help."""


class AuthenticationError(DistNetworkError):
    """The other end of a connection could not prove that it knows the job's secret.

    ``refused`` is false where it never answered: it may be gone, or no part of the job.
    """

    def __init__(self, message: str, refused: bool = True) -> None:
        super().__init__(message)
        self.refused = refused


class PeerLostError(DistNetworkError):
    """The connection to a member ended while it was needed.

    ``peer`` is the member's rank in the group of the communicator that noticed. If ``unreachable``,
    the member was silent for too long and may live. Otherwise it has ended the connection, or died.
    """

    def __init__(self, message: str, peer: int, unreachable: bool = False) -> None:
        super().__init__(message)
        self.peer = peer
        self.unreachable = unreachable

    @classmethod
    def of(cls, error: Exception, peer: int) -> PeerLostError:
        """Return a new one that says what ``error`` does, which may be one."""
        return cls(str(error), peer, isinstance(error, PeerLostError) and error.unreachable)


class CommunicatorTimeoutError(DistBackendError, TimeoutError):
    """A transport waited past a call's deadline for ``peer`` (a group rank, or None for any)."""

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer


class CommunicatorAbortedError(DistBackendError):
    """The communicator was aborted, by this rank or because of a report from another one."""


class HeaderMismatchError(DistBackendError):
    """A peer's frame does not belong to the call that this rank is in.

    ``peer`` is its group rank; ``expected`` and ``received`` are ``CallHeader`` values.
    """

    def __init__(self, message: str, peer: int, expected: object, received: object) -> None:
        super().__init__(message)
        self.peer = peer
        self.expected = expected
        self.received = received


class CollectiveMismatchError(DistBackendError):
    """The members of a group did not all make the same call; the message has a row for each."""


class CollectiveTimeoutError(DistBackendError, TimeoutError):
    """A call passed its deadline; the message names the missing ranks and each rank's state."""


class RankFailedError(DistBackendError):
    """A member died or left while others needed it.

    ``rank`` is its global rank, or None when only the group could tell.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
