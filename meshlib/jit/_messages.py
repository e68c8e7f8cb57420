"""Messages between two members inside ``jax.jit``, and their derivatives.

A send has a result on this member and one on the peer, and so do its derivatives. The messages of
a derivative therefore depend on the computations of *both* members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from meshlib._collectives.group_of_ranks import call_queue_of, resolve_rank
from meshlib._collectives.point_to_point import check_tag
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import Group, derived_group, resolve_group
from meshlib.jit._arguments import prepare
from meshlib.jit._collective import InJit, bind
from meshlib.jit._kinds import HostSide, SameShape, flat_of
from meshlib.jit._xla.direct import DirectCall
from meshlib.jit._xla.host_calls import host_call, untransformed
from meshlib.jit._xla.program import HostArray, HostFunction
from transport._calls.codes import dtype_code
from transport._calls.header import Kind


@dataclass(frozen=True)
class _OneToOne(SameShape):
    """A message to or from ``peer`` under ``tag``.

    Derivatives send messages of their own. ``derivation`` is the sequence of transformations that
    produced the message: a t for each tangent and a c for each transpose. Both members apply the
    same sequence. Each ``derivation`` has a derived group, so its tags do not mix with the
    program's.
    """

    anchored = True

    peer: int
    tag: int
    derivation: str = ""

    @property
    def carrier(self) -> ProcessGroup:
        """The group that carries the message."""
        if not self.derivation:
            return self.group
        desc = f"{self.group.group_desc}, derivative {self.derivation}"
        return derived_group(self.group, f"jit-derivative-{self.derivation}", desc)

    def differential(self) -> InJit:
        return replace(self, derivation=f"{self.derivation}t")

    def transposed(self) -> InJit:
        kind = _TRANSPOSED[type(self)]
        return kind(self.group, self.peer, self.tag, f"{self.derivation}c")


@dataclass(frozen=True)
class Send(_OneToOne):
    """A send of the operand to ``peer``, which returns the operand."""

    kind = Kind.SEND
    in_place: ClassVar[bool] = False
    only_sends: ClassVar[bool] = True

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.peer, self.tag


@dataclass(frozen=True)
class Receive(_OneToOne):
    """A receive from ``peer``; the operand is a template whose values do not matter."""

    kind = Kind.RECV
    is_template: ClassVar[bool] = True

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.peer, self.tag


@dataclass(frozen=True)
class _ReceiveAndAdd(Receive):
    """The transpose of a send: adds the peer's cotangent to that of the send's result."""

    is_direct = is_template = False

    def host_side(self, x: jax.ShapeDtypeStruct) -> HostSide:
        receive = super().host_side(x)

        def call(output: HostArray, _: HostArray) -> None:
            received = np.empty_like(output)
            receive(received, received)
            output += received

        return call


@dataclass(frozen=True)
class _SendAndForget(Send):
    """The transpose of a receive: sends the cotangent to the peer; the template gets zeros."""

    def returned(self, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)


@dataclass(frozen=True)
class SendReceive(InJit):
    """A send of the operand to ``dst``, and a receive from ``src`` in either order.

    The transpose sends in the opposite direction.
    """

    anchored = True

    dst: int
    src: int
    tag: int
    other: tuple[tuple[int, ...], str] | None = None
    """The shape and dtype of the received array; None: those of the operand."""
    back: tuple[tuple[int, ...], str] | None = None
    """The shape and dtype of the operand if ``other`` is not None."""
    derivation: str = ""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if self.other is None else jax.ShapeDtypeStruct(*self.other)

    def _halves(self) -> tuple[Send, Receive]:
        group, tag, derivation = self.group, self.tag, self.derivation
        return Send(group, self.dst, tag, derivation), Receive(group, self.src, tag, derivation)

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        send, receive = self._halves()
        sending, receiving = send.call_spec(x), receive.call_spec(self.result(x))
        carrier = call_queue_of(send.carrier)

        def call(output: HostArray, x: HostArray) -> None:
            work = carrier.issue(sending(x, x), async_op=True)
            carrier.issue(receiving(output, output))
            work.wait()

        return lambda outputs, inputs, _: call(outputs[0], inputs[0])

    def direct(self, x: jax.ShapeDtypeStruct) -> DirectCall | None:
        send, receive = self._halves()
        sent, received = send.direct(x), receive.direct(self.result(x))
        if sent is None or received is None:
            return None
        # A receive has no operand of its own.
        whole = received._replace(operand=sent.operand, in_place=False)
        return whole._replace(sending=sent._replace(result=received.result))

    def differential(self) -> InJit:
        return replace(self, derivation=f"{self.derivation}t")

    def transposed(self) -> InJit:
        derivation = f"{self.derivation}c"
        return replace(
            self,
            dst=self.src,
            src=self.dst,
            other=self.back,
            back=self.other,
            derivation=derivation,
        )

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        if self.other is not None:
            raise NotImplementedError("sendrecv of two shapes cannot be inside of jax.vmap")
        return x, dim


_TRANSPOSED: dict[type[_OneToOne], type[_OneToOne]] = {
    Send: _ReceiveAndAdd,
    _ReceiveAndAdd: Send,
    Receive: _SendAndForget,
    _SendAndForget: Receive,
}


def send(
    x: Any,
    dst: int | None = None,
    group: Group = None,
    *,
    tag: int = 0,
    group_dst: int | None = None,
) -> jax.Array:
    """Send ``x`` to ``dst`` (global) or ``group_dst``, which calls ``recv``; return ``x``.

    For programs that differ by rank; if all ranks run one program, use ``permute``, which cannot
    deadlock. Two ranks that send large arrays to each other before either receives block until
    the deadline. For derivatives, use the returned array: its cotangent is added to the receiver's.
    """
    x, calls = prepare(x, group)
    peer = resolve_rank(resolve_group(group), dst, group_dst, "dst")
    check_tag(tag)
    return bind(Send(calls, peer, tag), x)


def recv(
    like: Any,
    src: int | None = None,
    group: Group = None,
    *,
    tag: int = 0,
    group_src: int | None = None,
) -> jax.Array:
    """Receive from ``src`` (global) or ``group_src`` an array of the shape and dtype of ``like``.

    The transpose sends the cotangent back. For that, ``like`` must depend on the variables of
    differentiation (its values do not matter); otherwise JAX treats the result as a constant.
    """
    like, calls = prepare(like, group)
    peer = resolve_rank(resolve_group(group), src, group_src, "src")
    check_tag(tag)
    return bind(Receive(calls, peer, tag), like)


def recv_anysource(like: Any, group: Group = None, *, tag: int = 0) -> tuple[jax.Array, jax.Array]:
    """Receive an array like ``like`` from any member; return it and the sender's global rank.

    The rank is an int32 of shape (). The sender calls ``send``. If several messages have arrived,
    their order may differ from run to run. Differentiation and ``vmap`` raise NotImplementedError;
    ``recv``, which names the source, supports both.
    """
    what = "meshlib.jit.recv_anysource"
    like = untransformed(like, what, "Name the source: meshlib.jit.recv has derivatives")
    like, calls = prepare(like, group)
    check_tag(tag)

    def receive(outputs: Sequence[HostArray], *_: object) -> None:
        array, source = outputs
        source[...] = calls.recv(array, tag=tag)

    results = [jax.ShapeDtypeStruct(like.shape, like.dtype), jax.ShapeDtypeStruct((), np.int32)]
    # The template is an operand, so that JAX's transformations of the template reach the call.
    array, source = host_call(
        receive, results, like.reshape(-1)[:1], ordered=True, reads=False, on_gpu=True, group=calls
    )
    return array, source


def sendrecv(
    x: Any,
    dst: int | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    like: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    group_src: int | None = None,
) -> jax.Array:
    """Send ``x`` to ``dst`` and return an array received from ``src``.

    Ranks are global, or group ranks in ``group_dst`` and ``group_src``. Neither direction waits for
    the other, so members may exchange arrays of any size. Only the participants call it; a peer may
    also call ``send`` and ``recv``. The received array has the shape and dtype of ``like``, by
    default of ``x``. The transpose sends the cotangent to ``src`` and receives one from ``dst``.
    """
    x, calls = prepare(x, group)
    base = resolve_group(group)
    to, origin = (
        resolve_rank(base, dst, group_dst, "dst"),
        resolve_rank(base, src, group_src, "src"),
    )
    check_tag(tag)
    received = sent = None
    if like is not None and (like.shape, like.dtype) != (x.shape, x.dtype):
        dtype_code(like.dtype)
        received, sent = ((tuple(one.shape), str(one.dtype)) for one in (like, x))
    return bind(SendReceive(calls, to, origin, tag, received, sent), x)
