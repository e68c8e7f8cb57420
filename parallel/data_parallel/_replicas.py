"""Copies of a module on other devices, and the way back of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.data_parallel._devices import Devices
from parallel.data_parallel._shares import Plan
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
