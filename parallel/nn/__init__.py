"""Modules, layers and losses with hand-written backward passes, for any array library."""

from parallel.nn._layers.linear import Embedding, Linear
from parallel.nn._layers.simple import (
    GELU,
    Dropout,
    LayerNorm,
    ReLU,
    Residual,
    RMSNorm,
    Sequential,
    Sigmoid,
    Tanh,
)
from parallel.nn._loss import CrossEntropyLoss, MSELoss
from parallel.nn._module import Module, SavedContexts
from parallel.nn._parameter import Buffer, GradHook, Parameter, RemovableHandle
from parallel.nn._precision import ComputeIn

__all__ = [
    "GELU",
    "Buffer",
    "ComputeIn",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "GradHook",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "Module",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "RemovableHandle",
    "Residual",
    "SavedContexts",
    "Sequential",
    "Sigmoid",
    "Tanh",
]
