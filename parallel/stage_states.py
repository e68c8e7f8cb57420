"""The state of a model whose stages are on different ranks, as one tree of global arrays.

Its keys are paths in the whole model, for parameters and their optimizer states alike. A checkpoint
therefore loads on any number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshlib import DeviceMesh
from meshlib.sharding import DArray
from parallel._core.pipeline.stage_arrays import StageArrays
from parallel.nn._module import Module
from parallel.nn._parameter import as_global
from parallel.optim._optimizer import Optimizer


class StageStates:
    """The global state of ``model``, a stage of a pipeline, and its ``optimizer``.

        states = StageStates(stage, optimizer, mesh)
        checkpoints.save(states.state(), step=100)
        states.restore(checkpoints.load(states.layout()))

    ``state`` is a collective over the ranks along ``dim``. With only one stage the tree is the
    same.

    Args:
        model: This rank's stage. Its parameters have the paths that they have in the whole model;
            no two stages share a path.
        optimizer: The optimizer of its parameters.
        mesh: All ranks of the pipeline and its replicas, with names. Parameters may be split over
            some of its dims.
        dim: The dim of the stages.

    Raises:
        MeshDimError: If the mesh has no dim of this name.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, mesh: DeviceMesh, dim: str = "pp"
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._arrays = StageArrays(mesh, dim)

    def state(self) -> dict[str, Any]:
        """Return ``{"model": {path: DArray}, "optimizer": {path: {name: value}}}`` of all stages.

        Arrays are not copied. All ranks must call.
        """
        model, optimizer = self._own()
        return self._arrays.state({"model": model, "optimizer": optimizer})

    def layout(self) -> dict[str, Any]:
        """Return the argument ``like`` with which ``meshlib.checkpoint.load`` loads the state.

        All ranks must call. The optimizer need not have made a step.
        """
        own, _ = self._own()
        model = self._arrays.layout(own)
        whole = self._arrays.state({"model": own})["model"]
        shapes = {path: tuple(array.shape) for path, array in whole.items()}

        def like(keys: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
            # An array of another shape than the parameter's is a step count.
            return model[keys[0]] if shapes.get(keys[0]) == shape else ...

        return {"model": model, "optimizer": like}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Copy a state, loaded with ``layout()``, into the stage and its optimizer.

        The loaded state replaces the optimizer's whole state, even for parameters without a saved
        one. Raises KeyError, and changes nothing, if the state lacks an entry; ValueError if it
        does not fit.
        """
        own = self._model.state_dict()
        arrays = {path: _as(value, state["model"][path]) for path, value in own.items()}
        saved = state["optimizer"]
        kept = {
            parameter: {
                name: value.local.copy() if isinstance(value, DArray) else value
                for name, value in saved[path].items()
            }
            for path, parameter in self._model.named_parameters()
            if path in saved
        }
        self._model.load_state_dict(arrays)
        self._optimizer.state = kept

    def _own(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return this stage's arrays and optimizer states by path, as global arrays."""
        optimizer = {
            path: {
                name: as_global(parameter, value)
                for name, value in self._optimizer.state[parameter].items()
            }
            for path, parameter in self._model.named_parameters()
            if parameter in self._optimizer.state
        }
        return self._model.state_dict(), optimizer


def _as(own: Any, loaded: Any) -> Any:
    """Return the loaded part as an array of the type and global shape of ``own``."""
    if isinstance(own, DArray):
        return DArray(loaded.local, own.sharding, own.shape, own.dtype)
    return loaded.local
