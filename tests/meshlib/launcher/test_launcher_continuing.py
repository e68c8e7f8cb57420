"""The decisions of the leader where ranks go on when others are lost; how such a job has ended."""

from __future__ import annotations

import json

import pytest

from meshlib._events.events import Agreed, RankLost
from meshlib._events.log import publish, register_log
from meshlib._launcher.nodes.continuing import ContinuingLeader, exits_of_first, last_members
from meshlib._launcher.nodes.leader import Leader
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AttemptResult,
    Interrupted,
    JoinAccepted,
    JoinDeferred,
    JoinRefused,
    JoinRequest,
    MoreRanksGranted,
    MoreRanksRequest,
    RankFailed,
    RanksEnded,
    StopAll,
    parse,
)
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions, RankProgram
from meshlib._launcher.ranks.failure import ErrorRecord, RankExit
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore


def hello(agent, *, ranks=2, on_failure="continue"):
    return JoinRequest(agent, f"host-{agent}", ranks, None, 2, 2, "none", on_failure)


def allowed(on_failure, **given):
    return LaunchOptions(
        RankProgram("script", "x"), 2, nodes=NodeOptions(2, 2), on_failure=on_failure, **given
    )


def rank_exit(rank, *, kind="ValueError", stopped=False):
    error = ErrorRecord("E", (kind,), "text", "trace", 1.0)
    return RankExit(rank, 0, "host", 7, 1, 1.0, stopped, error)


def running(members=None, **given):
    """Return a leader of the nodes a and b, with ranks 0, 1 and 2, 3."""
    boss = ContinuingLeader(allowed("continue", **given), "a", 0.0, lambda _: members)
    boss.receive(hello("a"), 0.0)
    boss.receive(hello("b"), 0.0)
    return boss


def test_a_lost_rank_ends_nobody_and_new_ranks_get_new_numbers():
    boss = running()
    assert boss.receive(RankFailed("b", 0, 3, "was killed"), 1.0) == []
    assert boss.receive(MoreRanksRequest("b", 0, 1), 1.0) == [MoreRanksGranted("b", 0, 4, 1)]
    assert boss.receive(MoreRanksRequest("a", 0, 2), 1.0) == [MoreRanksGranted("a", 0, 5, 2)]
    assert boss.ranks_of("b") == [2, 3, 4]
    assert boss.receive(RanksEnded("a", 0, [rank_exit(1)], well=3), 2.0) == []
    assert boss.receive(RanksEnded("b", 0, [rank_exit(3)], well=2), 2.0) == [
        AttemptResult(0, again=False)
    ]


def test_a_lost_node_takes_its_ranks_along_and_comes_again():
    boss = running()
    boss.receive(MoreRanksRequest("b", 0, 1), 1.0)
    gone = AgentLeft("b", lost="was lost")
    how = "was lost: its node was lost"
    assert boss.losses(gone) == [RankLost(rank, how) for rank in (2, 3, 4)]
    assert boss.receive(gone, 1.0) == []
    assert boss.receive(hello("c", ranks=3), 2.0) == [JoinAccepted("c", 0, 2, 2, 5, 4)]
    assert boss.ranks_of("c") == [5, 6, 7]
    assert boss.receive(RanksEnded("c", 0, well=3), 3.0) == []
    assert boss.receive(RanksEnded("a", 0, well=2), 3.0) == [AttemptResult(0, again=False)]


def test_a_node_too_many_waits_until_another_is_lost():
    boss = running()
    (held,) = boss.receive(hello("c"), 1.0)
    assert held == JoinDeferred("c", "the job runs on 2 nodes: waiting until one of them is lost")
    assert boss.receive(AgentLeft("b", lost="was lost"), 2.0) == [JoinAccepted("c", 0, 2, 2, 4, 4)]
    boss.receive(hello("d"), 3.0)
    # Its ranks are all lost, and it has no more for them: it leaves.
    boss.receive(RanksEnded("c", 0, [rank_exit(4), rank_exit(5)]), 4.0)
    assert boss.receive(AgentLeft("c"), 4.0) == [JoinAccepted("d", 0, 3, 2, 6, 4)]


def test_nobody_is_admitted_to_a_job_that_ends():
    boss = running()
    boss.receive(AgentLeft("b", lost="was lost"), 1.0)
    boss.receive(RanksEnded("a", 0, well=2), 1.0)  # that was the last
    assert boss.receive(hello("c"), 2.0) == [JoinRefused("c", "the job has ended")]
    boss = running()
    boss.receive(RanksEnded("b", 0, well=2), 1.0)
    assert boss.receive(hello("c"), 2.0) == []
    assert boss.receive(MoreRanksRequest("b", 0, 1), 2.0) == []


def test_a_node_that_is_told_to_end_ends_alone():
    boss = running()
    assert boss.receive(Interrupted("b", 0, leaves=True), 1.0) == []
    ended = RanksEnded("b", 0, [rank_exit(2, stopped=True), rank_exit(3, stopped=True)])
    assert boss.losses(ended) == [RankLost(rank, "was ended with its node") for rank in (2, 3)]
    assert boss.receive(ended, 2.0) == []
    assert boss.receive(AgentLeft("b"), 2.0) == []
    assert boss.receive(RanksEnded("a", 0, well=2), 3.0) == [AttemptResult(0, again=False)]


@pytest.mark.parametrize(("agent", "leaves"), [("b", False), ("a", True)])
def test_the_user_and_the_leading_node_end_the_job(agent, leaves):
    boss = running()
    (stop,) = boss.receive(Interrupted(agent, 0, leaves=leaves), 1.0)
    assert isinstance(stop, StopAll)
    ended = RanksEnded("a", 0, [rank_exit(0, stopped=True)])
    assert boss.losses(ended) == []  # all are ended
    boss.receive(ended, 2.0)
    (result,) = boss.receive(RanksEnded("b", 0), 2.0)
    assert not result.again
    assert result.exits


def test_a_job_without_its_first_member_has_failed():
    boss = running(members=[2, 1])
    boss.receive(AgentLeft("b", lost="was lost"), 1.0)
    (result,) = boss.receive(RanksEnded("a", 0, well=2), 2.0)
    assert result == AttemptResult(0, again=False, error="node 1 (host-b) was lost")
    boss = running(max_restarts=1)
    boss.receive(RanksEnded("b", 0, well=2), 1.0)
    (result,) = boss.receive(RanksEnded("a", 0, [rank_exit(0)], well=1), 2.0)
    assert result.again
    assert [item.rank for item in result.exits] == [0]


def test_nodes_must_agree_on_going_on():
    boss = Leader(allowed("stop"), "a", 0.0)
    (refused,) = boss.receive(hello("b"), 1.0)
    words = "--on-failure is continue there, but stop on the leading node"
    assert refused == JoinRefused("b", words)


@pytest.mark.parametrize(
    "record",
    [
        MoreRanksRequest("a", 0, 2),
        MoreRanksGranted("a", 0, 4, 2),
        JoinAccepted("a", 0, 2, 2, 4, 4),
        JoinDeferred("a", "full"),
        Interrupted("a", 0, leaves=True),
        RanksEnded("a", 0, [], well=2),
    ],
    ids=lambda record: record.kind,
)
def test_records_survive_the_log(record):
    assert parse(record.line().encode()) == record


def test_the_last_members_are_those_of_the_last_world_and_epoch():
    launchers = HashStore()
    assert last_members(launchers, 0) is None
    for turn, members in enumerate([[0, 1], [5, 1], [1, 7, 2]]):
        job = PrefixStore(f"turn{turn}", PrefixStore(f"restart{turn // 2}", launchers))
        register_log(job)
        publish(job, RankLost(0, "fell"))
        publish(job, Agreed("epoch/2", json.dumps({"members": members})))
        publish(job, Agreed("epoch/3", "null"))  # nothing came of it
        publish(job, Agreed("epoch/1", json.dumps({"members": [9]})))
    assert last_members(launchers, 0) == [5, 1]
    assert last_members(launchers, 1) == [1, 7, 2]


def test_whose_exits_count():
    cause, echo = rank_exit(1), rank_exit(2, kind="RankFailedError")
    spare = rank_exit(5)
    assert exits_of_first([0, 1, 2], [cause, echo, spare]) == []
    assert exits_of_first([1, 2], [cause, echo, spare]) == [cause]
    assert exits_of_first([2, 1], [cause, echo, spare]) == [cause, echo]
