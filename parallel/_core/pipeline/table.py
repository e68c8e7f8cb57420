"""A schedule as data: for each rank its actions in order, checked when the table is made."""

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
    """The kind of a computation. Backward is one action, or two: the second may come much later."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the input and of the parameters."""
    INPUT = "I"
    """The gradient of the input alone, for which the stage before waits."""
    WEIGHT = "W"
    """The gradients of the parameters alone, for which no stage waits."""

    @property
    def sends_back(self) -> bool:
        """True if it gives the stage before its gradient."""
        return self is ActionKind.BACKWARD or self is ActionKind.INPUT


class Action(NamedTuple):
    """One computation: of ``stage``, of this ``kind``, on ``microbatch``; written ``0F3``."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that ``str`` writes so; raise ValueError for anything else."""
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"expected an action such as 0F3 (stage, one of F B I W, microbatch), "
                f"got {describe(text)}"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def needs(self, last_stage: int, split: bool) -> list[Action]:
        """Return the actions that must have ended before this one begins.

        ``split``: whether the next stage's backward of this microbatch is in two halves.
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
    """The actions of each rank, in order; ``simulate`` derives the times from it.

    Args:
        ranks: For each rank of the pipeline its actions, in their order.
        name: The table's name in messages.

    Raises:
        ValueError: For a table that no pipeline can run; it names the first error. Errors are a
            missing stage or microbatch, and an action that is missing, comes twice, is on two
            ranks, or is both whole and in halves. Another is an order in which ranks wait for each
            other forever.
    """

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "table"
    stages: int = field(init=False)
    microbatches: int = field(init=False)
    rank_of: tuple[int, ...] = field(init=False)
    """For each stage the rank that has it."""
    _halves: frozenset[tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        everything = [action for actions in self.ranks for action in actions]
        if not everything:
            raise ValueError(f"{self.name}: there are no actions")
        put = object.__setattr__
        put(self, "stages", 1 + max(action.stage for action in everything))
        put(self, "microbatches", 1 + max(action.microbatch for action in everything))
        put(self, "rank_of", self._place())
        halves = ((a.stage, a.microbatch) for a in everything if a.kind is ActionKind.INPUT)
        put(self, "_halves", frozenset(halves))
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
                        f"{self.name}: {action} is on rank {rank}, other actions of stage "
                        f"{action.stage} on rank {ranks[action.stage]}; a stage has one rank"
                    )
        missing = [stage for stage in range(self.stages) if stage not in ranks]
        if missing:
            raise ValueError(
                f"{self.name}: there are actions of stage {self.stages - 1}, and none of {missing}"
            )
        return tuple(ranks[stage] for stage in range(self.stages))

    def _check_whole(self, everything: Sequence[Action]) -> None:
        """Raise unless each stage does each microbatch once: F and B, or F, I and W."""
        there: set[Action] = set()
        for action in everything:
            if action in there:
                raise ValueError(f"{self.name}: {action} is there twice")
            there.add(action)
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                kinds = {kind for kind in ActionKind if Action(stage, kind, microbatch) in there}
                if kinds not in (
                    {ActionKind.FORWARD, ActionKind.BACKWARD},
                    set(ActionKind) - {ActionKind.BACKWARD},
                ):
                    raise ValueError(
                        f"{self.name}: stage {stage} has {sorted(map(str, kinds)) or 'nothing'} of"
                        f" microbatch {microbatch}; expected F and B, or F, I and W"
                    )

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must have ended before ``action`` begins."""
        next_is_split = (action.stage + 1, action.microbatch) in self._halves
        return action.needs(self.stages - 1, next_is_split)

    def in_time(self) -> list[tuple[int, Action]]:
        """Return all actions, with their ranks, in an order in which they can be done.

        Raises ValueError, naming what each rank waits for, if there is none.
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
            raise ValueError(f"{self.name}: this order has no end: {'; '.join(stuck)}")
        return order

    @property
    def digest(self) -> str:
        """A hash of the table, the same for equal tables only."""
        return hashlib.sha256(self.to_csv().encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ files

    def to_csv(self) -> str:
        """Return the table as text: a line a rank, its actions separated by commas."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    @classmethod
    def from_csv(cls, source: str | Path, name: str | None = None) -> Self:
        """Return the table in a file, in the notation of torch's compute-only CSV.

        Each line is a rank. A cell is an action, such as ``0F3``, or empty where the rank idles.
        Actions that torch overlaps, as in ``(0F3;1B2)OVERLAP_F_B``, run one after the other. A
        ``0REDUCE_GRAD`` is skipped, because the reduction follows a stage's last action anyway.

        Args:
            source: The path of the file, or its text (which has a newline or a comma).
            name: The table's name in messages; by default the file's name.

        Returns:
            The table, checked.

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
