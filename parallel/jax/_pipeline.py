"""Pipeline stages for JAX, and the global state of all stages for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshlib import DeviceMesh
from meshlib.sharding import DArray
from parallel._arrays import Array
from parallel._checks import check_callable
from parallel._core.pipeline.stage import Spec, Stage, as_tuple
from parallel._core.pipeline.stage_arrays import StageArrays
from parallel._groups import GroupLike
from parallel.jax import fsdp
from parallel.jax._trees import TreeOfParameters, is_trained, path_of

Tree = Any
_Trained = list[jax.Array]
_Inputs = tuple[Array, ...]


class _StageArguments(NamedTuple):
    """The arguments of a stage's program. ``floats`` are the inputs that have gradients."""

    trained: _Trained
    floats: _Inputs
    others: _Inputs
    fixed: list[Any]
    """The untrained leaves of the parameters: arrays, and None for each leaf of another type."""
    kwargs: dict[str, Any]


class PipelineStage(Stage):
    """A pipeline stage that computes a function of parameters and arrays.

        stage = PipelineStage(layers, params, mesh.get_local_rank("pp"), 4, mesh["pp"])
        schedule = Schedule1F1B(stage, 8, loss_fn)
        schedule.step(x, target=y)
        params = stage.params = update(stage.params, stage.grads)

    ``function(params, *inputs)`` returns an array or a tuple of arrays: the next stage's inputs. It
    is jitted and differentiated by ``jax.vjp``. The loss, ``loss(output, target)``, is jitted too.
    The schedule itself runs outside of ``jit``.

    For schedules with I and W, each half of the backward is a separate program, in which XLA drops
    unneeded work. W computes the stage's gradients of activations again, so I and W together take
    longer than B. The difference is small if a stage has few layers.

    Args:
        function: The function of the stage.
        params: A pytree; leaves other than floating-point arrays are passed on unchanged.
        stage_index: This stage's number, from 0.
        num_stages: The number of stages on all ranks.
        mesh: The ranks of the pipeline: ``mesh["pp"]``, a process group, or None for the default
            group.

    Raises:
        TypeError: For an argument of another type.
        ValueError: For a ``stage_index`` out of range, and if this rank is not in the mesh.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Tree,
        stage_index: int,
        num_stages: int,
        mesh: GroupLike | None = None,
    ) -> None:
        check_callable(function, "function")
        super().__init__(stage_index, num_stages, mesh)
        self.params: Tree = params
        self.grads: Tree = None
        """The sum of gradients since ``zero_grad``, in the structure of ``params``, with None for
        leaves that are not trained. None before the first step."""
        self._function = function
        self._tree = TreeOfParameters.of(params)
        self._training = True
        self._saved: dict[int, tuple[Any, list[int], int]] = {}
        self._saved_for_weight: dict[int, tuple[Any, tuple[jax.Array, ...]]] = {}
        self._sum: _Trained | None = None
        self._run = jax.jit(self._apply, static_argnums=(1,))
        self._run_for_backward = jax.jit(self._with_vjp, static_argnums=(1,))
        self._derivative = jax.jit(_derivative, static_argnums=(2,))
        self._add = jax.jit(_sum)
        self._losses: dict[int, Any] = {}

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.grads = self._sum = None

    # ------------------------------------------------------------------ programs

    def _apply(self, args: _StageArguments, where: tuple[bool, ...]) -> tuple[jax.Array, ...]:
        """Call the function; ``where`` is True for its inputs that are in ``floats``."""
        floats, others = iter(args.floats), iter(args.others)
        inputs = [next(floats) if is_float else next(others) for is_float in where]
        fixed = [self._others[i] if leaf is None else leaf for i, leaf in enumerate(args.fixed)]
        params = self._tree.join(args.trained, fixed)
        output = self._function(params, *inputs, **args.kwargs)
        return as_tuple(output, f"the output of {self!r}")

    def _with_vjp(
        self, args: _StageArguments, where: tuple[bool, ...]
    ) -> tuple[tuple[jax.Array, ...], Any]:
        def run(trained: _Trained, floats: _Inputs) -> tuple[Any, Any]:
            outputs = self._apply(args._replace(trained=trained, floats=floats), where)
            # Only floating-point outputs have gradients.
            return tuple(o for o in outputs if is_trained(o)), outputs

        _, vjp, outputs = jax.vjp(run, args.trained, args.floats, has_aux=True)
        return outputs, vjp

    # ------------------------------------------------------------------ called by the executor

    def empty(self, spec: Spec) -> Array:
        return np.empty(spec.shape, spec.dtype)

    def joined(self, arrays: Sequence[Array]) -> Array:
        return jnp.concatenate(arrays)

    def check_loss(self, function: Any) -> None:
        check_callable(function, "loss_fn")

    def begin(self, training: bool) -> None:
        self._training = training
        self._tree.check(self.params, "params")
        self._trained, self._others = self._tree.split(self.params)
        # Arrays are arguments of the programs; other leaves (a function, a string) are constants.
        self._fixed = [leaf if hasattr(leaf, "dtype") else None for leaf in self._others]

    def forward(
        self, microbatch: int, inputs: Sequence[Array], kwargs: dict[str, Any]
    ) -> tuple[Array, ...]:
        """Run the program; when training, save the derivative for the backward."""
        where = tuple(is_trained(array) for array in inputs)
        floats = tuple(array for array in inputs if is_trained(array))
        others = tuple(array for array in inputs if not is_trained(array))
        args = _StageArguments(self._trained, floats, others, self._fixed, kwargs)
        if not self._training:
            return jax.block_until_ready(self._run(args, where))
        outputs, vjp = jax.block_until_ready(self._run_for_backward(args, where))
        places = [place for place, is_float in enumerate(where) if is_float]
        self._saved[microbatch] = vjp, places, len(where)
        return outputs

    def loss(
        self, function: Any, outputs: Sequence[Array], target: Any, scale: float | None
    ) -> tuple[float, tuple[Array, ...]]:
        program = self._losses.get(id(function))
        if program is None:

            def loss(outputs: tuple[Any, ...], target: Any, scale: float) -> tuple[Any, Any]:
                value = function(*outputs, target)
                return value * scale, value

            program = jax.jit(jax.value_and_grad(loss, has_aux=True)), jax.jit(function)
            self._losses[id(function)] = program
        if scale is None:
            return float(program[1](*outputs, target)), ()
        (_, value), grads = program[0](tuple(outputs), target, scale)
        return float(value), jax.block_until_ready(grads)

    def backward(
        self, microbatch: int, grads: Sequence[Array | None], *, last: bool
    ) -> tuple[Array | None, ...]:
        vjp, places, count = self._saved.pop(microbatch)
        present = _present(grads)
        of_params, of_inputs = jax.block_until_ready(self._derivative(vjp, present, (0, 1)))
        self._accumulate(of_params)
        return _spread(of_inputs, places, count)

    def backward_input(
        self, microbatch: int, grads: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        vjp, places, count = self._saved.pop(microbatch)
        present = _present(grads)
        self._saved_for_weight[microbatch] = vjp, present
        (of_inputs,) = jax.block_until_ready(self._derivative(vjp, present, (1,)))
        return _spread(of_inputs, places, count)

    def backward_weight(self, microbatch: int, *, last: bool) -> None:
        vjp, present = self._saved_for_weight.pop(microbatch)
        self._accumulate(*jax.block_until_ready(self._derivative(vjp, present, (0,))))

    def end(self, failed: bool) -> None:
        self._saved.clear()
        self._saved_for_weight.clear()
        if self._sum is not None and not failed:
            self.grads = self._tree.join(self._sum)

    def _accumulate(self, grads: _Trained) -> None:
        self._sum = grads if self._sum is None else self._add(self._sum, grads)


_Vjp = Callable[[tuple[Array, ...]], tuple[_Trained, _Inputs]]


def _derivative(vjp: _Vjp, grads: tuple[Array, ...], which: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the gradients of the parameters (0), of the inputs (1), or both."""
    results = vjp(grads)
    return tuple(results[i] for i in which)


def _sum(a: _Trained, b: _Trained) -> _Trained:
    return [jnp.add(x, y) for x, y in zip(a, b, strict=True)]


def _present(grads: Sequence[Array | None]) -> tuple[Array, ...]:
    return tuple(grad for grad in grads if grad is not None)


def _spread(grads: Sequence[Array], places: Sequence[int], count: int) -> tuple[Array | None, ...]:
    """Return ``count`` gradients: ``grads`` at ``places``, and None for the other inputs."""
    spread: list[Array | None] = [None] * count
    for place, grad in zip(places, grads, strict=True):
        spread[place] = grad
    return tuple(spread)


class StageStates:
    """The global state of a pytree that is distributed over the stages of a pipeline.

        states = StageStates(mesh)
        checkpoints.save(states.state((params, optimizer_state)), step=100)
        loaded = checkpoints.load(states.layout((params, optimizer_state)))
        params, optimizer_state = states.restore((params, optimizer_state), loaded)

    The key of an array is its path, which no two stages share. ``parallelize`` and ``fsdp.shard``
    record in the tree how arrays are split, so a state loads on any other mesh. All ranks must
    call all methods, outside of ``jit``.

    Args:
        mesh: A mesh of all ranks, with names.
        dim: The dim of the stages. Its size may be 1.

    Raises:
        MeshDimError: If the mesh has no dim of this name.
    """

    def __init__(self, mesh: DeviceMesh, dim: str = "pp") -> None:
        self._arrays = StageArrays(mesh, dim)

    def state(self, tree: Tree) -> dict[str, Any]:
        """Return ``{path: DArray}`` of all stages' trees, with numbers for arrays without dims."""
        return self._arrays.state({"": self._own(tree)})[""]

    def layout(self, tree: Tree) -> dict[str, Any]:
        """Return the argument ``like`` with which ``meshlib.checkpoint.load`` loads the state."""
        own = self._own(tree)
        numbers = {path: ... for path, value in own.items() if not isinstance(value, DArray)}
        return {**numbers, **self._arrays.layout(own)}

    def restore(self, tree: Tree, state: Mapping[str, Any]) -> Tree:
        """Return ``tree`` with the values of ``state``, which was loaded with ``layout``.

        Raises KeyError for a path that ``state`` lacks.
        """

        def value(path: Any, leaf: Any) -> Any:
            loaded = state[path_of(path)]
            local = loaded.local if isinstance(loaded, DArray) else loaded
            return jnp.asarray(local, jnp.result_type(leaf))

        return jax.tree_util.tree_map_with_path(value, tree)

    def _own(self, tree: Tree) -> dict[str, Any]:
        own: dict[str, Any] = {}
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        nodes = jax.tree_util.tree_leaves(tree, is_leaf=fsdp.is_split)
        for (path, leaf), node in zip(leaves, nodes, strict=True):
            local, whole = np.asarray(leaf), fsdp.to_global(node)
            if isinstance(whole, DArray):
                own[path_of(path)] = whole
            else:
                own[path_of(path)] = local if local.ndim else local.item()
        return own
