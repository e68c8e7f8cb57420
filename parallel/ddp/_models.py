"""Whether the models of all ranks are the same."""

from __future__ import annotations

from collections.abc import Iterable

from meshlib import ProcessGroup
from parallel._arrays import written
from parallel._core.replicas import check_same, describe_options
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter


def check_same_model(module: Module, group: ProcessGroup, **options: object) -> None:
    """Raise ValueError, on every rank, when a rank's parameters or buffers are not rank 0's.

    Nor may ``options`` differ. It names, for each rank that differs, the first entry that does.
    """
    parameters = describe_parameters(module.named_parameters())
    buffers = [f"buffer {path} {written(b.data)}" for path, b in module.named_buffers()]
    check_same([*describe_options(**options), *parameters, *buffers], group)


def describe_parameters(named: Iterable[tuple[str, Parameter]]) -> list[str]:
    """Return one line for each parameter."""
    return [
        f"parameter {path} {written(p.data)}{'' if p.requires_grad else ' (frozen)'}"
        for path, p in named
    ]
