"""The decisions of the agent that leads, without processes, sockets or time."""

from __future__ import annotations

import pytest

from meshlib._launcher.nodes.leader import Leader
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AttemptResult,
    Interrupted,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    RankFailed,
    RanksEnded,
    StopAll,
    parse,
)
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions, RankProgram
from meshlib._launcher.ranks.failure import ErrorRecord, RankExit


def hello(agent, *, node=None, ranks=2, least=2, most=2, job="none"):
    return JoinRequest(agent, f"host-{agent}", ranks, node, least, most, job)


def leader(*, max_restarts=0, last_call=30.0, **given):
    nodes = NodeOptions(**({"least": 2, "most": 2, "last_call_timeout": last_call} | given))
    program = RankProgram("script", "x")
    options = LaunchOptions(program, 2, nodes=nodes, max_restarts=max_restarts)
    return Leader(options, "a", now=0.0)


def gathered(boss, *hellos, now=0.0):
    """Let the agents come; return the order in which they are admitted."""
    return admitted([decision for one in hellos for decision in boss.receive(one, now)])


def admitted(decisions):
    assert all(isinstance(decision, JoinAccepted) for decision in decisions)
    assert [decision.node for decision in decisions] == list(range(len(decisions)))
    return [decision.agent for decision in decisions]


def rank_exit(rank, *, code=1, types=("ValueError",), stopped=False):
    error = ErrorRecord("E", types, "text", "trace", 1.0) if types else None
    return RankExit(rank, 0, "host", 7, code, 1.0, stopped, error)


def test_a_round_begins_when_all_have_come():
    boss = leader()
    assert boss.receive(hello("a"), 0.0) == []
    assert boss.tick(1.0) == []
    assert boss.receive(hello("b", ranks=3), 2.0) == [
        JoinAccepted("a", 0, 0, 2, 0, 5),
        JoinAccepted("b", 0, 1, 2, 2, 5),
    ]
    assert boss.ranks_of("a") == [0, 1]
    assert boss.ranks_of("b") == [2, 3, 4]
    assert list(boss.ranks_of("c")) == []


def test_the_leader_is_node_0_although_another_came_first():
    assert gathered(leader(), hello("b"), hello("a")) == ["a", "b"]


def test_node_ranks_that_were_asked_for_are_given():
    boss = leader(least=3, most=3)
    three = {"least": 3, "most": 3}
    hellos = [hello("c", node=1, **three), hello("b", node=2, **three), hello("a", **three)]
    assert gathered(boss, *hellos) == ["a", "c", "b"]


def test_gaps_are_closed_when_fewer_come_than_might():
    boss = leader(most=5, last_call=10.0)
    for one in (hello("a", node=0, most=5), hello("b", node=4, most=5)):
        assert boss.receive(one, 0.0) == []
    assert admitted(boss.tick(10.0)) == ["a", "b"]


def test_the_last_call_waits_for_more_than_the_least():
    boss = leader(least=1, most=3, last_call=10.0)
    elastic = {"least": 1, "most": 3}
    assert boss.receive(hello("a", **elastic), 0.0) == []
    assert boss.tick(9.0) == []
    assert boss.receive(hello("b", **elastic), 9.0) == []
    assert boss.tick(18.0) == []  # each that comes renews it
    assert admitted(boss.tick(19.0)) == ["a", "b"]


def test_who_leaves_before_the_round_is_not_waited_for():
    boss = leader(least=2, most=3, last_call=5.0)
    elastic = {"least": 2, "most": 3}
    boss.receive(hello("a", **elastic), 0.0)
    boss.receive(hello("b", **elastic), 0.0)
    assert boss.receive(AgentLeft("b"), 1.0) == []
    assert boss.tick(50.0) == []
    assert boss.present == {"a"}
    assert boss.receive(hello("c", **elastic), 51.0) == []
    assert admitted(boss.tick(56.0)) == ["a", "c"]


def test_nodes_that_do_not_come_are_counted():
    boss = leader(join_timeout=60.0)
    boss.receive(hello("a"), 0.0)
    (result,) = boss.tick(60.0)
    assert isinstance(result, AttemptResult)
    assert not result.again
    assert result.error == "waited 60 s for 2 nodes; 1 arrived: host-a"
    assert boss.receive(hello("b"), 61.0) == [JoinRefused("b", "the job has ended")]


@pytest.mark.parametrize(
    ("newcomer", "reason"),
    [
        (hello("b", job="other"), "the job here is --rdzv-id none, not other"),
        (hello("b", most=3), "--nnodes is 2:3 there, but 2:2 on the leading node"),
        (hello("b", node=0), "--node-rank 0 is taken by host-a"),
    ],
)
def test_who_does_not_fit_is_refused(newcomer, reason):
    boss = leader()
    boss.receive(hello("a", node=0), 0.0)
    assert boss.receive(newcomer, 0.0) == [JoinRefused("b", reason)]
    assert gathered(boss, hello("c", node=1)) == ["a", "c"]


def test_one_too_many_is_refused():
    boss = leader()
    gathered(boss, hello("a"), hello("b"))
    assert boss.receive(hello("c"), 1.0) == [JoinRefused("c", "the job already has 2 nodes")]


def running(**rules):
    boss = leader(**rules)
    sizes = {"least": rules.get("least", 2), "most": rules.get("most", 2)}
    boss.receive(hello("a", **sizes), 0.0)
    boss.receive(hello("b", **sizes), 0.0)
    boss.tick(100.0)
    assert list(boss.ranks_of("b")) == [2, 3]
    return boss, sizes


def test_a_job_that_ends_well():
    boss, _ = running()
    assert boss.receive(RanksEnded("a", 0), 1.0) == []
    assert boss.receive(RanksEnded("b", 0), 2.0) == [AttemptResult(0, again=False)]
    assert boss.receive(hello("c"), 3.0) == [JoinRefused("c", "the job has ended")]


def test_a_failure_stops_all_once_and_ends_the_job():
    boss, _ = running()
    stop = boss.receive(RankFailed("b", 0, 3, "was killed by SIGKILL"), 1.0)
    assert stop == [StopAll(0, "rank 3 on node 1 (host-b) was killed by SIGKILL")]
    assert boss.receive(RankFailed("a", 0, 0, "ended with RankFailedError"), 1.0) == []
    first, second = rank_exit(3, code=-9, types=()), rank_exit(0, types=("RankFailedError",))
    assert boss.receive(RanksEnded("b", 0, [first]), 2.0) == []
    (result,) = boss.receive(RanksEnded("a", 0, [second]), 2.0)
    assert result == AttemptResult(0, again=False, exits=[first, second])


def test_what_an_echo_is_of_may_be_heard_later():
    records = {
        "was interrupted": Interrupted("b", 0),
        "was lost": AgentLeft("b", lost="was lost"),
    }
    for words, record in records.items():
        boss, _ = running()
        echo = RankFailed("a", 0, 0, "ended with RankFailedError", echo=True)
        assert len(boss.receive(echo, 1.0)) == 1
        assert boss.receive(record, 1.1) == []  # all are stopping already
        boss.receive(RanksEnded("b", 0), 2.0)
        (result,) = boss.receive(RanksEnded("a", 0, [rank_exit(0)]), 2.0)
        assert result.error == f"node 1 (host-b) {words}"


def test_a_failure_that_is_no_echo_stays_the_reason():
    boss, _ = running()
    boss.receive(RankFailed("a", 0, 0, "ended with ValueError"), 1.0)
    boss.receive(AgentLeft("b", lost="was lost"), 1.1)
    (result,) = boss.receive(RanksEnded("a", 0, [rank_exit(0)]), 2.0)
    assert result.error is None


def test_failures_are_tried_again_as_often_as_allowed():
    boss, _ = running(max_restarts=1)
    for attempt, again in ((0, True), (1, False)):
        boss.receive(RankFailed("b", attempt, 3, "fell"), 1.0)
        boss.receive(RanksEnded("a", attempt), 2.0)
        (result,) = boss.receive(RanksEnded("b", attempt, [rank_exit(3)]), 2.0)
        assert (result.attempt, result.again) == (attempt, again)
        if again:
            places = [*boss.receive(hello("b"), 3.0), *boss.receive(hello("a"), 3.0)]
            assert [place.attempt for place in places] == [1, 1]


def test_records_of_an_earlier_attempt_change_nothing():
    boss, _ = running(max_restarts=5)
    boss.receive(RanksEnded("a", 0, [rank_exit(0)]), 1.0)
    boss.receive(RanksEnded("b", 0), 1.0)
    gathered(boss, hello("a"), hello("b"))
    assert boss.receive(RankFailed("b", 0, 3, "late news"), 2.0) == []
    assert boss.receive(RanksEnded("b", 0, []), 2.0) == []
    assert boss.receive(Interrupted("b", 0), 2.0) == []
    assert boss.receive(RanksEnded("a", 1), 2.0) == []


def test_a_lost_node_ends_a_job_of_fixed_size():
    boss, _ = running()
    assert boss.receive(AgentLeft("b", lost="was lost"), 1.0) == [
        StopAll(0, "node 1 (host-b) was lost")
    ]
    exits = [rank_exit(0, types=("RankFailedError",))]
    assert boss.receive(RanksEnded("a", 0, exits), 2.0) == [
        AttemptResult(0, again=False, exits=exits, error="node 1 (host-b) was lost")
    ]


def test_a_job_goes_on_with_fewer_nodes():
    boss, sizes = running(least=1, most=2, max_restarts=1)
    boss.receive(AgentLeft("b", lost="was lost"), 1.0)
    (result,) = boss.receive(RanksEnded("a", 0, [rank_exit(0, types=("RankFailedError",))]), 2.0)
    assert result.again
    # At once: nobody else is expected.
    assert gathered(boss, hello("a", **sizes)) == ["a"]


def test_what_a_lost_node_says_later_is_ignored():
    boss, _ = running()
    boss.receive(AgentLeft("b", lost="was lost"), 1.0)
    assert boss.receive(RanksEnded("b", 0, []), 2.0) == []
    assert boss.receive(AgentLeft("b", lost="was lost"), 2.0) == []


def test_a_newcomer_makes_all_start_again_without_counting_as_a_failure():
    boss, sizes = running(least=2, most=3)
    assert boss.receive(hello("c", **sizes), 1.0) == [StopAll(0, "another node (host-c) joins")]
    boss.receive(RanksEnded("a", 0, [rank_exit(0, code=-15, types=(), stopped=True)]), 2.0)
    (result,) = boss.receive(RanksEnded("b", 0, [rank_exit(2, types=("RankFailedError",))]), 2.0)
    assert result.again
    boss.receive(hello("b", **sizes), 3.0)
    assert gathered(boss, hello("a", **sizes)) == ["a", "c", "b"]


def test_a_newcomer_does_not_make_a_finished_job_run_again():
    boss, sizes = running(least=2, most=3)
    boss.receive(RanksEnded("a", 0), 1.0)
    assert boss.receive(hello("c", **sizes), 1.0) == []
    assert boss.receive(RanksEnded("b", 0), 1.0) == [AttemptResult(0, again=False)]
    boss, sizes = running(least=2, most=3)
    boss.receive(hello("c", **sizes), 1.0)  # all ranks have just ended, but who knows
    boss.receive(RanksEnded("a", 0), 1.0)
    assert boss.receive(RanksEnded("b", 0), 1.0)[0] == AttemptResult(0, again=False)


def test_the_other_nodes_have_as_long_to_save_as_the_one_that_was_told():
    boss, _ = running()
    answers = boss.receive(Interrupted("b", 0, saves=True), 1.0)
    assert answers == [StopAll(0, "node 1 (host-b) was interrupted", saves=True)]


def test_an_interrupted_node_ends_the_job_without_another_try():
    boss, _ = running(max_restarts=3)
    assert boss.receive(Interrupted("b", 0), 1.0) == [StopAll(0, "node 1 (host-b) was interrupted")]
    assert boss.receive(RankFailed("a", 0, 0, "ended with an error"), 1.0) == []
    assert boss.receive(RanksEnded("b", 0), 1.0) == []
    assert boss.receive(AgentLeft("b"), 1.0) == []
    (result,) = boss.receive(RanksEnded("a", 0, [rank_exit(0)]), 2.0)
    assert (result.again, result.error) == (False, "node 1 (host-b) was interrupted")


def test_a_node_that_leaves_after_its_ranks_have_ended_ends_the_job():
    boss, _ = running(max_restarts=3)
    boss.receive(RanksEnded("b", 0), 1.0)
    assert boss.receive(AgentLeft("b"), 1.0) == [StopAll(0, "node 1 (host-b) was interrupted")]
    (result,) = boss.receive(RanksEnded("a", 0), 2.0)
    assert not result.again


@pytest.mark.parametrize(
    "record",
    [
        hello("a", node=1),
        RankFailed("a", 0, 3, "fell"),
        Interrupted("a", 0),
        RanksEnded("a", 0, [rank_exit(3)]),
        AgentLeft("a"),
        AgentLeft("a", lost="was lost"),
        JoinAccepted("a", 2, 0, 2, 0, 3),
        JoinRefused("a", "no"),
        StopAll(1, "why"),
        AttemptResult(1, again=True, exits=[rank_exit(3)], error="lost"),
    ],
    ids=lambda record: record.kind,
)
def test_records_survive_the_log(record):
    line = record.line()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert parse(line.encode()) == record
