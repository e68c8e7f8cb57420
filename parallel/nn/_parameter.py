"""Parameters, their gradients, and the hooks that fire when a gradient is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshlib.sharding import DArray, Sharding
from parallel._arrays import Array, is_floating, namespace, written
from parallel._checks import check_array, check_callable


class GlobalPart:
    """The ``shape`` of a global array, and how it lies on its mesh.

    Who splits a parameter (tensor parallel, ``fully_shard``) says it in ``parameter.global_part``.
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        self.sharding: Sharding = sharding
        self.shape: tuple[int, ...] = shape

    @property
    def array(self) -> Any:
        """This rank's part, which ``fully_shard`` keeps; None: the parameter's ``data`` is it."""
        return None

    def is_like(self, array: Any) -> bool:
        """True if ``array`` has the shape of this rank's part."""
        return getattr(array, "shape", None) == self.sharding.local_shape(self.shape)

    def as_global(self, array: Any) -> Any:
        """Return an array like the part (an optimizer's state) as the global array.

        Itself where it has another shape (a count of steps), or is a DArray.
        """
        if isinstance(array, DArray) or not self.is_like(array):
            return array
        return DArray(array, self.sharding, self.shape, array.dtype)

    def local(self, value: Any, *, copy: bool = True) -> Any:
        """Return this rank's part of ``value``, an array with all of the values, or the part.

        A DArray may lie in any way; all its ranks call then.
        """
        if isinstance(value, DArray):
            local = value.redistribute(self.sharding).local
            copy = copy and value.sharding == self.sharding
            return local.copy() if copy else local
        if value.shape == self.shape:
            value = value[self.sharding.slices(self.shape)]
        return value.copy() if copy else value


def kept_part(parameter: Any) -> GlobalPart | None:
    """Return the part that ``fully_shard`` keeps of a ``parameter``, else None."""
    part: GlobalPart | None = parameter.global_part
    return part if part is not None and part.array is not None else None


def as_global(parameter: Any, array: Any) -> Any:
    """Return an array like ``parameter.data`` as the state of modules and optimizers has it."""
    part: GlobalPart | None = parameter.global_part
    return array if part is None else part.as_global(array)


def from_global(parameter: Any, value: Any, *, copy: bool = True) -> Any:
    """Return the inverse of ``as_global``. A value that is not an array is returned as it is.

    ``value`` may be a DArray in any sharding (all its ranks call then), or have all of the values.
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
"""``hook(parameter)``: called when the gradient of the parameter has been accumulated."""


class RemovableHandle:
    """A registered hook: ``remove()`` unregisters it, and may be called again."""

    def __init__(self, hooks: dict[object, GradHook], key: object) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Unregister the hook. Idempotent."""
        self._hooks.pop(self._key, None)


class Parameter:
    """An array that is trained, and its gradient.

    ``data`` is the array. ``grad`` is None or an array of its shape and dtype; each backward pass
    adds to it. ``requires_grad=False`` freezes the parameter, and drops its gradients. ``name`` is
    a label for messages; paths come from ``Module.named_parameters``.

    **When a gradient is complete.** In forward, a module announces each use of a parameter
    (``expect_grad``). In backward, it calls ``accumulate_grad`` once for each use. The gradient is
    complete, and post-accumulate hooks fire, when no announced use is left. So the hooks fire once,
    after the last contribution. This also holds for a parameter that two modules share, a module
    that is called twice in one forward pass, and several outstanding forward passes.

    Raises TypeError if ``data`` is not an array.
    """

    global_part: GlobalPart | None = None
    """The global array of which ``data`` is this rank's part; None: each rank has all of it."""

    on_contribution: Callable[[Array], Array] | None = None
    """Called with each contribution to the gradient; returns the array to add. None: itself."""

    other_grad_dtype: Any = None
    """The dtype of gradients if it is not that of ``data``: modules then compute with a copy."""

    def __init__(self, data: Array, *, requires_grad: bool = True, name: str = "") -> None:
        namespace(data, "data")  # refuses what is not an array
        self.data: Array = data
        self.grad: Array | None = None
        self.requires_grad = requires_grad
        self.name = name
        self.uses: int = 0
        """The number of uses in forward that still wait for their contribution in backward."""
        self.grad_home: Array | None = None
        """The memory of gradients (``set_grad_home``); None: arrays of their own."""
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
        """The trained array: the global one if this rank has a part of it."""
        part = self.global_part
        if part is None:
            return self.data
        return part.as_global(self.data if part.array is None else part.array)

    def takes(self, dtype: Any) -> bool:
        """Return whether results of ``data`` and an array of ``dtype`` can be differentiated.

        They must have the dtype of ``data``, or any floating one if gradients have another dtype.
        """
        own = self.data.dtype
        if dtype == own:
            return True
        try:
            together = np.result_type(dtype, own)
        except TypeError:  # they have nothing in common
            return False
        return together == own or (self.grad_dtype != own and is_floating(together))

    @property
    def grad_dtype(self) -> Any:
        """The dtype of gradients."""
        return self.data.dtype if self.other_grad_dtype is None else self.other_grad_dtype

    def expect_grad(self) -> None:
        """Announce one use: exactly one ``accumulate_grad`` will follow, in backward."""
        self.uses += 1

    def forget_uses(self, count: int = 1) -> None:
        """Take back ``count`` announced uses whose backward will not run. Fires no hook."""
        self.uses = max(self.uses - count, 0)

    def accumulate_grad(self, contribution: Array) -> None:
        """Add ``contribution`` to ``grad``; fire the hooks when it was the last one expected.

        It has the shape and dtype of ``data`` (any floating dtype while ``grad_dtype`` is another);
        ``grad`` has the dtype ``grad_dtype``. The parameter takes the array over: the caller must
        not use its memory again. Raises ValueError for another shape or dtype, RuntimeError when
        no use was announced.
        """
        # NumPy may have promoted a contribution in lower precision; it does for bfloat16.
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
        self._pay_back()

    def accumulate_matmul(self, left: Array, right: Array) -> None:
        """Do ``accumulate_grad(left @ right)``, straight into the gradient's home if it has one."""
        if (
            self.requires_grad
            and self.grad is None
            and self.grad_home is not None
            and self.on_contribution is None
            and self.grad_dtype == self.data.dtype
        ):
            namespace(self.data).matmul(left, right, out=self.grad_home)
            self.grad = self.grad_home
            self._pay_back()
        else:
            self.accumulate_grad(left @ right)

    def _pay_back(self) -> None:
        if self.uses == 0:
            raise RuntimeError(f"{self!r} got a gradient in backward for no use in forward")
        self.uses -= 1
        if self.uses == 0 and self.requires_grad:
            for hook in list(self._hooks.values()):
                hook(self)

    def register_post_accumulate_grad_hook(self, hook: GradHook) -> RemovableHandle:
        """Call ``hook(parameter)`` each time the gradient is complete (see the class).

        Hooks run in the order of registration, inside the backward pass. A hook may use, change
        or clear ``grad``. It must leave ``data`` alone: the module may not be done with it. Raises
        TypeError for what cannot be called.
        """
        check_callable(hook, "hook")
        # Not the handle itself, which refers to the hooks: they would outlive the parameter.
        key = object()
        self._hooks[key] = hook
        return RemovableHandle(self._hooks, key)

    def set_grad_home(self, home: Array | None) -> None:
        """Make gradients live in ``home`` from now on; what ``grad`` holds moves there.

        ``home`` is an array of the shape and dtype of gradients, for example a view of a larger
        buffer. While ``grad`` is None its content has no meaning. None ends the arrangement.
        Raises ValueError for another shape or dtype, TypeError for a value that is not an array.
        """
        if home is not None:
            check_array(home, "home")
        if home is not None and (home.shape != self.shape or home.dtype != self.grad_dtype):
            raise ValueError(f"home of {self!r} must have its shape and dtype, got {written(home)}")
        if self.grad is not None and self.grad is not home:
            if home is None:
                self.grad = self.grad.copy()
            else:
                home[...] = self.grad
                self.grad = home
        self.grad_home = home

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradient, or fill it with zeros in place."""
        if set_to_none:
            self.grad = None
        elif self.grad is not None:
            self.grad.fill(0)


class Buffer:
    """An array that belongs to a module's state but is not trained, such as a running mean.

    ``persistent=False`` keeps it out of ``state_dict``. Raises TypeError for ``data`` that is not
    an array.
    """

    def __init__(self, data: Array, *, persistent: bool = True) -> None:
        namespace(data, "data")
        self.data: Array = data
        self.persistent = persistent

    def __repr__(self) -> str:
        return f"Buffer({written(self.data)})"
