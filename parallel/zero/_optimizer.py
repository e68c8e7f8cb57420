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
    Shards,
    StateLayouts,
    assign_owners,
    check_group_rank,
    collected,
    described,
    shards_by_placement,
    whole_nbytes,
)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose states are sharded over the replicas: each rank has 1/N of them.

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, mesh["dp"], lr=1e-3)

    Each parameter has one owner, a rank that stores its state and updates it in ``step``. Then the
    ranks exchange the updated parameters, by one all-gather for each dtype. Parameters are not
    split, so the shares are only as even as the parameters' sizes allow. ``optimizer_class`` alone
    computes bitwise equal results, if it updates each parameter independently (clip by a global
    norm before ``step``).

    For pytrees and optax, use ``ZeroRedundancyOptax``.

    In a ``Join`` with the model, ranks that are out of inputs continue to update their parameters.

    Args:
        params: Parameters, or groups of them as dicts; the same on all ranks, in the same order.
        optimizer_class: Called with this rank's parameters and ``defaults``.
        process_group: The replicas: ``mesh["dp"]``, a group, or None for the default group.
        parameters_as_bucket_view: Move the parameters' arrays into one flat array for each dtype,
            so that the exchange needs no copies and no additional memory.
        defaults: Options of ``optimizer_class``.

    Raises:
        ValueError: On every rank, when the ranks' parameters differ (naming the first difference),
            without parameters, and for options that ``optimizer_class`` rejects.
        TypeError: If ``optimizer_class`` does not make an ``Optimizer``, or for arguments of
            another type.
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
        self._layouts = StateLayouts(self._group, process_group, self.owner)
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
        """Add parameters with their own options. All ranks must call.

        Raises the errors of ``Optimizer``, and ValueError if the ranks' parameters differ.
        """
        constructing = self._inner is None  # the constructor raises errors on all ranks itself
        with raise_on_all_ranks(None if constructing else self._group):
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
        sharded = [p for p in parameters if kept_part(p) is not None]
        check_same(
            ValueError(
                f"{sharded[0]!r} is split by fully_shard, and so are its states with any"
                " optimizer; expected whole parameters"
            )
            if sharded
            else lines,
            self._group,
        )
        # Uses the sizes of global arrays, so that the owners are the same in other mesh slices.
        owners = assign_owners([whole_nbytes(p) for p in parameters], self._loads)
        self._owners.update(zip(parameters, owners, strict=True))
        self._shards = shards_by_placement(self._owners, self._group, as_views=self._as_views)

    def _share(self, group: ParamGroup) -> ParamGroup:
        me = self._group.rank()
        return {**group, "params": [p for p in group["params"] if self._owners[p] == me]}

    def owner(self, parameter: Parameter) -> int:
        """Return the group rank that updates ``parameter`` and stores its state.

        Raises KeyError for a parameter that the optimizer does not have.
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
        """Update this rank's parameters, and exchange the results. A collective."""
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
        """Raise TypeError: use ``step``, in which the ranks exchange parameters."""
        raise TypeError("ZeroRedundancyOptimizer updates its parameters together: call step()")

    # ------------------------------------------------------------------ state

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the whole state on group rank ``to`` (None: on all ranks), for ``state_dict``.

        A collective. The state is valid until the next step. Raises ValueError if ``to`` is not in
        the group, and TypeError unless it is an integer.
        """
        check_group_rank(to, self._group)
        parts = collected(self._own_state(), self._group, to)
        if parts is not None:
            state = {n: values for part in parts for n, values in part["state"].items()}
            self._consolidated = self._with_all(parts[0], state)

    def state_dict(self) -> dict[str, Any]:
        """Return the consolidated state, which has the format of ``optimizer_class``.

        Any number of ranks can load it, and so can ``optimizer_class`` itself. Raises RuntimeError
        on ranks to which ``consolidate_state_dict`` has not brought the state.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"the optimizer's state is sharded over the {self._group.size()} ranks of "
                f"{self._group}: call consolidate_state_dict(to=...) on all of them after the last "
                "step, then state_dict() on the rank `to`"
            )
        return self._consolidated

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state. Raises the errors of ``optimizer_class``.

        The state may have DArrays in any sharding; then all ranks must call.
        """
        self.check_state(state)
        self._consolidated = None
        self._load_options(state)
        inner, numbers, parameters = self.local_optimizer, self._numbers(), self.parameters()
        local = {number: i for i, number in enumerate(self._own_numbers())}
        groups: list[ParamGroup] = []
        for whole, own in zip(state["param_groups"], inner.param_groups, strict=True):
            own_numbers = [local[numbers[parameter]] for parameter in own["params"]]
            groups.append({**whole, "params": own_numbers})
        parts: dict[int, dict[str, Any]] = {}
        for number, values in state["state"].items():
            part = self._layouts.from_global(parameters[number], values)
            if number in local:
                parts[local[number]] = part
        inner.load_state_dict({**state, "state": parts, "param_groups": groups})

    def global_state_dict(self) -> dict[str, Any]:
        """Return the whole state with DArrays, each on the ranks that own it. A collective.

        Use it for checkpoints: the ranks exchange only descriptions of their arrays. The tree is
        the same on all ranks. Any number of ranks can load it, and so can ``optimizer_class``
        itself. If layers are split over another dim of the mesh, ``process_group`` must be a slice
        of that mesh, such as ``mesh["dp"]``.
        """
        part, parameters = self._own_state(), self.parameters()
        own = part["state"]
        descriptions = {number: described(values) for number, values in own.items()}
        state = {
            number: self._layouts.as_global(parameters[number], values, own.get(number))
            for of_rank in gathered(descriptions, self._group)
            for number, values in of_rank.items()
        }
        return self._with_all(part, state)

    def state_sharding(self, parameter: Parameter, shape: Sequence[int]) -> Sharding:
        """Return the sharding of a state of ``parameter`` whose global array has ``shape``.

        ``load_state_dict`` does not move states that have this sharding. Raises KeyError for a
        parameter that the optimizer does not have.
        """
        self.owner(parameter)
        return self._layouts.sharding(parameter, tuple(shape))

    def _own_numbers(self) -> list[int]:
        numbers = self._numbers()
        return [numbers[parameter] for parameter in self.local_optimizer.parameters()]

    def _own_state(self) -> dict[str, Any]:
        """Return the state of this rank's parameters, by their numbers among all parameters."""
        inner, numbers = self.local_optimizer, self._numbers()
        state = {numbers[parameter]: values for parameter, values in inner.state.items()}
        return {**inner.state_dict(), "state": state}

    def _with_all(self, part: dict[str, Any], state: dict[int, Any]) -> dict[str, Any]:
        """Return a rank's state, with ``state`` and groups replaced by those of all parameters."""
        groups = super().state_dict()["param_groups"]
        return {**part, "state": dict(sorted(state.items())), "param_groups": groups}

    # ------------------------------------------------------------------ uneven inputs

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the replicas."""
        return self._group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that participates in the other ranks' steps."""
        return FunctionsHook(lambda phase: self._step())

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase in messages."""
        return "step"
