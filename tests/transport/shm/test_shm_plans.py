"""Plans of collectives: that no member reads what is not written, or writes what others still need;
and that the compiled core and NumPy, which run them, do the same.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from collective_oracle import reduced
from rank_threads import Member, Transport, run_group

from transport.call import NO_ROOT, Kind
from transport.native import core
from transport.operands.copying import address
from transport.operands.reduce_op import ReduceOp, premul_sum
from transport.shm import ShmCommunicator
from transport.shm.board.board import Board
from transport.shm.board.layout import Layout, Sizes
from transport.shm.board.patience import Patience
from transport.shm.collectives import interpreter
from transport.shm.collectives.arena import Arena
from transport.shm.collectives.planning import Planner
from transport.shm.collectives.runner import Runner
from transport.shm.collectives.steps import ALL, NOTHING, Cut, Op, Part, Plan, Step

# Laps of 8 to 32 numbers of 8 bytes.
SIZES = Sizes(block=256, direct=8, ring=1 << 10, piece=128, single=1 << 13)


def _shm(sizes: Sizes) -> Transport:
    return Transport("shm", lambda of, _: ShmCommunicator(of, sizes), has_links=False)


SHM = _shm(SIZES)
PLANNED = [
    Kind.BROADCAST,
    Kind.ALL_REDUCE,
    Kind.REDUCE,
    Kind.ALL_GATHER,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.ALL_TO_ALL,
    Kind.REDUCE_SCATTER,
]
ROOTED = {Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER}
REDUCES = {Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER}


class Case(NamedTuple):
    """A call, and what it has: ``counts[src][dst]`` elements go from one member to another."""

    kind: Kind
    root: int
    counts: list[list[int]]
    dtype: Any = np.float64
    op: ReduceOp = ReduceOp.SUM
    symmetric: frozenset[int] = frozenset()
    """The members whose arrays lie in symmetric memory."""


def _values(src: int, dst: int, count: int, dtype: Any) -> Any:
    """What goes from one member to another: numbers of which every bit counts."""
    noise = np.random.default_rng([src, dst]).integers(1, 1 << 20, count)
    return (noise / 1024 if np.dtype(dtype).kind in "fc" else noise).astype(dtype)


def _compared(got: Any, wanted: Any, what: object) -> None:
    assert got.tobytes() == wanted.tobytes(), what


def _carry_out(member: Member, case: Case, room: Any) -> None:
    """Make the call, and compare what comes out with what should."""
    kind, root, counts, dtype, op, symmetric = case
    rank, size, comm = member.rank, member.size, member.comm
    free = room[: room.size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)

    def new(values: Any) -> Any:
        """Return an array, which lies in symmetric memory on those members."""
        nonlocal free
        if rank not in symmetric:
            return values.copy()
        array, free = free[: values.size], free[values.size :]
        array[:] = values
        return array

    def same(got: Any, wanted: Any) -> None:
        _compared(got, wanted.astype(dtype), (rank, case))

    def folded(dst: int, count: int) -> Any:
        parts = [_values(src, dst, count, dtype) for src in range(size)]
        if op.factor is not None:
            return reduced([(part * part.dtype.type(op.factor)) for part in parts], "SUM")
        return reduced(parts, op.kind.name)

    where = root if kind in ROOTED else NO_ROOT
    count = counts[0][0]
    call = member.call(kind, dtype, count, op if kind in REDUCES else None, root=where)
    mine = [new(_values(rank, dst, counts[rank][dst], dtype)) for dst in range(size)]
    outputs = [np.zeros(counts[src][rank], dtype) for src in range(size)]
    match kind:
        case Kind.BROADCAST:
            buffer = mine[0] if rank == root else np.zeros(count, dtype)
            comm.broadcast(call, buffer, root)
            same(buffer, _values(root, 0, count, dtype))
        case Kind.ALL_REDUCE:
            comm.all_reduce(call, mine[0], op)
            same(mine[0], folded(0, count))
        case Kind.REDUCE:
            comm.reduce(call, mine[0], op, root)
            same(mine[0], folded(0, count) if rank == root else _values(rank, 0, count, dtype))
        case Kind.REDUCE_SCATTER:
            output = mine[rank] if count % 2 else np.zeros(count, dtype)
            comm.reduce_scatter(call, output, mine, op)
            same(output, folded(rank, count))
        case Kind.ALL_GATHER:
            outputs = [np.zeros(counts[src][0], dtype) for src in range(size)]
            comm.all_gather(call, outputs, mine[0])
            for src, output in enumerate(outputs):
                same(output, _values(src, 0, counts[src][0], dtype))
        case Kind.GATHER:
            outputs = [np.zeros(counts[src][root], dtype) for src in range(size)]
            comm.gather(call, outputs if rank == root else None, mine[root], root)
            for src, output in enumerate(outputs if rank == root else ()):
                same(output, _values(src, root, counts[src][root], dtype))
        case Kind.SCATTER:
            comm.scatter(call, outputs[root], mine if rank == root else None, root)
            same(outputs[root], _values(root, rank, counts[root][rank], dtype))
        case Kind.ALL_TO_ALL:
            comm.all_to_all(call, outputs, mine)
            for src, output in enumerate(outputs):
                same(output, _values(src, rank, counts[src][rank], dtype))


def _cases(size: int, seed: int, each: int) -> list[Case]:
    """Return calls of every kind, equal on all members: of no elements, of one, of many laps."""
    rng = random.Random(f"{size} {seed}")
    cases: list[Case] = []
    for kind in PLANNED:
        for number in range(each):
            count = rng.choice((0, 1, 5, 31, 32, 33, 100, 167))
            counts = [[count] * size for _ in range(size)]
            if kind in {Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL} and number % 2:
                counts = [[rng.randrange(2 * count + 1) for _ in range(size)] for _ in range(size)]
            dtype = rng.choice((np.float64, np.float32, np.int64, np.float16, np.int8))
            op = ReduceOp.SUM
            if np.dtype(dtype).kind == "f":
                op = rng.choice((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, premul_sum(0.5)))
            who: list[int] = [r for r in range(size) if rng.random() < (0, 1, 0.5)[number % 3]]
            cases.append(Case(kind, rng.randrange(size), counts, dtype, op, frozenset(who)))
    rng.shuffle(cases)
    return cases


@pytest.fixture
def short_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is read in place as well."""
    make = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, number: replace(make(self, number), wide=256))


# That the steps order what must be ordered.


class Access(NamedTuple):
    """A member's use of bytes ``low`` to ``high`` of something, in its place in the order."""

    member: int
    time: int
    seen: tuple[int, ...]
    low: int
    high: int
    writes: bool


class Log:
    """What the members of a group do, each in its own order: shown turns, turns they have seen, and
    uses of memory.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]

    def note(self, member: int, *event: Any) -> None:
        self._events[member].append(event)

    def races(self) -> Iterator[tuple[Any, Access, Access]]:
        """Yield each two uses of the same bytes, one of them a write, that nothing puts in order
        (Lamport's happened-before, by vector clocks): whatever the scheduler did this time.
        """
        for place, accesses in self._accesses().items():
            for i, one in enumerate(accesses):
                for other in accesses[:i]:
                    overlap = one.low < other.high and other.low < one.high
                    if one.member != other.member and overlap and (one.writes or other.writes):
                        ordered = one.seen[other.member] >= other.time
                        if not ordered and other.seen[one.member] < one.time:
                            yield place, other, one

    def _accesses(self) -> dict[Any, list[Access]]:
        clocks = [[0] * self._size for _ in range(self._size)]
        shown: list[list[tuple[int, list[int]]]] = [[] for _ in range(self._size)]
        found: dict[Any, list[Access]] = defaultdict(list)
        at = [0] * self._size
        moved = True
        while moved:
            moved = False
            for member, events in enumerate(self._events):
                clock = clocks[member]
                while at[member] < len(events):
                    what, *rest = events[at[member]]
                    clock[member] += 1
                    if what == "shows":
                        shown[member].append((rest[0], clock.copy()))
                    elif what == "sees":
                        peer, turn = rest
                        seen = next((clock for shown, clock in shown[peer] if shown >= turn), None)
                        if seen is None:
                            clock[member] -= 1
                            break  # until that one has been followed to there
                        clock[:] = map(max, clock, seen)
                    else:
                        place, low, high, writes = rest
                        access = Access(member, clock[member], tuple(clock), low, high, writes)
                        found[place].append(access)
                    at[member] += 1
                    moved = True
        assert at == [len(events) for events in self._events]
        return found


def _watch(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Have what the NumPy interpreter and the board do noted in ``log``."""
    publish = Board.publish

    def shows(self: Board, step: int) -> None:
        log.note(self.rank, "shows", self.at.base + step)
        publish(self, step)

    monkeypatch.setattr(Board, "publish", shows)

    def sees(name: str) -> None:
        inner: Callable[..., Any] = getattr(Board, name)

        def outer(self: Board, *args: Any) -> Any:
            result = inner(self, *args)
            if name in {"reach", "meet_one"}:
                turn = self.at.base + (args[2] if name == "reach" else 1)
                log.note(self.rank, "sees", args[1], turn)
            else:
                for peer in self.peers if self.at.floor > 1 else ():
                    log.note(self.rank, "sees", peer, self.at.floor)
            return result

        monkeypatch.setattr(Board, name, outer)

    for name in ("begin", "meet", "meet_one", "reach", "reach_all", "claim"):
        sees(name)
    now = threading.local()

    def during(op: Op, inner: Callable[..., None]) -> Callable[..., None]:
        def outer(self: Any, step: Step, lap: int) -> None:
            now.writes = op is Op.STAGE or (op is Op.FOLD and step.number == ALL)
            inner(self, step, lap)

        return outer

    ways = tuple(during(op, way) for op, way in zip(Op, interpreter._DO, strict=True))
    monkeypatch.setattr(interpreter, "_DO", ways)
    passage = interpreter._Passage
    block, run = passage._block, passage.run

    def in_block(self: Any, part: Part, lap: int, start: int, stop: int) -> Any:
        view = block(self, part, lap, start, stop)
        low = address(view) - address(self._blocks[0][0])
        log.note(self._board.rank, "uses", "blocks", low, low + view.nbytes, now.writes)
        return view

    def whole(self: Any, start: int) -> None:
        """Who calls writes its arrays before and after that."""
        places = [] if self._where is None else self._where
        now.member = rank = self._board.rank
        mine = [(low, low + array.nbytes) for low, array in zip(places, self._arrays, strict=False)]
        for low, high in mine:
            log.note(rank, "uses", rank, low, high, True)
        run(self, start)
        for low, high in mine:
            log.note(rank, "uses", rank, low, high, True)

    monkeypatch.setattr(passage, "_block", in_block)
    monkeypatch.setattr(passage, "run", whole)
    view = Arena.view

    def in_place(self: Arena, peer: int, where: int, count: int, dtype: Any) -> Any:
        high = where + count * np.dtype(dtype).itemsize
        log.note(now.member, "uses", peer, where, high, now.writes)
        return view(self, peer, where, count, dtype)

    monkeypatch.setattr(Arena, "view", in_place)


def _run(size: int, cases: list[Case], shm: Transport = SHM) -> None:
    def body(member: Member) -> None:
        comm = member.comm
        room = comm.allocate(member.call(Kind.ALLOCATE), 1 << 14, np.dtype(np.uint8))
        for case in cases:
            _carry_out(member, case, room)
        member.barrier()

    run_group(shm, size, body)


@pytest.mark.usefixtures("short_laps")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_uses_of_memory_are_in_order(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(size)
    _watch(monkeypatch, log)
    _run(size, _cases(size, 1, 9))
    assert next(log.races(), None) is None
    places = {place for place, accesses in log._accesses().items() if len(accesses) > 50}
    assert places == {"blocks", *range(size)}  # there was something to put in order


WAITS = {
    Kind.BROADCAST: (Op.REACH, Op.AWAIT),
    Kind.ALL_REDUCE: (Op.REACH,),
    Kind.REDUCE: (Op.REACH, Op.AWAIT),
    Kind.ALL_GATHER: (Op.REACH, Op.AWAIT),
    Kind.GATHER: (Op.REACH, Op.AWAIT),
    Kind.SCATTER: (Op.REACH, Op.AWAIT),
    Kind.ALL_TO_ALL: (Op.REACH, Op.AWAIT),
    Kind.REDUCE_SCATTER: (Op.REACH, Op.AWAIT),
}


@pytest.mark.parametrize("kind", PLANNED, ids=lambda kind: kind.name)
def test_a_plan_that_does_not_wait_is_found_out(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Planner.plan
    monkeypatch.setitem(globals(), "_compared", lambda *_: None)  # results may be anything
    for op in WAITS[kind]:
        with monkeypatch.context() as patch:

            def lacking(self: Planner, number: int, op: Op = op) -> Plan:
                plan = make(self, number)
                steps = tuple(step for step in plan.steps if step.op is not op)
                return replace(plan, steps=steps)

            patch.setattr(Planner, "plan", lacking)
            log = Log(3)
            _watch(patch, log)
            everywhere = frozenset(range(3)) if op is Op.AWAIT else frozenset[int]()
            case = Case(kind, 1, [[600] * 3] * 3, symmetric=everywhere)
            _run(3, [case, case])
            assert next(log.races(), None) is not None, op


# That both interpreters do the same.


@pytest.mark.skipif(core is None, reason="this installation has no compiled core")
@pytest.mark.usefixtures("short_laps")
@pytest.mark.parametrize("compiled", ["all", "some"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_core_and_numpy_do_the_same(
    size: int, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Threads of one process have no core otherwise, since they must sleep while they wait.
    monkeypatch.setattr(Patience, "share_process", lambda self: None)
    begin = Runner.__init__
    made: list[bool] = []

    class Watched:
        def __init__(self, plans: Any) -> None:
            self._plans = plans

        def run(self, *args: Any) -> Any:
            start = self._plans.run(*args)
            made.append(start is None)
            return start

    def without(self: Runner, board: Any, *arguments: Any) -> None:
        begin(self, board, *arguments)
        self.compiled = None if compiled == "some" and board.rank else Watched(self.compiled)

    monkeypatch.setattr(Runner, "__init__", without)
    # So much data of a member without the core is read where it lies, and the core leaves off.
    _run(size, _cases(size, 2, 9), _shm(replace(SIZES, single=512)))
    assert sum(made) > 40  # the others are of dtypes and operations that the core does not have
    assert False in made


# What plans say.


def _plan(kind: Kind, size: int, rank: int, root: int = 0) -> Plan:
    planner = Planner(Layout.choose(size, SIZES), rank, SIZES.piece)
    return planner.plan(kind * size + root)


def test_the_steps_of_an_all_reduce() -> None:
    others = Part(1, 0, 0, Cut.BEFORE), Part(1, 0, 0, Cut.AFTER)
    assert _plan(Kind.ALL_REDUCE, 3, 1) == Plan(
        (
            Step(Op.NOTE),
            Step(Op.STAGE, parts=others),
            Step(Op.PUBLISH, number=1),
            Step(Op.MEET),
            Step(Op.SURVEY),
            Step(Op.LOOP, lap=1),
            Step(Op.REACH, lap=-1, number=2),
            Step(Op.FOLD, number=ALL, parts=tuple(Part(r, 0, 0, Cut.OWN) for r in range(3))),
            Step(Op.STAGE, lap=1, parts=others),
            Step(Op.PUBLISH, number=2),
            Step(Op.TAKE, lap=-1, parts=others),
            Step(Op.END),
        ),
        arrays=1,
        read_only=0,
        sends=(0, NOTHING, 0),
        expects=(0, NOTHING, 0),
        capacity=256,
        spread=True,
        known=True,
        places_from=1,
    )


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("kind", PLANNED, ids=lambda kind: kind.name)
def test_who_sends_to_whom_and_through_which_share(kind: Kind, size: int) -> None:
    root = size - 1
    plans = [_plan(kind, size, rank, root) for rank in range(size)]
    block = Layout.choose(size, SIZES).block
    for rank, plan in enumerate(plans):
        staged = {p.share for s in plan.steps if s.op is Op.STAGE for p in s.parts}
        assert (max(staged, default=0) + 1) * plan.capacity <= block
        for peer in range(size):
            sent = plan.sends[peer] != NOTHING
            assert sent == (plans[peer].expects[rank] != NOTHING)
            # What one has for another lies where that one looks for it.
            taken = {
                (p.share, p.cut)
                for s in plans[peer].steps
                if s.op in {Op.TAKE, Op.FOLD} and sent
                for p in s.parts
                if p.peer == rank
            }
            given = {
                (p.share, p.cut)
                for s in plan.steps
                if s.op is Op.STAGE and sent
                for p in s.parts
                if kind not in {Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.SCATTER}
                or p.array == plan.sends[peer]
            }
            if kind is not Kind.ALL_REDUCE:
                assert taken == given


def test_a_group_has_few_plans_whatever_the_sizes() -> None:
    def body(member: Member) -> int:
        rng = random.Random(7)
        for _ in range(60):
            counts = [[rng.randrange(300) for _ in range(2)] for _ in range(2)]
            case = Case(Kind.ALL_TO_ALL, 0, counts, rng.choice((np.int8, np.float64)))
            _carry_out(member, case, np.zeros(0, np.uint8))
        return len(member.comm._meeting.runner._plans)  # type: ignore[attr-defined]

    assert run_group(SHM, 2, body) == [1, 1]
