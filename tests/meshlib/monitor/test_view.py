"""The model behind the page, the terminal and the metrics, from events and samples as recorded."""

import json
from dataclasses import replace

import pytest

from meshlib._events.events import Abort, Agreed, Leave, RankEnded, RankLost, Ready
from meshlib._monitor.metrics import metrics
from meshlib._monitor.shares import Smooth, dim_shares, stragglers
from meshlib._monitor.view import SILENT_SECONDS, STUCK_SECONDS, JobView
from meshlib._monitor.words import as_values, duration, headline, named, rate
from tests.meshlib.monitor.monitor_samples import open_call, sample

NOW = 1000.0


def job(*samples, size=4, now=NOW):
    view = JobView("train.py", size)
    for one in samples:
        view.take(replace(one, size=size), now)
    view.tick(now)
    return view


def states(view, now=NOW):
    return {one.rank: one.state(now) for one in view.ordered()}


def test_ranks_have_states():
    view = job(
        sample(0),
        sample(1, open_calls=[open_call(0.1)]),
        sample(2, open_calls=[open_call(STUCK_SECONDS + 1, waiting_for=1)]),
        size=5,
    )
    view.on_event(RankLost(3, "was lost: its connection to the store broke", vague=True), NOW)
    view.on_event(RankLost(3, "was killed by SIGKILL"), NOW)
    view.on_event(RankLost(3, "was lost: it broke", vague=True), NOW)
    view.on_event(RankLost(3, "is gone"), NOW)
    assert states(view) == {0: "computing", 1: "in a call", 2: "waiting", 3: "lost", 4: "absent"}
    assert [note.text for note in view.notes] == ["rank 3 was killed by SIGKILL"]
    assert "rank 4 has not joined" in headline(view, NOW)
    assert "rank 3 was lost" in headline(view, NOW)
    assert "rank 2 waits for rank 1" in headline(view, NOW)
    later = NOW + SILENT_SECONDS + 0.1
    assert states(view, later) == {0: "silent", 1: "silent", 2: "silent", 3: "lost", 4: "absent"}
    assert [one.rank for one in view.there(NOW)] == [0, 1, 2]
    assert view.there(later) == []


def test_a_call_that_nobody_waits_for_blocks_no_rank():
    assert states(job(sample(0, open_calls=[open_call(9, blocking=False)]), size=1)) == {
        0: "computing"
    }


def test_a_sample_that_is_read_twice_is_one():
    view = job(sample(0, 1), size=1)
    view.take(sample(0, 1, size=1), NOW + SILENT_SECONDS + 1)
    assert states(view, NOW + SILENT_SECONDS + 1) == {0: "silent"}
    view.take(sample(0, 2, size=1), NOW + SILENT_SECONDS + 1)
    assert states(view, NOW + SILENT_SECONDS + 1) == {0: "computing"}


def test_ranks_leave_and_others_come():
    view = job(*map(sample, range(4)))
    view.on_event(RankLost(2, "was killed"), NOW + 1)
    view.on_event(Ready(4), NOW + 2)
    view.on_event(Ready(4), NOW + 2)
    view.take(sample(4, place=-1, size=1), NOW + 2)
    assert states(view)[4] == "spare"
    members = json.dumps({"members": [0, 1, 4, 3]})
    view.on_event(Agreed("epoch/1", members), NOW + 3)
    view.on_event(Agreed("epoch/1", members), NOW + 3)  # by another rank
    view.on_event(Agreed("epoch/2", "null"), NOW + 3)
    view.on_event(Agreed("vote/1", "null"), NOW + 3)
    view.on_event(Ready(4), NOW + 3)  # as it said before it knew
    view.take(sample(4, 2, place=2, epoch=1), NOW + 3)
    assert states(view)[4] == "computing"
    assert (view.epoch, view.size) == (1, 4)
    view.on_event(Leave(0, {}), NOW + 4)
    view.on_event(RankEnded(1), NOW + 4)
    assert [note.kind for note in view.notes] == ["lost", "ready", "join", "epoch", "left", "left"]
    assert view.notes[3].text == "epoch 1 has begun, with 4 ranks: 0, 1, 4, 3"


def test_a_failure_is_a_line():
    view = job(sample(0), size=1)
    view.on_event(Abort("g", "RankFailedError", "first\nsecond"), NOW)
    assert (view.notes[0].kind, view.notes[0].text) == ("failure", "first")


def test_after_a_restart_the_ranks_are_other_ones():
    view = job(*map(sample, range(4)))
    view.on_event(RankLost(2, "was killed"), NOW)
    view.begin("again", NOW + 1)
    assert states(view) == dict.fromkeys(range(4), "absent")
    assert [note.kind for note in view.notes] == ["lost", "begin"]
    view.end("done", NOW + 2)
    view.end("done", NOW + 2)
    assert headline(view, NOW + 2) == "Over: done."
    assert len(view.notes) == 3


def test_waiting_is_what_others_did_not_need():
    view = job(sample(0, inside=0.5), sample(1, inside=0.2), size=2)
    (dp, whole) = view.dims
    assert (dp.name, whole.name) == ("dp", "default")
    assert dp.inside == pytest.approx(0.35)
    assert dp.waiting == pytest.approx(0.15)
    assert (dp.bandwidth, dp.calls) == (pytest.approx(2000), pytest.approx(10))
    assert dim_shares([]) == []


def test_who_is_in_a_call_with_a_silent_rank_waits():
    view = job(sample(0, inside=0.5), sample(1, inside=0.5), size=2)
    assert view.dims[0].waiting == pytest.approx(0.0)
    later = NOW + SILENT_SECONDS + 1
    view.take(sample(0, 2, inside=1.0), later)
    view.tick(later)
    assert view.dims[0].waiting == view.dims[0].inside > 0.5


@pytest.mark.parametrize(
    ("inside", "slow"),
    [
        ([0.5, 0.5, 0.5, 0.1], [3]),
        ([0.5, 0.1, 0.5, 0.2], [1, 3]),
        ([0.5, 0.5, 0.45, 0.5], []),
        ([0.1, 0.9], [0]),
        ([0.5], []),
        ([], []),
    ],
)
def test_stragglers_are_named_the_slowest_first(inside, slow):
    view = job(*(sample(rank, inside=share) for rank, share in enumerate(inside)), size=len(inside))
    assert [one.rank for one in view.stragglers] == slow
    assert ("keep" in headline(view, NOW)) == bool(slow)
    assert stragglers([]) == []


def test_an_average_follows_the_last_samples():
    smooth = Smooth()
    for number in range(1, 30):
        smooth.take(sample(0, number, inside=0.25))
    assert smooth.inside == pytest.approx(0.25)
    assert smooth.groups["d"].nbytes == pytest.approx(1000)
    for number in range(30, 70):
        smooth.take(sample(0, number, inside=0.75, traffic=[]))
    assert smooth.inside == pytest.approx(0.75)
    assert smooth.groups == {}


def test_the_page_gets_plain_values():
    view = job(*map(sample, range(4)))
    view.on_event(RankLost(2, "was killed"), NOW)
    values = json.loads(json.dumps(as_values(view, NOW)))
    assert [one["state"] for one in values["ranks"]] == [*["computing"] * 2, "lost", "computing"]
    assert values["ranks"][3]["mesh"] == [
        {"name": "dp", "index": 1, "size": 2},
        {"name": "tp", "index": 1, "size": 2},
    ]
    assert values["notes"] == [{"time": NOW, "kind": "lost", "text": "rank 2 was killed"}]
    assert values["history"][0]["step"] == 0.1
    assert as_values(JobView("x"), NOW)["headline"] == "No rank has joined yet."


def test_metrics_are_what_prometheus_reads():
    view = job(*(sample(rank, inside=0.1 if rank == 3 else 0.6) for rank in range(4)))
    view.on_event(RankLost(2, "was killed"), NOW)
    lines = metrics(view, NOW).splitlines()
    for line in (
        'meshlib_ranks{state="lost"} 1',
        'meshlib_ranks{state="computing"} 3',
        'meshlib_rank_up{rank="2"} 0',
        'meshlib_step_seconds{rank="0"} 0.1',
        'meshlib_rank_straggles{rank="3"} 1',
        'meshlib_dim_bytes_per_second{dim="dp"} 4000',
        "# TYPE meshlib_rank_calls_total counter",
    ):
        assert line in lines
    assert not any("steps_total" in line for line in lines)
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_name_of_a_group_may_be_anything():
    view = job(sample(0), size=1)
    view.ranks[0].smooth.groups["d"].name = 'a "b"\\\n'
    view.tick(NOW)
    assert 'dim="a \\"b\\"\\\\\\n"' in metrics(view, NOW)


def test_numbers_are_read_by_people():
    assert [duration(s) for s in (0, 2e-6, 0.0015, 2.5, 125)] == [
        "–", "2 µs", "1.5 ms", "2.5 s", "2 min 5 s",
    ]  # fmt: skip
    assert [rate(b) for b in (0, 999, 1500, 2.5e9)] == ["0 B/s", "999 B/s", "1.5 kB/s", "2.5 GB/s"]
    assert named([1]) == "rank 1"
    assert named(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
