"""Of what global array the array of a parameter is this rank's part."""

from __future__ import annotations

from typing import Any, ClassVar

from meshlib.sharding import DArray, Sharding


class GlobalPart:
    """The ``shape`` of a global array, and how it lies on its mesh.

    A layer that splits its parameters (tensor parallel) says it in ``parameter.global_part``.
    """

    kept: ClassVar[bool] = False
    """Whether modules compute with more than the part: ``fully_shard`` keeps parts.

    The state of modules and optimizers then has the global array.
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        self.sharding: Sharding = sharding
        self.shape: tuple[int, ...] = shape

    @property
    def array(self) -> Any:
        """This rank's part, where it is ``kept``."""
        raise NotImplementedError

    def is_like(self, array: Any) -> bool:
        """Whether ``array`` has the shape of this rank's part."""
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
    """Return what ``parameter`` is a part of where ``fully_shard`` keeps it, else None."""
    part: GlobalPart | None = parameter.global_part
    return part if part is not None and part.kept else None


def as_kept(parameter: Any, array: Any) -> Any:
    """Return an array like ``parameter.master`` as the state of modules and optimizers has it."""
    part = kept_part(parameter)
    return array if part is None else part.as_global(array)


def as_global(parameter: Any, array: Any) -> Any:
    """Return an array like ``parameter.master`` as the global array, split by whomever."""
    part: GlobalPart | None = parameter.global_part
    return array if part is None else part.as_global(array)


def from_kept(parameter: Any, value: Any, *, copy: bool = True) -> Any:
    """Return the inverse of ``as_kept``. A value that is no array is returned as it is.

    ``value`` may be a DArray in any sharding (all its ranks call then), or have all of the values.
    """
    part = kept_part(parameter)
    if not hasattr(value, "dtype"):
        return value
    if part is not None:
        return part.local(value, copy=copy)
    if isinstance(value, DArray):
        return value.full_array()
    return value.copy() if copy else value
