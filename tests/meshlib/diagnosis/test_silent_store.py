"""A store that says nothing any more (its host is cut off, its process stopped) delays no error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from meshlib._calls.failures.reporter import Reporter
from meshlib._calls.members import Members
from meshlib._calls.state import GroupState
from meshlib._recording.recorder import COLLECTIVE, Record
from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._errors import (
    CollectiveTimeoutError,
    CommunicatorTimeoutError,
    DistError,
    PeerLostError,
    RankFailedError,
    StoreSilentError,
    StoreTimeoutError,
)
from transport._store import PrefixStore, TCPStore, TCPStoreServer
from transport._store.commands import Op
from transport._waiting.deadline import Deadline

SOON = 30.0

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def stopped() -> Iterator[TCPStore]:
    """A client, of long patience, of a server whose process has been stopped."""
    server = TCPStoreServer(secret=b"s")
    store, other = (TCPStore(*server.address, timeout=10 * SOON, secret=b"s") for _ in range(2))
    goes_on, stopped = threading.Event(), threading.Event()

    def stop(_fields: object) -> tuple[bytes]:
        stopped.set()
        goes_on.wait(10 * SOON)
        return (b"0",)

    server._commands._at_once[Op.NUM_KEYS] = stop
    thread = threading.Thread(target=other.num_keys)
    thread.start()
    assert stopped.wait(SOON)
    yield store
    goes_on.set()
    thread.join(SOON)
    for client in (store, other):
        client.close()
    server.close()


class Cut(GroupState):
    """That of a group of two, of which this rank hears nothing."""

    def __init__(self) -> None:
        super().__init__(None, Members("g", (0, 1), 1, {"cpu": "tcp"}, SOON, ""))

    def await_failure(self, timeout: float) -> DistError | None:
        time.sleep(timeout)
        return None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CommunicatorTimeoutError("rank 0 sent nothing", 0), CollectiveTimeoutError),
        (PeerLostError("rank 0 hung up", 0), RankFailedError),
    ],
    ids=["timeout", "loss"],
)
def test_a_call_that_failed_says_what_this_rank_knows(
    stopped: TCPStore, error: DistError, expected: type[DistError]
) -> None:
    header = CallHeader(1, 4, NO_ROOT, Kind.ALL_REDUCE, 11, 1)
    packed, code = Call(header, Deadline.after(SOON)).packed, test_patience.__code__
    record = Record(bytes(packed), True, "g", 32, COLLECTIVE, 6.0, None, 0, code, 0)
    explained: list[DistError] = []
    reporter = Reporter(Cut(), PrefixStore("job", stopped))
    thread = threading.Thread(target=lambda: explained.append(reporter.explain(record, error)))
    thread.start()
    thread.join(SOON)  # the server is silent all the time
    assert [type(one) for one in explained] == [expected]
    assert str(error) in str(explained[0])
    assert "did not answer in time" in str(explained[0])


def test_patience(stopped: TCPStore) -> None:
    hurried = PrefixStore("job", stopped).with_grace(0.05)
    for call, granted in (
        (lambda: hurried.set("k", "v"), 0.05),
        (lambda: hurried.get("k", timeout=0.05), 0.1),
        (lambda: hurried.append("k", bytes(1 << 22)), 0.05),  # more than the kernel takes
        (lambda: hurried.check(["k"]), 0.05),
    ):
        deadline = Deadline.after(SOON)
        with pytest.raises(StoreSilentError, match="did not answer in time") as caught:
            call()
        assert caught.value.seconds == granted
        assert not isinstance(caught.value, StoreTimeoutError)
        assert not deadline.expired
