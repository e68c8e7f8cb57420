"""What a table means for one rank: its actions, and the messages that come to it."""

from __future__ import annotations

from typing import NamedTuple

from parallel.pipeline.tables.actions import Action, Kind
from parallel.pipeline.tables.table import Table


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


class Plan:
    """One rank's part of a table; without ``training``, of its forwards alone. Made once.

    ``row`` are its actions, ``last`` for each stage the one with which its gradients are complete,
    ``coming`` for each other rank the messages from there, in the order in which they are sent,
    ``needed`` for each action that waits for one of them which.
    """

    def __init__(self, table: Table, rank: int, training: bool) -> None:
        self.table = table
        self.rank = rank
        self.training = training

        def done(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(a for a in actions if training or a.kind is Kind.FORWARD)

        self.row: tuple[Action, ...] = done(table.ranks[rank])
        self.last: dict[int, Action] = {
            a.stage: a for a in self.row if a.kind in (Kind.BACKWARD, Kind.WEIGHT)
        }
        self.needed: dict[Action, Message] = {}
        self.coming: dict[int, tuple[Message, ...]] = {
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
