"""Computing in lower precision than one trains in.

Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.1: the parameters that
the optimizer updates stay in float32; forward and backward use copies in 16 bits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from parallel._arrays import is_array, is_floating
from parallel._checks import check_instance, to_floating
from parallel._nested import all_leaves, map_leaves
from parallel.nn._module import Module, Work
from parallel.nn._parameter import Parameter, kept_part

_Dtype = np.dtype[Any]
_T = TypeVar("_T")


class Casting:
    """Runs a module's forward and backward in another dtype.

    Whatever comes in is cast to ``dtype``, whatever goes out is cast back to what came in;
    meanwhile copies in ``dtype`` stand in for the parameters. Gradients keep the parameters' own
    dtype. Integers, and buffers, are left alone.
    """

    def __init__(self, module: Module, dtype: npt.DTypeLike) -> None:
        self.module = module
        self.dtype: np.dtype[Any] = to_floating(dtype, "dtype")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, _Dtype]:
        """Return the output, and the dtype outside, which ``backward`` wants."""
        first = next(self.module.parameters(), None)
        own = self.dtype if first is None else first.grad_dtype
        outside = first_dtype([args, kwargs]) or own
        with self._lowered():
            output = self.module(*cast(args, self.dtype), **cast(kwargs, self.dtype))
        return cast(output, outside), outside

    def backward(self, outside: _Dtype, *args: Any, **kwargs: Any) -> Any:
        """Return the input's gradient in the dtype ``outside``, which ``forward`` returned."""
        with self.module.deferred_by(self._do_deferred), self._lowered():
            grad = self.module.backward(*cast(args, self.dtype), **cast(kwargs, self.dtype))
        return cast(grad, outside)

    def _do_deferred(self, work: Work) -> None:
        with self._lowered():
            work()

    @contextmanager
    def _lowered(self) -> Generator[None]:
        # Copies are made each time: an optimizer may have stepped, and keeping them takes memory.
        before = [(p, p.data, p.other_grad_dtype) for p in _computed_in(self.module)]
        copies = [own.astype(self.dtype, copy=False) for _, own, _ in before]
        for (parameter, _, _), copy in zip(before, copies, strict=True):
            parameter.other_grad_dtype, parameter.data = parameter.grad_dtype, copy
        try:
            yield
        finally:
            for (parameter, own, other), copy in zip(before, copies, strict=True):
                if parameter.data is copy:  # else ``fully_shard`` has taken the whole back
                    parameter.data, parameter.other_grad_dtype = own, other


def _computed_in(module: Module) -> Iterator[Parameter]:
    """Yield the floating parameters of ``module``, each once, that have no precision of their own.

    Those are of modules in another ``ComputeIn``, and parts that ``fully_shard`` has yet to gather.
    """
    seen: set[Parameter] = set()
    below = [module]
    while below:
        one = below.pop()
        for value in vars(one).values():
            if isinstance(value, Parameter) and value not in seen:
                seen.add(value)
                part = kept_part(value)
                whole = part is None or part.array is not value.data
                if whole and is_floating(value.data.dtype):
                    yield value
        below += [child for _, child in one.named_children() if not isinstance(child, ComputeIn)]


class ComputeIn(Module):
    """``module``, computed in ``dtype``: its own parts may be in ComputeIn of another dtype.

        nn.Sequential(
            nn.ComputeIn(nn.Linear(512, 512, rng=rng), "float16"),
            nn.LayerNorm(512),                                       # as it was
        )

    The result has the dtype of the input (of the parameters, if the input is integers). The
    parameters and their gradients stay what they are.

    Raises ValueError for a dtype that is not floating, TypeError for a value that is not a dtype or
    a module.
    """

    def __init__(self, module: Module, dtype: npt.DTypeLike) -> None:
        super().__init__()
        check_instance(module, Module, "module")
        self.module = module
        self._casting = Casting(module, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, in the dtype of the input."""
        output, outside = self._casting.forward(*args, **kwargs)
        self.save_for_backward(outside)
        return output

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient of the module's input, in the dtype of the input."""
        return self._casting.backward(self.saved(), *args, **kwargs)


def cast(value: _T, dtype: _Dtype) -> _T:
    """Return ``value`` with its floating arrays, however deep in tuples and dicts, in ``dtype``."""

    def convert(_: str, leaf: Any) -> Any:
        return leaf.astype(dtype, copy=False) if _is_floating_array(leaf) else leaf

    return map_leaves(convert, value)


def first_dtype(value: Any) -> _Dtype | None:
    """Return the dtype of the first floating array in ``value``, None if there is none."""
    return next((leaf.dtype for _, leaf in all_leaves(value) if _is_floating_array(leaf)), None)


def _is_floating_array(leaf: Any) -> bool:
    return is_array(leaf) and is_floating(leaf.dtype)


@dataclass(frozen=True)
class _Dtypes:
    param_dtype: npt.DTypeLike | None = None
    reduce_dtype: npt.DTypeLike | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name, None)
            if value is not None:
                object.__setattr__(self, name, to_floating(value, name))

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """Return the option ``name``, one of the dtypes, as a dtype, or None."""
        value = getattr(self, name)
        return None if value is None else np.dtype(value)


@dataclass(frozen=True)
class MixedPrecision(_Dtypes):
    """The dtypes in which a model computes and averages; the parameters keep their own.

    ``param_dtype`` is the dtype of forward and backward, as with ``nn.ComputeIn`` around the whole
    module. Parts that need another dtype get a ``ComputeIn`` of their own. ``reduce_dtype`` is the
    dtype of the buckets on the wire. None means the parameters' own. The names are torch's.

    Raises ValueError for a dtype that is not floating, TypeError for an argument that is not a
    dtype.
    """


@dataclass(frozen=True)
class MixedPrecisionPolicy(_Dtypes):
    """The dtypes of one ``fully_shard``: None leaves things as they are.

    Args:
        param_dtype: Parameters are gathered, and modules compute, in this dtype. The shards that
            the optimizer updates keep theirs.
        reduce_dtype: Gradients are reduced in this dtype; by default the parameters' own.
        output_dtype: Floating outputs of ``forward`` are cast to this dtype; by default they are
            not cast.
        cast_forward_inputs: Cast floating inputs of ``forward`` to ``param_dtype``.

    Raises ValueError for a dtype that is not floating, TypeError for an argument that is not a
    dtype.
    """

    output_dtype: npt.DTypeLike | None = None
    cast_forward_inputs: bool = True
