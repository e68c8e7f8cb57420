"""Calls from compiled XLA programs to Python, on the program's own buffers.

This module uses the custom call behind ``jax.experimental.buffer_callback``, which copies in
neither direction, or the handler of ``meshlib/_native/jit``. Each ordered call passes an XLA token
to the next. The tokens pass through ``jit``, ``scan``, ``while`` and ``cond``, and from one
dispatched computation to the next. So XLA keeps the calls in the order of the Python program on
every rank.

JAX has separate tokens for each thread, so the order holds within one thread. Hence only one
thread may run a group's programs; programs of other threads are refused before they begin.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.core
import jax.ffi
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshlib._groups.process_group import ProcessGroup
from meshlib._job.thread_rank import thread_rank
from meshlib.jit._xla.call_site import CallSite
from meshlib.jit._xla.device_buffers import on_program_stream
from meshlib.jit._xla.direct import DirectCall, DirectCallback, handler
from meshlib.jit._xla.program import Callback, HostFunction, Program
from transport._environment import ANY_JAX

_TARGETS = {
    "cpu": "xla_buffer_python_cpu_callback",
    "cuda": "xla_buffer_python_gpu_callback",
}


OLDEST, BEYOND = (0, 8, 2), (0, 13)
"""The range of JAX versions that tests cover: from ``OLDEST``, below ``BEYOND``."""


def check_version(version: tuple[int, ...]) -> None:
    """Raise RuntimeError for a version of JAX that is not tested, unless MESHLIB_ANY_JAX is 1."""
    if not OLDEST <= version < BEYOND and os.environ.get(ANY_JAX, "0") != "1":
        here, oldest, beyond = (".".join(map(str, n)) for n in (version, OLDEST, BEYOND))
        raise RuntimeError(
            f"JAX is version {here}; meshlib.jit uses private parts of JAX and is tested with"
            f" versions from {oldest} on and below {beyond}. Install one of those, or set"
            f" {ANY_JAX}=1 to try this one"
        )


@cache
def internals() -> ModuleType:
    """Return ``meshlib.jit._xla.internals``, after checking JAX's version (``check_version``).

    The first call of any kind imports it, because importing ``meshlib.jit`` must not change JAX.
    From then on, programs with calls check their thread.
    """
    check_version(jax.__version_info__)
    from meshlib.jit._xla import internals

    internals.run_alone(_host_call_p)
    internals.watch_programs(_enter)
    return internals


def _enter(kept: Iterable[object]) -> None:
    for one in kept:
        if isinstance(one, Program):
            one.enter()


_host_call_p = Primitive("meshlib_host_call")
_host_call_p.multiple_results = True


def is_tracing() -> bool:
    """Return whether the calling thread is inside a JAX transformation."""
    return not internals().is_top_level()


def is_compiling() -> bool:
    """Return whether the calling thread's computations are being traced for compilation."""
    return is_tracing() and isinstance(jax.lax.add(np.float32(0), np.float32(0)), jax.core.Tracer)


def host_call(
    function: HostFunction,
    results: Iterable[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    ordered: bool,
    aliases: tuple[tuple[int, int], ...] = (),
    reads: bool = True,
    on_gpu: bool = False,
    group: ProcessGroup | None = None,
    direct: DirectCall | None = None,
    site: CallSite | None = None,
) -> list[jax.Array]:
    """Add a call of ``function`` to the program, and return its outputs.

    The call has no derivative and no batching rule; primitives built on it define their own.

    Args:
        function: Called with the outputs, the inputs and the ``Program``. An exception in it ends
            the program.
        results: The outputs' shapes and dtypes.
        operands: The arrays that ``function`` reads.
        ordered: Ordered calls happen one after the other, in the order of the Python program. An
            unordered call happens once its operands are ready, on any thread. So it must not wait
            for another call.
        aliases: Pairs (operand number, result number) that share memory: the output holds the
            operand's values at first.
        reads: If false, ``function`` gets no inputs, because it reads only its outputs.
        on_gpu: Whether the program may be compiled for a GPU. On a GPU, ``function`` gets CuPy
            arrays, and the program's stream is CuPy's current one. Work that ``function`` queues on
            it runs after the program's earlier work and before its later work.
        group: The group on which ``function`` makes calls. The first thread that runs a program
            with calls on the group owns the group. Until that thread ends, other threads may not
            run programs with calls on it.
        direct: A description of an ordered call, which compiled code may make instead of
            ``function``.
        site: The user's line at which compiled code records the call.

    Returns:
        The outputs, of the shapes and dtypes of ``results``.

    Raises:
        jax.errors.JaxRuntimeError: If ``function`` raises. The error appears when the program is
            dispatched or its results are read; its text ends with the exception's type and text.
        NotImplementedError: When the program is compiled for several devices, or for another
            platform.
    """
    avals = tuple(map(internals().shaped, results))
    return _host_call_p.bind(
        *operands,
        function=function,
        avals=avals,
        ordered=ordered,
        aliases=aliases,
        reads=reads,
        on_gpu=on_gpu,
        group=group,
        direct=direct,
        site=site,
    )


@_host_call_p.def_effectful_abstract_eval  # pyright: ignore[reportUntypedFunctionDecorator]
def _abstract_eval(  # pyright: ignore[reportUnusedFunction]
    *_: Any, avals: tuple[Any, ...], ordered: bool, **__: Any
) -> tuple[tuple[Any, ...], set[Any]]:
    return avals, {internals().ORDERED if ordered else internals().UNORDERED}


def _program_of(module: Any) -> Program:
    for callback in module.host_callbacks:
        if isinstance(ours := getattr(callback, "owner", callback), (Callback, DirectCallback)):
            return ours.program
    return Program()


def _lower(
    ctx: Any,
    *operands: Any,
    function: HostFunction,
    avals: tuple[Any, ...],
    ordered: bool,
    aliases: tuple[tuple[int, int], ...],
    reads: bool,
    on_gpu: bool,
    group: ProcessGroup | None,
    direct: DirectCall | None,
    site: CallSite | None,
) -> Any:
    tokens = 1 if ordered else 0
    module = ctx.module_context
    devices = _device_count(module.axis_context)
    if devices > 1:
        raise NotImplementedError(_ONE_DEVICE.format(devices=devices))
    (platform,) = module.platforms
    if platform == "cuda" and not on_gpu:
        _refuse(ctx)
    if platform == "cpu":
        _require_threads(module)
    views = on_program_stream if platform == "cuda" else None
    program = _program_of(module)
    if group is not None:
        program.add_group(group)
        module.add_keepalive(program)  # the executable keeps it alive
    target = _TARGETS[platform]
    if direct is not None and ordered and platform == "cpu" and _has_handler():
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_in]  # type: ignore[union-attr]
        go_on = direct.go_on_at(site)
        callback = DirectCallback(direct, program, function, go_on, structs).compile()
        target, which = _HANDLER, {"call": np.uint64(id(callback))}
    else:
        callback = Callback(function, program, tokens, len(operands), views, reads)
        which = {"index": np.uint64(len(module.host_callbacks))}
    module.add_host_callback(callback)  # the executable keeps it alive
    rule: Any = jax.ffi.ffi_lowering(
        target,
        has_side_effect=True,
        operand_output_aliases={tokens + i: tokens + o for i, o in aliases},
    )
    if not ordered:
        return rule(ctx, *operands, **which)
    return internals().lower_ordered(ctx, rule, operands, **which)


_HANDLER = "meshlib_program_call"


@cache
def _has_handler() -> bool:
    """Register the compiled handler for calls with XLA; return whether that succeeded.

    Call it only after JAX has started: if XLA refused the handler earlier, JAX could not start.
    """
    if handler is None:
        return False
    try:
        jax.ffi.register_ffi_target(_HANDLER, handler, platform="cpu")
    except Exception as error:  # noqa: BLE001 (any refusal by XLA)
        logging.getLogger("meshlib").warning("calls inside jax.jit are made by Python: %s", error)
        return False
    return True


_ONE_DEVICE = (
    "this call inside jax.jit is in a program over {devices} devices of this process; a rank makes"
    " a call once, so the program has to be on one device. Start a process for each device"
    " (meshrun --nproc-per-node), or put the program's arrays on one (jax.device_put), or make the"
    " call outside of jit on the program's results. For one program over the devices of all ranks"
    " see mesh.to_jax()."
)


def _require_threads(module: Any) -> None:
    """Refuse a program of a thread rank on a backend with too few threads for all ranks."""
    rank = thread_rank()
    if rank is None or rank.jax_device is None or module.backend is rank.jax_device.client:
        return
    raise RuntimeError(
        f"rank {rank.rank} has put arrays of this program on a JAX device from before run_ranks."
        f" XLA has too few threads there for {rank.size} ranks that are threads: they would"
        " deadlock. Leave arrays where JAX puts them, or call"
        " jax.extend.backend.get_default_device() inside the rank instead of jax.devices()."
        f" Or set the environment variable NPROC to at least {2 * rank.size} before JAX is first"
        " used."
    )


def _device_count(axis_context: Any) -> int:
    """Return the number of devices of a program with this context (of jit, shard_map, pmap)."""
    known = getattr(axis_context, "num_devices", None)
    if known is not None:
        return known
    mesh = getattr(axis_context, "mesh", None)
    return 1 if mesh is None else mesh.size


def _refuse(ctx: Any, *_: Any, **__: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(
        "this call inside jax.jit does not support the platforms that the program is compiled for"
        f" ({platforms}). A program with meshlib's collectives runs on 'cpu' or on 'cuda', not on"
        " both. With parallel.DistributedDataParallel, it runs on the device of the parameters."
        " Put the program on jax.devices('cpu')[0], or make the calls outside of jit."
    )


mlir.register_lowering(_host_call_p, _refuse)
for _platform in _TARGETS:
    mlir.register_lowering(_host_call_p, _lower, platform=_platform, cacheable=False)


def _same(x: Any, **_: Any) -> Any:
    return x


def _lower_same(_: Any, x: Any, **__: Any) -> list[Any]:
    return [x]


_untransformed_p = Primitive("meshlib_untransformed")
_untransformed_p.def_impl(_same)
_untransformed_p.def_abstract_eval(_same)
mlir.register_lowering(_untransformed_p, _lower_same)


_AVERAGE = (
    "Average the result instead, outside of them: ddp.average(...), or meshlib.jit.all_reduce,"
    " which has derivatives of any order"
)


def untransformed(tree: Any, what: str, instead: str = _AVERAGE) -> Any:
    """Return ``tree`` with arrays that refuse differentiation and batching (``vmap``).

    Args:
        tree: A pytree.
        what: Names the value that cannot be differentiated or batched, for the error.
        instead: A sentence of the error that proposes another way.

    Returns:
        The guarded tree.

    Raises:
        NotImplementedError: While tracing, if an array is differentiated or batched; the error
            names ``what``.
    """

    def guard(leaf: Any) -> Any:
        if not isinstance(leaf, jax.core.Tracer):
            return leaf
        return _untransformed_p.bind(leaf, what=what, instead=instead)

    return jax.tree_util.tree_map(guard, tree)


def _no_derivative(*_: Any, what: str = "this call", instead: str = _AVERAGE, **__: Any) -> Any:
    raise NotImplementedError(
        f"{what} has no derivative: it cannot be inside of jax.grad, jvp, vjp or hessian. {instead}"
    )


def _no_batches(*_: Any, what: str = "this call", **__: Any) -> Any:
    raise NotImplementedError(
        f"{what} cannot be inside of jax.vmap: each rank makes its calls once a step. Put vmap"
        " inside of the loss function, or use scan or a loop"
    )


for _primitive in (_host_call_p, _untransformed_p):
    ad.primitive_jvps[_primitive] = _no_derivative
    batching.primitive_batchers[_primitive] = _no_batches
