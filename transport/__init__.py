"""Transports, which move bytes between ranks, and the parts to build another one.

``_HOMES`` lists the public names; docs/inside/adding-a-transport.md explains them. Each name is
imported at its first use (PEP 562), because the launcher imports this package without NumPy.
"""

import typing as _typing

if _typing.TYPE_CHECKING:  # the same names again, for type checkers and editors
    from transport._calls.call import Call as Call
    from transport._calls.header import CallHeader as CallHeader
    from transport._calls.header import Kind as Kind
    from transport._communicators.base import Communicator as Communicator
    from transport._communicators.runtime import Membership as Membership
    from transport._communicators.runtime import Runtime as Runtime
    from transport._communicators.store_waits import PeerKeys as PeerKeys
    from transport._cuda.completion import Completion as Completion
    from transport._cuda.device_state import DeviceStream as DeviceStream
    from transport._cuda.driver import Driver as Driver
    from transport._cuda.driver import driver_of as driver_of
    from transport._cuda.flat import DeviceFlat as DeviceFlat
    from transport._cuda.flat import StreamOrder as StreamOrder
    from transport._errors import CommunicatorAbortedError as CommunicatorAbortedError
    from transport._errors import CommunicatorTimeoutError as CommunicatorTimeoutError
    from transport._errors import DistBackendError as DistBackendError
    from transport._errors import DistError as DistError
    from transport._errors import DistNetworkError as DistNetworkError
    from transport._errors import DistStoreError as DistStoreError
    from transport._errors import HeaderMismatchError as HeaderMismatchError
    from transport._errors import PeerLostError as PeerLostError
    from transport._link import Link as Link
    from transport._link import OnPiece as OnPiece
    from transport._link import Request as Request
    from transport._link import waited_for as waited_for
    from transport._link import wrong_frame as wrong_frame
    from transport._links.communicator import LinkCommunicator as LinkCommunicator
    from transport._links.mailbox import Mailbox as Mailbox
    from transport._operands.compression import Compression as Compression
    from transport._operands.order import add_all as add_all
    from transport._operands.reduce_op import Flat as Flat
    from transport._operands.reduce_op import ReduceOp as ReduceOp
    from transport._store import FileStore as FileStore
    from transport._store import HashStore as HashStore
    from transport._store import PrefixStore as PrefixStore
    from transport._store import Store as Store
    from transport._store import TCPStore as TCPStore
    from transport._waiting.deadline import Deadline as Deadline
    from transport._waiting.deadline import Timeout as Timeout
    from transport._waiting.interrupts import Condition as Condition

_HOMES = {
    "transport._calls.call": "Call",
    "transport._calls.header": "CallHeader Kind",
    "transport._communicators.base": "Communicator",
    "transport._communicators.runtime": "Membership Runtime",
    "transport._communicators.store_waits": "PeerKeys",
    "transport._cuda.completion": "Completion",
    "transport._cuda.device_state": "DeviceStream",
    "transport._cuda.driver": "Driver driver_of",
    "transport._cuda.flat": "DeviceFlat StreamOrder",
    "transport._errors": (
        "CommunicatorAbortedError CommunicatorTimeoutError DistBackendError DistError "
        "DistNetworkError DistStoreError HeaderMismatchError PeerLostError"
    ),
    "transport._link": "Link OnPiece Request waited_for wrong_frame",
    "transport._links.communicator": "LinkCommunicator",
    "transport._links.mailbox": "Mailbox",
    "transport._operands.compression": "Compression",
    "transport._operands.order": "add_all",
    "transport._operands.reduce_op": "Flat ReduceOp",
    "transport._store": "FileStore HashStore PrefixStore Store TCPStore",
    "transport._waiting.deadline": "Deadline Timeout",
    "transport._waiting.interrupts": "Condition",
}
"""The public names, by the module that defines them."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not _typing.TYPE_CHECKING:
    __all__ = sorted(_HOME_OF)  # noqa: PLE0605 (it is a list)

    def __getattr__(name: str) -> _typing.Any:
        """Import a public name at its first use."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return globals().setdefault(name, getattr(import_module(_HOME_OF[name]), name))

    def __dir__() -> list[str]:
        special = (name for name in globals() if name.startswith("__"))
        return sorted({*special, *__all__})
