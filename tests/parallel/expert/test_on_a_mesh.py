"""Experts over ranks: what one process computes, with the bytes that tokens have."""

import re
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks
from parallel import fully_shard, nn, optim
from parallel.state import global_state
from tests.support.parallel.moe_models import DIM, EXPERTS, make_moe, tokens
from tests.support.transport.counting import Count, counting
from transport._choosing.choice import DEFAULT
from transport._communicators import backends


class Net(nn.Module):
    """Two mixtures with a norm between, and what of them is sharded over which ranks."""

    def __init__(self, mesh=None, **options):
        super().__init__()
        if mesh is not None:
            names = mesh.mesh_dim_names
            options |= {dim: mesh[dim] for dim in ("ep", "tp") if dim in names}
            shared = [name for name in names if name != "tp"]
            options["balance_over"] = mesh[shared] if shared else None
        self.first = make_moe(balance_weight=0.05, seed=1, **options)
        self.norm = nn.LayerNorm(DIM, dtype="f8")
        self.second = make_moe(balance_weight=0.05, seed=2, shared=True, **options)

    def forward(self, x):
        return self.second(self.norm(x + self.first(x)))

    def backward(self, grad):
        grad = self.norm.backward(self.second.backward(grad))
        return grad + self.first.backward(grad)


def train(model, rank=0, world=1, steps=6):
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    loss_function = nn.CrossEntropyLoss()
    losses = []
    for step in range(steps):
        x = tokens(step, rank, world)
        optimizer.zero_grad()
        loss = loss_function(model(x), np.abs(x).argmax(axis=-1))
        balance = model.first.router.balance_loss + model.second.router.balance_loss
        losses.append(loss + 0.05 * balance)
        model.backward(loss_function.backward())
        optimizer.step()
    return losses


def whole_state(model):
    return {
        path: value.full_array() if isinstance(value, dist.DArray) else value.copy()
        for path, value in global_state(model)["model"].items()
    }


def run_on(shape, options):
    """Train ``Net`` on a mesh of ``shape``; return losses and whole parameters of each rank."""

    def program():
        mesh = dist.init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        model = Net(mesh, **options)
        data = [name for name in shape if name != "tp"]
        replicas = [name for name in data if name != "ep"]
        alone = []
        for layer in (model.first, model.second):
            if replicas:
                fully_shard(layer.experts, mesh[replicas])
            else:
                alone += layer.experts.parameters()
        if data:
            fully_shard(model, mesh[data], ignored_params=alone)
        over = mesh[data] if data else None
        rank, world = (0, 1) if over is None else (over.process_group.rank(), over.size())
        losses = np.array(train(model, rank, world))
        if over is not None:
            over.all_reduce(losses, dist.ReduceOp.AVG)
        return losses, whole_state(model)

    return run_ranks(program, int(np.prod(list(shape.values()))))


MESHES = [
    {"ep": 2},
    {"ep": 4},
    {"tp": 2},
    {"dp": 2, "ep": 2},
    {"ep": 2, "tp": 2},
    {"dp": 2, "ep": 4},
    {"dp": 2, "ep": 2, "tp": 2},
]


@pytest.mark.parametrize("shape", MESHES, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()))
def test_training_equals_one_process(shape):
    options = {"top_k": 2, "score": "sigmoid" if "tp" in shape else "softmax"}
    one = Net(**options)
    losses = train(one)
    expected = whole_state(one)
    for got_losses, state in run_on(shape, options):
        np.testing.assert_allclose(got_losses, losses, rtol=0, atol=1e-11)
        assert state.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_allclose(state[path], value, rtol=0, atol=1e-10, err_msg=path)


now = [Count()]


class Current(Count):
    def add(self, nbytes):
        now[0].add(nbytes)


@pytest.fixture(scope="session")
def counted():
    """A backend that counts in ``now`` what all ranks send."""
    make = counting(lambda rank, peer: Current())
    backends.register("counted-moe", lambda membership: make(membership, DEFAULT), ["cpu"])
    return "counted-moe"


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_bytes_are_those_of_the_tokens_that_move(dtype, counted):
    """Forward and backward send each row once to its expert and once back; nothing is padded.

    Besides, forward sends a count (8 bytes) for each expert of another rank.
    """
    n = 4
    gate = threading.Barrier(n, timeout=60)
    counts = {"forward": Count(), "backward": Count()}

    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("ep",))
        rank = dist.get_rank()
        layer = make_moe(ep=mesh["ep"]).map_arrays(lambda array: array.astype(dtype))
        x = tokens(0, rank, n, count=40 + 4 * n).astype(dtype)[: 5 + 3 * rank]  # uneven, too
        layer(x)
        layer.discard_saved()
        gate.wait()
        if rank == 0:
            now[0] = counts["forward"]
        gate.wait()
        y = layer(x)
        gate.wait()
        if rank == 0:
            now[0] = counts["backward"]
        gate.wait()
        layer.backward(y)
        gate.wait()
        _, chosen = layer.router.eval()(x)
        return int((chosen // (EXPERTS // n) != rank).sum())

    moved = sum(run_ranks(program, n, backend=counted))
    assert moved > 0
    row = DIM * np.dtype(dtype).itemsize
    assert counts["backward"].bytes == 2 * moved * row
    assert counts["forward"].bytes == 2 * moved * row + n * (n - 1) * (EXPERTS // n) * 8


def test_a_rank_without_tokens_takes_part():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        layer = make_moe(ep=mesh["ep"], balance_weight=0.1, balance_over=mesh["ep"])
        x = tokens(0)[: 0 if dist.get_rank() else 24]
        y = layer(x)
        grad = layer.backward(np.ones_like(x))
        return y, grad, layer.experts.up.weight.grad

    one = make_moe(balance_weight=0.1)
    y = one(tokens(0))
    grad = one.backward(np.ones_like(y))
    (got, got_grad, weight), (nothing, _, other) = run_ranks(program, 2)
    np.testing.assert_allclose(got, y, rtol=0, atol=1e-13)
    np.testing.assert_allclose(got_grad, grad, rtol=0, atol=1e-13)
    assert nothing.shape == (0, DIM)
    whole = np.concatenate([weight, other], axis=1) * 2  # divided by the size of ep
    np.testing.assert_allclose(whole, one.experts.up.weight.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("ep",), {"experts": 5}, "experts is 5, which does not divide by the 2 ranks of"),
        (("tp",), {}, "hidden is 7, which does not divide by the 2 ranks of"),
    ],
)
def test_what_does_not_divide_is_named(names, options, message, monkeypatch):
    monkeypatch.setattr("tests.support.parallel.moe_models.HIDDEN", 7)

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=names)
        make_moe(**{name: mesh[name] for name in names}, **options)

    with pytest.raises(RankError, match=re.escape(message)):
        run_ranks(program, 2)
