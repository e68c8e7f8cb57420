"""A parameter server that updates once for the gradients of all trainers.

    meshrun --nproc-per-node 3 examples/rpc/parameter_server.py

Rank 0 has the model. Each other rank computes gradients on its own batches, sends them, and gets
the new model back. ``update_and_fetch`` answers all trainers when the last one's gradients have
arrived. No thread waits meanwhile (``async_execution``).
"""

from __future__ import annotations

import argparse
import threading
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import meshlib as dist
from meshlib import rpc
from parallel import nn, optim


def make_model() -> nn.Module:
    """Return a network for digits, with the same values on every worker."""
    rng = np.random.default_rng(0)
    return nn.Sequential(nn.Linear(64, 64, rng=rng), nn.ReLU(), nn.Linear(64, 10, rng=rng))


def make_data() -> tuple[Any, Any]:
    """Return images (n, 64), float32 in [0, 1], and labels (n,)."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels


class ParameterServer:
    """The model, and the gradients received since its last update."""

    def __init__(self, trainers: int) -> None:
        self.model = make_model()
        self._parameters = list(self.model.parameters())
        self._optimizer = optim.Adam(self._parameters, lr=3e-3)
        self._trainers = trainers
        self._lock = threading.Lock()
        self._received = 0
        self._answer: rpc.Future[Any] = rpc.Future()

    def fetch(self) -> list[Any]:
        """Return the model's arrays."""
        return [parameter.data for parameter in self._parameters]

    @rpc.functions.async_execution
    def update_and_fetch(self, grads: list[Any]) -> rpc.Future[Any]:
        """Add a trainer's gradients; the answer is the model after the update by all trainers."""
        with self._lock:
            for parameter, grad in zip(self._parameters, grads, strict=True):
                share = grad / self._trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
            self._received += 1
            answer, full = self._answer, self._received == self._trainers
            if full:
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._received, self._answer = 0, rpc.Future()
        if full:
            # The next update waits for all trainers, so it cannot change arrays still being read.
            answer.set_result(self.fetch())
        return answer


def train(server: rpc.RRef[ParameterServer], share: slice, epochs: int, batch: int) -> float:
    """Train on a share of the data; return the last epoch's mean loss."""
    images, labels = (array[share] for array in make_data())
    model, loss_function = make_model(), nn.CrossEntropyLoss()
    arrays = server.rpc_sync().fetch()
    mean = 0.0
    for _ in range(epochs):
        losses: list[float] = []
        for begin in range(0, len(images), batch):
            for parameter, array in zip(model.parameters(), arrays, strict=True):
                parameter.data = array
            part = slice(begin, begin + batch)
            losses.append(loss_function(model(images[part]), labels[part]))
            model.backward(loss_function.backward())
            arrays = server.rpc_sync().update_and_fetch([p.grad for p in model.parameters()])
            model.zero_grad()
        mean = float(np.mean(losses))
    return mean


def run(epochs: int, batch: int = 32) -> float:
    """Train with all ranks of the job; on rank 0, return the test accuracy, from 0 to 1."""
    rpc.init_rpc(f"worker{dist.get_rank()}")
    right = 0.0
    if dist.get_rank() == 0:
        trainers = dist.get_world_size() - 1
        server = rpc.RRef(ParameterServer(trainers))
        images, labels = make_data()
        size = 1500 // trainers  # the other images are for the test
        shares = [slice(i * size, (i + 1) * size) for i in range(trainers)]
        calls = [
            rpc.rpc_async(1 + i, train, (server, share, epochs, batch), timeout=0)
            for i, share in enumerate(shares)
        ]
        for i, loss in enumerate(rpc.wait_all(calls)):
            print(f"worker{1 + i}: loss {loss:.3f}")
        model = server.local_value().model.eval()
        right = float((model(images[1500:]).argmax(axis=-1) == labels[1500:]).mean())
        print(f"test accuracy {right:.1%}")
    rpc.shutdown()
    return right


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group()
    run(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
