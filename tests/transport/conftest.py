"""The transports that the conformance suite runs over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_transport import QueueCommunicator

from tests.support.gpu.host_driver import HostDriver, HostMachine
from tests.support.gpu.on_device import OnDevice
from tests.support.net.far_links import FarTcpCommunicator
from tests.support.transport.rank_threads import TINY, Transport
from transport._choosing.choice import Thresholds
from transport._communicators.backends import lookup
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._cuda.staged import StagedCommunicator
from transport._hierarchical.auto import choose
from transport._inproc.communicator import InprocCommunicator
from transport._links.alone import AloneCommunicator
from transport._links.communicator import LinkCommunicator
from transport._place import Place, unsupported_reason
from transport._shm import ShmCommunicator
from transport._shm.sizes import DEFAULT_SIZES, Sizes
from transport._tcp import TcpCommunicator


def _lending(membership: Membership, table: Thresholds) -> LinkCommunicator:
    """Nothing is buffered: every send waits for its receiver, so no deadlock can hide."""
    return InprocCommunicator(membership, table, eager_bytes=-1)


def _queues(membership: Membership, table: Thresholds) -> LinkCommunicator:
    """The example of docs/inside/adding-a-transport.md, made of public names alone."""
    if membership.size == 1:
        return AloneCommunicator(membership)
    made = QueueCommunicator(membership)
    made.table = table
    return made


def _shm(membership: Membership, table: Thresholds) -> Communicator:
    """With tiny thresholds, tiny blocks: every way of going about it, and several chunks."""
    if membership.size == 1:
        return lookup("shm").make(membership)
    tiny = Sizes(block=64, direct=24, ring=256)
    return ShmCommunicator(membership, tiny if table is TINY else DEFAULT_SIZES)


def _two_hosts(membership: Membership, table: Thresholds) -> Communicator:
    """Two hosts by turns; rank 0's cannot share memory."""
    ranks = range(membership.size)
    places = tuple(
        Place(f"host {rank % 2}", unsupported_reason() or ("" if rank else "pretended"))
        for rank in ranks
    )
    return choose(replace(membership, places=places), table)


def _many_hosts(membership: Membership, table: Thresholds) -> Communicator:
    """Hosts of three, two, one and one, with shared memory inside; two or three ranks have one. The
    last two are at a site of their own.
    """
    numbers = (0, 0, 0, 1, 1, 2, 3)[: membership.size]
    places = tuple(
        Place(f"host {number}", unsupported_reason() or "", site="far" * (number > 1))
        for number in numbers
    )
    return choose(replace(membership, places=places), table)


def _staged(membership: Membership, table: Thresholds) -> OnDevice:
    """Device memory that is the host's, via the host; with tiny thresholds, many steps."""
    chunk = 48 if table is TINY else 1 << 20
    comm = StagedCommunicator(membership, _shm(membership, table), chunk)
    return OnDevice(comm, HostDriver(HostMachine(seed=membership.rank)))


TRANSPORTS = [
    Transport("inproc", InprocCommunicator),
    Transport("inproc-unbuffered", _lending),
    Transport("queues", _queues),
    Transport("tcp", TcpCommunicator),
    Transport("tls", TcpCommunicator, tls=True),
    Transport("tcp-far", FarTcpCommunicator),
    Transport("shm", _shm, has_links=False, shows_links=False),
    Transport("staged", _staged, has_links=False, shows_links=False, on_device=True),
    Transport("two hosts", _two_hosts, shows_links=False),
    Transport("many hosts", _many_hosts, has_links=False, shows_links=False),
]

# A group of one has the same communicator over every transport, except for devices.
_ALONE = {"inproc", "staged"}
# TLS differs from TCP in how bytes move, not in who moves what to whom; delay in the order.
_REPEATED = {"tls", "tcp-far"}
_LARGEST_GROUP_REPEATED = 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what TLS, delay and groups of one would only repeat."""
    left_out = [item for item in items if _repeats(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _repeats(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    transport, size = parameters.get("transport"), parameters.get("n", 0)
    if isinstance(transport, Transport) and transport.name == "tcp-far" and "p2p" in item.nodeid:
        return True
    if isinstance(transport, Transport) and size == 1 and transport.name not in _ALONE:
        return True
    repeated = isinstance(transport, Transport) and transport.name in _REPEATED
    return repeated and size > _LARGEST_GROUP_REPEATED


# Without the compiled core no rank shares memory.
_SHARE_MEMORY = {"shm", "staged", "many hosts"}
if unsupported_reason() is not None:
    TRANSPORTS = [transport for transport in TRANSPORTS if transport.name not in _SHARE_MEMORY]


@pytest.fixture(params=TRANSPORTS, ids=str)
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param
