"""``DataParallel``: one process, several devices (``DistributedDataParallel``: many processes)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallel._checks import to_count

Tree = Any


class DataParallel:
    """Runs a function of parameters and a batch on all of this process's devices.

        step = DataParallel(step)                  # the one line that changes
        params, loss = step(params, batch)

    ``fn(params, *batch)`` is compiled for all devices together. The parameters are copied to each
    device, and the batch is divided among them along ``dim``. Where ``fn`` combines samples (the
    mean of a loss, the gradient of parameters), XLA sums over the devices. ``fn`` needs no change:
    it computes the same as on one device, up to rounding. Its results are arrays over the devices,
    and can be the next call's parameters without a copy.

    The devices may not be able to share a batch equally, such as an epoch's last one. Then it is
    cut into fewer equal parts, and several devices compute the same part: on 4 devices 6 samples
    make 2 parts, and 7 samples one.

    Args:
        fn: A function that ``jax.jit`` takes, with array arguments. Not one with calls of
            ``meshlib.jit`` inside: those belong to one device a rank.
        devices: The devices; by default all local ones.
        dim: The dim along which every array in ``batch`` has its samples. Arrays without that dim
            are copied to each device.

    Raises:
        TypeError: For ``devices`` or ``dim`` of another type.
        ValueError: For no devices or one that comes twice, a negative ``dim``, and, when called,
            for a batch whose arrays disagree in their number of samples.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        *,
        dim: int = 0,
    ) -> None:
        self.devices: list[Any] = _distinct_devices(devices)
        self.dim: int = to_count(dim, "dim", 0)
        self._everywhere = NamedSharding(Mesh(np.array(self.devices), "copies"), PartitionSpec())
        self._fn = jax.jit(fn)

    def __call__(self, params: Tree, *batch: Tree) -> Any:
        """Return ``fn(params, *batch)``."""
        divided = self._divided_by(math.gcd(self._count_samples(batch), len(self.devices)))

        def place(array: Any) -> Any:
            counts = np.ndim(array) > self.dim
            return jax.device_put(array, divided if counts else self._everywhere)

        placed = jax.tree_util.tree_map(place, batch)
        return self._fn(jax.device_put(params, self._everywhere), *placed)

    def _divided_by(self, parts: int) -> NamedSharding:
        """Return the placement of arrays in equal parts, each on equally many devices."""
        mesh = Mesh(np.array(self.devices).reshape(parts, -1), ("parts", "copies"))
        return NamedSharding(mesh, PartitionSpec(*[None] * self.dim, "parts"))

    def _count_samples(self, batch: tuple[Tree, ...]) -> int:
        shapes = [np.shape(array) for array in jax.tree_util.tree_leaves(batch)]
        sizes = {shape[self.dim] for shape in shapes if len(shape) > self.dim}
        if len(sizes) > 1:
            raise ValueError(
                f"the arrays of the batch have {sorted(sizes)} samples along dim {self.dim} "
                f"(shapes {shapes}); expected the same. Pass what holds no samples in params"
            )
        return sizes.pop() if sizes else 0


def _distinct_devices(devices: Sequence[Any] | None) -> list[Any]:
    if isinstance(devices, (int, str)):
        raise TypeError(f"devices must be a sequence of JAX's devices, got {devices!r}")
    chosen = jax.local_devices() if devices is None else list(devices)
    if not chosen:
        raise ValueError("devices is empty; expected at least one device")
    for place, device in enumerate(chosen):
        if not isinstance(device, jax.Device):
            raise TypeError(f"devices[{place}] must be a device of JAX, got {device!r}")
        if device in chosen[:place]:
            raise ValueError(f"devices has {device} twice")
    return chosen
