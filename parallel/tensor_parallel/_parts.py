"""This rank's parts of parameters that are split over the ranks of a mesh dimension."""

from __future__ import annotations

from meshlib import DeviceMesh, ProcessGroup
from meshlib.sharding import DArray, Sharding
from parallel._arrays import Array, namespace
from parallel._groups import Ranks, resolve
from parallel.nn._global_part import GlobalPart, kept_part
from parallel.nn._parameter import Parameter
from parallel.tensor_parallel._regions import gather, own_part, part_size


class Parts:
    """Cuts parameters into the parts of the ranks of ``mesh``, and says so in them.

    Raises TypeError for what is no set of ranks, ValueError for one without this rank.
    """

    def __init__(self, mesh: Ranks | None) -> None:
        self.group: ProcessGroup = resolve(mesh, "mesh")
        self.mesh: DeviceMesh | None = mesh if isinstance(mesh, DeviceMesh) else None
        self._dims: dict[Parameter, int | None] = {}

    def check(self, parameter: Parameter, dim: int | None, size: int, what: str) -> None:
        """Raise ValueError where ``cut`` would: see there. ``size``, called ``what``, is divided.

        One that modules share may be cut once more along the same dim: nothing is done then.
        """
        if dim is not None:
            part_size(size, self.group, what)
        if kept_part(parameter) is not None:
            raise ValueError(
                f"{what} belongs to a parameter that fully_shard keeps as parts; expected one that"
                " is whole: parallelize first, fully_shard then"
            )
        if parameter.global_part is not None and parameter not in self._dims:
            raise ValueError(f"{what} belongs to a parameter that is split already")

    def cut(self, parameter: Parameter, dim: int | None) -> None:
        """Keep this rank's part along ``dim``, a copy; None: all of it, the same on all ranks.

        Raises ValueError for a parameter that modules share, and that was cut along another dim.
        """
        if parameter in self._dims:
            if self._dims[parameter] != dim:
                raise ValueError(
                    f"modules share {parameter!r}: one has it split along dim"
                    f" {self._dims[parameter]}, another along dim {dim}; expected the same"
                )
            return
        self._dims[parameter] = dim
        shape = parameter.shape
        if dim is not None:
            parameter.set_grad_home(None)
            parameter.grad = None
            parameter.data = own_part(parameter.data, self.group, dim).copy()
        if self.mesh is not None:  # a group has no dims that could be named
            dims = [] if dim is None else [*[()] * dim, tuple(range(self.mesh.ndim))]
            sharding = Sharding.of_positions(self.mesh, dims)
            parameter.global_part = GlobalPart(sharding, shape)

    def sum(self, contribution: Array) -> Array:
        """Return the sum of the ranks' contributions to a gradient. A collective."""
        contribution = namespace(contribution).ascontiguousarray(contribution)
        self.group.all_reduce(contribution)
        return contribution

    def whole(self, parameter: Parameter) -> Array:
        """Return the global array of a parameter that was cut, a new one. A collective."""
        value, dim = parameter.value, self._dims[parameter]
        if isinstance(value, DArray):  # split again, by ``fully_shard``
            return value.full_array()
        return (value if dim is None else gather(value, self.group, dim)).copy()
