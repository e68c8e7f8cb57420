"""``DataParallel``: one process, several GPUs (several processes: the distributed one).

Experimental, not run on a GPU (``docs/gpu.md``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshlib.extend import to_whole_number, to_whole_numbers
from parallel._checks import to_count
from parallel.data_parallel._devices import (
    Devices,
    Plan,
    divide_gradients,
    divide_inputs,
    first_device,
    join_gradients,
    join_outputs,
    plan_of,
)
from parallel.nn._module import Module
from parallel.nn._parameter import Buffer, Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass: what its backward needs."""

    replicas: list[Module]
    device_ids: list[int]
    plan: Plan
    used: list[Parameter]
    """The module's parameters that a replica used, in the order of registration."""
    input_device: int
    """Where the input's gradient goes."""


def replicate(module: Module, device_ids: Sequence[int], on: Devices) -> list[Module]:
    """Return a copy of ``module`` for each device; its arrays are on the first one.

    The first copy has the module's own arrays, buffers and random generators. Others get copies of
    arrays, and generators that are spawned from its own: independent, and the same in each run.
    Everything else that modules have as attributes is copied (``copy.deepcopy``).

    Raises TypeError for a module that cannot be copied.
    """
    # Parameters are copied by their arrays, the activations of passes that are outstanding not at
    # all: neither may be reached by deepcopy.
    outstanding = module.take_saved()
    try:
        return [_replica(module, device, on, device == device_ids[0]) for device in device_ids]
    finally:
        module.put_saved(outstanding)


def _replica(module: Module, device: int, on: Devices, first: bool) -> Module:
    memo: dict[int, Any] = {}
    parameters, buffers = list(module.parameters()), list(module.buffers())
    for parameter, data in zip(
        parameters, on.put_all([parameter.data for parameter in parameters], device), strict=True
    ):
        memo[id(parameter)] = Parameter(
            data, requires_grad=parameter.requires_grad, name=parameter.name
        )
    if first:
        memo.update((id(buffer), buffer) for buffer in buffers)
    else:
        arrays = on.put_all([buffer.data for buffer in buffers], device)
        for buffer, data in zip(buffers, arrays, strict=True):
            memo[id(buffer)] = Buffer(data, persistent=buffer.persistent)
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, np.random.Generator) and id(value) not in memo:
                memo[id(value)] = value if first else value.spawn(1)[0]
    try:
        with on.on(device):
            return copy.deepcopy(module, memo)
    except TypeError as error:
        raise TypeError(
            f"the module cannot be copied to cuda:{device}: {error}; expected attributes that "
            "copy.deepcopy takes"
        ) from error


def announce(module: Module, replicas: Sequence[Module]) -> list[Parameter]:
    """Announce one use of each parameter that a replica's forward used, and return these."""
    copies = zip(*(replica.parameters() for replica in replicas), strict=True)
    used = [
        parameter
        for parameter, own in zip(module.parameters(), copies, strict=True)
        if any(replica.uses for replica in own)
    ]
    for parameter in used:
        parameter.expect_grad()
    return used


def add_gradients(module: Module, done: Pass, on: Devices) -> None:
    """Give each parameter that was used the sum of the replicas' gradients.

    Added up on the first device, in the order of the devices.
    """
    home = done.device_ids[0]
    used = set(done.used)
    copies = zip(*(replica.parameters() for replica in done.replicas), strict=True)
    # The last layer's come first, as from any backward.
    for parameter, own in reversed(list(zip(module.parameters(), copies, strict=True))):
        if parameter not in used:
            continue
        gradients = [replica.grad for replica in own if replica.grad is not None]
        with on.on(home):
            if gradients:
                total, *others = on.put_all(gradients, home)
                for other in others:
                    total += other
                parameter.accumulate_grad(total)
            else:
                parameter.forget_uses()


class DataParallel(Module):
    """Runs a module of CuPy arrays on several GPUs of this process, as ``torch.nn.DataParallel``.

        model = DataParallel(model.map_arrays(cupy.asarray))      # the one line that changes
        loss(model(x), y)
        model.backward(loss.backward())

    The module's parameters are on the first device. A forward divides the arrays among its
    arguments along ``dim``, copies parameters and buffers to the other devices, runs a replica of
    the module on each, in threads, and joins the outputs on ``output_device``. A backward divides
    the output's gradient in the same way, and adds the replicas' gradients up on the first device,
    in the order of the devices: parameters get the gradients that they get on one device, up to
    rounding, and the same bits in each run. It returns the input's gradient, on the device of the
    first array of the input (on the first device if that was on the host).

    Arrays are divided as ``torch.chunk`` does: 5 rows among 3 devices as 2, 2 and 1; 4 as 2 and 2,
    and the third has nothing to do. Arguments may be nested in lists, tuples and dicts. Arrays of
    the host are copied to the devices; arrays without ``dim`` go to all devices as a whole, and so
    does what is no array. Where each replica returns a number, such as a loss, the output is a
    vector with one for each replica.

    What forward changes in the module is lost with the replica, except for the buffers and random
    generators of the first device. Arrays that are neither parameters nor buffers stay on it.
    Paths have ``module.`` in front (``module.0.weight``), as with ``DistributedDataParallel``
    and of PyTorch: ``model.module.state_dict()`` has the paths of the module alone.

    Prefer ``DistributedDataParallel`` wherever you can start a process for each device: here all
    devices share one interpreter, and parameters travel in each forward.

    Args:
        module: the model.
        device_ids: the numbers of the devices; by default all, from 0 on.
        output_device: where outputs go; by default the first of ``device_ids``.
        dim: the dim that counts samples.

    Raises:
        TypeError: for arguments of another type; when called, for outputs that cannot be joined.
        ValueError: for no devices, one that does not exist or comes twice, a negative ``dim``, and
            parameters or buffers that are not on the first device (naming the first of them); when
            called, for arrays that differ in their size along ``dim``.
        DistBackendError: where there is no CuPy, or no GPU.
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(module, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"module must be a Module, got {type(module).__qualname__}; for functions of JAX's "
                "arrays there is parallel.jax.DataParallel"
            )
        self.dim: int = to_count(dim, "dim", 0)
        self._devices = Devices.of_arrays([parameter.data for parameter in module.parameters()])
        count = self._devices.count()
        self.device_ids: list[int] = _distinct(device_ids, count)
        self.output_device = self.device_ids[0]
        if output_device is not None:
            self.output_device: int = to_whole_number(output_device, "output_device")
            _check_exists(self.output_device, "output_device", count)
        self.module = module
        self.training: bool = module.training
        self._check_home()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole input, on ``output_device``.

        An exception of a replica is raised with a note that names its device; this pass is not
        outstanding then.
        """
        self._check_home()
        on = self._devices
        shares = divide_inputs(args, kwargs, self.dim, self.device_ids, on)
        device_ids = self.device_ids[: len(shares)]
        replicas = replicate(self.module, device_ids, on)
        outputs = on.run(device_ids, _calls(replicas, shares))
        plan = plan_of(outputs, self.dim)
        output = join_outputs(plan, outputs, self.output_device, on)
        if self.training:
            used = announce(self.module, replicas)
            home = first_device([args, kwargs], on)
            home = self.device_ids[0] if home is None else home
            self.save_for_backward(Pass(replicas, device_ids, plan, used, home))
        return output

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient of the input, given the output's; accumulate the parameters'.

        Several arguments are the gradients of the entries of an output that is a tuple. After an
        exception of a replica no gradient was changed, and the pass is no longer outstanding.
        """
        done: Pass = self.saved()
        on = self._devices
        with ExitStack() as undo:
            undo.callback(self.forget, done)
            shares = divide_gradients(done.plan, args, kwargs, done.device_ids, on)
            backwards = [replica.backward for replica in done.replicas]
            results = on.run(done.device_ids, _calls(backwards, shares))
            result = join_gradients(results, self.dim, done.input_device, on)
            undo.pop_all()
        add_gradients(self.module, done, on)
        return result

    def forget(self, context: Pass) -> None:
        """Take back the uses that one forward announced."""
        for parameter in context.used:
            parameter.forget_uses()

    def _check_home(self) -> None:
        home = self.device_ids[0]
        arrays = [
            *(("parameter", path, p.data) for path, p in self.module.named_parameters()),
            *(("buffer", path, b.data) for path, b in self.module.named_buffers()),
        ]
        for kind, path, array in arrays:
            device = self._devices.device_of(array)
            if device != home:
                where = "the host" if device is None else f"cuda:{device}"
                raise ValueError(
                    f"{kind} {path} is on {where}, expected on cuda:{home}, the first of "
                    f"device_ids {self.device_ids}: move the module there, with cupy.cuda.Device"
                    f"({home}): module.map_arrays(cupy.array)"
                )


def _calls(
    functions: Sequence[Callable[..., Any]],
    shares: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
) -> list[Callable[[], Any]]:
    return [
        partial(function, *args, **kwargs)
        for function, (args, kwargs) in zip(functions, shares, strict=True)
    ]


def _distinct(device_ids: Sequence[int] | None, count: int) -> list[int]:
    if device_ids is None:
        return list(range(count))
    chosen = to_whole_numbers(device_ids, "device_ids")
    if not chosen:
        raise ValueError("device_ids is empty; expected at least one device")
    for place, device in enumerate(chosen):
        _check_exists(device, f"device_ids[{place}]", count)
        if device in chosen[:place]:
            raise ValueError(f"device_ids has {device} twice")
    return chosen


def _check_exists(device: int, name: str, count: int) -> None:
    if not 0 <= device < count:
        raise ValueError(
            f"{name} is {device}, but this process has {count} GPUs; expected 0 to {count - 1}"
        )
