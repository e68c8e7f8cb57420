"""``CallSpec``: what a call is, in one value and one order of its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshlib._native import calls as native
from meshlib._recording.recorder import COLLECTIVE
from transport._call import NO_ROOT, Call, Kind
from transport._communicators.base import Communicator

Run = Callable[[Communicator[Any], Call], Any]
"""What a call does at its turn; what it returns is the call's result."""


class CallSpec:
    """The description of a call: ``run`` is called at its turn, with the communicator for
    ``device``.

    The fields ``elements`` to ``extra`` must be equal on every member (see ``CallHeader``);
    ``dtype`` and ``op`` are wire codes. Records show ``nbytes``. A ``peer`` (a group rank or
    ``ANY_SOURCE``) marks a point-to-point call, whose tag is ``extra``. Immutable.
    """

    __slots__ = (
        "device",
        "dtype",
        "elements",
        "extra",
        "kind",
        "nbytes",
        "op",
        "peer",
        "root",
        "run",
    )

    def __init__(
        self,
        kind: Kind,
        run: Run,
        elements: int = 0,
        root: int = NO_ROOT,
        dtype: int = 0,
        op: int = 0,
        extra: int = 0,
        nbytes: int = 0,
        device: str = "cpu",
        peer: int = COLLECTIVE,
    ) -> None:
        # The compiled core has this, too: making one is a part of every call.
        self.kind: Kind = kind
        self.run: Run = run
        self.elements: int = elements
        self.root: int = root
        self.dtype: int = dtype
        self.op: int = op
        self.extra: int = extra
        self.nbytes: int = nbytes
        self.device: str = device
        self.peer: int = peer


PythonsCallSpec = CallSpec
if native is not None and not TYPE_CHECKING:
    CallSpec = native.CallSpec
