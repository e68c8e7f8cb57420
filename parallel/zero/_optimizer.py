"""``ZeroRedundancyOptimizer`` for ``parallel.nn`` parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshlib import ProcessGroup
from meshlib.sharding import Sharding
from parallel._arrays import written
from parallel._checks import describe
from parallel._core.replicas import check_same, raise_on_all_ranks
from parallel._groups import GroupLike, gathered, resolve
from parallel.join._context import FunctionsHook, Join, Joinable, JoinHook
from parallel.nn._parameter import Parameter, kept_part
from parallel.optim._optimizer import Optimizer, ParamGroup
from parallel.zero._shards import (
    Keepers,
    Shards,
    assign_owners,
    check_group_rank,
    collected,
    described,
    shards_by_placement,
    whole_nbytes,
)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose states are spread over the replicas: each rank has 1/N of them.

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, mesh["dp"], lr=1e-3)

    Each parameter is owned by one rank, which keeps its state and updates it in ``step``; then the
    ranks exchange what they updated, one all-gather for each dtype. Parameters are not split, so
    shares are as even as their sizes allow. The parameters come out as with ``optimizer_class``
    itself, bit for bit, as long as that treats each parameter by itself (clip by a global norm
    before ``step``).

    For pytrees and optax there is ``ZeroRedundancyOptax``.

    In a ``Join`` with the model, ranks that are out of inputs go on updating what they own.

    Args:
        params: Parameters, or groups of them as dicts; the same on all ranks, in the same order.
        optimizer_class: Called with this rank's parameters and ``defaults``.
        process_group: The replicas: ``mesh["dp"]``, a group, or None for the default group.
        parameters_as_bucket_view: Move the parameters' arrays into one flat array for each dtype:
            the exchange then needs neither copies nor memory.
        defaults: Options of ``optimizer_class``.

    Raises:
        ValueError: On every rank, when the ranks' parameters differ, naming the first that does;
            for no parameters; and what ``optimizer_class`` raises for its options.
        TypeError: For an ``optimizer_class`` that makes no ``Optimizer``, or arguments of another
            type.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[ParamGroup],
        optimizer_class: Callable[..., Optimizer],
        process_group: GroupLike | None = None,
        *,
        parameters_as_bucket_view: bool = False,
        **defaults: Any,
    ) -> None:
        self._group = resolve(process_group, "process_group")
        self._as_views = parameters_as_bucket_view
        self._keepers = Keepers(self._group, process_group, self.owner)
        self._owners: dict[Parameter, int] = {}
        self._loads = [0] * self._group.size()
        self._shards: list[Shards] = []
        self._inner: Optimizer | None = None
        self._consolidated: dict[str, Any] | None = None
        with raise_on_all_ranks(self._group):
            must = "optimizer_class must make an optimizer when called, such as optim.AdamW, got"
            if not callable(optimizer_class):
                raise TypeError(f"{must} {describe(optimizer_class)}")
            probe = optimizer_class([Parameter(np.zeros(0))], **defaults)
            if not isinstance(probe, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{must} {optimizer_class!r}, which makes {describe(probe)}")
            super().__init__(params, probe.defaults)
        self._own(self.param_groups)
        self._inner = optimizer_class([self._share(g) for g in self.param_groups], **defaults)

    def add_param_group(self, group: ParamGroup) -> None:
        """Add parameters with options of their own; called by all ranks.

        Raises the errors of ``Optimizer``, and ValueError where the ranks' parameters differ.
        """
        inside = self._inner is None  # the constructor tells itself what is wrong
        with raise_on_all_ranks(None if inside else self._group):
            super().add_param_group(group)
        if self._inner is not None:
            self._own(self.param_groups[-1:])
            self._inner.add_param_group(self._share(self.param_groups[-1]))

    def _own(self, groups: Iterable[ParamGroup]) -> None:
        parameters = [parameter for group in groups for parameter in group["params"]]
        lines = [
            f"parameter {number} {written(parameter.data)}"
            for number, parameter in enumerate(parameters, len(self._owners))
        ]
        in_parts = [p for p in parameters if kept_part(p) is not None]
        check_same(
            ValueError(
                f"{in_parts[0]!r} is kept in parts by fully_shard, and so are its states with any"
                " optimizer; expected whole parameters"
            )
            if in_parts
            else lines,
            self._group,
        )
        # Of whole arrays, where a layer has split them: in other slices the owners are the same.
        owners = assign_owners([whole_nbytes(p) for p in parameters], self._loads)
        self._owners.update(zip(parameters, owners, strict=True))
        self._shards = shards_by_placement(self._owners, self._group, as_views=self._as_views)

    def _share(self, group: ParamGroup) -> ParamGroup:
        me = self._group.rank()
        return {**group, "params": [p for p in group["params"] if self._owners[p] == me]}

    def owner(self, parameter: Parameter) -> int:
        """Return the group rank that updates ``parameter`` and keeps its state.

        Raises KeyError for one that the optimizer does not have.
        """
        if parameter not in self._owners:
            raise KeyError(f"the optimizer does not have the parameter {describe(parameter)}")
        return self._owners[parameter]

    @property
    def local_optimizer(self) -> Optimizer:
        """The optimizer of this rank's parameters."""
        assert self._inner is not None
        return self._inner

    def step(self) -> None:
        """Update this rank's parameters, and exchange. A collective."""
        with Join.notify_join_context(self):
            self._step()

    def _step(self) -> None:
        self._consolidated = None
        inner = self.local_optimizer
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
        inner.step()
        for shards in self._shards:
            shards.exchange()

    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        """Not possible: raises TypeError. The ranks exchange parameters in ``step``."""
        raise TypeError("ZeroRedundancyOptimizer updates its parameters together: call step()")

    # ------------------------------------------------------------------ state

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the whole state on group rank ``to`` (None: on all), for ``state_dict``.

        A collective. The state is valid until the next step. Raises ValueError for a rank that is
        not in the group, and TypeError unless it is an integer.
        """
        check_group_rank(to, self._group)
        parts = collected(self._own_state(), self._group, to)
        if parts is not None:
            state = {n: values for part in parts for n, values in part["state"].items()}
            self._consolidated = self._with_all(parts[0], state)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as ``optimizer_class`` alone would, after it was consolidated.

        It can be loaded by any number of ranks, and by an ``optimizer_class`` without sharding.
        Raises RuntimeError where ``consolidate_state_dict`` has not brought the state.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"the optimizer's state is spread over the {self._group.size()} ranks of "
                f"{self._group}: call consolidate_state_dict(to=...) on all of them since the last "
                "step, then state_dict() on the rank that it was brought to"
            )
        return self._consolidated

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's part of a whole state. Raises the errors of ``optimizer_class``.

        Where it has DArrays, in whatever sharding, all ranks call.
        """
        self.check_state(state)
        self._consolidated = None
        self._load_options(state)
        inner, numbers, parameters = self.local_optimizer, self._numbers(), self.parameters()
        local = {number: i for i, number in enumerate(self._own_numbers())}
        groups: list[ParamGroup] = []
        for whole, mine in zip(state["param_groups"], inner.param_groups, strict=True):
            chosen = [local[numbers[parameter]] for parameter in mine["params"]]
            groups.append({**whole, "params": chosen})
        parts: dict[int, dict[str, Any]] = {}
        for number, values in state["state"].items():
            mine = self._keepers.take(parameters[number], values)
            if number in local:
                parts[local[number]] = mine
        inner.load_state_dict({**state, "state": parts, "param_groups": groups})

    def global_state_dict(self) -> dict[str, Any]:
        """Return the whole state with DArrays, each on the ranks that keep it. A collective.

        For checkpoints: the ranks tell each other what there is, and no array moves. It is the same
        tree on all ranks, and loads into any number of ranks, and into an ``optimizer_class``
        without sharding. With layers that are split over another dim of the mesh,
        ``process_group`` must have been a slice of it, such as ``mesh["dp"]``.
        """
        mine, parameters = self._own_state(), self.parameters()
        kept = mine["state"]
        own = {number: described(values) for number, values in kept.items()}
        state = {
            number: self._keepers.give(parameters[number], values, kept.get(number))
            for theirs in gathered(own, self._group)
            for number, values in theirs.items()
        }
        return self._with_all(mine, state)

    def state_sharding(self, parameter: Parameter, shape: Sequence[int]) -> Sharding:
        """Return how a state of ``parameter`` lies that has ``shape`` as a global array.

        So ``load_state_dict`` need not move it. Raises KeyError as ``owner`` does.
        """
        self.owner(parameter)
        return self._keepers.sharding(parameter, tuple(shape))

    def _own_numbers(self) -> list[int]:
        numbers = self._numbers()
        return [numbers[parameter] for parameter in self.local_optimizer.parameters()]

    def _own_state(self) -> dict[str, Any]:
        """Return the state of this rank's parameters, by their numbers among all."""
        inner, numbers = self.local_optimizer, self._numbers()
        state = {numbers[parameter]: values for parameter, values in inner.state.items()}
        return {**inner.state_dict(), "state": state}

    def _with_all(self, part: dict[str, Any], state: dict[int, Any]) -> dict[str, Any]:
        """Return ``part``, a rank's state, with the ``state`` and groups of all parameters."""
        groups = super().state_dict()["param_groups"]
        return {**part, "state": dict(sorted(state.items())), "param_groups": groups}

    # ------------------------------------------------------------------ uneven inputs

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the replicas."""
        return self._group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that takes part in the others' steps."""
        return FunctionsHook(lambda phase: self._step())

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase in messages."""
        return "step"
