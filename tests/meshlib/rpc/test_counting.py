"""The count of references by grants: a model with workers that pass, drop and die."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlib._calls.future import Future
from meshlib.rpc._errors import RRefLostError
from meshlib.rpc._references.counting import ReferenceCounts

OWNER = 0
OID = (1, 1)
OFTEN = ["passes", "receives", "delivers", "delivers"]
SELDOM = ["passes", "drops", "receives", "delivers", "answers", "dies", "breaks", "settles"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *OFTEN,
                "passes",
                "drops",
                "receives",
                "delivers",
                "answers",
                "dies",
                "breaks",
                "settles",
            ]
        ),
        st.integers(0, 99),
    ),
    min_size=30,  # else most lists have five
    max_size=80,
)


class Model:
    """Workers, what they hold, and what is on its way. Messages between two keep their order, and
    arrive in any order with those of others.
    """

    def __init__(self, count):
        self.count = count
        self.table = ReferenceCounts(lambda oid: Future(), count)
        self.dead = set()
        self.held = defaultdict(list)  # by worker: who gave it
        self.to_owner = defaultdict(deque)
        self.messages = defaultdict(deque)
        self.losses = defaultdict(int)  # by way: lost with a connection, as its sender tells
        self.made = False
        self.uncertain = False  # the request for it was lost with a worker
        self.questions = []
        self.held[1].append(1)
        self.to_owner[1].append(("create",))

    def alive(self):
        return [w for w in range(self.count) if w not in self.dead]

    def post(self, worker, what):
        if worker == OWNER:
            self.act(worker, what)
        else:
            self.to_owner[worker].append(what)

    def act(self, worker, what):
        match what:
            case ("create",):
                self.table.create(OID)
                self.made = True
            case ("grant", to):
                self.table.grant(OID, worker, to)
            case ("release", giver):
                self.table.release(OID, giver, worker)
            case ("held", giver, count):
                self.table.answer(OID, giver, worker, count)
        self.post_questions()

    def post_questions(self):
        self.questions += self.table.questions
        self.table.questions.clear()

    def passes(self, n):
        givers = [w for w in self.alive() if self.held[w]]
        if givers:
            giver = givers[n % len(givers)]
            to = self.alive()[n // 7 % len(self.alive())]
            self.post(giver, ("grant", to))
            self.messages[giver, to].append(giver)

    def drops(self, n):
        holders = [w for w in self.alive() if self.held[w]]
        if holders:
            holder = holders[n % len(holders)]
            self.post(holder, ("release", self.held[holder].pop(n // 7 % len(self.held[holder]))))

    def receives(self, n):
        ways = [way for way, queue in self.messages.items() if queue and way[1] not in self.dead]
        if ways:
            way = ways[n % len(ways)]
            self.held[way[1]].append(self.messages[way].popleft())

    def breaks(self, n):
        """A connection breaks, and the last messages on it are lost; both workers live."""
        ways = [way for way, queue in self.messages.items() if queue and not self.dead & {*way}]
        if ways:
            way = ways[n % len(ways)]
            for _ in range(min(1 + n // 7 % 3, len(self.messages[way]))):
                self.messages[way].pop()
                self.losses[way] += 1

    def settles(self, n):
        """A worker hears what its giver had sent it in vain, and releases that in its place."""
        ways = [way for way, lost in self.losses.items() if lost and way[1] not in self.dead]
        if ways:
            giver, to = ways[n % len(ways)]
            self.losses[giver, to] -= 1
            self.post(to, ("release", giver))

    def delivers(self, n):
        ways = [w for w, queue in self.to_owner.items() if queue]
        if ways:
            worker = ways[n % len(ways)]
            self.act(worker, self.to_owner[worker].popleft())

    def answers(self, n):
        """A worker that is asked answers, when nothing from the dead is on its way to it."""
        ready = [
            (worker, giver)
            for worker, giver, _ in self.questions
            if worker not in self.dead
            and not self.messages[giver, worker]
            and not self.losses[giver, worker]
        ]
        if ready:
            worker, giver = ready[n % len(ready)]
            self.questions.remove((worker, giver, OID))
            self.post(worker, ("held", giver, self.held[worker].count(giver)))

    def dies(self, n):
        mortal = [w for w in self.alive() if w != OWNER]
        if len(mortal) > 1 and n % 3 == 0:
            worker = mortal[n // 3 % len(mortal)]
            self.dead.add(worker)
            if ("create",) in self.to_owner[worker]:
                self.uncertain = True
            late = [*self.to_owner[worker]][: n // 9 % 4]  # the rest it had not sent
            self.to_owner[worker].clear()
            self.held[worker].clear()
            for way in self.messages:
                if way[1] == worker:
                    self.messages[way].clear()
                    self.losses[way] = 0
                elif way[0] == worker:  # the last ones had not left it
                    for _ in range(min(n // 5 % 3, len(self.messages[way]))):
                        self.messages[way].pop()
            for way in self.losses:
                if way[0] == worker and n % 2:  # nobody has been told
                    self.losses[way] = 0
            self.table.forget_worker(worker, "died")
            self.post_questions()
            for what in late:  # which a thread had read
                self.act(worker, what)

    def references(self):
        return sum(map(len, self.held.values())) + sum(map(len, self.messages.values()))

    def is_freed(self):
        try:
            self.table.find(OID)
            return False
        except RRefLostError:
            return True

    def end(self):
        while any(queue for way, queue in self.messages.items() if way[1] not in self.dead):
            self.receives(0)
        while any(lost for way, lost in self.losses.items() if way[1] not in self.dead):
            self.settles(0)
        for worker in self.alive():
            while self.held[worker]:
                self.post(worker, ("release", self.held[worker].pop()))
        while any(self.to_owner.values()) or self.has_questions():
            self.delivers(0)
            self.answers(0)

    def has_questions(self):
        return any(worker not in self.dead for worker, _, _ in self.questions)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 5), ACTIONS)
def test_an_object_lives_while_it_is_referred_to_and_no_longer(count, actions):
    model = Model(count)
    for action, n in actions:
        getattr(model, action)(n)
        if model.made and model.references() and not model.uncertain:
            assert not model.is_freed()
    model.end()
    assert len(model.table) == 0


def test_what_comes_of_the_dead_changes_nothing():
    table = ReferenceCounts(lambda oid: Future(), 4)
    table.forget_worker(1, "died")
    assert table.create(OID).created  # its function is about to run
    assert len(table) == 0
    table.create((2, 1))
    table.release((2, 1), 1, 3)
    table.grant((2, 1), 1, 3)
    table.release((2, 1), 2, 2)
    assert len(table) == 0


def test_a_request_that_comes_after_its_object_was_given_up_makes_none():
    table = ReferenceCounts(lambda oid: Future(), 4)
    table.void(OID)
    table.create(OID)  # while its creator still holds a reference
    table.release(OID, 1, 1)
    assert len(table) == 0
    table.create(OID)
    assert len(table) == 0


def test_a_lost_reference_says_why():
    table = ReferenceCounts(lambda oid: Future(), 4)
    table.create(OID)
    table.release(OID, 1, 1)
    with pytest.raises(RRefLostError, match="was freed"):
        table.find(OID)
    table.forget_worker(2, "was killed by SIGKILL")
    with pytest.raises(RRefLostError, match="its creator, rank 2, was killed by SIGKILL"):
        table.find((2, 7))
    waiting = table.find((3, 1))
    assert table.forget_worker(3, "died") == [waiting]


def answer(table, giver, counts):
    """Have all who are asked about ``giver`` answer; what they have is in ``counts``."""
    questions = [question for question in table.questions if question[1] == giver]
    table.questions = [question for question in table.questions if question[1] != giver]
    for worker, _, oid in questions:
        table.answer(oid, giver, worker, counts.get(worker, 0))
    return {worker for worker, _, _ in questions}


def made():
    table = ReferenceCounts(lambda oid: Future(), 4)
    table.create(OID)
    return table


def test_a_reference_that_was_granted_and_lost_with_its_giver_is_given_up():
    table = made()
    table.grant(OID, 1, 2)
    table.release(OID, 1, 1)
    table.forget_worker(1, "died")
    assert answer(table, 1, {}) == {0, 2, 3}
    assert len(table) == 0


def test_a_reference_whose_grant_was_lost_with_its_giver_keeps_the_object():
    table = made()
    table.forget_worker(1, "died")
    table.release(OID, 1, 3)  # of which the owner had not heard either
    answer(table, 1, {2: 1})
    assert len(table) == 1
    table.release(OID, 1, 2)
    assert len(table) == 0


def test_who_was_given_a_reference_before_it_died_is_asked_about_when_that_is_heard():
    table = made()
    table.forget_worker(2, "died")
    assert not table.questions
    table.grant(OID, 1, 2)
    table.release(OID, 1, 1)
    assert answer(table, 2, {3: 1}) == {0, 1, 3}
    assert len(table) == 1
    table.release(OID, 2, 3)
    assert len(table) == 0


def test_who_dies_before_it_has_answered_is_asked_about():
    table = made()
    table.forget_worker(1, "died")
    table.forget_worker(2, "died")
    answer(table, 1, {})
    assert len(table) == 1
    assert answer(table, 2, {3: 1}) == {0, 3}
    assert len(table) == 1
    table.forget_worker(3, "died")
    assert answer(table, 3, {}) == {0}
    assert len(table) == 0
