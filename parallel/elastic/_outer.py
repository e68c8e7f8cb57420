"""Outer loops, in which replicas train independently for many steps between averages.

For slow networks: the replicas exchange one array of the parameters' size per round of many steps.
McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv:1602.05629; Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767;
Douillard et al., "DiLoCo", arXiv:2311.08105, algorithm 1.
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
    """Makes each step of an elastic loop a *round* of many independent steps on each replica.

        outer = DiLoCo(model, optimizer, elastic.mesh["dp"])
        state = {"model": model, "inner": optimizer, "outer": outer, "momentum": outer.optimizer}

        for step in elastic.steps(state, until=100, batches=ElasticBatches(60000, 4 * 500 * 32)):
            with step, outer.round(step):
                for samples in step.share.microbatches(32):
                    train(model, samples)
                    optimizer.step()
                    optimizer.zero_grad()

    At the end of a round, the replicas average their changes of the parameters. The outer optimizer
    uses the negative average as a gradient. If a round is not committed, the parameters and the
    inner optimizer's state are reset to its beginning.

    Args:
        model: The trained module, without a wrapper over the same replicas; it may be fully sharded
            over other dims.
        optimizer: The inner optimizer, for the steps of a round: AdamW in the paper.
        ranks: The replicas: ``elastic.mesh["dp"]``.
        outer: The optimizer for the end of a round, with the same parameters. By default as in the
            paper: SGD with a learning rate of 0.7 and Nesterov momentum of 0.9. ``SGD(lr=1.0)``
            averages parameters, which is local SGD.

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
        """The outer optimizer, which is part of the loop's state."""

    def move_to(self, mesh: DeviceMesh) -> None:
        """Continue with the replicas of ``mesh`` along the same dims as before."""
        self._ranks = same_dims(self._ranks, mesh, type(self).__name__)
        self._group = resolve(self._ranks, "mesh")
        self._residuals = None

    @contextmanager
    def round(self, step: Step) -> Generator[None]:
        """Return a context for independent training; at its end, replicas average their changes.

        The outer optimizer updates the parameters if ``step`` is committed. Raises the errors of
        calls on the replicas' group, which the elastic loop handles.
        """
        parameters = list(self._model.parameters())
        initial = [parameter.data.copy() for parameter in parameters]
        before = copy.deepcopy(self._inner.state_dict())
        changes: list[Any] = []
        try:
            yield
            changes = [old - p.data for old, p in zip(initial, parameters, strict=True)]
        finally:
            after = self._inner.state_dict()
            for parameter, old in zip(parameters, initial, strict=True):
                parameter.data[...] = old
                parameter.zero_grad()
            self._inner.load_state_dict(before)
        residuals = self._copy_residuals(changes)
        average_coalesced(changes, self._group, residuals=residuals)

        def commit() -> None:
            self._residuals = residuals
            self._inner.load_state_dict(after)
            for parameter, change in zip(parameters, changes, strict=True):
                parameter.grad = change
            self.optimizer.step()
            self.optimizer.zero_grad()

        step.on_commit(commit)

    def _copy_residuals(self, changes: list[Any]) -> list[Any] | None:
        """Copy the rounding errors of earlier rounds; return None without error feedback."""
        compression = self._group.compression
        if compression is None or not compression.error_feedback:
            return None
        if not all(isinstance(array, np.ndarray) for array in changes):
            return None
        if self._residuals is None:
            return [np.zeros(array.shape, np.float32) for array in changes]
        return [residual.copy() for residual in self._residuals]
