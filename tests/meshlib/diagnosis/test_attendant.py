"""The thread that ranks share, when they come and go."""

import threading

from meshlib.diagnosis import attendant
from meshlib.diagnosis.attendant import Attendant
from transport.store import HashStore

SOON = 30.0


class Worker(Attendant[str]):
    """Says when it works, and that it has lost its store."""

    name = "worker"

    def __init__(self):
        super().__init__()
        self.works = threading.Event()
        self.bereaved = threading.Event()

    def work(self, store, ending):
        store.set("worked", "yes")
        self.works.set()
        ending.wait()

    def bereave(self):
        self.bereaved.set()


def test_it_works_on_though_the_first_rank_leaves_before_the_thread_runs(monkeypatch):
    may_run = threading.Event()
    client = attendant._Shift._client

    def later(shift):
        assert may_run.wait(SOON)
        return client(shift)

    monkeypatch.setattr(attendant._Shift, "_client", later)
    first = HashStore()
    with first.clone() as second:
        worker = Worker.of(first)
        assert worker is Worker.of(second)
        worker.enter("first", first)
        worker.enter("second", second)
        worker.leave("first")
        first.close()
        may_run.set()
        assert worker.works.wait(SOON)
        assert second.get("worked") == b"yes"
        worker.leave("second")
        assert not worker.bereaved.is_set()
