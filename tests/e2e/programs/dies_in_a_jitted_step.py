"""Rank 1 is killed while all are in a jitted step; the other says whom it lost."""

import os
import signal

import jax
import jax.numpy as jnp

import meshlib as dist
from meshlib import jit as mj
from parallel.jax import DistributedDataParallel

dist.init_process_group()
params = {name: jnp.ones((300, 300)) for name in "abc"}
ddp = DistributedDataParallel(params, bucket_cap_mb=0.1)


@jax.jit
def step(params, x):
    def loss(params):
        y = x
        for name in "abc":
            y = jnp.tanh(y @ params[name])
        return mj.all_reduce(y.sum())

    return ddp.value_and_grad(loss)(params)[1]


x = jnp.ones((4, 300))
for _ in range(3):
    jax.block_until_ready(step(params, x))
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(100):
        jax.block_until_ready(step(params, x))
except jax.errors.JaxRuntimeError as error:
    print("raised:", "rank 1" in str(error), flush=True)
    raise SystemExit(3) from None
