"""``DataParallel``: one process, several devices (several processes: the distributed one)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any


class DataParallel:
    """Runs a function of parameters and a batch on all of this process's devices.

        step = DataParallel(step)                  # the one line that changes
        params, loss = step(params, batch)

    ``fn(params, *batch)`` is compiled for all devices together: the parameters are copied to each,
    the batch is divided among them along ``dim``, and wherever ``fn`` combines samples (the mean
    of a loss, the gradient of parameters) XLA adds up over the devices. What ``fn`` computes is
    what it computes on one device, up to rounding; it needs no change. Its results are arrays
    over the devices like any other, and fit as the next call's parameters without a copy.

    Args:
        fn: a function that ``jax.jit`` takes, with array arguments. Not one with calls of
            ``meshlib.jit`` inside: those belong to one device a rank.
        devices: the devices; by default all local ones.
        dim: the dim of every array in ``batch`` that counts samples. Arrays without dims are
            copied to each device.

    Raises:
        ValueError: for no devices, and, when called, for a batch whose arrays disagree in their
            number of samples, or whose samples the devices cannot share equally.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        *,
        dim: int = 0,
    ) -> None:
        chosen = jax.local_devices() if devices is None else list(devices)
        if not chosen:
            raise ValueError("devices is empty; expected at least one device")
        self.devices = chosen
        self.dim = dim
        mesh = Mesh(np.array(chosen), ("devices",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._divided = NamedSharding(mesh, PartitionSpec(*[None] * dim, "devices"))
        self._fn = jax.jit(fn)

    def __call__(self, params: Tree, *batch: Tree) -> Any:
        """Return ``fn(params, *batch)``."""
        self._check(batch)
        placed = jax.tree_util.tree_map(self._place, batch)
        return self._fn(jax.device_put(params, self._everywhere), *placed)

    def _place(self, array: Any) -> Any:
        sharding = self._divided if np.ndim(array) > self.dim else self._everywhere
        return jax.device_put(array, sharding)

    def _check(self, batch: tuple[Tree, ...]) -> None:
        shapes = [np.shape(array) for array in jax.tree_util.tree_leaves(batch)]
        sizes = {shape[self.dim] for shape in shapes if len(shape) > self.dim}
        if len(sizes) > 1:
            raise ValueError(
                f"the arrays of the batch have {sorted(sizes)} samples along dim {self.dim} "
                f"(shapes {shapes}); expected the same"
            )
        for size in sizes:
            if size % len(self.devices):
                raise ValueError(
                    f"the batch has {size} samples, which {len(self.devices)} devices cannot share "
                    "equally; drop or pad the last ones"
                )
