"""Passes over processes of which one dies: of modules, which need no JAX, and in ``jax.grad``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys, time
import numpy as np
import meshlib as dist
from meshlib import rpc
from parallel import nn
from parallel.rpc import RemoteModule, dist_autograd
from parallel.rpc._contexts import keeper

class Scale(nn.Module):
    def __init__(self, dies):
        super().__init__()
        self.weight, self.dies = nn.Parameter(np.full(3, 2.0)), dies
    def forward(self, x):
        self.save_for_backward(x)
        return self.weight.data * x
    def backward(self, grad):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.weight.accumulate_grad(grad * self.saved())
        return self.weight.data * grad

class Relay:
    # Its module lives elsewhere.
    def __init__(self, to, dies): self.module = RemoteModule(to, Scale, (dies,))
    def forward(self, x): return self.module(x)

class Sum(nn.Module):
    def forward(self, x):
        self.save_for_backward(x.shape)
        return float(x.sum())
    def backward(self, grad): return np.full(self.saved(), grad)

def note(): open("seen", "w").close()
def contexts(): return len(keeper())

dist.init_process_group()
me = dist.get_rank()
rpc.init_rpc(f"worker{me}")
if me == 3:  # its context comes to 1 and 2, and it dies
    relay = RemoteModule(1, Relay, (2, False))
    with dist_autograd.context() as context_id:
        relay(np.ones(3))
        rpc.rpc_sync(0, note)
        os.kill(os.getpid(), signal.SIGKILL)
if me == 0:
    while any(rpc.rpc_sync(to, contexts) for to in (1, 2)) or not os.path.exists("seen"):
        time.sleep(0.005)
    relay = RemoteModule(1, Relay, (2, True))
    try:
        with dist_autograd.context() as context_id:
            loss = dist_autograd.forward(Sum(), relay(np.ones(3)))
            dist_autograd.backward(context_id, [loss])
    except rpc.WorkerLostError as error:
        print(error.worker, error.rank, error)
    while rpc.rpc_sync(1, contexts) or contexts():
        time.sleep(0.005)
rpc.shutdown()
print("done", me, "jax" in sys.modules)
"""


def test_a_death_in_a_backward_pass_is_named_and_contexts_of_the_dead_end(meshrun):
    script = meshrun.script(PROGRAM)
    result = meshrun.run("-n", "4", "--on-failure", "continue", script)
    assert result.code == 0, result.err
    lines = sorted(result.out.splitlines())
    assert lines[:2] == ["done 0 False", "done 1 False"]
    assert lines[2].startswith("worker2 2 worker 'worker2' (rank 2) was killed by SIGKILL, ")


IN_GRAD = """
import os, signal
import jax, jax.numpy as jnp
import meshlib as dist
from meshlib import rpc
from parallel.rpc import Weights, dist_autograd

@dist_autograd.function
def layer(w, x): return jnp.sin(w * x)

@dist_autograd.function
def mortal(x, step):
    if step == 2: os.kill(os.getpid(), signal.SIGKILL)
    return x * x

dist.init_process_group()
me = dist.get_rank()
rpc.init_rpc(f"worker{me}")
if me == 0:
    w = rpc.remote(1, Weights, (jnp.ones(3),))
    def gradient(x, step):
        def loss(x):
            y = rpc.rpc_sync(1, layer, (w, x))
            return rpc.rpc_sync(2, mortal, (y, step)).sum()
        return jax.grad(loss)(x)
    x = jnp.arange(3.0)
    for step in range(3):
        try:
            with dist_autograd.context():
                found = gradient(x, step)
                print("right", jnp.allclose(found, 2 * jnp.sin(x) * jnp.cos(x)))
        except rpc.WorkerLostError as error:
            print(error.worker, error.rank, error)
    print("goes on", float(rpc.rpc_sync(1, layer, (w, x))[0]))
rpc.shutdown()
"""


def test_a_death_in_a_call_of_a_function_that_jax_differentiates_is_named(meshrun):
    script = meshrun.script(IN_GRAD)
    result = meshrun.run("-n", "3", "--on-failure", "continue", script)
    assert result.code == 0, result.err
    first, second, lost, last = result.out.splitlines()
    assert (first, second, last) == ("right True", "right True", "goes on 0.0")
    assert lost.startswith("worker2 2 worker 'worker2' (rank 2) was killed by SIGKILL, ")
    assert "after __main__.mortal was called there" in lost
