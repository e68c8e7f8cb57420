"""Another agent takes over the lead, from the log alone, wherever the first one has ended."""

from __future__ import annotations

import random

import pytest

from meshlib._launcher.nodes.continuing import ContinuingLeader
from meshlib._launcher.nodes.etcd_log import LeaderTerms
from meshlib._launcher.nodes.leader import Leader
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AgentRecord,
    AttemptResult,
    Interrupted,
    JoinAccepted,
    JoinRequest,
    Leads,
    MoreRanksGranted,
    MoreRanksRequest,
    RankFailed,
    RanksEnded,
    StopAll,
    is_decision,
    parse,
)
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions, RankProgram
from meshlib._launcher.ranks.failure import RankExit

MOST, RESTARTS, ROUNDS = 3, 2, 60
WORTH_COMPARING = (
    *("present", "_candidates", "_attempt", "_number", "_restarts_left", "_done", "_expected"),
)


def leader(on_failure):
    nodes = NodeOptions(1, MOST, etcd="etcd://h:1/p")
    program = RankProgram("script", "x")
    options = LaunchOptions(
        program, 1, nodes=nodes, max_restarts=RESTARTS, on_failure=on_failure, replace=9
    )
    if on_failure == "continue":
        return ContinuingLeader(options, "a", 0.0, lambda _: None)
    return Leader(options, "a", 0.0)


def state(boss):
    return {name: getattr(boss, name) for name in WORTH_COMPARING}


def something(draw: random.Random, agents: list[str], on_failure: str, boss: Leader) -> AgentRecord:
    """Return a record that an agent may write now."""
    attempt, number = boss._attempt, boss._number
    running = (
        []
        if attempt is None
        else [
            agent for agent in attempt.members if attempt.has(agent) and agent not in attempt.ended
        ]
    )
    waits = [
        agent
        for agent in agents
        if agent not in boss._candidates and (attempt is None or agent not in attempt.members)
    ]
    if waits and (not running or draw.random() < 0.3):
        agent = draw.choice(waits)
        return JoinRequest(agent, f"host-{agent}", 2, None, 1, MOST, "none", on_failure)
    if not running:
        return AgentLeft(draw.choice(agents))
    agent = draw.choice(running)
    failed = RankExit(attempt.ranks[agent][0], 0, "host", 7, 1, 1.0, False, None)
    return draw.choice(
        [
            RankFailed(agent, number, failed.rank, "was killed", echo=draw.random() < 0.5),
            MoreRanksRequest(agent, number, 1),
            RanksEnded(agent, number, [failed] if draw.random() < 0.5 else [], well=1),
            AgentLeft(agent, lost="was lost"),
            Interrupted(agent, number)
            if draw.random() < 0.2
            else MoreRanksRequest(agent, number, 2),
        ]
    )


def check(
    other: Leader, log: list[AgentRecord], expected: list[AgentRecord], boss: Leader, now: float
):
    """``other`` takes over, decides what is ``expected``, and knows what ``boss`` knows."""
    due = other.take_over(list(log), now)
    if due != expected and boss._attempt is None:
        # It begins with the nodes that wait; the first leader would have waited for a last call.
        assert {type(one) for one in due} == {JoinAccepted}
        assert {one.agent for one in due} == boss._candidates.keys()
        return
    assert due == expected
    assert state(other) == state(boss)


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
@pytest.mark.parametrize("seed", range(40))
def test_the_state_is_that_of_a_leader_that_has_lived_on(on_failure, seed):
    draw = random.Random(seed)
    agents, boss, log, now = list("abcde"), leader(on_failure), [], 0.0
    seen = set()
    for _ in range(ROUNDS):
        now += 100.0  # more than a last call, less than the time for joining
        decisions = boss.tick(now)
        if not decisions:
            record = something(draw, agents, on_failure, boss)
            if isinstance(record, AgentLeft):
                agents = [agent for agent in agents if agent != record.agent] or ["z"]
            log.append(record)
            decisions = boss.receive(record, now)
            # The first leader has ended before it could write its answer.
            check(leader(on_failure), log, decisions, boss, now)
        log += decisions
        seen |= {type(one) for one in decisions}
        check(leader(on_failure), [parse(one.line().encode()) for one in log], [], boss, now)
        if boss._done:
            break
    assert seen & {JoinAccepted, MoreRanksGranted, StopAll, AttemptResult}


def test_what_a_former_leader_decides_is_void():
    terms = LeaderTerms()
    log = [
        *(Leads("a", 1), JoinAccepted("b", 0, 0, 1, 0, 1)),
        Leads("c", 2),
        *(
            Leads("a", 1),
            StopAll(0, "void"),
            AgentLeft("c", lost="void"),
            AgentLeft("b"),
            RankFailed("b", 0, 0, "x"),
        ),
        *(Leads("c", 2), StopAll(0, "counts")),
    ]
    counted = [record for record in log if terms.admit(record) and not isinstance(record, Leads)]
    assert counted == [
        JoinAccepted("b", 0, 0, 1, 0, 1),
        AgentLeft("b"),
        RankFailed("b", 0, 0, "x"),
        StopAll(0, "counts"),
    ]
    assert [is_decision(record) for record in counted] == [True, False, False, True]
