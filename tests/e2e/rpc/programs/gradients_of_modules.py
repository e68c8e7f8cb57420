import os
import signal
import sys
import time

import numpy as np

import meshlib as dist
from meshlib import rpc
from parallel import nn
from parallel.rpc import RemoteModule, dist_autograd
from parallel.rpc._contexts import context_store


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
    def __init__(self, to, dies):
        self.module = RemoteModule(to, Scale, (dies,))

    def forward(self, x):
        return self.module(x)


class Sum(nn.Module):
    def forward(self, x):
        self.save_for_backward(x.shape)
        return float(x.sum())

    def backward(self, grad):
        return np.full(self.saved(), grad)


def note():
    open("seen", "w").close()


def contexts():
    return len(context_store())


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
