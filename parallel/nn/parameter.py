"""Parameters, their gradients, and the hooks that fire when a gradient is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshlib.sharding import DArray, Sharding
from parallel.arrays import Array, is_floating, namespace, written
from parallel.checks import check_array, check_callable

GradHook = Callable[["Parameter"], None]
"""``hook(parameter)``: called when the gradient of the parameter has been accumulated."""


class RemovableHandle:
    """What registering a hook returns: ``remove()`` unregisters it, once or more often."""

    def __init__(self, hooks: dict[object, GradHook], key: object) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Unregister the hook. Idempotent."""
        self._hooks.pop(self._key, None)


class Parameter:
    """An array that is trained, and its gradient.

    ``data`` is the array; ``grad`` is None or an array of its shape and dtype, to which each
    backward pass adds. ``requires_grad=False`` freezes the parameter: gradients given to it are
    dropped. ``name`` is a label for messages; paths come from ``Module.named_parameters``.

    **When a gradient is complete.** A module announces, in forward, each use of a parameter
    (``expect_grad``), and pays each use back in backward with one ``accumulate_grad``. The
    gradient is complete, and post-accumulate hooks fire, when no announced use is left. So a
    parameter that two modules share, or a module that is called twice in one forward pass, fires
    its hooks once, after the last contribution; with several forward passes outstanding they fire
    once as well, in the last backward pass.

    **Parts.** A parameter may be kept as this rank's part of a global array: ``data`` and ``grad``
    are that part then (what optimizers work on), ``value`` is the global array. Modules that
    compute with it need the whole: whoever cut it up lends it to them (``lend``, ``take_back``).

    Raises TypeError for ``data`` that is no array.
    """

    sharding: Sharding | None = None
    """How the global array lies on its mesh, None for a parameter that is kept whole."""
    split: tuple[Sharding, tuple[int, ...]] | None = None
    """Of what global array, in which sharding, the array that modules compute with is a part.

    A layer that splits its parameters (tensor parallel) says it here; None: it is the global one.
    """

    on_contribution: Callable[[Array], Array] | None = None
    """Called with each contribution to the gradient; returns the array to add. None: itself."""

    owner: object = None
    """Who keeps the parameter as parts, and lends the whole: None for one that is kept whole."""

    def __init__(self, data: Array, *, requires_grad: bool = True, name: str = "") -> None:
        namespace(data, "data")  # refuses what is not an array
        self.data: Array = data
        self.grad: Array | None = None
        self.requires_grad = requires_grad
        self.name = name
        self.uses: int = 0
        """How many uses in forward still wait for their contribution in backward."""
        self._master: Array | None = None
        self.grad_home: Array | None = None
        """Where gradients live (``set_grad_home``), None: in arrays of their own."""
        self._whole: Array | None = None
        self._global_shape: tuple[int, ...] = ()
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
    def master(self) -> Array:
        """The array that is trained: ``data``, unless that is a substitute in lower precision."""
        return self.data if self._master is None else self._master

    def substitute(self, data: Array | None) -> Array | None:
        """Let modules compute with ``data`` in place of ``master``; None: with ``master`` again.

        Returns the substitute that was there, None if there was none: pass it to go back. Raises
        ValueError for another shape.
        """
        if data is not None and data.shape != self.data.shape:
            raise ValueError(f"{self!r}: a substitute must have its shape, got {list(data.shape)}")
        master = self.master
        before = None if self._master is None else self.data
        self._master = None if data is None else master
        self.data = master if data is None else data
        return before

    # Parts of global arrays

    def keep_part(self, part: Array, sharding: Sharding, shape: tuple[int, ...]) -> None:
        """Keep ``part``: this rank's of a global array of ``shape``, in ``sharding``."""
        self.grad_home = self.grad = self._master = None
        self.data = part
        self.sharding = sharding
        self._global_shape = shape

    @property
    def layout(self) -> tuple[Sharding, tuple[int, ...]] | None:
        """How the global array lies on its mesh, and its shape; None where each rank has it all."""
        return self.split if self.sharding is None else (self.sharding, self._global_shape)

    def lend(self, whole: Array, grad: Array | None) -> None:
        """Let modules compute with ``whole`` in place of the part, and add to ``grad``."""
        self._master = self.master
        self.data = self._whole = whole
        self.grad = grad

    def take_back(self, grad: Array | None) -> Array | None:
        """End ``lend``: ``grad`` is the part's gradient. Returns that of the whole."""
        of_whole = self.grad
        self.data, self._master = self.master, None
        self._whole = self.grad_home = None
        self.grad = grad
        return of_whole

    @property
    def whole(self) -> Array:
        """The array that modules compute with, in no lower precision than they were given it."""
        return self.master if self._whole is None else self._whole

    @property
    def value(self) -> Array | DArray:
        """The array that is trained: where it is kept as parts, the global one."""
        return self.as_global(self.master)

    def as_global(self, array: Array) -> Array | DArray:
        """Return an array like ``master`` (an optimizer's state) as the global array it is part of.

        Where the parameter is kept whole, and for an array of another shape, that is itself.
        """
        if self.sharding is None or getattr(array, "shape", None) != self.master.shape:
            return array
        return DArray(array, self.sharding, self._global_shape, array.dtype)

    def whole_of(self, array: Any) -> Any:
        """Return an array like ``data`` as the part that it is where a layer has ``split`` this.

        Itself where none has, where the parameter is kept as parts, and for what is of another
        shape (a count of steps) or a DArray already.
        """
        if self.split is None or self.sharding is not None or isinstance(array, DArray):
            return array
        sharding, shape = self.split
        if getattr(array, "shape", None) != sharding.local_shape(shape):
            return array
        return DArray(array, sharding, shape, array.dtype)

    def part_of(self, value: Any, *, copy: bool = True) -> Any:
        """Return the inverse of ``as_global``: of an array, as many values as ``master`` has.

        ``value`` is a DArray in any sharding (all its ranks call then), or an array with all of the
        values; what is no array is returned as it is.
        """
        if isinstance(value, DArray):
            if self.sharding is None:
                return value.full_array()
            local = value.redistribute(self.sharding).local
            return local.copy() if copy and value.sharding == self.sharding else local
        if not hasattr(value, "dtype"):
            return value
        if self.sharding is not None and value.shape == self._global_shape:
            value = value[self.sharding.slices(self._global_shape)]
        return value.copy() if copy else value

    def takes(self, dtype: Any) -> bool:
        """Return whether what is computed from ``data`` and an array of ``dtype`` stays trainable.

        It has the dtype of ``data`` then; while that is not the dtype of ``master``, any floating
        one.
        """
        own = self.data.dtype
        if dtype == own:
            return True
        try:
            together = np.result_type(dtype, own)
        except TypeError:  # they have nothing in common
            return False
        return together == own or (self._in_other_precision and is_floating(together))

    @property
    def _in_other_precision(self) -> bool:
        """Whether modules compute in another dtype than that of what is trained."""
        return self.master.dtype != self.data.dtype

    def expect_grad(self) -> None:
        """Announce one use: exactly one ``accumulate_grad`` will follow, in backward."""
        self.uses += 1

    def forget_uses(self, count: int = 1) -> None:
        """Take back ``count`` announced uses whose backward will not run. Fires no hook."""
        self.uses = max(self.uses - count, 0)

    def accumulate_grad(self, contribution: Array) -> None:
        """Add ``contribution`` to ``grad``; fire the hooks when it was the last one expected.

        It has the shape and dtype of ``data`` (any floating dtype while ``master`` has another);
        ``grad`` has the dtype of ``master``. The parameter takes the array over: the caller must
        not use its memory again. Raises ValueError for another shape or dtype, RuntimeError when
        no use was announced.
        """
        # What is computed in lower precision may have been promoted on the way: bfloat16 is.
        fits = contribution.dtype == self.data.dtype or (
            self._in_other_precision and is_floating(contribution.dtype)
        )
        if contribution.shape != self.data.shape or not fits:
            raise ValueError(
                f"gradient of {self!r} must have its shape and dtype, got {written(contribution)}"
            )
        if self.requires_grad:
            contribution = contribution.astype(self.master.dtype, copy=False)
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
            and self.master.dtype == self.data.dtype
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

        ``home`` is an array of the shape and dtype of ``master``, for example a view of a larger
        buffer. While ``grad`` is None its content has no meaning. None ends the arrangement.
        Raises ValueError for another shape or dtype, TypeError for what is no array.
        """
        if home is not None:
            check_array(home, "home")
        if home is not None and (home.shape != self.shape or home.dtype != self.master.dtype):
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

    ``persistent=False`` keeps it out of ``state_dict``. Raises TypeError for ``data`` that is no
    array.
    """

    def __init__(self, data: Array, *, persistent: bool = True) -> None:
        namespace(data, "data")
        self.data: Array = data
        self.persistent = persistent

    def __repr__(self) -> str:
        return f"Buffer({written(self.data)})"
