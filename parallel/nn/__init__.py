"""Modules, layers and losses with hand-written backward passes, for any array library."""

from parallel.nn.layers.activations import GELU, Dropout, ReLU, Sigmoid, Tanh
from parallel.nn.layers.attention import DotProductAttention, MultiHeadAttention
from parallel.nn.layers.container import Residual, Sequential
from parallel.nn.layers.embedding import Embedding
from parallel.nn.layers.linear import Linear
from parallel.nn.layers.normalization import LayerNorm, RMSNorm
from parallel.nn.layers.rotary import RotaryEmbedding
from parallel.nn.loss import CrossEntropyLoss, MSELoss
from parallel.nn.module import Module, SavedContexts
from parallel.nn.parameter import Buffer, GradHook, Parameter, RemovableHandle
from parallel.nn.precision import ComputeIn

__all__ = [
    "GELU",
    "Buffer",
    "ComputeIn",
    "CrossEntropyLoss",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "GradHook",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "Module",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "RemovableHandle",
    "Residual",
    "RotaryEmbedding",
    "SavedContexts",
    "Sequential",
    "Sigmoid",
    "Tanh",
]
