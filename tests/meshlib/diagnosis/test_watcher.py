"""The news of a rank whose connection broke: their order, and the thread that reads them."""

import threading

from meshlib._diagnosis import shared_thread, watcher
from meshlib._diagnosis.shared_thread import SharedThread
from meshlib._diagnosis.watcher import LOST, Watcher
from meshlib._events.events import RankLost
from meshlib._events.log import EVENTS
from transport import _environment as environment
from transport._store.hash_store import HashStore

whole = HashStore.tail


class CallingListener:
    """A listener to news."""

    def __init__(self, on_event):
        self.on_event = on_event

    def on_store_lost(self, error):
        """Take it."""


def by_line(self, key, offset, timeout=None):
    """Read the entries of a log one by one."""
    found = whole(self, key, offset, timeout=timeout)
    return found[: found.index(b"\n") + 1]


def test_the_news_of_how_a_rank_ended_is_waited_for_past_other_news(monkeypatch):
    monkeypatch.setenv(environment.AGENT_STORE, "127.0.0.1:1")
    monkeypatch.setattr(watcher, "FROM_LAUNCHER_SECONDS", 60.0)
    monkeypatch.setattr(HashStore, "tail", by_line)
    store, received, done = HashStore(), [], threading.Event()

    def on_event(event):
        received.append((event.rank, event.how))
        if len(received) == 3:
            done.set()

    for event in (
        RankLost(1, LOST, vague=True),
        RankLost(2, "was killed by SIGSEGV"),
        RankLost(1, "was killed by SIGKILL"),
    ):
        store.append(EVENTS, event.line())
    following = Watcher(store, 0, CallingListener(on_event))
    assert done.wait(60)
    following.close()
    assert received == [(2, "was killed by SIGSEGV"), (1, "was killed by SIGKILL"), (1, LOST)]


def test_where_no_launcher_of_ours_will_say_more_a_lost_rank_is_told_at_once(monkeypatch):
    monkeypatch.delenv(environment.AGENT_STORE, raising=False)
    monkeypatch.setattr(watcher, "FROM_LAUNCHER_SECONDS", 600.0)
    monkeypatch.setattr(watcher, "EXPLANATION_SECONDS", 600.0)
    store, received = HashStore(), threading.Event()
    following = Watcher(store, 0, CallingListener(lambda _: received.set()))
    store.append(EVENTS, RankLost(1, LOST, vague=True).line())
    assert received.wait(60)
    following.close()


class Worker(SharedThread[str]):
    """Says when it works, and that it has lost its store."""

    name = "worker"

    def __init__(self):
        super().__init__()
        self.works = threading.Event()
        self.store_lost = threading.Event()

    def work(self, store, ending):
        store.set("worked", "yes")
        self.works.set()
        ending.wait()

    def on_store_lost(self, error):
        self.store_lost.set()


def test_it_works_on_though_the_first_rank_leaves_before_the_thread_runs(monkeypatch):
    may_run = threading.Event()
    client = shared_thread._ThreadLifetime._client

    def later(shift):
        assert may_run.wait(60)
        return client(shift)

    monkeypatch.setattr(shared_thread._ThreadLifetime, "_client", later)
    first = HashStore()
    with first.clone() as second:
        worker = Worker.of(first)
        assert worker is Worker.of(second)
        worker.enter("first", first)
        worker.enter("second", second)
        worker.leave("first")
        first.close()
        may_run.set()
        assert worker.works.wait(60)
        assert second.get("worked") == b"yes"
        worker.leave("second")
        assert not worker.store_lost.is_set()
