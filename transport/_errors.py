"""The exceptions of all packages, derived from c10d's four classes.

They are defined in the lowest package, because transports raise most of them.
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
    """A store could not be reached, or a key was not set in time."""


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A wait on a store passed its deadline; the message names the keys and the store.

    ``missing`` are the keys that were not set, with all their prefixes, if known.
    """

    def __init__(self, message: str = "", missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class StoreSilentError(DistStoreError):
    """A store's server does not answer or is unreachable, but may be alive.

    ``seconds`` is how long the client waited for an answer, None if the kernel has no route.
    """

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class QueueEmptyError(DistStoreError):
    """A queue of a store is empty, and the caller asked not to wait."""


class StorePlaceError(DistStoreError):
    """A store cannot be at the requested place, and retrying would not help."""


class AuthenticationError(DistNetworkError):
    """The other end of a connection could not prove that it knows the job's secret.

    ``refused`` is false if the other end never answered: it may be dead, or not of this job.
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
        """Return a PeerLostError with the message of ``error``, and its ``unreachable`` if any."""
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

    ``rank`` is its global rank, or None if the communicator does not know it.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
