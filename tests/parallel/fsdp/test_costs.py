"""Bytes on the wire and bytes of memory, counted."""

import gc
import math
import threading
import tracemalloc

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import nn, optim
from parallel.fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.parallel.fsdp_training import on_mesh, shard
from tests.support.transport.counting import Count, counting
from transport._choosing.choice import DEFAULT
from transport._communicators import backends

now = [Count()]


class Current(Count):
    def add(self, nbytes):
        now[0].add(nbytes)


@pytest.fixture(scope="session", autouse=True)
def counted():
    """A backend that counts in ``now`` what all ranks send."""
    make = counting(lambda rank, peer: Current())
    backends.register("counted", lambda membership: make(membership, DEFAULT), ["cpu"])


def make_layers(rows=131, width=96, layers=3, *, bias=True, dtype="f8"):
    rng = np.random.default_rng(0)
    return nn.Sequential(
        *(nn.Linear(width, width, bias, rng=rng, dtype=dtype) for _ in range(layers)),
        nn.Linear(width, rows, bias, rng=rng, dtype=dtype),
    )


def bytes_of_a_step(n, shape, names, prepare):
    """Return what all ranks send in the second step, as multiples of the parameters' bytes."""
    gate = threading.Barrier(n, timeout=60)
    count = Count()

    def program():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        model, step = prepare(mesh)
        step(model)
        gate.wait()
        now[0] = count
        gate.wait()
        step(model)
        gate.wait()
        now[0] = Count()
        return sum(math.prod(p.value.shape) * p.data.itemsize for p in model.parameters())

    total = run_ranks(program, n, backend="counted")[0]
    return count.bytes / total


def one_step(model):
    x = np.ones((2, 96), model[0].weight.data.dtype)
    model.backward(model(x))


@pytest.mark.parametrize(("n", "bias"), [(2, True), (4, False), (8, False)])
@pytest.mark.parametrize(("reshard", "times"), [(True, 3), (False, 2)])
def test_bytes_are_three_times_the_parameters_but_for_the_own_part(n, bias, reshard, times):
    """Over all ranks: (n - 1)/n of the parameters for each, in each gather and reduce-scatter.

    More than two ranks gather and reduce what is less than 64 KiB in fewer, larger messages; the
    layers are larger than that. Their parts are uneven.
    """

    def prepare(mesh):
        return shard(make_layers(bias=bias), mesh, reshard_after_forward=reshard), one_step

    assert bytes_of_a_step(n, (n,), ("dp_shard",), prepare) == times * (n - 1)


@pytest.mark.parametrize(("reshard", "times"), [(True, 3), (False, 2)])
def test_whether_parameters_stay_for_backward_may_change(reshard, times):
    def prepare(mesh):
        model = shard(make_layers(rows=128, bias=False), mesh, reshard_after_forward=not reshard)
        model.set_reshard_after_forward(reshard)
        return model, one_step

    assert bytes_of_a_step(2, (2,), ("dp_shard",), prepare) == times


def test_bytes_of_hsdp():
    """Three times over the shards; then each rank's part, twice (n - 1)/n, over the replicas."""

    def prepare(mesh):
        return shard(make_layers(rows=128, bias=False), mesh, reshard_after_forward=True), one_step

    got = bytes_of_a_step(4, (2, 2), ("dp_replicate", "dp_shard"), prepare)
    assert got == pytest.approx(2 * 3 + 2 * 1, rel=1e-3)


def test_bytes_with_a_smaller_mesh_between_forward_and_backward():
    """A gather over 4, one over 2 for backward, a reduce-scatter over 4."""

    def prepare(mesh):
        return shard(make_layers(rows=128, bias=False), mesh, reshard_after_forward=2), one_step

    assert bytes_of_a_step(4, (4,), ("dp_shard",), prepare) == 3 + 2 + 3


def test_bytes_in_lower_precision():
    """Parameters in 2 of 4 bytes, gradients in all of them."""

    def prepare(mesh):
        policy = MixedPrecisionPolicy(param_dtype="float16")
        model = make_layers(rows=130, dtype="f4", bias=False)
        return shard(model, mesh, reshard_after_forward=True, mp_policy=policy), one_step

    assert bytes_of_a_step(2, (2,), ("dp_shard",), prepare) == 0.5 + 0.5 + 1


def test_bytes_with_accumulation_in_whole_gradients():
    def prepare(mesh):
        def step(model):
            with model.no_sync():
                one_step(model)
            one_step(model)

        return shard(make_layers(rows=130), mesh, reshard_after_forward=True), step

    assert bytes_of_a_step(2, (2,), ("dp_shard",), prepare) == 2 + 3


def test_memory_is_a_share_of_the_parameters_gradients_and_states():
    """NumPy's memory, which tracemalloc sees: all four ranks together have one model's.

    Besides there are, on each rank, at most five wholes of a layer: two of parameters, this one's
    and the next one's, two of gradients, this one's and one that is being reduced, and one of parts
    under way between the ranks.
    """
    n, layers, width = 4, 24, 160
    gate = threading.Barrier(n, timeout=60)
    model_bytes = layers * width * width * 8
    seen = {}

    def note(what):
        gate.wait()
        if dist.get_rank() == 0:
            gc.collect()
            seen[what] = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
        gate.wait()

    def program(mesh):
        note("before")
        model = make_layers(width, width, layers - 1, bias=False)
        for layer in model:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        optimizer = optim.Adam(model.parameters())

        note("sharded")
        for _ in range(2):
            optimizer.zero_grad()
            note("step begins")
            model.backward(model(np.ones((2, width))))
            note("backward")
            optimizer.step()
        note("step")

    on_mesh(program, n)  # what is imported at first use
    # What there is by now need not be looked through for garbage at each note.
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        on_mesh(program, n)
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    wholes = 5 * n * width * width * 8
    before = seen["before"][0]
    now_and_most = {what: np.subtract(memory, before) for what, memory in seen.items()}
    slack = 0.4 * model_bytes  # activations, messages under way, records of calls
    assert now_and_most["sharded"][0] <= model_bytes + slack
    peak = now_and_most["backward"][1]
    # parameters, gradients and Adam's two moments; and what is under way
    assert model_bytes < peak <= 4 * model_bytes + wholes + slack
    assert now_and_most["step"][0] <= 4 * model_bytes + wholes + slack
    # Kept whole on all ranks, it would be n times that.
    assert 4 * model_bytes + wholes + slack < 0.5 * n * 4 * model_bytes
