"""Gradient clipping by the global norm, including sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from zlib import crc32

import numpy as np

from meshlib import ProcessGroup, ReduceOp
from parallel._arrays import Array, namespace
from parallel._checks import check_instance, check_nonnegative, describe
from parallel._core.replicas import check_same, describe_options
from parallel._groups import GroupLike, resolve
from parallel.nn._parameter import Parameter

_LEAST = 1e-6  # as in torch: keeps the factor finite when the norm is 0


def clip_grad_norm_(
    parameters: Iterable[Parameter] | Parameter,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: GroupLike | None = None,
) -> float:
    """Scale all gradients, in place, so that their global norm is at most ``max_norm``.

    Each gradient counts once. For sharded parameters (``fully_shard``, tensor parallel layers on
    a mesh) the shards of all ranks count, with one small all-reduce per set of mesh dims. Other
    parameters must have equal gradients on all ranks; their norm is local. All ranks must call.

    Args:
        parameters: The parameters to clip; one without a gradient counts as zero.
        max_norm: The largest norm allowed.
        norm_type: 2 for the root of the sum of squares, any other positive number, or ``math.inf``.
        error_if_nonfinite: Raise RuntimeError, and scale nothing, when the norm is not finite.
        mesh: Ranks whose different parameters also count, such as ``mesh["pp"]``.

    Returns:
        The norm before clipping, the same on all ranks.

    Raises:
        TypeError: For an argument that is not a parameter or a number.
        ValueError: For a negative ``max_norm``, a ``norm_type`` that is not positive, or options
            that differ between ranks.
        RuntimeError: See ``error_if_nonfinite``.

    TypeError and ValueError are raised on all ranks that hold shards of the same parameters.
    """
    wrong, listed, options = None, [], []
    try:
        listed = [parameters] if isinstance(parameters, Parameter) else list(parameters)
        for i, parameter in enumerate(listed):
            check_instance(parameter, Parameter, f"parameters[{i}]", "model.parameters()")
        check_nonnegative(max_norm=max_norm, norm_type=norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {describe(norm_type)}")
        options = describe_options(
            max_norm=float(max_norm),
            norm_type=float(norm_type),
            error_if_nonfinite=bool(error_if_nonfinite),
        )
    except (TypeError, ValueError) as error:  # raised below, after the other ranks were informed
        wrong = error
    op = ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM
    agreed = _CheckedReduction(wrong or options, op)
    sums: dict[ProcessGroup | None, float] = {}
    for parameter in listed:
        if isinstance(parameter, Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]
            ranks = _split_over(parameter)
            own = 0.0 if wrong is not None else _powers(parameter.grad, float(norm_type))
            sums[ranks] = _joined(op, sums.get(ranks, 0.0), own)
    total = 0.0
    for ranks, own in sums.items():
        total = _joined(op, total, own if ranks is None else agreed.reduced(own, ranks))
    if mesh is not None:
        total = agreed.reduced(total, resolve(mesh, "mesh"))
    if wrong is not None:
        raise wrong
    norm = total if norm_type == math.inf else total ** (1 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}; expected a finite one")
    factor = max_norm / (norm + _LEAST)
    if not factor >= 1:  # also true if the norm is NaN
        for parameter in listed:
            if parameter.grad is not None:
                parameter.grad *= parameter.grad.dtype.type(factor)
    return norm


def _split_over(parameter: Parameter) -> ProcessGroup | None:
    """Return the group of ranks that hold the parameter's shards; None if it is not sharded."""
    if parameter.global_part is None:
        return None
    sharding = parameter.global_part.sharding
    dims = sorted({i for dim in sharding.dims for i in dim})
    return sharding.mesh[dims].process_group if dims else None


def _powers(grad: Array | None, norm_type: float) -> float:
    """Return the sum of ``abs(grad) ** norm_type``, or the maximum of ``abs(grad)`` for inf.

    Computes in at least single precision.
    """
    if grad is None or not grad.size:
        return 0.0
    xp = namespace(grad)
    flat = xp.abs(grad.reshape(-1))
    if flat.dtype.itemsize < 4:
        flat = flat.astype(np.float32)
    if norm_type == math.inf:
        return float(flat.max())
    return float(xp.dot(flat, flat) if norm_type == 2 else (flat**norm_type).sum())


def _joined(op: ReduceOp, a: float, b: float) -> float:
    return float(np.maximum(a, b)) if op is ReduceOp.MAX else a + b


class _CheckedReduction:
    """A reduction of numbers that also checks that all ranks passed the same options.

    ``options`` has one line per option, or is the error in this rank's arguments.
    """

    def __init__(self, options: Sequence[str] | TypeError | ValueError, op: ReduceOp) -> None:
        self._options, self._op = options, op
        # A hash that is small enough for an exact sum of its squares; 0 marks an error.
        failed = isinstance(options, Exception)
        self._mark = 0 if failed else crc32(repr(options).encode()) % 0xFFFF + 1

    def reduced(self, value: float, group: ProcessGroup) -> float:
        """Return ``value``, reduced over the group.

        Raises the argument error of any rank on all ranks, and ValueError if options differ.
        """
        size, mark = group.size(), self._mark
        if size == 1:
            return value
        other = -mark if self._op is ReduceOp.MAX else mark * mark
        numbers = group.all_reduce(np.array([value, mark, other], np.float64), self._op).tolist()
        marks, others = int(numbers[1]), int(numbers[2])
        same = marks == -others if self._op is ReduceOp.MAX else marks * marks == others * size
        if not same:
            check_same(self._options, group, "the arguments of clip_grad_norm_")
        return numbers[0]
