"""A small GPT, for the tests that compare meshes with one process."""

import numpy as np

from meshlib.sharding import Replicate, Shard
from parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    nn,
    optim,
)

VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH, BATCH = 24, 16, 8, 4, 16, 2


class Block(nn.Module):
    def __init__(self, rng, dtype):
        super().__init__()
        options = {"rng": rng, "dtype": dtype}
        self.attention_norm = nn.RMSNorm(WIDTH, dtype=dtype)
        self.attention = nn.MultiHeadAttention(WIDTH, HEADS, KV_HEADS, bias=True, **options)
        self.mlp_norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, **options)
        self.gelu = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH, **options)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(self.gelu(self.up(self.mlp_norm(x))))

    def backward(self, grad):
        inner = self.up.backward(self.gelu.backward(self.down.backward(grad)))
        grad = grad + self.mlp_norm.backward(inner)
        return grad + self.attention_norm.backward(self.attention.backward(grad))


class GPT(nn.Module):
    def __init__(self, blocks=2, *, tied=False, dtype="f8", seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, rng=rng, dtype=dtype)
        self.blocks = nn.Sequential(*(Block(rng, dtype) for _ in range(blocks)))
        self.norm = nn.RMSNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, False, rng=rng, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))

    def backward(self, grad):
        grad = self.norm.backward(self.head.backward(grad))
        self.embedding.backward(self.blocks.backward(grad))


def sequence_parallel_plan():
    """The plan of Megatron's sequence parallelism: between the layers sequences are split."""
    return {
        "embedding": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.*_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(Shard(1), Replicate()),
        "blocks.*.attention.[qkv]*": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1)),
    }


def tensor_parallel_plan():
    """Whole sequences between the layers; one all-reduce of its gradient for attention's input."""
    return {
        "embedding": RowwiseParallel(),
        "blocks.*.attention": PrepareModuleInput(Replicate(), Replicate()),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(),
    }


def batch(step):
    tokens = np.random.default_rng([5, step]).integers(0, VOCABULARY, (BATCH, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def train(model, loss=None, part=None, steps=20):
    """Train, and return the losses; ``part`` takes this rank's part of tokens and targets."""
    inner = getattr(model, "module", model)
    optimizer = optim.AdamW(inner.parameters(), lr=0.01)
    loss = loss or nn.CrossEntropyLoss()
    losses = []
    for step in range(steps):
        tokens, targets = (part(x) if part else x for x in batch(step))
        optimizer.zero_grad()
        losses.append(loss(model(tokens), targets))
        model.backward(loss.backward())
        optimizer.step()
    return losses


def assert_close(got, expected, tolerance=1e-9):
    assert sorted(got) == sorted(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance, err_msg=path)
