"""What ranks hear of a rank whose connection broke, and in which order."""

import threading

from meshlib.diagnosis import watcher
from meshlib.diagnosis.event_log import EVENTS
from meshlib.diagnosis.events import RankLost
from meshlib.diagnosis.watcher import LOST, Watcher
from transport.store.hash_store import HashStore

whole = HashStore.tail


def by_line(self, key, offset, timeout=None):
    """Read the entries of a log one by one."""
    found = whole(self, key, offset, timeout=timeout)
    return found[: found.index(b"\n") + 1]


def test_the_news_of_how_a_rank_ended_is_waited_for_past_other_news(monkeypatch):
    monkeypatch.setattr(watcher, "BETTER_NEWS_SECONDS", 60.0)
    monkeypatch.setattr(HashStore, "tail", by_line)
    store, heard, done = HashStore(), [], threading.Event()

    def hear(event):
        heard.append((event.rank, event.how))
        if len(heard) == 3:
            done.set()

    for event in (
        RankLost(1, LOST, vague=True),
        RankLost(2, "was killed by SIGSEGV"),
        RankLost(1, "was killed by SIGKILL"),
    ):
        store.append(EVENTS, event.line())
    following = Watcher(store, 0, hear, lambda: None)
    assert done.wait(60)
    following.close()
    assert heard == [(2, "was killed by SIGSEGV"), (1, "was killed by SIGKILL"), (1, LOST)]
