"""What ranks send each other in a step: planned from the table, received ahead of need.

Between two ranks messages come in the order in which they are sent, and the receiver knows that
order from the sender's row of the table: so it may begin each receive before the message is there,
and nobody waits for anything but what the table makes it wait for. Sends never wait.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshlib import ProcessGroup, Work
from parallel.arrays import Array
from parallel.pipeline.actions import Action, Kind
from parallel.pipeline.specs import Spec, Specs
from parallel.pipeline.table import Table

_PAYLOAD = 0x7069_7065
_SPECS = _PAYLOAD + 1
AHEAD = 2
"""So many actions before its use a message's receive begins."""


class Message(NamedTuple):
    """What stage ``stage`` needs for a microbatch: its input, or its output's gradient."""

    stage: int
    is_gradient: bool
    microbatch: int


def message_for(action: Action, table: Table) -> Message | None:
    """Return what another stage gives ``action``, on whichever rank that is."""
    if action.kind is Kind.FORWARD:
        return Message(action.stage, False, action.microbatch) if action.stage else None
    if action.kind.sends_back and action.stage < table.stages - 1:
        return Message(action.stage, True, action.microbatch)
    return None


def message_of(action: Action, table: Table) -> Message | None:
    """Return what ``action`` gives another stage, on whichever rank that is."""
    if action.kind is Kind.FORWARD:
        if action.stage < table.stages - 1:
            return Message(action.stage + 1, False, action.microbatch)
    elif action.kind.sends_back and action.stage:
        return Message(action.stage - 1, True, action.microbatch)
    return None


@dataclass
class Agreement:
    """What is known of the inputs and outputs of this rank's stages, and what others were told.

    Completed with the first microbatch, and kept from step to step.
    """

    inputs: dict[int, Specs] = field(default_factory=dict[int, Specs])
    outputs: dict[int, Specs] = field(default_factory=dict[int, Specs])
    told: set[int] = field(default_factory=set[int])


class Messages:
    """The messages of one rank in one step.

    ``empty(stage, spec)`` makes an array to receive into. Without ``training`` there are forwards
    alone.
    """

    def __init__(
        self,
        table: Table,
        group: ProcessGroup,
        agreement: Agreement,
        empty: Callable[[int, Spec], Array],
        training: bool,
    ) -> None:
        self._table, self._group, self._empty = table, group, empty
        self._inputs, self._outputs = agreement.inputs, agreement.outputs
        self._told = agreement.told
        self._rank = group.rank()
        self._arrived: dict[Message, tuple[list[Array], list[Work[Any]]]] = {}
        self._here: dict[Message, tuple[Array | None, ...]] = {}
        self._sends: deque[Work[Any]] = deque()
        self._from: dict[int, deque[Message]] = {}
        for source, actions in enumerate(table.ranks):
            if source == self._rank:
                continue
            sent = (
                message_of(action, table)
                for action in actions
                if training or action.kind is Kind.FORWARD
            )
            self._from[source] = deque(
                message
                for message in sent
                if message is not None and table.rank_of[message.stage] == self._rank
            )

    # ------------------------------------------------------------------ receiving

    def expect(self, action: Action) -> None:
        """Begin to receive what ``action`` needs, if that is known by now."""
        message = self._from_elsewhere(action)
        if message is not None:
            self._post(message, may_ask=False)

    def take(self, action: Action) -> tuple[Array | None, ...]:
        """Wait for what ``action`` needs and return it."""
        message = message_for(action, self._table)
        assert message is not None, "who needs nothing takes nothing"
        if message in self._here:
            return self._here.pop(message)
        self._post(message, may_ask=True)
        arrays, works = self._arrived.pop(message)
        for work in works:
            work.wait()
        if not message.is_gradient:
            return tuple(arrays)
        coming = iter(arrays)
        specs = self._outputs[message.stage]
        return tuple(next(coming) if spec.is_trained else None for spec in specs)

    def _from_elsewhere(self, action: Action) -> Message | None:
        message = message_for(action, self._table)
        if message is None or self._source(message) == self._rank:
            return None
        return message

    def _source(self, message: Message) -> int:
        return self._table.rank_of[message.stage + (1 if message.is_gradient else -1)]

    def _post(self, message: Message, *, may_ask: bool) -> None:
        """Begin the receive of ``message``, and of those that come before it from there."""
        if message in self._arrived:
            return
        source = self._source(message)
        queue = self._from[source]
        while message not in self._arrived:
            following = queue[0]
            specs = self._specs(following, may_ask)
            if specs is None:
                return
            queue.popleft()
            arrays = [self._empty(following.stage, spec) for spec in specs]
            works = [
                work
                for array in arrays
                if (work := self._group.irecv(array, tag=_PAYLOAD, group_src=source)) is not None
            ]
            self._arrived[following] = arrays, works

    def _specs(self, message: Message, may_ask: bool) -> Specs | None:
        if message.is_gradient:
            outputs = self._outputs.get(message.stage)
            return None if outputs is None else tuple(s for s in outputs if s.is_trained)
        if message.stage not in self._inputs and may_ask:
            self._inputs[message.stage] = self._ask(message)
        return self._inputs.get(message.stage)

    def _ask(self, message: Message) -> Specs:
        source = self._source(message)
        size = np.zeros(1, np.int64)
        self._group.recv(size, tag=_SPECS + message.stage, group_src=source)
        data = np.empty(size[0], np.uint8)
        self._group.recv(data, tag=_SPECS + message.stage, group_src=source)
        return pickle.loads(data.tobytes())

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
        data = np.frombuffer(pickle.dumps(specs), np.uint8)
        self._send(np.array([data.size]), target, _SPECS + stage)
        self._send(data, target, _SPECS + stage)

    def _send(self, array: Array, target: int, tag: int) -> None:
        work = self._group.isend(array, tag=tag, group_dst=target)
        if work is not None:
            self._sends.append(work)

    def finish(self) -> None:
        """Wait until all that was sent may be reused."""
        while self._sends:
            self._sends.popleft().wait()
