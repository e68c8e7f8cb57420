"""Schedules as tables of actions, which are validated at construction."""

from __future__ import annotations

import csv
import enum
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from parallel._checks import describe

_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")
_NO_COMPUTATION = re.compile(r"\d+REDUCE_GRAD")
_OVERLAPPED = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")


class ActionKind(enum.StrEnum):
    """The kind of a computation. Backward is one action (B), or two (I and, later, W)."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the input and of the parameters."""
    INPUT = "I"
    """The gradient of the input only, for which the previous stage waits."""
    WEIGHT = "W"
    """The gradients of the parameters only, for which no stage waits."""

    @property
    def sends_back(self) -> bool:
        """True if the action sends a gradient to the previous stage."""
        return self is ActionKind.BACKWARD or self is ActionKind.INPUT


class Action(NamedTuple):
    """A computation of a stage on a microbatch; its text form is ``0F3``."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action with this text form; raise ValueError for any other text."""
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"expected an action such as 0F3 (stage, one of F B I W, microbatch), "
                f"got {describe(text)}"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def needs(self, last_stage: int, split: bool) -> list[Action]:
        """Return the actions that must end before this one begins.

        ``split`` is True if the next stage's backward of this microbatch is in two halves.
        """
        stage, kind, microbatch = self
        if kind is ActionKind.FORWARD:
            return [Action(stage - 1, ActionKind.FORWARD, microbatch)] if stage else []
        if kind is ActionKind.WEIGHT:
            return [Action(stage, ActionKind.INPUT, microbatch)]
        before = [Action(stage, ActionKind.FORWARD, microbatch)]
        if stage < last_stage:
            before.append(
                Action(stage + 1, ActionKind.INPUT if split else ActionKind.BACKWARD, microbatch)
            )
        return before


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule: the actions of each rank, in order. ``simulate`` returns their times.

    Args:
        ranks: The actions of each rank of the pipeline, in order.
        name: The table's name in messages.

    Raises:
        ValueError: For a table that no pipeline can run, naming the first error: a missing stage,
            microbatch or action, or an action that is listed twice. Other errors are a stage on two
            ranks, a backward that is both whole and in halves, and an order that deadlocks.
    """

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "table"
    stages: int = field(init=False)
    microbatches: int = field(init=False)
    rank_of: tuple[int, ...] = field(init=False)
    """The rank of each stage."""
    _halves: frozenset[tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        everything = [action for actions in self.ranks for action in actions]
        if not everything:
            raise ValueError(f"{self.name} has no actions")
        set_field = object.__setattr__
        set_field(self, "stages", 1 + max(action.stage for action in everything))
        set_field(self, "microbatches", 1 + max(action.microbatch for action in everything))
        set_field(self, "rank_of", self._place())
        halves = ((a.stage, a.microbatch) for a in everything if a.kind is ActionKind.INPUT)
        set_field(self, "_halves", frozenset(halves))
        self._check_whole(everything)
        self.in_time()

    def _place(self) -> tuple[int, ...]:
        ranks: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            if not actions:
                raise ValueError(f"{self.name}: rank {rank} has no actions")
            for action in actions:
                if ranks.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"{self.name}: {action} is on rank {rank}, but other actions of stage "
                        f"{action.stage} are on rank {ranks[action.stage]}; expected one rank"
                    )
        missing = [stage for stage in range(self.stages) if stage not in ranks]
        if missing:
            raise ValueError(
                f"{self.name} has actions of stage {self.stages - 1}, but none of stages {missing}"
            )
        return tuple(ranks[stage] for stage in range(self.stages))

    def _check_whole(self, everything: Sequence[Action]) -> None:
        """Raise unless each stage has F and B, or F, I and W, once for each microbatch."""
        found: set[Action] = set()
        for action in everything:
            if action in found:
                raise ValueError(f"{self.name} has {action} twice")
            found.add(action)
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                kinds = {kind for kind in ActionKind if Action(stage, kind, microbatch) in found}
                if kinds not in (
                    {ActionKind.FORWARD, ActionKind.BACKWARD},
                    set(ActionKind) - {ActionKind.BACKWARD},
                ):
                    raise ValueError(
                        f"{self.name}: stage {stage} has {sorted(map(str, kinds)) or 'nothing'} of"
                        f" microbatch {microbatch}; expected F and B, or F, I and W"
                    )

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must end before ``action`` begins."""
        next_is_split = (action.stage + 1, action.microbatch) in self._halves
        return action.needs(self.stages - 1, next_is_split)

    def in_time(self) -> list[tuple[int, Action]]:
        """Return all (rank, action) in an order in which they can run.

        Raises ValueError, naming the actions that each rank waits for, if the table deadlocks.
        """
        at = [0] * len(self.ranks)
        done: set[Action] = set()
        order: list[tuple[int, Action]] = []
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.ranks):
                while at[rank] < len(actions) and done.issuperset(self.needs(actions[at[rank]])):
                    order.append((rank, actions[at[rank]]))
                    done.add(actions[at[rank]])
                    at[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at {actions[at[rank]]}, which needs "
            + " and ".join(str(need) for need in self.needs(actions[at[rank]]) if need not in done)
            for rank, actions in enumerate(self.ranks)
            if at[rank] < len(actions)
        ]
        if stuck:
            raise ValueError(f"{self.name} deadlocks: {'; '.join(stuck)}")
        return order

    @property
    def digest(self) -> str:
        """A hash of the table, to compare tables between ranks."""
        return hashlib.sha256(self.to_csv().encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ files

    def to_csv(self) -> str:
        """Return the table as text: a line for each rank, with actions separated by commas."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    @classmethod
    def from_csv(cls, source: str | Path, name: str | None = None) -> Self:
        """Read a table from CSV in torch's compute-only format.

        Each line is a rank. A cell is an action, such as ``0F3``, or empty while the rank is idle.
        Actions that torch overlaps, as in ``(0F3;1B2)OVERLAP_F_B``, run in sequence.
        ``0REDUCE_GRAD`` is skipped, because the reduction always follows a stage's last action.

        Args:
            source: The path of the file, or the CSV text itself, which has a newline or a comma.
            name: The table's name in messages; by default the file's name.

        Returns:
            The table.

        Raises:
            ValueError: For a cell that is not a computation, naming line and column, or a table
                that no pipeline can run.
            OSError: When the file cannot be read.
        """
        is_text = isinstance(source, str) and ("\n" in source or "," in source)
        label = name or ("the table" if is_text else str(source))
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
        rows: list[tuple[Action, ...]] = []
        for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
            row: list[Action] = []
            for column, cell in enumerate(cells, 1):
                try:
                    row += _actions(cell)
                except ValueError as error:
                    place = f"{label}, line {number}, column {column}"
                    raise ValueError(f"{place}: {error}") from None
            if row:
                rows.append(tuple(row))
        return cls(tuple(rows), label)


def _actions(cell: str) -> Iterable[Action]:
    cell = cell.strip()
    if not cell or _NO_COMPUTATION.fullmatch(cell):
        return []
    overlapped = _OVERLAPPED.fullmatch(cell)
    return map(Action.parse, [cell] if overlapped is None else overlapped.groups())
