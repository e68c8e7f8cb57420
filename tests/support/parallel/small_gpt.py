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

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 24, 16, 8, 16, 2


class Attention(nn.Module):
    """Causal self-attention of the heads here: all, or those that ``parallelize`` has left."""

    def __init__(self, options):
        super().__init__()
        self.query, self.key, self.value, self.output = (
            nn.Linear(WIDTH, WIDTH, **options) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (self.by_head(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        self.save_for_backward((q, k, v, weights))
        return self.output(self.joined(weights @ v))

    def backward(self, grad):
        grad = self.by_head(self.output.backward(grad))
        q, k, v, weights = self.saved()
        of_weights = grad @ v.swapaxes(-1, -2)
        inner = (of_weights * weights).sum(axis=-1, keepdims=True)
        of_scores = weights * (of_weights - inner) * q.shape[-1] ** -0.5
        x_grad = self.value.backward(self.joined(weights.swapaxes(-1, -2) @ grad))
        x_grad += self.key.backward(self.joined(of_scores.swapaxes(-1, -2) @ q))
        x_grad += self.query.backward(self.joined(of_scores @ k))
        return x_grad

    def by_head(self, x):
        return x.reshape(*x.shape[:2], -1, WIDTH // HEADS).swapaxes(1, 2)

    def joined(self, x):
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


class Block(nn.Module):
    def __init__(self, rng, dtype):
        super().__init__()
        options = {"rng": rng, "dtype": dtype}
        self.attention_norm = nn.RMSNorm(WIDTH, dtype=dtype)
        self.attention = Attention(options)
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
