"""The count of references by grants: a model with workers that pass, drop and die."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlib.calls.work import Future
from meshlib.rpc.errors import RRefLostError
from meshlib.rpc.references.ownership import ObjectId, Ownership

OWNER = 0
OID = ObjectId(1, 1)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["passes", "drops", "receives", "hears", "dies"]), st.integers(0, 99)
    ),
    max_size=120,
)


class Model:
    """Workers, what they hold, and what is on its way. Messages between two keep their order, and
    arrive in any order with those of others.
    """

    def __init__(self, count):
        self.count = count
        self.table = Ownership(lambda oid: Future())
        self.dead = set()
        self.held = defaultdict(list)  # by worker: who gave it
        self.to_owner = defaultdict(deque)
        self.messages = defaultdict(deque)
        self.made = False
        self.uncertain = False  # a grant was lost with a worker
        self.held[1].append(1)
        self.to_owner[1].append(("create",))

    def alive(self):
        return [w for w in range(self.count) if w not in self.dead]

    def tell(self, worker, what):
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

    def passes(self, n):
        givers = [w for w in self.alive() if self.held[w]]
        if givers:
            giver = givers[n % len(givers)]
            to = self.alive()[n // 7 % len(self.alive())]
            self.tell(giver, ("grant", to))
            self.messages[giver, to].append(giver)

    def drops(self, n):
        holders = [w for w in self.alive() if self.held[w]]
        if holders:
            holder = holders[n % len(holders)]
            self.tell(holder, ("release", self.held[holder].pop(n // 7 % len(self.held[holder]))))

    def receives(self, n):
        ways = [way for way, queue in self.messages.items() if queue and way[1] not in self.dead]
        if ways:
            way = ways[n % len(ways)]
            self.held[way[1]].append(self.messages[way].popleft())

    def hears(self, n):
        ways = [w for w, queue in self.to_owner.items() if queue]
        if ways:
            worker = ways[n % len(ways)]
            self.act(worker, self.to_owner[worker].popleft())

    def dies(self, n):
        mortal = [w for w in self.alive() if w != OWNER]
        if len(mortal) > 1 and n % 3 == 0:
            worker = mortal[n // 3 % len(mortal)]
            self.dead.add(worker)
            if any(what[0] in ("grant", "create") for what in self.to_owner[worker]):
                self.uncertain = True
            late = [*self.to_owner[worker]][: n // 9 % 4]  # the rest it had not sent
            self.to_owner[worker].clear()
            self.held[worker].clear()
            for way in self.messages:
                if way[1] == worker:
                    self.messages[way].clear()
            self.table.bury(worker, "died")
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
        for worker in self.alive():
            while self.held[worker]:
                self.tell(worker, ("release", self.held[worker].pop()))
        while any(self.to_owner.values()):
            self.hears(0)


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
    table = Ownership(lambda oid: Future())
    table.bury(1, "died")
    assert table.create(OID).created  # its function is about to run
    assert len(table) == 0
    table.create(ObjectId(2, 1))
    table.release(ObjectId(2, 1), 1, 3)
    table.grant(ObjectId(2, 1), 1, 3)
    table.release(ObjectId(2, 1), 2, 2)
    assert len(table) == 0


def test_a_lost_reference_says_why():
    table = Ownership(lambda oid: Future())
    table.create(OID)
    table.release(OID, 1, 1)
    with pytest.raises(RRefLostError, match="was freed"):
        table.find(OID)
    table.bury(2, "was killed by SIGKILL")
    with pytest.raises(RRefLostError, match=r"never made: rank 2, .*, was killed by SIGKILL"):
        table.find(ObjectId(2, 7))
    waiting = table.find(ObjectId(3, 1))
    assert table.bury(3, "died") == [waiting]
