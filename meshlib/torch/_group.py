"""``torch.distributed``'s process group over a group of meshlib.

PyTorch lets Python subclass ``ProcessGroup``, but not ``Backend``. C++ calls the methods of its
trampoline class (c10d's old and new names, which are aliases here); Python calls all methods. A
group of PyTorch, with the backend that the program named, handles tensors on other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.torch._collectives import TensorCollectives
from meshlib.torch._hooks import HAS_HOOKS, CallHooks
from meshlib.torch._membership import JoinedGroup, join, leave
from meshlib.torch._registration import NAME
from meshlib.torch._works import ContinuationThreads

_c10d: Any = import_module("torch.distributed")
_module: Any = import_module("torch.distributed.distributed_c10d")
_torch: Any = import_module("torch")

_NAMELESS = "undefined"


class TorchProcessGroup(TensorCollectives, _c10d.ProcessGroup):
    """A process group of PyTorch whose calls on CPU tensors run in meshlib.

    ``store`` is torch's, with the group's prefix; ``joined`` has the group of meshlib.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_completion_hooks = HAS_HOOKS
    supports_abort_hooks = HAS_HOOKS

    def __init__(self, store: Any, joined: JoinedGroup, name: str) -> None:
        _c10d.ProcessGroup.__init__(self, joined.group.rank(), joined.group.size())
        self._store = store
        self._joined = joined
        self._name = name
        self._desc = _NAMELESS
        self._others: Any = None
        self._others_begin = False
        self.continuations: ContinuationThreads = ContinuationThreads()
        self.call_hooks: CallHooks = CallHooks()
        self._abort_hooks: dict[int, Callable[[], object]] = {}
        call_queue_of(joined.group).state.on_failure(self._call_abort_hooks)

    # ------------------------------------------------------------------ names and stores

    @property
    def mesh_group(self) -> Any:
        """meshlib's group of these ranks, for collectives on arrays."""
        return self._joined.group

    @property
    def group_name(self) -> str:
        """PyTorch's name of the group, unique in the process."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's purpose, such as ``mesh_dp``."""
        return self._desc

    @property
    def _device_types(self) -> list[Any]:
        # While PyTorch (2.15) creates the group, its recorder asks for PyTorch's own backends of
        # this group: there are none.
        if self not in _module._world.pg_backend_config:
            return []
        # While PyTorch creates the other backends, it may ask for the default group's.
        kinds = ["cpu"] if self._others_begin else self._backends()
        return [_torch.device(kind) for kind in kinds]

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def get_group_store(self) -> Any:
        """Return torch's store, with this group's prefix."""
        return self._store

    # C++ uses these names.
    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, group_name: str) -> None:
        self._name = group_name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, group_desc: str) -> None:
        self._desc = group_desc
        if group_desc != _NAMELESS:
            self._joined.group.group_desc = group_desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    # ------------------------------------------------------------------ other devices

    def _get_backend(self, device: Any) -> Any:
        device = _torch.device(device)
        return (
            self
            if device.type == "cpu"
            else self.group_for_device(device.type)._get_backend(device)
        )

    def group_for_device(self, device: str) -> Any:
        """Return PyTorch's group of these ranks, for tensors on ``device``.

        All members create it in their first call on such tensors. Raises ValueError if the program
        named no backend for the device.
        """
        backends = self._backends()
        if device == "cpu" or device not in backends:
            named = ",".join(f"{kind}:{name}" for kind, name in backends.items())
            raise ValueError(
                f"{self._joined.group} has no backend for tensors on {device!r}; it has {named!r}:"
                f' expected init_process_group("cpu:{NAME},{device}:...")'
            )
        if self._others is None:
            others = ",".join(f"{kind}:{name}" for kind, name in backends.items() if kind != "cpu")
            self._others_begin = True
            try:
                self._others, _ = _module._new_process_group_helper(
                    self.size(),
                    self.rank(),
                    list(self._joined.group.ranks),
                    others,
                    self._store,
                    f"{self._name}/elsewhere",
                    timeout=self._joined.group.timeout,
                    group_desc=self._desc,
                )
            finally:
                self._others_begin = False
            _disown(self._others)
        return self._others

    def _backends(self) -> dict[str, str]:
        config = _module._world.pg_backend_config.get(self, f"cpu:{NAME}")
        return dict(pair.split(":", 1) for pair in config.split(","))

    # ------------------------------------------------------------------ hooks

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        """Call ``hook(PreHookArgs)`` before each call."""
        self.call_hooks.before[hook_id] = hook

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        """Call ``hook(PostHookArgs)`` after each call is issued, or ends if it is synchronous."""
        self.call_hooks.after[hook_id] = hook

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Call ``hook()`` when the group breaks, in any thread."""
        self._abort_hooks[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook. Idempotent."""
        self.call_hooks.before.pop(hook_id, None)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook. Idempotent."""
        self.call_hooks.after.pop(hook_id, None)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook. Idempotent."""
        self._abort_hooks.pop(hook_id, None)

    def _call_abort_hooks(self, _: object) -> None:
        hooks, self._abort_hooks = self._abort_hooks, {}
        for hook in hooks.values():
            hook()

    # ------------------------------------------------------------------ the end

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default deadline of calls."""
        self._joined.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Break the group on all members: their calls raise ``DistBackendError``."""
        self._joined.group.abort("torch.distributed's abort()")

    def shutdown(self) -> None:
        """Leave the group, and the job if this group created it. Idempotent."""
        if self._others is not None:
            self._others.shutdown()
            self._others = None
        leave(self._joined)
        self.continuations.close()


def _missing(name: str) -> Callable[..., Any]:
    def method(self: TorchProcessGroup, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.mesh_group}: backend {NAME!r} has no {name}()")

    return method


_MISSING = (
    "split_group",
    "merge_remote_group",
    "shrink",
    "reconfigure",
    "get_reconfigure_handle",
    "new_window",
)
for _name in _MISSING:
    setattr(TorchProcessGroup, _name, _missing(_name))


def _disown(group: Any) -> None:
    """Remove ``group`` from PyTorch's tables: another group owns it and shuts it down."""
    world = _module._world
    world.pg_map.pop(group)
    world.pg_backend_config.pop(group)
    _module._unregister_process_group(world.pg_names.pop(group))
    for tag in {"", world.pg_to_tag.pop(group)}:
        if group in world.tags_to_pg.get(tag, ()):
            world.tags_to_pg[tag].remove(group)


def make_group(options: Any, backend_options: Any = None) -> TorchProcessGroup:
    """Create a process group for ``torch.distributed``, from its extended arguments.

    Raises ValueError for ``pg_options``, because this backend has none.
    """
    if backend_options is not None:
        raise ValueError(f"pg_options is {backend_options!r}; expected None for backend {NAME!r}")
    # An empty list means the default group, for which get_world_size() would raise.
    ranks: list[int] = list(options.global_ranks_in_group)
    joined = join(
        options.store,
        options.group_rank,
        ranks or range(options.group_size),
        _c10d.get_world_size() if ranks else options.group_size,
        options.timeout,
        f"torch {options.group_id}",
    )
    return TorchProcessGroup(options.store, joined, options.group_id)
