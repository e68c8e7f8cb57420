"""Messages between two members inside ``jax.jit``, and those of their derivatives.

A send has a result of its own and one on the other member; so it goes with all derivatives. What
is sent back and forth for them depends on what *both* members compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from meshlib.groups.process_group import ProcessGroup
from meshlib.jit.collective import InJit
from meshlib.jit.kinds import HostSide, SameShape, flat_of
from meshlib.jit.program import HostArray
from transport.call import Kind


@dataclass(frozen=True)
class _OneToOne(SameShape):
    """A message to or from ``peer`` under ``tag``.

    Derivatives send messages of their own, as many as the loss asks for. Both members take them
    alike, so ``derivation`` (t for a tangent, c for a transpose, for each one that was taken) says
    which belong together; each has a group beside, whose tags are not those of the program.
    """

    anchored = True

    peer: int
    tag: int
    derivation: str = ""

    @property
    def carrier(self) -> ProcessGroup:
        """The group that the message goes through."""
        if not self.derivation:
            return self.group
        desc = f"{self.group.group_desc}, derivative {self.derivation}"
        return self.group.companion(f"jit-derivative-{self.derivation}", desc)

    def differential(self) -> InJit:
        return replace(self, derivation=f"{self.derivation}t")

    def transposed(self) -> InJit:
        kind = _TRANSPOSED[type(self)]
        return kind(self.group, self.peer, self.tag, f"{self.derivation}c")


@dataclass(frozen=True)
class Send(_OneToOne):
    """Sends the operand to ``peer``, and returns it."""

    kind = Kind.SEND

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.peer, self.tag


@dataclass(frozen=True)
class Receive(_OneToOne):
    """Receives from ``peer``; the operand is a template whose values do not matter."""

    kind = Kind.RECV

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.peer, self.tag


@dataclass(frozen=True)
class _ReceiveAndAdd(Receive):
    """The transpose of a send, whose operand goes two ways: to its result and to the peer."""

    is_direct = False

    def host_side(self, x: jax.ShapeDtypeStruct) -> HostSide:
        receive = super().host_side(x)

        def call(output: HostArray, _: HostArray) -> None:
            received = np.empty_like(output)
            receive(received, received)
            output += received

        return call


@dataclass(frozen=True)
class _SendAndForget(Send):
    """The transpose of a receive: the cotangent goes to the peer, nothing to the template."""

    @property
    def has_result(self) -> bool:
        return False


_TRANSPOSED: dict[type[_OneToOne], type[_OneToOne]] = {
    Send: _ReceiveAndAdd,
    _ReceiveAndAdd: Send,
    Receive: _SendAndForget,
    _SendAndForget: Receive,
}
