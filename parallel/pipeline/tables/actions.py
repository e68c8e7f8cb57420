"""What a rank of a pipeline can do: forward, backward, or one half of backward, of a microbatch."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from parallel.checks import describe


class Kind(enum.StrEnum):
    """What is computed. Backward is one action, or two of which the second may come much later."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the input and of the parameters."""
    INPUT = "I"
    """The gradient of the input alone: what the stage before waits for."""
    WEIGHT = "W"
    """The gradients of the parameters alone: for which nobody waits."""

    @property
    def sends_back(self) -> bool:
        """Whether it gives the stage before its gradient."""
        return self is Kind.BACKWARD or self is Kind.INPUT


_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One computation: of ``stage``, of this ``kind``, on ``microbatch``; written ``0F3``."""

    stage: int
    kind: Kind
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
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    def needs(self, last_stage: int, split: bool) -> list[Action]:
        """Return the actions that must have ended before this one begins.

        ``split``: whether the next stage's backward of this microbatch is in two halves.
        """
        stage, kind, microbatch = self
        if kind is Kind.FORWARD:
            return [Action(stage - 1, Kind.FORWARD, microbatch)] if stage else []
        if kind is Kind.WEIGHT:
            return [Action(stage, Kind.INPUT, microbatch)]
        before = [Action(stage, Kind.FORWARD, microbatch)]
        if stage < last_stage:
            before.append(Action(stage + 1, Kind.INPUT if split else Kind.BACKWARD, microbatch))
        return before
