"""``RemoteModule``: parallel.nn modules on other workers, and optimizers beside them."""

import time
from itertools import pairwise

import numpy as np
import pytest

from meshlib import rpc
from parallel import nn, optim
from parallel.rpc import DistributedOptimizer, RemoteModule, dist_autograd
from parallel.rpc._contexts import context_store
from tests.support.meshlib.rpc_workers import workers


def mlp(sizes, seed):
    rng = np.random.default_rng(seed)
    layers = [nn.Linear(a, b, rng=rng, dtype=np.float64) for a, b in pairwise(sizes)]
    return nn.Sequential(layers[0], nn.Tanh(), *layers[1:])


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


X, T = draw(0, 6, 4), np.array([0, 2, 1, 1, 0, 2])
FIRST, LAST = ((4, 5, 5), 1), ((5, 5, 3), 2)


def gradients_of(rref, context_id):
    found = dist_autograd.get_gradients(context_id)
    return [found.get(parameter) for parameter in rref.local_value().parameters()]


def values_of(rref):
    return [parameter.data for parameter in rref.local_value().parameters()]


def uses_of(rref):
    """The saved values in the module, and whether its own gradients were left alone."""
    module = rref.local_value()
    outstanding = sum(one.outstanding for one in module.modules())
    return outstanding, [p.uses for p in module.parameters()], [p.grad for p in module.parameters()]


def step_in_one_process(first, last, loss, x, target):
    value = loss(last(first(x)), target)
    grad = first.backward(last.backward(loss.backward()))
    return value, grad


def test_two_modules_in_a_row_train_as_in_one_process():
    def program():
        first, last = RemoteModule("w1", mlp, FIRST), RemoteModule("w2/cpu", mlp, LAST)
        params = [*first.remote_parameters(), *last.remote_parameters()]
        assert len(params) == 8
        optimizer = DistributedOptimizer(optim.Adam, params, lr=1e-2)
        alone = mlp(*FIRST), mlp(*LAST)
        own = optim.Adam([*alone[0].parameters(), *alone[1].parameters()], lr=1e-2)
        loss_fn = nn.CrossEntropyLoss()
        for _ in range(3):
            own.zero_grad()
            value, _ = step_in_one_process(*alone, nn.CrossEntropyLoss(), X, T)
            with dist_autograd.context() as context_id:
                loss = dist_autograd.forward(loss_fn, last(first(X)), T)
                assert float(loss) == value
                dist_autograd.backward(context_id, [loss])
                for remote, local in zip((first, last), alone, strict=True):
                    rref = remote.get_module_rref()
                    found = rpc.rpc_sync(rref.owner(), gradients_of, (rref, context_id))
                    for actual, parameter in zip(found, local.parameters(), strict=True):
                        np.testing.assert_array_equal(actual, parameter.grad)
                optimizer.step(context_id)
            own.step()
        for remote, local in zip((first, last), alone, strict=True):
            rref = remote.get_module_rref()
            for actual, parameter in zip(
                rpc.rpc_sync(rref.owner(), values_of, (rref,)), local.parameters(), strict=True
            ):
                np.testing.assert_array_equal(actual, parameter.data)

    workers(3, program)


def test_microbatches_overlap_and_what_is_not_used_is_forgotten():
    def program():
        first, last = RemoteModule(1, mlp, FIRST), RemoteModule(2, mlp, LAST)
        alone = mlp(*FIRST), mlp(*LAST)
        parts = [(X[:2], T[:2]), (X[2:4], T[2:4]), (X[4:], T[4:])]
        with dist_autograd.context() as context_id:
            hidden = [first.forward_async(x) for x, _ in parts]
            first(X)  # nobody uses it
            outputs = [last.forward_async(one.wait()) for one in reversed(hidden)]
            losses = [
                dist_autograd.forward(nn.CrossEntropyLoss(), out.wait(), t)
                for out, (_, t) in zip(outputs, reversed(parts), strict=True)
            ]
            dist_autograd.backward(context_id, losses)
            for x, t in parts:
                step_in_one_process(*alone, nn.CrossEntropyLoss(), x, t)
            for remote, local in zip((first, last), alone, strict=True):
                rref = remote.get_module_rref()
                found = rpc.rpc_sync(rref.owner(), gradients_of, (rref, context_id))
                for actual, parameter in zip(found, local.parameters(), strict=True):
                    np.testing.assert_allclose(actual, parameter.grad, rtol=1e-12, atol=1e-15)
            with pytest.raises(RuntimeError, match="forward pass of CrossEntropyLoss"):
                dist_autograd.backward(context_id, losses[:1])
        rref = first.get_module_rref()
        rpc.rpc_sync(1, wait_until_forgotten, (context_id,))
        assert rpc.rpc_sync(1, uses_of, (rref,)) == (0, [0] * 4, [None] * 4)

    workers(3, program)


def wait_until_forgotten(context_id):
    until = time.monotonic() + 40
    while True:
        try:
            context_store().find(context_id)
        except ValueError:
            return
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_module_in_evaluation_mode_and_wrong_uses_are_named():
    def program():
        module = RemoteModule("w1", mlp, FIRST)
        with pytest.raises(AttributeError, match=r"no parameters\(\).*remote_parameters\(\)"):
            module.parameters()
        with pytest.raises(ValueError, match="remote_device is 'w1/cuda:0'"):
            RemoteModule("w1/cuda:0", mlp, FIRST)
        with dist_autograd.context():
            hidden = module(X)
            module.eval()
            with pytest.raises(NotImplementedError, match="recorded value in evaluation mode"):
                module(hidden)
            expected = mlp(*FIRST)(X)
            np.testing.assert_array_equal(module(X), expected)
            module.train()
        np.testing.assert_array_equal(module(X), expected)

    workers(2, program)
