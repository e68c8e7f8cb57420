"""The state of a model whose stages lie on different ranks, as one tree of global arrays.

Names are paths in the whole model, and states of an optimizer go by the path of their parameter: so
a checkpoint loads on any other number of stages.
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

    ``state`` is a collective over the ranks along ``dim``. A pipeline of one stage is none, and has
    the same tree.

    Args:
        model: This rank's stage, whose parameters have the paths that they have in the whole model;
            no two stages have the same.
        optimizer: That of its parameters.
        mesh: All ranks of the pipeline and its replicas, with names; parameters are split over
            some of its dims, or not at all.
        dim: The dim along which the stages lie.

    Raises:
        MeshDimError: For a mesh that has no such dim.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, mesh: DeviceMesh, dim: str = "pp"
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._arrays = StageArrays(mesh, dim)

    def state(self) -> dict[str, Any]:
        """Return ``{"model": {path: DArray}, "optimizer": {path: {name: value}}}`` of all stages.

        Arrays are not copied. All ranks call.
        """
        model, optimizer = self._own()
        return self._arrays.state({"model": model, "optimizer": optimizer})

    def layout(self) -> dict[str, Any]:
        """Return the argument ``like`` with which ``meshlib.checkpoint.load`` loads the state.

        All ranks call. The optimizer need not have made a step.
        """
        own, _ = self._own()
        model = self._arrays.layout(own)
        whole = self._arrays.state({"model": own})["model"]
        shapes = {path: tuple(array.shape) for path, array in whole.items()}

        def like(keys: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
            # An array of another shape than the parameter's is a count of steps.
            return model[keys[0]] if shapes.get(keys[0]) == shape else ...

        return {"model": model, "optimizer": like}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Copy what was loaded, in the layout of ``layout``, into the stage and its optimizer.

        What the optimizer kept before goes, also where nothing was saved. Raises KeyError for a
        state that lacks something, when nothing is changed; ValueError for one that does not fit.
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

    # ------------------------------------------------------------------ what there is

    def _own(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return this stage's arrays and the states of its parameters, by path, as global ones."""
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
    """Return loaded values in the stage's form; the parts are the same."""
    if isinstance(own, DArray):
        return DArray(loaded.local, own.sharding, own.shape, own.dtype)
    return loaded.local
