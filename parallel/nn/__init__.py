"""Modules, layers and losses with hand-written backward passes, for any array library."""

from parallel.nn.activations import GELU, ReLU, Sigmoid, Tanh
from parallel.nn.container import Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding
from parallel.nn.linear import Linear
from parallel.nn.loss import CrossEntropyLoss
from parallel.nn.module import Module, SavedContexts
from parallel.nn.normalization import LayerNorm
from parallel.nn.parameter import Buffer, GradHook, Parameter, RemovableHandle
from parallel.nn.precision import ComputeIn

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
    "Module",
    "Parameter",
    "ReLU",
    "RemovableHandle",
    "SavedContexts",
    "Sequential",
    "Sigmoid",
    "Tanh",
]
