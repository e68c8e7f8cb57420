"""The messages between ranks in a step, planned from the schedule's table.

Messages between two ranks arrive in the order of sending, which the receiver knows from the
sender's row of the table. So it can post a receive before the message arrives, and a rank waits
only where the table requires it. Sends never wait.

A small message stays in the receiver's mailbox until a thread needs and copies it, which is faster
than receiving it in another thread. A large message may not fit in the mailbox, so its receive is
posted early and runs in another thread.
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
"""The receive of a large message is posted this many actions before its use."""
SMALL = 256 << 10
"""The maximum size, in bytes, of a message that is received only when it is needed."""


class StageMessage(NamedTuple):
    """The message to a stage for a microbatch: the stage's input, or its output's gradient."""

    stage: int
    is_gradient: bool
    microbatch: int


def message_for(action: Action, table: ScheduleTable) -> StageMessage | None:
    """Return the message that ``action`` needs from another stage, on any rank."""
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
    """One rank's part of a table; without ``training``, only the forwards.

    ``row`` has the rank's actions. ``last`` maps each stage to the action that completes its
    gradients. ``coming`` maps each other rank to its messages to this rank, in the order of
    sending. ``needed`` maps each action that needs one of these messages to the message.
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
    """The known specs of the inputs and outputs of this rank's stages.

    ``informed`` are the next stages that were sent their inputs' specs. All this is completed
    with the first microbatch, and kept for later steps.
    """

    inputs: dict[int, Specs] = field(default_factory=dict[int, Specs])
    outputs: dict[int, Specs] = field(default_factory=dict[int, Specs])
    informed: set[int] = field(default_factory=set[int])


class StageMessages:
    """The messages of one rank in one step.

    This rank's ``stages`` allocate the arrays to receive into.
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
        self._informed = shapes.informed
        self._posted: dict[StageMessage, tuple[list[Array], list[Work[Any]]]] = {}
        self._local: dict[StageMessage, tuple[Array | None, ...]] = {}
        self._sends: deque[Work[Any]] = deque()
        self._from = {source: deque(messages) for source, messages in plan.coming.items()}

    # ------------------------------------------------------------------ receiving

    def expect(self, action: Action) -> None:
        """Post the receive of the message for ``action``, if it is large and its shape is known."""
        message = self._needed.get(action)
        if message is not None:
            self._post(message, early=True)

    def receive(self, action: Action) -> tuple[Array | None, ...]:
        """Wait for the message for ``action`` and return its arrays."""
        message = message_for(action, self._table)
        assert message is not None, "only actions that need a message receive one"
        if message in self._local:
            return self._local.pop(message)
        self._post(message, early=False)
        arrays, works = self._posted.pop(message)
        for work in works:
            work.wait()
        if not message.is_gradient:
            return tuple(arrays)
        gradients = iter(arrays)
        specs = self._outputs[message.stage]
        return tuple(next(gradients) if spec.is_trained else None for spec in specs)

    def _source(self, message: StageMessage) -> int:
        return self._table.rank_of[message.stage + (1 if message.is_gradient else -1)]

    def _post(self, message: StageMessage, *, early: bool) -> None:
        """Post the receive of ``message``, and of earlier messages from the same rank.

        With ``early``, stop at the first small message or unknown shape, in order not to wait.
        """
        if message in self._posted:
            return
        source = self._source(message)
        queue = self._from[source]
        while message not in self._posted:
            following = queue[0]
            specs = self._specs(following, may_wait=not early)
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
            self._posted[following] = arrays, works

    def _specs(self, message: StageMessage, may_wait: bool) -> Specs | None:
        if message.is_gradient:
            outputs = self._outputs.get(message.stage)
            return None if outputs is None else tuple(s for s in outputs if s.is_trained)
        if message.stage not in self._inputs and may_wait:
            self._inputs[message.stage] = self._receive_specs(message)
        return self._inputs.get(message.stage)

    def _receive_specs(self, message: StageMessage) -> Specs:
        source = self._source(message)
        size = np.zeros(1, np.int64)
        self._group.recv(size, tag=_SPECS + message.stage, group_src=source)
        if not size[0]:
            raise ValueError(
                f"stage {message.stage} needs its inputs' shapes from stage {message.stage - 1},"
                " whose rank does not exist in a fake job; expected a rank that has stage 0"
            )
        data = np.empty(size[0], np.uint8)
        self._group.recv(data, tag=_SPECS + message.stage, group_src=source)
        return load(data.data)

    # ------------------------------------------------------------------ sending

    def send(self, action: Action, arrays: Sequence[Array | None]) -> None:
        """Pass the results of ``action`` to the stage that needs them."""
        message = message_of(action, self._table)
        if message is None:
            return
        target = self._table.rank_of[message.stage]
        if target == self._rank:
            self._local[message] = tuple(arrays)
            if not message.is_gradient:
                self._inputs.setdefault(message.stage, self._outputs[action.stage])
            return
        if not message.is_gradient and message.stage not in self._informed:
            self._informed.add(message.stage)
            self._send_specs(message.stage, self._outputs[action.stage], target)
        for array in arrays:
            if array is not None:
                self._isend(array, target, _PAYLOAD)
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()

    def _send_specs(self, stage: int, specs: Specs, target: int) -> None:
        data = np.frombuffer(dump(specs).data, np.uint8)
        self._isend(np.array([data.size]), target, _SPECS + stage)
        self._isend(data, target, _SPECS + stage)

    def _isend(self, array: Array, target: int, tag: int) -> None:
        self._sends.append(self._group.isend(array, tag=tag, group_dst=target))

    def finish(self) -> None:
        """Wait until all sends are complete and their arrays may be reused."""
        while self._sends:
            self._sends.popleft().wait()
