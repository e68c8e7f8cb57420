"""Mixed precision: forward and backward in a lower precision than the parameters.

Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.1: the optimizer
updates float32 parameters; forward and backward use copies in 16 bits.
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

    Floating inputs are cast to ``dtype``, and results back to the dtype of the input. Meanwhile,
    copies in ``dtype`` replace the parameters. Gradients have the parameters' own dtype. Integers
    and buffers are not cast.
    """

    def __init__(self, module: Module, dtype: npt.DTypeLike) -> None:
        self.module = module
        self.dtype: np.dtype[Any] = to_floating(dtype, "dtype")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, _Dtype]:
        """Return the output, and the dtype of the input for ``backward``."""
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
        # The copies are not kept, because an optimizer may step, and to save memory.
        before = [(p, p.data, p.other_grad_dtype) for p in _computed_in(self.module)]
        copies = [own.astype(self.dtype, copy=False) for _, own, _ in before]
        for (parameter, _, _), copy in zip(before, copies, strict=True):
            parameter.other_grad_dtype, parameter.data = parameter.grad_dtype, copy
        try:
            yield
        finally:
            for (parameter, own, other), copy in zip(before, copies, strict=True):
                if parameter.data is copy:  # unless ``fully_shard`` has freed the whole array
                    parameter.data, parameter.other_grad_dtype = own, other


def _computed_in(module: Module) -> Iterator[Parameter]:
    """Yield the floating parameters to compute with in the dtype of ``module``, each once.

    Excludes parameters of modules in another ``ComputeIn``, and shards that ``fully_shard`` has not
    gathered yet.
    """
    seen: set[Parameter] = set()
    pending = [module]
    while pending:
        current = pending.pop()
        for value in vars(current).values():
            if isinstance(value, Parameter) and value not in seen:
                seen.add(value)
                part = kept_part(value)
                whole = part is None or part.array is not value.data
                if whole and is_floating(value.data.dtype):
                    yield value
        children = (child for _, child in current.named_children())
        pending += [child for child in children if not isinstance(child, ComputeIn)]


class ComputeIn(Module):
    """A wrapper that computes ``module`` in ``dtype``; submodules may use another ``ComputeIn``.

        nn.Sequential(
            nn.ComputeIn(nn.Linear(512, 512, rng=rng), "float16"),
            nn.LayerNorm(512),                                       # not changed
        )

    The result has the dtype of the input (or of the parameters, if the input is integers). The
    dtypes of the parameters and their gradients do not change.

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
    """Return ``value`` with all floating arrays, also in nested containers, cast to ``dtype``."""

    def convert(_: str, leaf: Any) -> Any:
        return leaf.astype(dtype, copy=False) if _is_floating_array(leaf) else leaf

    return map_leaves(convert, value)


def first_dtype(value: Any) -> _Dtype | None:
    """Return the dtype of the first floating array in ``value``, if any."""
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
        """Return the option ``name`` as a NumPy dtype, or None."""
        value = getattr(self, name)
        return None if value is None else np.dtype(value)


@dataclass(frozen=True)
class MixedPrecision(_Dtypes):
    """The dtypes of computation and averaging; those of the parameters do not change.

    ``param_dtype`` is the dtype of forward and backward, as with ``nn.ComputeIn`` around the whole
    module. Submodules that need another dtype use their own ``ComputeIn``. ``reduce_dtype`` is the
    dtype of the buckets on the wire. None means the parameters' dtype. The names are torch's.

    Raises ValueError for a dtype that is not floating, TypeError for an argument that is not a
    dtype.
    """


@dataclass(frozen=True)
class MixedPrecisionPolicy(_Dtypes):
    """The dtypes of one ``fully_shard``; None means no cast.

    Args:
        param_dtype: Parameters are gathered, and modules compute, in this dtype. The dtype of the
            shards, which the optimizer updates, does not change.
        reduce_dtype: Gradients are reduced in this dtype; by default the parameters' dtype.
        output_dtype: Floating outputs of ``forward`` are cast to this dtype.
        cast_forward_inputs: Cast floating inputs of ``forward`` to ``param_dtype``.

    Raises ValueError for a dtype that is not floating, TypeError for an argument that is not a
    dtype.
    """

    output_dtype: npt.DTypeLike | None = None
    cast_forward_inputs: bool = True
