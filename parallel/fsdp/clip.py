"""Clipping by the norm of all gradients, wherever their parts lie."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from meshlib import ProcessGroup, ReduceOp
from parallel.arrays import Array, namespace
from parallel.checks import check_instance, check_nonnegative, describe
from parallel.groups import Ranks, resolve
from parallel.nn.parameter import Parameter

_LEAST = 1e-6  # as in torch: keeps the factor finite where the norm is 0


def clip_grad_norm_(
    parameters: Iterable[Parameter] | Parameter,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: Ranks | None = None,
) -> float:
    """Scale all gradients, in place, so that their common norm is at most ``max_norm``.

    Each part counts once: of parameters that are split (``fully_shard``, tensor parallel layers
    on a mesh), the parts of all ranks do, over one small all-reduce for each set of mesh dims; of
    others this rank's gradients do, which are the same on all ranks. All ranks call.

    Args:
        parameters: those whose gradients count; without a gradient they count as zero.
        max_norm: the norm that is not exceeded.
        norm_type: 2 for the root of the sum of squares, any other positive number, or ``math.inf``.
        error_if_nonfinite: raise RuntimeError, and scale nothing, when the norm is not finite.
        mesh: ranks that have other parameters, which count, too: ``mesh["pp"]``.

    Returns:
        The norm before, the same on all ranks.

    Raises:
        TypeError: for what is no parameter or number.
        ValueError: for a negative ``max_norm``, a ``norm_type`` that is not positive.
        RuntimeError: see ``error_if_nonfinite``.
    """
    listed = [parameters] if isinstance(parameters, Parameter) else list(parameters)
    for i, parameter in enumerate(listed):
        check_instance(parameter, Parameter, f"parameters[{i}]", "model.parameters()")
    check_nonnegative(max_norm=max_norm, norm_type=norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {describe(norm_type)}")
    op = ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM
    sums: dict[ProcessGroup | None, float] = {}
    for parameter in listed:
        ranks = _split_over(parameter)
        sums[ranks] = _joined(op, sums.get(ranks, 0.0), _powers(parameter.grad, float(norm_type)))
    total = 0.0
    for ranks, own in sums.items():
        total = _joined(op, total, own if ranks is None else _reduced(own, op, ranks))
    if mesh is not None:
        total = _reduced(total, op, resolve(mesh, "mesh"))
    norm = total if norm_type == math.inf else total ** (1 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}; expected a finite one")
    factor = max_norm / (norm + _LEAST)
    if not factor >= 1:  # also where the norm is no number
        for parameter in listed:
            if parameter.grad is not None:
                parameter.grad *= parameter.grad.dtype.type(factor)
    return norm


def _split_over(parameter: Parameter) -> ProcessGroup | None:
    """Return the ranks that have other parts of the same values; None where nobody has."""
    sharding = parameter.sharding or (None if parameter.split is None else parameter.split[0])
    dims = [] if sharding is None else sorted({i for dim in sharding.dims for i in dim})
    if sharding is None or not dims:
        return None
    return sharding.mesh[dims].process_group


def _powers(grad: Array | None, norm_type: float) -> float:
    """Return the sum of the elements' absolute values to the power ``norm_type``, or the largest.

    In at least single precision.
    """
    if grad is None or not grad.size:
        return 0.0
    xp = namespace(grad)
    flat = xp.abs(grad.reshape(-1))
    if flat.dtype.itemsize < 4:
        flat = flat.astype(np.float32)
    return float(flat.max() if norm_type == math.inf else _power_sum(xp, flat, norm_type))


def _power_sum(xp: Any, flat: Array, norm_type: float) -> Any:
    return float(xp.dot(flat, flat)) if norm_type == 2 else (flat**norm_type).sum()


def _joined(op: ReduceOp, a: float, b: float) -> float:
    return float(np.maximum(a, b)) if op is ReduceOp.MAX else a + b


def _reduced(value: float, op: ReduceOp, group: ProcessGroup) -> float:
    return value if group.size() == 1 else float(group.all_reduce(np.array([value]), op)[0])
