"""An optimizer as every replica has one: equal again after a ``Join``."""

from __future__ import annotations

from typing import Any, Protocol

from meshlib import ProcessGroup
from parallel.checks import describe
from parallel.groups import Ranks, resolve
from parallel.join.joinable import Joinable, JoinHook


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class OptimizerReplica(Joinable):
    """Gives ``optimizer``, on ranks that ran out of inputs, the state of one that did not.

    Such a rank takes fewer steps: its momenta would differ from then on, and the replicas with
    them. Once all are out of inputs the state is broadcast. ``process_group`` is that of the
    wrapped model.

    Raises TypeError for an ``optimizer`` without ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, optimizer: _Stateful, process_group: Ranks | None = None) -> None:
        if not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")):
            raise TypeError(
                f"optimizer must have state_dict() and load_state_dict(), got {describe(optimizer)}"
            )
        self._optimizer = optimizer
        self._group = resolve(process_group, "process_group")

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the replicas."""
        return self._group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that copies the state at the end."""
        return _CopyState(self._optimizer, self._group)


class _CopyState(JoinHook):
    def __init__(self, optimizer: _Stateful, group: ProcessGroup) -> None:
        self._optimizer = optimizer
        self._group = group

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        mine = source == self._group.rank()
        state: list[Any] = [self._optimizer.state_dict() if mine else None]
        self._group.broadcast_object_list(state, group_src=source)
        if not is_last_joiner:
            self._optimizer.load_state_dict(state[0])
