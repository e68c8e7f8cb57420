"""Splitting a model over the ranks of a mesh dimension, by a plan of names and styles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from parallel._checks import check_instance, describe
from parallel._groups import Ranks
from parallel._nested import meant_by
from parallel.nn._layers.attention import MultiHeadAttention
from parallel.nn._module import Module
from parallel.tensor_parallel._parts import Parts, part_size
from parallel.tensor_parallel._prepare import prepares_whole_input
from parallel.tensor_parallel._styles import ColwiseParallel, ParallelStyle, RowwiseParallel

_M = TypeVar("_M", bound=Module)


def parallelize(module: _M, mesh: Ranks | None, plan: Mapping[str, ParallelStyle]) -> _M:
    """Split ``module`` over the ranks of ``mesh`` as ``plan`` says, and return it.

    The modules are changed in place, parameters keep their names, and each rank keeps its part of
    those that are split; what modules share stays shared. All ranks pass the same samples. Apply it
    to a whole model whose values are the same on all ranks, before ``fully_shard`` and
    ``DistributedDataParallel``, which take the other dims of the mesh::

        parallelize(model, mesh["tp"], {
            "embedding": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(Shard(1), Replicate()),
            "blocks.*.attention.query": ColwiseParallel(),
            ...
        })

    Args:
        module: a ``parallel.nn.Module``.
        mesh: the ranks: ``mesh["tp"]``, a process group, or None for the default group.
        plan: for names of modules below ``module``, "" being itself, how each is split. In a name,
            ``*``, ``?`` and ``[...]`` stand for what they do in file names, within one part between
            dots.

    Returns:
        The ``module``.

    Raises:
        ValueError: for a name that no module has, with the nearest that one has, or a module that
            two names mean; for sizes, and numbers of heads, that do not divide by the number of
            ranks; for attention of which only some projections are split; for parameters that are
            split already. Nothing was changed or sent then.
        TypeError: for what is no module, mesh, plan or style, and for a module that a style is not
            for.
    """
    check_instance(module, Module, "module")
    parts = Parts(mesh)
    styles = _matched(module, plan)
    modules = dict(module.named_modules())
    for path, style in styles.items():
        style.check(modules[path], path, parts)
    for path, one in modules.items():
        if isinstance(one, MultiHeadAttention):
            _check_heads(one, path, styles, parts)
    for path, style in styles.items():
        around = [styles[above] for above in _above(path) if above in styles]
        style.apply(modules[path], parts, prepares_whole_input(around))
    return module


def _matched(module: Module, plan: Any) -> dict[str, ParallelStyle]:
    if not isinstance(plan, Mapping):
        raise TypeError(
            "plan must be a dict of names and styles, such as {'blocks.*.up': ColwiseParallel()},"
            f" got {describe(plan)}"
        )
    for name, style in cast(Mapping[Any, Any], plan).items():
        check_instance(name, str, f"the name {name!r} in plan")
        check_instance(style, ParallelStyle, f"plan[{name!r}]", "ColwiseParallel()")
    paths = {path: [path] for path, _ in module.named_modules()}
    return meant_by(cast(Mapping[str, ParallelStyle], plan), paths, "no module has")


def _above(path: str) -> Iterable[str]:
    """Yield the paths of the modules that the one at ``path`` is in, the module itself last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _check_heads(
    attention: MultiHeadAttention, path: str, styles: Mapping[str, ParallelStyle], parts: Parts
) -> None:
    """Raise ValueError unless whole heads are split, or none: a head is on one rank."""
    wanted = {
        **dict.fromkeys(("query", "key", "value"), ColwiseParallel),
        "output": RowwiseParallel,
    }
    of = {name: styles.get(f"{path}.{name}" if path else name) for name in wanted}
    split = [name for name, style in of.items() if style is not None]
    if not split:
        return
    wrong = [name for name, kind in wanted.items() if not isinstance(of[name], kind)]
    if wrong:
        raise ValueError(
            f"plan splits {', '.join(split)} of the attention {path!r}; expected ColwiseParallel"
            f" for query, key and value, and RowwiseParallel for output: not so {', '.join(wrong)}"
        )
    for heads in ("heads", "kv_heads"):
        part_size(getattr(attention, heads), parts.group, f"the number of {heads} of {path!r}")
