"""The messages between ranks in a step: planned from the table, received before they are needed.

Messages between two ranks arrive in the order of sending, and the receiver knows that order from
the sender's row of the table. So it can begin a receive before the message arrives, and a rank
waits only where the table requires it. Sends never wait.

A small message stays in the receiver's mailbox until a thread needs it. That thread then copies it,
which takes less time than a hand-over from another thread. A large message may not fit in the
mailbox, so its receive begins early, in its own thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshlib import ProcessGroup, Work
from meshlib.extend import dump, load
from parallel._arrays import Array
from parallel._core.pipeline.stage import Specs, Stage
from parallel._core.pipeline.table import Action, ActionKind, ScheduleTable

_PAYLOAD = 0x7069_7065
_SPECS = _PAYLOAD + 1
AHEAD = 2
"""The receive of a large message begins this many actions before its use."""
SMALL = 256 << 10
"""The most bytes of a message that is received only when it is needed."""


class StageMessage(NamedTuple):
    """The message to stage ``stage`` for a microbatch: its input, or its output's gradient."""

    stage: int
    is_gradient: bool
    microbatch: int


def message_for(action: Action, table: ScheduleTable) -> StageMessage | None:
    """Return the message that ``action`` gets from another stage, on any rank."""
    forward = action.kind is ActionKind.FORWARD
    alone = 0 if forward else table.stages - 1
    if action.stage == alone or not (forward or action.kind.sends_back):
        return None
    return StageMessage(action.stage, not forward, action.microbatch)


def message_of(action: Action, table: ScheduleTable) -> StageMessage | None:
    """Return the message that ``action`` sends to another stage, on any rank."""
    forward = action.kind is ActionKind.FORWARD
    stage = action.stage + (1 if forward else -1)
    if not 0 <= stage < table.stages or not (forward or action.kind.sends_back):
        return None
    return StageMessage(stage, not forward, action.microbatch)


class RankPlan:
    """One rank's part of a table; without ``training``, of its forwards alone. Made once.

    The rank's actions are in ``row``. For each stage, ``last`` is the action that completes its
    gradients. For each other rank, ``coming`` lists the messages from there in the order of
    sending. For each action that waits for a message, ``needed`` is that message.
    """

    def __init__(self, table: ScheduleTable, rank: int, training: bool) -> None:
        self.table = table
        self.rank = rank
        self.training = training

        def done(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(a for a in actions if training or a.kind is ActionKind.FORWARD)

        self.row: tuple[Action, ...] = done(table.ranks[rank])
        self.last: dict[int, Action] = {
            a.stage: a for a in self.row if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)
        }
        self.needed: dict[Action, StageMessage] = {}
        self.coming: dict[int, tuple[StageMessage, ...]] = {
            source: tuple(
                message
                for action in done(actions)
                if (message := message_of(action, table)) and table.rank_of[message.stage] == rank
            )
            for source, actions in enumerate(table.ranks)
            if source != rank
        }
        from_elsewhere = {message for messages in self.coming.values() for message in messages}
        for action in self.row:
            message = message_for(action, table)
            if message is not None and message in from_elsewhere:
                self.needed[action] = message


@dataclass
class StageShapes:
    """The known specs of the inputs and outputs of this rank's stages, and the stages already told.

    Completed with the first microbatch, and kept from step to step.
    """

    inputs: dict[int, Specs] = field(default_factory=dict[int, Specs])
    outputs: dict[int, Specs] = field(default_factory=dict[int, Specs])
    told: set[int] = field(default_factory=set[int])


class StageMessages:
    """The messages of one rank in one step.

    This rank's ``stages`` make the arrays to receive into.
    """

    def __init__(
        self,
        plan: RankPlan,
        group: ProcessGroup,
        shapes: StageShapes,
        stages: Mapping[int, Stage],
    ) -> None:
        self._table, self._rank = plan.table, plan.rank
        self._needed = plan.needed
        self._group, self._stages = group, stages
        self._inputs, self._outputs = shapes.inputs, shapes.outputs
        self._told = shapes.told
        self._arrived: dict[StageMessage, tuple[list[Array], list[Work[Any]]]] = {}
        self._here: dict[StageMessage, tuple[Array | None, ...]] = {}
        self._sends: deque[Work[Any]] = deque()
        self._from = {source: deque(messages) for source, messages in plan.coming.items()}

    # ------------------------------------------------------------------ receiving

    def expect(self, action: Action) -> None:
        """Begin to receive what ``action`` needs, if that is large, and known by now."""
        message = self._needed.get(action)
        if message is not None:
            self._post(message, early=True)

    def take(self, action: Action) -> tuple[Array | None, ...]:
        """Wait for what ``action`` needs and return it."""
        message = message_for(action, self._table)
        assert message is not None, "who needs nothing takes nothing"
        if message in self._here:
            return self._here.pop(message)
        self._post(message, early=False)
        arrays, works = self._arrived.pop(message)
        for work in works:
            work.wait()
        if not message.is_gradient:
            return tuple(arrays)
        coming = iter(arrays)
        specs = self._outputs[message.stage]
        return tuple(next(coming) if spec.is_trained else None for spec in specs)

    def _source(self, message: StageMessage) -> int:
        return self._table.rank_of[message.stage + (1 if message.is_gradient else -1)]

    def _post(self, message: StageMessage, *, early: bool) -> None:
        """Begin the receive of ``message``, and of earlier messages from the same rank.

        With ``early``, it stops at the first small message or unknown shape: it must not wait.
        """
        if message in self._arrived:
            return
        source = self._source(message)
        queue = self._from[source]
        while message not in self._arrived:
            following = queue[0]
            specs = self._specs(following, may_ask=not early)
            if specs is None:
                return
            small = sum(spec.nbytes for spec in specs) <= SMALL
            if small and early:
                return
            queue.popleft()
            arrays = [self._stages[following.stage].empty(spec) for spec in specs]
            works: list[Work[Any]] = []
            for array in arrays:
                if small:
                    self._group.recv(array, tag=_PAYLOAD, group_src=source)
                    continue
                works.append(self._group.irecv(array, tag=_PAYLOAD, group_src=source))
            self._arrived[following] = arrays, works

    def _specs(self, message: StageMessage, may_ask: bool) -> Specs | None:
        if message.is_gradient:
            outputs = self._outputs.get(message.stage)
            return None if outputs is None else tuple(s for s in outputs if s.is_trained)
        if message.stage not in self._inputs and may_ask:
            self._inputs[message.stage] = self._ask(message)
        return self._inputs.get(message.stage)

    def _ask(self, message: StageMessage) -> Specs:
        source = self._source(message)
        size = np.zeros(1, np.int64)
        self._group.recv(size, tag=_SPECS + message.stage, group_src=source)
        if not size[0]:
            raise ValueError(
                f"stage {message.stage} asks stage {message.stage - 1} for its inputs' shapes,"
                " and no such rank exists in a fake job; expected a rank that has stage 0"
            )
        data = np.empty(size[0], np.uint8)
        self._group.recv(data, tag=_SPECS + message.stage, group_src=source)
        return load(data.data)

    # ------------------------------------------------------------------ sending

    def give(self, action: Action, arrays: Sequence[Array | None]) -> None:
        """Hand over what ``action`` has computed to the stage that needs it."""
        message = message_of(action, self._table)
        if message is None:
            return
        target = self._table.rank_of[message.stage]
        if target == self._rank:
            self._here[message] = tuple(arrays)
            if not message.is_gradient:
                self._inputs.setdefault(message.stage, self._outputs[action.stage])
            return
        if not message.is_gradient and message.stage not in self._told:
            self._told.add(message.stage)
            self._tell(message.stage, self._outputs[action.stage], target)
        for array in arrays:
            if array is not None:
                self._send(array, target, _PAYLOAD)
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()

    def _tell(self, stage: int, specs: Specs, target: int) -> None:
        data = np.frombuffer(dump(specs).data, np.uint8)
        self._send(np.array([data.size]), target, _SPECS + stage)
        self._send(data, target, _SPECS + stage)

    def _send(self, array: Array, target: int, tag: int) -> None:
        self._sends.append(self._group.isend(array, tag=tag, group_dst=target))

    def finish(self) -> None:
        """Wait until all that was sent may be reused."""
        while self._sends:
            self._sends.popleft().wait()
