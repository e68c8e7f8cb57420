"""Small models and training loops, for comparing sharded training with one process."""

import numpy as np

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import ColwiseParallel, RowwiseParallel, nn, optim, parallelize
from parallel.fsdp import fully_shard
from parallel.nn._parameter import as_global, kept_part

BATCH, LENGTH, WIDTH, VOCABULARY = 16, 5, 8, 11


def make_mlp(dtype="f8", seed=0):
    """Layers of uneven sizes: on 4 ranks some have parts of other sizes, on 8 some have none."""
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 17, rng=rng, dtype=dtype), nn.Tanh()),
        nn.Sequential(nn.LayerNorm(17, dtype=dtype), nn.Linear(17, 18, rng=rng, dtype=dtype)),
        nn.GELU(),
        nn.Linear(18, 3, rng=rng, dtype=dtype),
    )


class Attention(nn.Module):
    """One head, without a mask; q, k and v in one layer."""

    def __init__(self, width, rng, dtype):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, rng=rng, dtype=dtype)
        self.out = nn.Linear(width, width, rng=rng, dtype=dtype)

    def forward(self, x):
        q, k, v = np.split(self.qkv(x), 3, axis=-1)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = scores / scores.sum(axis=-1, keepdims=True)
        self.save_for_backward((q, k, v, weights))
        return self.out(weights @ v)

    def backward(self, grad):
        grad = self.out.backward(grad)
        q, k, v, weights = self.saved()
        of_weights = grad @ v.swapaxes(-1, -2)
        inner = (of_weights * weights).sum(axis=-1, keepdims=True)
        of_scores = weights * (of_weights - inner) / np.sqrt(q.shape[-1])
        parts = of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad
        return self.qkv.backward(np.concatenate(parts, axis=-1))


class Residual(nn.Module):
    """x + layers(x)."""

    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)

    def backward(self, grad):
        return grad + self.inner.backward(grad)


class Unembed(nn.Module):
    """Scores by the vectors of an embedding, which are shared."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        self.save_for_backward(x)
        return x @ self.weight.data.T

    def backward(self, grad):
        x = self.saved()
        rows = grad.reshape(-1, grad.shape[-1])
        self.weight.accumulate_matmul(rows.T, x.reshape(-1, x.shape[-1]))
        return grad @ self.weight.data


class Last(nn.Module):
    """The last position's vector."""

    def forward(self, x):
        self.save_for_backward(x.shape)
        return x[:, -1]

    def backward(self, grad):
        whole = np.zeros(self.saved(), grad.dtype)
        whole[:, -1] = grad
        return whole


def make_transformer(dtype="f8", blocks=2, tp=None, width=WIDTH):
    """Embedding, blocks of attention and MLP, and the embedding's vectors again at the end."""
    rng = np.random.default_rng(3)
    embedding = nn.Embedding(VOCABULARY, width, rng=rng, dtype=dtype)
    layers = [embedding]
    for _ in range(blocks):
        attention = Attention(width, rng, dtype)
        up = nn.Linear(width, 4 * width, rng=rng, dtype=dtype)
        down = nn.Linear(4 * width, width, rng=rng, dtype=dtype)
        if tp is not None:
            parallelize(up, tp, {"": ColwiseParallel()})
            parallelize(down, tp, {"": RowwiseParallel()})
        mlp = Residual(nn.LayerNorm(width, dtype=dtype), up, nn.GELU(), down)
        layers.append(nn.Sequential(Residual(nn.LayerNorm(width, dtype=dtype), attention), mlp))
    return nn.Sequential(*layers, Last(), Unembed(embedding.weight))


def mlp_batch(step, rank=0, world=1, micro=0):
    rng = np.random.default_rng([7, step, micro])
    x, y = rng.normal(size=(BATCH, 6)), rng.integers(0, 3, BATCH)
    return x[rank::world], y[rank::world]


def tokens_batch(step, rank=0, world=1, micro=0):
    rng = np.random.default_rng([8, step, micro])
    x = rng.integers(0, VOCABULARY, (BATCH, LENGTH))
    return x[rank::world], (x[:, 0] + x[:, -1])[rank::world] % VOCABULARY


MODELS = {"mlp": (make_mlp, mlp_batch), "transformer": (make_transformer, tokens_batch)}


def shard(model, mesh, **options):
    """Apply ``fully_shard`` to the layers with parameters, and to the whole."""
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def train(model, batches, rank=0, world=1, steps=5, after_backward=None, optimizer=None):
    """Train, and return the losses; each step uses this rank's part of the batch."""
    optimizer = optimizer or optim.AdamW(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    losses = []
    for step in range(steps):
        x, y = batches(step, rank, world)
        optimizer.zero_grad()
        losses.append(float(loss_function(model(x), y)))
        model.backward(loss_function.backward())
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
    return losses


def whole(state):
    """Return a state dict with whole arrays: a collective where there are DArrays."""
    return {
        path: value.full_array() if hasattr(value, "full_array") else value.copy()
        for path, value in state.items()
    }


def assert_equal(got, expected, tolerance=1e-10):
    assert list(got) == list(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance, err_msg=path)


def on_mesh(program, n, names=("dp_shard",), shape=None):
    def body():
        mesh = dist.init_device_mesh("cpu", shape or (n,), mesh_dim_names=names)
        return program(mesh)

    return run_ranks(body, n)


def gradients(model):
    return {
        path: p.grad.copy() if kept_part(p) is None else as_global(p, p.grad).full_array()
        for path, p in model.named_parameters()
    }


def backward(model, rank=0, world=1, micro=0, scale=1.0, batches=mlp_batch):
    loss_function = nn.CrossEntropyLoss()
    x, y = batches(0, rank, world, micro)
    loss_function(model(x), y)
    return model.backward(loss_function.backward(scale))


def expected_gradients(micros=1):
    model = make_mlp()
    for micro in range(micros):
        backward(model, micro=micro, scale=1 / micros)
    return gradients(model)
