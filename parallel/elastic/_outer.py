"""Outer loops: replicas train apart for a while, and then bring together what they have learnt.

For members that are far away from each other: they exchange one array of the parameters' size for
many steps. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", arXiv:1602.05629; Stich, "Local SGD Converges Fast and Communicates Little",
arXiv:1805.09767; Douillard et al., "DiLoCo", arXiv:2311.08105, algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshlib import DeviceMesh
from parallel._checks import check_instance
from parallel._core.replicas import average_coalesced
from parallel._groups import GroupLike, resolve, same_dims
from parallel.elastic._step import Step
from parallel.nn._module import Module
from parallel.optim._optimizer import SGD, Optimizer


class DiLoCo:
    """Makes each step of an elastic loop a *round* of many steps by each replica alone.

        outer = DiLoCo(model, optimizer, elastic.mesh["dp"])
        state = {"model": model, "inner": optimizer, "outer": outer, "momentum": outer.optimizer}

        for step in elastic.steps(state, until=100, batches=ElasticBatches(60000, 4 * 500 * 32)):
            with step, outer.round(step):
                for samples in step.share.microbatches(32):
                    train(model, samples)
                    optimizer.step()
                    optimizer.zero_grad()

    At the end of a round, the replicas average their changes of the parameters. The outer optimizer
    takes the negative average as a gradient. When a round does not count, the parameters and the
    inner optimizer's state go back to its beginning.

    Args:
        model: The module that is trained, without a wrapper over the same replicas; it may be fully
            sharded over others.
        optimizer: The inner one, which makes the steps of a round: AdamW in the paper.
        ranks: The replicas: ``elastic.mesh["dp"]``.
        outer: The optimizer of the step at the end of a round, with the same parameters; by default
            the paper's: SGD with a rate of 0.7 and Nesterov's momentum of 0.9. With ``SGD(lr=1.0)``
            parameters are averaged: local SGD.

    Raises:
        TypeError: For arguments of another type.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        ranks: GroupLike,
        outer: Optimizer | None = None,
    ) -> None:
        check_instance(model, Module, "model", "a parallel.nn.Module")
        check_instance(optimizer, Optimizer, "optimizer", "parallel.optim.AdamW(...)")
        self._model = model
        self._inner = optimizer
        self._ranks = ranks
        self._group = resolve(ranks, "ranks")
        self._residuals: list[Any] | None = None
        self.optimizer: Optimizer = outer or SGD(
            model.parameters(), lr=0.7, momentum=0.9, nesterov=True
        )
        """The outer optimizer: part of the state of the loop."""

    def move_to(self, mesh: DeviceMesh) -> None:
        """Go on with other replicas: those of ``mesh``, along the dims that it has had."""
        self._ranks = same_dims(self._ranks, mesh, type(self).__name__)
        self._group = resolve(self._ranks, "mesh")
        self._residuals = None

    @contextmanager
    def round(self, step: Step) -> Generator[None]:
        """Train apart inside of the block; at its end come together, if ``step`` is committed.

        Raises the errors of calls on the replicas' group, which the elastic loop handles.
        """
        parameters = list(self._model.parameters())
        begun = [parameter.data.copy() for parameter in parameters]
        before = copy.deepcopy(self._inner.state_dict())
        moved: list[Any] = []
        try:
            yield
            moved = [old - p.data for old, p in zip(begun, parameters, strict=True)]
        finally:
            after = self._inner.state_dict()
            for parameter, old in zip(parameters, begun, strict=True):
                parameter.data[...] = old
                parameter.zero_grad()
            self._inner.load_state_dict(before)
        residuals = self._feedback(moved)
        average_coalesced(moved, self._group, residuals=residuals)

        def commit() -> None:
            self._residuals = residuals
            self._inner.load_state_dict(after)
            for parameter, distance in zip(parameters, moved, strict=True):
                parameter.grad = distance
            self.optimizer.step()
            self.optimizer.zero_grad()

        step.on_commit(commit)

    def _feedback(self, moved: list[Any]) -> list[Any] | None:
        """Return the mutable rounding errors of earlier rounds, or None if none are kept."""
        compression = self._group.compression
        if compression is None or not compression.error_feedback:
            return None
        if not all(isinstance(array, np.ndarray) for array in moved):
            return None
        if self._residuals is None:
            return [np.zeros(array.shape, np.float32) for array in moved]
        return [residual.copy() for residual in self._residuals]
