"""Making the attention of a model compute over a split sequence."""

from __future__ import annotations

from typing import Literal, TypeVar, cast, get_args

from parallel._checks import check_instance
from parallel._groups import Ranks, resolve
from parallel.context._all_to_all import UlyssesAttention, check_heads
from parallel.context._ring import RingAttention
from parallel.nn._layers.attention import DotProductAttention, MultiHeadAttention
from parallel.nn._module import Module

_M = TypeVar("_M", bound=Module)
Method = Literal["ring", "all_to_all"]


def context_parallel(
    module: _M, mesh: Ranks | None = None, *, method: Method = "ring", zigzag: bool | None = None
) -> _M:
    """Let all attention in ``module`` compute over sequences that are split over ``mesh``.

    Each ``DotProductAttention`` becomes, in place, a ``RingAttention`` or a ``UlyssesAttention``;
    nothing else changes, for all other layers compute place by place. Each rank passes its places
    of the sequences through the model, ``split_sequence(tokens, mesh["cp"])``, and of the targets;
    gradients are to be averaged over ``mesh`` as over data-parallel ranks.

    Args:
        module: a ``parallel.nn.Module``.
        mesh: the ranks: ``mesh["cp"]``, a process group, or None for the default group.
        method: "ring": keys and values go round; "all_to_all": each rank gets whole heads.
        zigzag: for the ring, which places each rank has, see ``sequence_positions``: a zig-zag, or
            a row. None: a zig-zag for causal attention. An all-to-all has a row.

    Returns:
        The ``module``.

    Raises:
        ValueError: for a module without attention, heads that do not divide by the ranks and an
            all-to-all, a zig-zag and an all-to-all, another method. Nothing was changed then.
        TypeError: for what is no module or no set of ranks, and attention that is spread already.
    """
    check_instance(module, Module, "module")
    group = resolve(mesh, "mesh")
    if method not in get_args(Method):
        raise ValueError(f"method must be 'ring' or 'all_to_all', got {method!r}")
    if zigzag and method == "all_to_all":
        raise ValueError("zigzag is for method='ring'; with 'all_to_all' sequences lie in a row")
    found = {
        path: one for path, one in module.named_modules() if isinstance(one, DotProductAttention)
    }
    if not found:
        raise ValueError(
            f"module {type(module).__name__} has no attention to be spread over {group}: no"
            " DotProductAttention is in it"
        )
    for path, one in found.items():
        if type(one) is not DotProductAttention:
            raise TypeError(
                f"{path!r} must be a DotProductAttention, is a {type(one).__name__}: it is spread"
                " over ranks already, or has an attention of its own"
            )
    if method == "all_to_all":
        for path, one in module.named_modules():
            if isinstance(one, MultiHeadAttention):
                # Those that tensor parallel, if any, has left here.
                heads, kv_heads = (x.out_features // one.head_dim for x in (one.query, one.key))
                check_heads(heads, kv_heads, group, f" in {path!r}")
    for one in found.values():
        if method == "ring":
            one.__class__ = RingAttention
            cast(RingAttention, one).spread(group, one.causal if zigzag is None else zigzag)
        else:
            one.__class__ = UlyssesAttention
            cast(UlyssesAttention, one).spread(group)
    return module
