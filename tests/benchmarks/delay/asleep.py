"""The trainers of ``tests.benchmarks.data_parallel`` whose layers take time, but no processor."""

from __future__ import annotations

import time
from typing import Any

from tests.benchmarks.data_parallel.trainers import NumPyTrainer, TorchTrainer


class SleepingNumPyTrainer(NumPyTrainer):
    """Each layer sleeps for ``seconds`` forward and twice as long backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def _model(self, parallel: Any, width: int) -> Any:
        model, seconds = super()._model(parallel, width), self._seconds
        if not seconds:
            return model

        class Asleep(parallel.nn.Module):
            def forward(self, x: Any) -> Any:
                time.sleep(seconds)
                return x

            def backward(self, grad: Any) -> Any:
                time.sleep(2 * seconds)
                return grad

        layers = [
            each
            for layer in model
            for each in ((layer, Asleep()) if isinstance(layer, parallel.nn.Linear) else (layer,))
        ]
        return parallel.nn.Sequential(*layers)


class SleepingTorchTrainer(TorchTrainer):
    """The same in PyTorch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def _model(self, width: int) -> Any:
        model, seconds = super()._model(width), self._seconds
        if not seconds:
            return model
        torch = self._torch

        class Sleep(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, x: Any) -> Any:
                time.sleep(seconds)
                return x.view_as(x)

            @staticmethod
            def backward(context: Any, grad: Any) -> Any:
                time.sleep(2 * seconds)
                return grad

        class Asleep(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return Sleep.apply(x)

        layers = [
            each
            for layer in model
            for each in ((layer, Asleep()) if isinstance(layer, torch.nn.Linear) else (layer,))
        ]
        return torch.nn.Sequential(*layers)
