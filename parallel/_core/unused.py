"""Parameters without a gradient: which are allowed, and which have one on no rank at all."""

from __future__ import annotations

from collections.abc import Sequence

import meshlib as dist
from meshlib import ProcessGroup
from parallel._arrays import Namespace


class UnusedParameters:
    """The rules about unused parameters that one reducer holds to.

    Parameters are numbers; ``paths`` names them. ``find``: they may go unused in any pass.
    ``static``: what goes unused in the first pass, and nothing else, may in all others.
    """

    def __init__(
        self, paths: Sequence[str], group: ProcessGroup, *, find: bool, static: bool
    ) -> None:
        self._paths = paths
        self._group = group
        self._find = find
        self._static = static
        self._known: set[int] | None = None  # unused here, once a first pass has shown it
        self._absent: set[int] | None = None  # used nowhere, likewise

    def forget(self) -> None:
        """Let the next pass be the first one again: the parameters have changed."""
        self._known = self._absent = None

    def check(self, unused: set[int], *, whole_pass: bool) -> None:
        """Raise RuntimeError when ``unused`` parameters were not to be expected.

        Before the pass only those are known that the forward did not use; after it, all.
        """
        if self._known is not None:
            changed = unused ^ self._known if whole_pass else unused - self._known
            if changed:
                raise RuntimeError(
                    "static_graph=True, but these parameters are used in one pass and not in "
                    f"another on rank {self._group.rank()} of {self._group}: {self._name(changed)}"
                )
        elif unused and not (self._find or self._static):
            raise RuntimeError(
                f"these parameters got no gradient on rank {self._group.rank()} of {self._group}: "
                f"{self._name(unused)}. Use them in the forward pass, freeze them "
                "(requires_grad=False) on all ranks, or pass find_unused_parameters=True"
            )

    def learn(self, unused: set[int]) -> None:
        """Note what a pass of this rank's own left unused."""
        if self._static and self._known is None:
            self._known = set(unused)

    def absent_everywhere(self, present: Sequence[bool], xp: Namespace) -> set[int]:
        """Return the parameters that no rank has a gradient for: theirs is left as it is.

        ``present`` says which this rank has. A collective, unless the answer is known.
        """
        if self._absent is not None:
            return self._absent
        if not (self._find or self._static):
            return set()
        flags = xp.asarray(present, dtype="uint8")
        self._group.all_reduce(flags, op=dist.ReduceOp.MAX)
        absent = {number for number, flag in enumerate(flags.tolist()) if not flag}
        if self._static:
            self._absent = absent
        return absent

    def _name(self, numbers: set[int]) -> str:
        return ", ".join(self._paths[number] for number in sorted(numbers))
