"""A program over two devices of a process is refused with what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshlib import jit as mj
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel

assert len(jax.local_devices()) == 2
both = Mesh(np.array(jax.local_devices()), "d")


def rank():
    x = jax.device_put(jnp.ones(4), NamedSharding(both, P("d")))
    ddp = DistributedDataParallel({"w": x})
    programs = [
        mj.all_reduce,
        jax.jit(mj.all_reduce),
        jax.jit(jax.shard_map(mj.all_reduce, mesh=both, in_specs=P("d"), out_specs=P("d"))),
        jax.jit(lambda x: (mj.barrier(), x)[1]),
        jax.jit(lambda x: ddp.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": x})),
    ]
    for program in programs:
        with pytest.raises(NotImplementedError, match=r"2 devices of this process.*a process"):
            program(x)
    # One device is as good as the other.
    moved = jax.device_put(x, jax.local_devices()[1])
    assert (programs[1](moved) == 2).all()
    assert (ddp.value_and_grad(lambda p: p["w"].sum())({"w": moved})[1]["w"] == 1).all()


run_ranks(rank, 2)
