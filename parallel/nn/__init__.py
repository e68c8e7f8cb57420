"""Modules, layers and losses with hand-written backward passes, for any array library."""

from parallel.nn.activations import GELU, ReLU, Sigmoid, Tanh
from parallel.nn.attention import DotProductAttention, MultiHeadAttention
from parallel.nn.container import Residual, Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding
from parallel.nn.linear import Linear
from parallel.nn.loss import CrossEntropyLoss
from parallel.nn.module import Module, SavedContexts
from parallel.nn.normalization import LayerNorm, RMSNorm
from parallel.nn.parameter import Buffer, GradHook, Parameter, RemovableHandle
from parallel.nn.precision import ComputeIn
from parallel.nn.rotary import RotaryEmbedding

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
