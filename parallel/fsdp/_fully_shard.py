"""``fully_shard``: sharding of a module's parameters over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar, cast

from meshlib import DeviceMesh, current_mesh
from meshlib.extend import log_of, to_whole_number
from parallel._checks import check_instance, describe
from parallel._core.replicas import check_same, describe_options, raise_on_all_ranks
from parallel._groups import check_shard_mesh
from parallel.ddp._gradients import describe_parameters
from parallel.fsdp._group import ParameterGroup, ParameterShard
from parallel.fsdp._schedule import FSDPModule, ModuleState
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter
from parallel.nn._precision import MixedPrecisionPolicy

_M = TypeVar("_M", bound=Module)


def fully_shard(
    module: _M,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[Parameter] = (),
) -> _M:
    """Shard the parameters of ``module`` over n ranks, to be gathered only while in use.

    Changes the module in place and returns it. From then on each parameter's ``data`` and ``grad``
    are this rank's shard (rows, by ceiling division). Its ``value``, and its entry in
    ``state_dict``, is the whole array as a DArray.

    Forward and backward gather a module's parameters before they compute, and meanwhile prefetch
    the next module's. After backward, ``grad`` holds the averaged gradients. An optimizer works on
    the shards, so its state is also 1/n of the whole.

    One call makes one group of parameters, which are gathered and reduced together: the parameters
    of ``module`` and of all submodules that are not fully sharded yet. So begin with the layers and
    end with the whole model::

        for block in model.blocks:
            fully_shard(block, mesh["dp_shard"])
        fully_shard(model, mesh["dp_shard"])

    Each rank keeps its own values for its shard, so initialise all ranks alike, or load a
    checkpoint. Parameters may be frozen and unfrozen between two steps, and modules may share
    them. Tensor parallel layers may have split them, if both meshes are slices of one mesh. A
    module must not keep ``parameter.data``, or views of it, from forward to backward: its memory
    is reused.

    Rajbhandari et al., "ZeRO", arXiv:1910.02054 (stage 3; without ``reshard_after_forward`` about
    stage 2); Zhao et al., "PyTorch FSDP", arXiv:2304.11277.

    Args:
        module: A ``parallel.nn.Module``; it becomes an ``FSDPModule`` as well.
        mesh: A slice of one dim, over which to shard. With two dims (HSDP), parameters are
            replicated over the first and sharded over the second; all replicas start with the
            first replica's values. None: the mesh of the enclosing ``with mesh:`` block.
        reshard_after_forward: True frees the whole parameters after forward and gathers them again
            for backward; False keeps them. A number k, which must divide the number of ranks, keeps
            1/k of them, and backward gathers over k consecutive ranks of the mesh. None: False for
            the outermost module, whose backward follows at once, and True for others.
        mp_policy: Dtypes to compute, reduce and return in; by default the parameters' dtype.
        ignored_params: Parameters of ``module`` that stay whole and whose gradients are not
            reduced, such as experts that only this rank has.

    Returns:
        The ``module``.

    Raises:
        TypeError: If ``mesh`` is not a mesh; on every rank, for a module, number, policy or
            parameter of the wrong type.
        ValueError: For a mesh of more than two dims, or without a mesh outside of any
            ``with mesh:`` block. On every rank: for a number that does not divide the mesh's size,
            a module that is fully sharded already, or a parameter without dims. Also on every
            rank, if parameters or options differ between ranks (naming the first difference).
        MeshDimError: If the mesh of the tensor parallel layers has another root.
    """
    mesh = current_mesh() if mesh is None else mesh
    where = check_shard_mesh(mesh)
    shards = mesh.shape[-1]
    with raise_on_all_ranks(mesh.process_group):
        _check_module(module, where)
        policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        example = "MixedPrecisionPolicy(param_dtype='float16')"
        check_instance(policy, MixedPrecisionPolicy, f"{where}: mp_policy", example)
        resharding = _check_resharding(reshard_after_forward, shards, where)
        ignored = list(ignored_params)
        for i, parameter in enumerate(ignored):
            check_instance(parameter, Parameter, f"{where}: ignored_params[{i}]", "layer.weight")
        own, borrowed = _managed(module, where, set(ignored))
    check_same(
        [
            *describe_options(reshard_after_forward=resharding, mp_policy=policy),
            *describe_parameters(own),
        ],
        mesh.process_group,
    )
    group = ParameterGroup([parameter for _, parameter in own], mesh, policy)
    group.reshard_after_forward = resharding if resharding is None else resharding > 1
    if own and resharding is not None and 1 < resharding < shards:
        group.forward_group = _consecutive(mesh, resharding)
    module.__class__ = cast(Any, _sharded_class(type(module)))
    sharded = cast(FSDPModule, module)
    sharded._fsdp = ModuleState(sharded, group, borrowed, policy)  # pyright: ignore[reportPrivateUsage]
    log_of(mesh.process_group).info(
        "fully_shard on %s: %s with %d elements in %d parameters; reshard_after_forward=%s %s",
        mesh,
        type(module).__qualname__,
        sum(math.prod(part.whole_shape) for part in group.parts),
        len(own),
        reshard_after_forward,
        policy,
    )
    return module


@cache
def _sharded_class(kind: type[Module]) -> type[Module]:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})


def _managed(
    module: Module, where: str, ignored: set[Parameter]
) -> tuple[list[tuple[str, Parameter]], list[ParameterGroup]]:
    """Return the parameters that become ``module``'s own, and the groups that it borrows from.

    It borrows from the groups of other fully sharded modules with which it shares parameters.
    """
    own: dict[Parameter, str] = {}
    borrowed: list[ParameterGroup] = []
    for path, part in _not_sharded(module, ""):
        for name, parameter in vars(part).items():
            if not isinstance(parameter, Parameter) or parameter in own or parameter in ignored:
                continue
            path_of = f"{path}.{name}" if path else name
            if isinstance(parameter.global_part, ParameterShard):
                if parameter.global_part.group not in borrowed:
                    borrowed.append(parameter.global_part.group)
            elif not parameter.shape:
                raise ValueError(
                    f"{where}: parameter {path_of} is a single number, which cannot be split over"
                    " ranks; expected at least one dim, such as the shape (1,)"
                )
            else:
                own[parameter] = path_of
    return [(path, parameter) for parameter, path in own.items()], borrowed


def _not_sharded(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    """Yield (path, module) for ``module`` and its submodules, skipping fully sharded ones."""
    yield path, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _not_sharded(child, f"{path}.{name}" if path else name)


def _check_module(module: Any, where: str) -> None:
    """Raise unless ``fully_shard`` can be applied to the value."""
    if not isinstance(module, Module):
        raise TypeError(f"{where}: module must be a parallel.nn.Module, got {describe(module)}")
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{where}: module {type(module).__qualname__} is fully sharded already; expected a"
            " module to which fully_shard was not applied"
        )


def _check_resharding(value: Any, shards: int, where: str) -> int | None:
    """Return the number of ranks over which to shard between forward and backward."""
    if value is None:
        return None
    if isinstance(value, bool):
        return shards if value else 1
    try:
        number = to_whole_number(value, "reshard_after_forward")
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    if number < 1 or shards % number:
        raise ValueError(
            f"{where}: reshard_after_forward is {number}; expected True, False, or a number that"
            f" divides the {shards} ranks to shard over"
        )
    return number


def _consecutive(mesh: DeviceMesh, size: int) -> Any:
    """Return this rank's group of ``size`` consecutive ranks along the last dim."""
    last = mesh[mesh.ndim - 1]
    names = last.mesh_dim_names
    new = None if names is None else [f"{names[0]}_{part}{size}" for part in ("by", "in")]
    return last.unflatten(0, (-1, size), new)[1].process_group
