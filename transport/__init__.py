"""Moving bytes between ranks: what a transport of one's own is made of.

``_HOMES`` lists the public names; docs/adding-a-transport.md explains them. Each is imported at its
first use (PEP 562): the launcher is built on this package, too, and does without NumPy.
"""

import typing as _typing

if _typing.TYPE_CHECKING:  # the same names again, for type checkers and editors
    from transport.call import Call as Call
    from transport.call import CallHeader as CallHeader
    from transport.call import Kind as Kind
    from transport.communicators.base import Communicator as Communicator
    from transport.communicators.runtime import Membership as Membership
    from transport.communicators.runtime import Runtime as Runtime
    from transport.communicators.store_waits import PeerKeys as PeerKeys
    from transport.condition import Condition as Condition
    from transport.condition import let_go as let_go
    from transport.cuda.device_state import DeviceStream as DeviceStream
    from transport.cuda.driver import Driver as Driver
    from transport.cuda.driver import driver_of as driver_of
    from transport.cuda.flat import Completion as Completion
    from transport.cuda.flat import DeviceFlat as DeviceFlat
    from transport.cuda.flat import StreamOrder as StreamOrder
    from transport.deadline import Deadline as Deadline
    from transport.deadline import Timeout as Timeout
    from transport.errors import CommunicatorAbortedError as CommunicatorAbortedError
    from transport.errors import CommunicatorTimeoutError as CommunicatorTimeoutError
    from transport.errors import DistBackendError as DistBackendError
    from transport.errors import DistError as DistError
    from transport.errors import DistNetworkError as DistNetworkError
    from transport.errors import DistStoreError as DistStoreError
    from transport.errors import HeaderMismatchError as HeaderMismatchError
    from transport.errors import PeerLostError as PeerLostError
    from transport.link import Link as Link
    from transport.link import OnPiece as OnPiece
    from transport.link import waited_for as waited_for
    from transport.link import wrong_frame as wrong_frame
    from transport.links.communicator import LinkCommunicator as LinkCommunicator
    from transport.links.mailbox import Mailbox as Mailbox
    from transport.operands.compression import Compression as Compression
    from transport.operands.order import add_all as add_all
    from transport.operands.reduce_op import Flat as Flat
    from transport.operands.reduce_op import ReduceOp as ReduceOp
    from transport.store import FileStore as FileStore
    from transport.store import HashStore as HashStore
    from transport.store import PrefixStore as PrefixStore
    from transport.store import Store as Store
    from transport.store import TCPStore as TCPStore

_HOMES = {
    "transport.call": "Call CallHeader Kind",
    "transport.communicators.base": "Communicator",
    "transport.communicators.runtime": "Membership Runtime",
    "transport.communicators.store_waits": "PeerKeys",
    "transport.condition": "Condition let_go",
    "transport.cuda.device_state": "DeviceStream",
    "transport.cuda.driver": "Driver driver_of",
    "transport.cuda.flat": "Completion DeviceFlat StreamOrder",
    "transport.deadline": "Deadline Timeout",
    "transport.errors": (
        "CommunicatorAbortedError CommunicatorTimeoutError DistBackendError DistError "
        "DistNetworkError DistStoreError HeaderMismatchError PeerLostError"
    ),
    "transport.link": "Link OnPiece waited_for wrong_frame",
    "transport.links.communicator": "LinkCommunicator",
    "transport.links.mailbox": "Mailbox",
    "transport.operands.compression": "Compression",
    "transport.operands.order": "add_all",
    "transport.operands.reduce_op": "Flat ReduceOp",
    "transport.store": "FileStore HashStore PrefixStore Store TCPStore",
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
