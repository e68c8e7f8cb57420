"""The model that is measured, in each library: 4 × Linear(2048), ReLU between, SGD.

A trainer is a rank's side: it joins a job, and makes steps on its own or with the other ranks.
Only what runs in the library's own environment is imported, so PyTorch's needs nothing of ours.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from meshlib._bench.libraries.c10d import C10dLibrary, Meshlib, TorchGloo

LAYERS = 4
LEARNING_RATE = 1e-4


class Trainer(ABC):
    """A model of float32 parameters (67 MB at width 2048), the same on all ranks at first."""

    name: ClassVar[str]
    library: C10dLibrary

    @abstractmethod
    def build(self, rank: int, width: int, batch: int) -> None:
        """Make the model, this rank's batch (batch, width), and both kinds of step."""

    @abstractmethod
    def step(self, synchronise: bool) -> None:
        """Run forward, backward and SGD; average the gradients in between if ``synchronise``."""

    @abstractmethod
    def first_weights(self) -> Any:
        """Return some of the synchronised model's weights, as a NumPy array."""

    def hidden(self) -> float | None:
        """Return the share of the last step's communication that was hidden, if it is known."""
        return None


def _weights(width: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(LAYERS)
    ]


def _batch(rank: int, width: int, batch: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1 + rank).normal(size=(batch, width)).astype(np.float32)


class TorchTrainer(Trainer):
    """PyTorch's DistributedDataParallel over Gloo, as it comes."""

    name = "torch"
    bucket_views = False

    def __init__(self) -> None:
        self.library = TorchGloo()
        self._torch: Any = importlib.import_module("torch")

    def build(self, rank: int, width: int, batch: int) -> None:
        torch = self._torch
        self._x = torch.from_numpy(_batch(rank, width, batch))
        self._local = self._model(width)
        wrap: Any = importlib.import_module("torch.nn.parallel").DistributedDataParallel
        self._ddp = wrap(self._model(width), gradient_as_bucket_view=self.bucket_views)
        self._optimizers = [
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for model in (self._local, self._ddp)
        ]

    def _model(self, width: int) -> Any:
        nn = self._torch.nn
        layers: list[Any] = []
        for weight in _weights(width):
            linear = nn.Linear(width, width)
            with self._torch.no_grad():
                linear.weight.copy_(self._torch.from_numpy(weight.T))
                linear.bias.zero_()
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def step(self, synchronise: bool) -> None:
        model = self._ddp if synchronise else self._local
        optimizer = self._optimizers[synchronise]
        optimizer.zero_grad(set_to_none=True)
        (model(self._x) ** 2).mean().backward()
        optimizer.step()

    def first_weights(self) -> Any:
        return next(self._ddp.parameters()).detach().numpy()[:8]


class TorchViewsTrainer(TorchTrainer):
    """The same with gradients as views of the buckets."""

    name = "torch-views"
    bucket_views = True


class NumPyTrainer(Trainer):
    """Our DistributedDataParallel for modules."""

    name = "numpy"

    def __init__(self) -> None:
        self.library = Meshlib()

    def build(self, rank: int, width: int, batch: int) -> None:
        parallel: Any = importlib.import_module("parallel")
        self._x = _batch(rank, width, batch)
        self._local = self._model(parallel, width)
        self._ddp = parallel.DistributedDataParallel(
            self._model(parallel, width), gradient_as_bucket_view=True
        )
        self._optimizers = [
            parallel.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for model in (self._local, self._ddp)
        ]

    def _model(self, parallel: Any, width: int) -> Any:
        layers: list[Any] = []
        for weight in _weights(width):
            linear = parallel.nn.Linear(width, width)
            linear.weight.data = weight.T.copy()
            linear.bias.data = np.zeros(width, np.float32)
            layers += [linear, parallel.nn.ReLU()]
        layers[0].input_grad = False  # as in the others, where a batch needs no gradient
        return parallel.nn.Sequential(*layers[:-1])

    def step(self, synchronise: bool) -> None:
        model = self._ddp if synchronise else self._local
        optimizer = self._optimizers[synchronise]
        optimizer.zero_grad()
        y = model(self._x)
        model.backward(y * np.float32(2 / y.size))
        optimizer.step()

    def first_weights(self) -> Any:
        return next(iter(self._ddp.parameters())).data[:8]

    def hidden(self) -> float | None:
        statistics = self._ddp.statistics
        return None if statistics is None else statistics.hidden


class JaxTrainer(Trainer):
    """Our DistributedDataParallel for pytrees, in a jitted step that reuses its parameters."""

    name = "jax"

    def __init__(self) -> None:
        self.library = Meshlib()

    def build(self, rank: int, width: int, batch: int) -> None:
        jax: Any = importlib.import_module("jax")
        parallel: Any = importlib.import_module("parallel.jax")
        jnp = jax.numpy
        x = jnp.asarray(_batch(rank, width, batch))
        params = [(jnp.asarray(w), jnp.zeros(width, np.float32)) for w in _weights(width)]
        self._ddp = parallel.DistributedDataParallel(params)

        def loss(params: Any, x: Any) -> Any:
            for weight, bias in params[:-1]:
                x = jax.nn.relu(x @ weight + bias)
            weight, bias = params[-1]
            return ((x @ weight + bias) ** 2).mean()

        def make_step(value_and_grad: Any) -> Any:
            def step(params: Any) -> Any:
                def descend(param: Any, grad: Any) -> Any:
                    return param - LEARNING_RATE * grad

                _, grads = value_and_grad(params, x)
                return jax.tree.map(descend, params, grads)

            return jax.jit(step, donate_argnums=0)

        self._block: Any = jax.block_until_ready
        self._steps = [
            make_step(jax.value_and_grad(loss)),
            make_step(self._ddp.value_and_grad(loss)),
        ]
        self._params = [jax.tree.map(jnp.copy, params), self._ddp.params]

    def step(self, synchronise: bool) -> None:
        self._params[synchronise] = self._block(self._steps[synchronise](self._params[synchronise]))

    def first_weights(self) -> Any:
        return np.asarray(self._params[1][0][0])[:8]

    def hidden(self) -> float | None:
        statistics = self._ddp.statistics
        return None if statistics is None else statistics.hidden


TRAINERS: dict[str, type[Trainer]] = {
    trainer.name: trainer for trainer in (TorchTrainer, TorchViewsTrainer, NumPyTrainer, JaxTrainer)
}
