"""The planners: what a member does in each kind of collective.

*Exchanges*, in which every member has something for every other one: each shows on its card what
it has and stages lap 0; all meet; then each stages a lap ahead of the one it takes.

*From a root or to it*: who sends stages a lap at a time, as many ahead as it has blocks; who
receives says after each lap that it is through with it. A sender meets those who wait for it in
its second lap at the latest, and so leaves a call of one lap with nobody waited for.

*All_reduce*: each member stages what others reduce, share by share of each lap. It reduces its own
share from all other blocks and its own array, and writes the result back to where it was staged,
and into its array; then everybody takes the other shares' results out of its own block. So a place
in a block goes back and forth between two members, each of which reads it before it writes it. To
write what the other has only read takes processors longer: between distant cores the whole call
took two and a half times as long. There is one meeting for each lap, and one more.

Data in a place where others can read it is not staged: the others read it there, reduce it there
and write results there, each member's for itself, whatever the others' is; its owner stays until
all are through.
"""

from __future__ import annotations

from transport.call import Kind
from transport.shm.board.layout import BLOCKS, LINE, Layout
from transport.shm.collectives.steps import ALL, NOTHING, WIDE, Cut, Op, Part, Plan, Step


class Planner:
    """Makes the plans of member ``rank``; ``piece`` (bytes) is how much a broadcast moves at a
    time: while the others copy one piece out, the root copies the next one in.

    The plan for a kind of call and a root, if it has one, is number ``kind * size + root``, which
    is below ``count``.
    """

    def __init__(self, layout: Layout, rank: int, piece: int) -> None:
        self._rank, self._size = rank, layout.size
        self._peers = [peer for peer in range(layout.size) if peer != rank]
        self._block = layout.block
        self.count: int = (max(Kind) + 1) * layout.size
        self._piece = max(LINE, min(piece, layout.block) // LINE * LINE)

    def plan(self, number: int) -> Plan:
        """Make a plan anew."""
        kind, root = divmod(number, self._size)
        match Kind(kind):
            case Kind.ALL_REDUCE:
                return self._all_reduce()
            case Kind.ALL_GATHER | Kind.ALL_TO_ALL | Kind.REDUCE_SCATTER as exchange:
                return self._exchange(exchange)
            case rooted:
                receives = rooted in {Kind.REDUCE, Kind.GATHER}
                if receives == (root == self._rank):
                    return self._receive(rooted, root)
                return self._send(rooted, root)

    def _by_member(self, arrays: dict[int, int]) -> tuple[int, ...]:
        return tuple(arrays.get(member, NOTHING) for member in range(self._size))

    def _share_among(self, members: int) -> int:
        """Return the bytes of each share where so many members share a block."""
        return self._block // members // LINE * LINE or LINE

    def _all_reduce(self) -> Plan:
        rank = self._rank
        others = tuple(Part(rank, 0, 0, cut) for cut in (Cut.BEFORE, Cut.AFTER))
        shares = tuple(Part(member, 0, 0, Cut.OWN) for member in range(self._size))
        steps = (
            Step(Op.NOTE),
            Step(Op.STAGE, parts=others),
            Step(Op.PUBLISH, number=1),
            Step(Op.MEET),
            Step(Op.SURVEY),
            # At step lap + 1 the lap is staged, and the one before it is reduced.
            Step(Op.LOOP, lap=1),
            Step(Op.REACH, lap=-1, number=2),
            Step(Op.FOLD, number=ALL, parts=shares),
            # The block that this overwrites has been free since lap - 3 was taken out of it.
            Step(Op.STAGE, lap=1, parts=others),
            Step(Op.PUBLISH, number=2),
            Step(Op.TAKE, lap=-1, parts=others),
            # At the end nobody uses another's block, or its own before the next call.
            Step(Op.END),
        )
        array = self._by_member(dict.fromkeys(self._peers, 0))
        return Plan(steps, 1, 0, array, array, self._block, spread=True, known=True, places_from=1)

    def _exchange(self, kind: Kind) -> Plan:
        rank, size = self._rank, self._size
        same, reduces = kind is Kind.ALL_GATHER, kind is Kind.REDUCE_SCATTER
        inputs = 1 if same else size
        sends = {peer: 0 if same else peer for peer in self._peers}
        expects = {peer: inputs if reduces else inputs + peer for peer in self._peers}
        if same:
            staged = (Part(rank, 0),)
        else:
            staged = tuple(Part(rank, peer, _share(peer, rank)) for peer in self._peers)

        def part(peer: int, array: int) -> Part:
            return Part(peer, array, 0 if same or peer == rank else _share(rank, peer))

        if reduces:
            # Of its own the input.
            parts = [part(r, rank if r == rank else inputs) for r in range(size)]
            take = Step(Op.FOLD, number=inputs, parts=tuple(parts))
        else:
            in_turn = [(rank + i) % size for i in range(1, size)]  # not all from one at a time
            take = Step(Op.TAKE, parts=tuple(part(peer, expects[peer]) for peer in in_turn))
        own = Part(rank, 0 if same else rank), Part(rank, inputs + rank)
        steps = (
            Step(Op.NOTE),
            Step(Op.STAGE, parts=staged),
            Step(Op.PUBLISH, number=1),
            *(() if reduces else (Step(Op.KEEP, parts=own),)),
            Step(Op.MEET),
            Step(Op.SURVEY),
            Step(Op.LOOP),
            # The block that this overwrites was read before its readers published the step before.
            Step(Op.STAGE, lap=1, parts=staged),
            Step(Op.PUBLISH, lap=1, number=1),
            Step(Op.REACH, number=1),
            take,
            Step(Op.END),
            Step(Op.CLOSE),
            Step(Op.AWAIT),
        )
        return Plan(
            steps,
            inputs + (1 if reduces else size),
            inputs,
            self._by_member(sends),
            self._by_member(expects),
            self._block if same else self._share_among(size - 1),
            wide=WIDE // (size - 1) // LINE * LINE,
        )

    def _send(self, kind: Kind, root: int) -> Plan:
        """The plan of who sends: ``root`` to all, or another member to ``root``."""
        rank, size = self._rank, self._size
        scatters = kind is Kind.SCATTER
        known = kind in {Kind.BROADCAST, Kind.REDUCE}
        readers = self._peers if root == rank else [root]
        peer = ALL if root == rank else root
        staged = (Part(rank, 0),)
        if scatters:
            staged = tuple(Part(rank, to, _share(to, rank)) for to in self._peers)
        stage = Step(Op.STAGE, parts=staged), Step(Op.PUBLISH, number=1)
        steps = (
            Step(Op.SURVEY),
            Step(Op.NOTE),
            *stage,
            *(() if kind is Kind.BROADCAST else (Step(Op.MEET, lap=1, peer=peer),)),
            Step(Op.LOOP, number=1),
            Step(Op.REACH, lap=-BLOCKS, peer=peer, number=2),
            *stage,
            Step(Op.END),
            *((Step(Op.KEEP, parts=(Part(rank, rank), Part(rank, size))),) if scatters else ()),
            Step(Op.CHECK_LATER),
            Step(Op.CLOSE, number=not known),
            Step(Op.AWAIT, peer=peer),
        )
        return Plan(
            steps,
            size + 1 if scatters else 1,
            size if scatters else 1,
            self._by_member({reader: reader if scatters else 0 for reader in readers}),
            self._by_member({}),
            self._lap_of(kind),
            known=known,
            alone=size == 2 and kind is Kind.BROADCAST,
        )

    def _receive(self, kind: Kind, root: int) -> Plan:
        """The plan of who receives: from ``root``, or as ``root`` from all others."""
        rank, size = self._rank, self._size
        known = kind in {Kind.BROADCAST, Kind.REDUCE}
        gathers = kind is Kind.GATHER
        first = 1 if gathers else 0
        senders = self._peers if root == rank else [root]
        peer = ALL if root == rank else root
        expects = {sender: first + sender if gathers else 0 for sender in senders}
        share = _share(rank, root) if kind is Kind.SCATTER else 0
        if kind is Kind.REDUCE:
            take = Step(Op.FOLD, number=0, parts=tuple(Part(r, 0) for r in range(size)))
        else:
            parts = tuple(Part(sender, array, share) for sender, array in expects.items())
            take = Step(Op.TAKE, parts=parts)
        own = Part(rank, 0), Part(rank, first + rank)
        steps = (
            Step(Op.PUBLISH, number=1),
            *((Step(Op.KEEP, parts=own),) if gathers else ()),
            Step(Op.MEET, peer=peer),
            Step(Op.SURVEY),
            Step(Op.LOOP),
            Step(Op.REACH, peer=peer, number=1),
            take,
            # Through with the lap before that.
            Step(Op.PUBLISH, lap=1, number=1),
            Step(Op.END),
            *(() if peer == ALL else (Step(Op.CHECK_LATER),)),  # else all cards are compared
            Step(Op.CLOSE, number=not known),
        )
        return Plan(
            steps,
            size + 1 if gathers else 1,
            first,
            self._by_member({}),
            self._by_member(expects),
            self._lap_of(kind),
            known=known,
            wide=WIDE // len(senders) // LINE * LINE,
            alone=gathers or (size == 2 and kind is not Kind.REDUCE),
        )

    def _lap_of(self, kind: Kind) -> int:
        if kind is Kind.BROADCAST:
            return self._piece
        # Smaller than it might be: who scatters stages a piece while the others copy one out.
        return self._share_among(self._size) if kind is Kind.SCATTER else self._block


def _share(peer: int, owner: int) -> int:
    """Return which share of ``owner``'s block is ``peer``'s: it has none for itself."""
    return peer - (peer > owner)
