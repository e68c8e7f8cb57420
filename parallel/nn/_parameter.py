"""Parameters, their gradients, and hooks on complete gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshlib.sharding import DArray, Sharding
from parallel._arrays import Array, is_floating, namespace, written
from parallel._checks import check_array, check_callable


class GlobalPart:
    """The ``shape`` and sharding of the global array of which a parameter is a part.

    Tensor parallelism and ``fully_shard`` set ``parameter.global_part`` when they split a
    parameter.
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        self.sharding: Sharding = sharding
        self.shape: tuple[int, ...] = shape

    @property
    def array(self) -> Any:
        """This rank's part, if ``fully_shard`` stores it; None: the part is ``parameter.data``."""
        return None

    def is_like(self, array: Any) -> bool:
        """True if ``array`` has the shape of this rank's part."""
        return getattr(array, "shape", None) == self.sharding.local_shape(self.shape)

    def as_global(self, array: Any) -> Any:
        """Return the global array whose local part is ``array``, such as an optimizer's state.

        A DArray, or an array of another shape than the part (a step count), is returned unchanged.
        """
        if isinstance(array, DArray) or not self.is_like(array):
            return array
        return DArray(array, self.sharding, self.shape, array.dtype)

    def local(self, value: Any, *, copy: bool = True) -> Any:
        """Return this rank's part of ``value``: a whole array, the part itself, or a DArray.

        A DArray may have any sharding; then all its ranks must call.
        """
        if isinstance(value, DArray):
            local = value.redistribute(self.sharding).local
            copy = copy and value.sharding == self.sharding
            return local.copy() if copy else local
        if value.shape == self.shape:
            value = value[self.sharding.slices(self.shape)]
        return value.copy() if copy else value


def kept_part(parameter: Any) -> GlobalPart | None:
    """Return the ``global_part`` of a fully sharded ``parameter``, or None."""
    part: GlobalPart | None = parameter.global_part
    return part if part is not None and part.array is not None else None


def as_global(parameter: Any, array: Any) -> Any:
    """Return ``array``, or the DArray that represents it in state dicts if it is a part."""
    part: GlobalPart | None = parameter.global_part
    return array if part is None else part.as_global(array)


def from_global(parameter: Any, value: Any, *, copy: bool = True) -> Any:
    """Return the inverse of ``as_global``. A value that is not an array is returned unchanged.

    ``value`` may be a whole array, or a DArray in any sharding (then all its ranks must call).
    """
    part: GlobalPart | None = parameter.global_part
    if not hasattr(value, "dtype"):
        return value
    if part is not None:
        return part.local(value, copy=copy)
    if isinstance(value, DArray):
        return value.full_array()
    return value.copy() if copy else value


GradHook = Callable[["Parameter"], None]
"""``hook(parameter)``: called when the gradient of the parameter is complete."""


class RemovableHandle:
    """The handle of a registered hook, which ``remove()`` unregisters."""

    def __init__(self, hooks: dict[object, GradHook], key: object) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Unregister the hook. Idempotent."""
        self._hooks.pop(self._key, None)


class Parameter:
    """A trained array and its gradient.

    ``data`` is the array. ``grad`` is None or an array of its shape and dtype; each backward pass
    adds to it. ``requires_grad=False`` freezes the parameter, and drops its gradients. ``name`` is
    a label for messages; ``Module.named_parameters`` yields the paths.

    **When a gradient is complete.** In forward, a module announces each use of a parameter
    (``expect_grad``). In backward, it calls ``accumulate_grad`` once for each use. When no
    announced use remains, the gradient is complete, and post-accumulate hooks fire. So the hooks
    fire once, after the last contribution. This also holds for a parameter that two modules share,
    a module that is called twice in one forward pass, and several outstanding forward passes.

    Raises TypeError if ``data`` is not an array.
    """

    global_part: GlobalPart | None = None
    """The global array of which ``data`` is a part; None: ``data`` is whole on each rank."""

    on_contribution: Callable[[Array], Array] | None = None
    """Maps each contribution to the gradient to the array that is added. None: the identity."""

    other_grad_dtype: Any = None
    """The dtype of gradients while modules compute with a copy in another dtype; else None."""

    def __init__(self, data: Array, *, requires_grad: bool = True, name: str = "") -> None:
        namespace(data, "data")  # raises TypeError unless it is an array
        self.data: Array = data
        self.grad: Array | None = None
        self.requires_grad = requires_grad
        self.name = name
        self.uses: int = 0
        """The number of uses in forward that still wait for their gradient in backward."""
        self.grad_home: Array | None = None
        """The memory for gradients (``set_grad_home``); None: new arrays."""
        self._hooks: dict[object, GradHook] = {}

    def __repr__(self) -> str:
        label = f"{self.name}: " if self.name else ""
        frozen = "" if self.requires_grad else ", frozen"
        return f"Parameter({label}{written(self.data)}{frozen})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``data``."""
        return tuple(self.data.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.data.size)

    @property
    def value(self) -> Array | DArray:
        """The trained array: ``data``, or a DArray if it is split over ranks."""
        part = self.global_part
        if part is None:
            return self.data
        return part.as_global(self.data if part.array is None else part.array)

    def takes(self, dtype: Any) -> bool:
        """Return whether a layer may combine ``data`` with an input of ``dtype``.

        The result must have the dtype of ``data``, or any floating dtype if gradients have another
        dtype than ``data``.
        """
        own = self.data.dtype
        if dtype == own:
            return True
        try:
            together = np.result_type(dtype, own)
        except TypeError:  # no common dtype
            return False
        return together == own or (self.grad_dtype != own and is_floating(together))

    @property
    def grad_dtype(self) -> Any:
        """The dtype of gradients."""
        return self.data.dtype if self.other_grad_dtype is None else self.other_grad_dtype

    def expect_grad(self) -> None:
        """Announce one use, for which backward will call ``accumulate_grad`` once."""
        self.uses += 1

    def forget_uses(self, count: int = 1) -> None:
        """Withdraw ``count`` announced uses whose backward will not run. Does not fire hooks."""
        self.uses = max(self.uses - count, 0)

    def accumulate_grad(self, contribution: Array) -> None:
        """Add ``contribution`` to ``grad``; fire the hooks after the last announced use.

        It must have the shape and dtype of ``data`` (or any floating dtype if ``grad_dtype``
        differs from it). ``grad`` has the dtype ``grad_dtype``. The parameter may keep the array,
        so the caller must not use it again. Raises ValueError for another shape or dtype,
        RuntimeError when no use was announced.
        """
        # For data of lower precision, such as bfloat16, NumPy promotes some contributions.
        own = self.data.dtype
        fits = contribution.dtype == own or (
            self.grad_dtype != own and is_floating(contribution.dtype)
        )
        if contribution.shape != self.data.shape or not fits:
            raise ValueError(
                f"gradient of {self!r} must have its shape and dtype, got {written(contribution)}"
            )
        if self.requires_grad:
            contribution = contribution.astype(self.grad_dtype, copy=False)
            if self.on_contribution is not None:
                contribution = self.on_contribution(contribution)
            if self.grad is not None:
                self.grad += contribution
            elif self.grad_home is not None:
                self.grad_home[...] = contribution
                self.grad = self.grad_home
            else:
                self.grad = contribution
        self._end_use()

    def accumulate_matmul(self, left: Array, right: Array) -> None:
        """Call ``accumulate_grad(left @ right)``, computed in ``grad_home`` if possible."""
        if (
            self.requires_grad
            and self.grad is None
            and self.grad_home is not None
            and self.on_contribution is None
            and self.grad_dtype == self.data.dtype
        ):
            namespace(self.data).matmul(left, right, out=self.grad_home)
            self.grad = self.grad_home
            self._end_use()
        else:
            self.accumulate_grad(left @ right)

    def _end_use(self) -> None:
        if self.uses == 0:
            raise RuntimeError(f"{self!r} got a gradient in backward without a use in forward")
        self.uses -= 1
        if self.uses == 0 and self.requires_grad:
            for hook in list(self._hooks.values()):
                hook(self)

    def register_post_accumulate_grad_hook(self, hook: GradHook) -> RemovableHandle:
        """Call ``hook(parameter)`` each time the gradient is complete (see the class).

        Hooks run in the order of registration, inside the backward pass. A hook may use, change
        or clear ``grad``. It must not change ``data``, which the module may still use. Raises
        TypeError if ``hook`` is not callable.
        """
        check_callable(hook, "hook")
        # The handle as key would make a reference cycle with the hooks.
        key = object()
        self._hooks[key] = hook
        return RemovableHandle(self._hooks, key)

    def set_grad_home(self, home: Array | None) -> None:
        """Store gradients in ``home`` from now on; copy an existing ``grad`` there.

        ``home`` is an array of the shape and dtype of gradients, for example a view of a larger
        buffer. While ``grad`` is None, its contents are meaningless. With None, new gradients get
        their own arrays again. Raises ValueError for another shape or dtype, TypeError for a value
        that is not an array.
        """
        if home is not None:
            check_array(home, "home")
        if home is not None and (home.shape != self.shape or home.dtype != self.grad_dtype):
            raise ValueError(
                f"home of {self!r} must have the shape and dtype of its gradients, got"
                f" {written(home)}"
            )
        if self.grad is not None and self.grad is not home:
            if home is None:
                self.grad = self.grad.copy()
            else:
                home[...] = self.grad
                self.grad = home
        self.grad_home = home

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradient, or fill it with zeros in place."""
        if set_to_none:
            self.grad = None
        elif self.grad is not None:
            self.grad.fill(0)


class Buffer:
    """An array of a module's state that is not trained, such as a running mean.

    ``persistent=False`` excludes it from ``state_dict``. Raises TypeError if ``data`` is not an
    array.
    """

    def __init__(self, data: Array, *, persistent: bool = True) -> None:
        namespace(data, "data")
        self.data: Array = data
        self.persistent = persistent

    def __repr__(self) -> str:
        return f"Buffer({written(self.data)})"
