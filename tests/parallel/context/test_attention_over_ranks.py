"""Ring attention and Ulysses: the attention of one process, and what it costs."""

import threading
import tracemalloc

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import nn
from parallel._core.attention.ring import RingAlgorithm
from parallel.context import (
    RingAttention,
    UlyssesAttention,
    context_parallel,
    sequence_positions,
    split_sequence,
)

KINDS = {
    "ring": RingAttention,
    "ring in a row": lambda mesh, causal: RingAttention(mesh, causal, zigzag=False),
    "all_to_all": UlyssesAttention,
}


def normal(*shape, seed=0, dtype="f8"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "kv_heads"), [(2, 2), (4, 4), (3, 3)])
def test_forward_and_backward_are_those_of_one_process(kind, causal, n, kv_heads):
    length, heads = 4 * n, 2 * kv_heads
    q, grad = normal(2, length, heads, 3), normal(2, length, heads, 3, seed=1)
    k, v = (normal(2, length, kv_heads, 3, seed=seed) for seed in (2, 3))
    core = nn.DotProductAttention(causal)
    expected = core(q, k, v), *core.backward(grad)

    def program():
        own = KINDS[kind](None, causal)
        part = own.positions(4)
        result = own(*(x[:, part] for x in (q, k, v)))
        got = result, *own.backward(grad[:, part])
        assert own.outstanding == 0
        for ours, whole in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, whole[:, part], rtol=0, atol=1e-12)
        return part

    parts = run_ranks(program, n)
    assert sorted(np.concatenate(parts)) == list(range(length))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_summed_in_float32(kind):
    q, k, v = (normal(1, 64, 4, 8, seed=seed, dtype="f2") for seed in range(3))
    core = nn.DotProductAttention()
    expected = [core(*(x.astype("f8") for x in (q, k, v))), *core.backward(q.astype("f8"))]

    def program():
        own = KINDS[kind](None, True)
        part = own.positions(16)
        got = [own(q[:, part], k[:, part], v[:, part]), *own.backward(q[:, part])]
        for ours, whole in zip(got, expected, strict=True):
            assert ours.dtype == np.float16
            np.testing.assert_allclose(ours, whole[:, part], rtol=4e-3, atol=4e-3)

    run_ranks(program, 4)


def test_places_of_a_zigzag_are_an_early_and_a_late_chunk():
    def program():
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        places = sequence_positions(4, mesh["cp"])
        tokens = np.arange(24).reshape(2, 12)
        np.testing.assert_array_equal(split_sequence(tokens, mesh["cp"]), tokens[:, places])
        row = sequence_positions(4, mesh["cp"], zigzag=False)
        np.testing.assert_array_equal(split_sequence(tokens.T, dim=0, zigzag=False), tokens.T[row])
        return places.tolist()

    assert run_ranks(program, 3) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def pairs(n, causal, zigzag, length=8):
    """How many pairs of a query and a key each rank computes, as ``RingAlgorithm.block`` says."""
    counts = []
    for rank in range(n):
        total = 0
        for source in range(n):
            block = RingAlgorithm(np, rank, n, causal, zigzag).block(source, length // 2)
            if block is not None:
                places = np.arange(length)
                shape = len(places[block.queries]), len(places[block.keys])
                total += shape[0] * (shape[0] + 1) // 2 if block.causal else shape[0] * shape[1]
        counts.append(total)
    return counts


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_zigzag_is_the_same_work_on_all_ranks_and_a_row_is_not(n):
    whole = 8 * n * (8 * n + 1) // 2
    for zigzag in (True, False):
        counts = pairs(n, True, zigzag)
        assert sum(counts) == whole
        assert (len(set(counts)) == 1) is zigzag
    assert set(pairs(n, False, True)) == {8 * 8 * n}


@pytest.mark.parametrize("n", [2, 4])
def test_messages_and_bytes_of_a_ring(n):
    """Forward each rank sends keys and values n - 1 times; backward that, and their gradients.

    And n - 2 words of a byte, by which a rank says that it has begun with a step.
    """
    block = 2 * 3 * 8 * 2 * 4 * 8  # keys and values of (3, 8, 2, 4)

    def program():
        own = RingAttention()
        q, k, v = normal(3, 8, 4, 4), normal(3, 8, 2, 4), normal(3, 8, 2, 4)
        with dist.profile() as forward:
            y = own(q, k, v)
        with dist.profile() as backward:
            own.backward(y)
        return [
            {row.kind: (row.calls, row.nbytes) for row in profile.summaries()}
            for profile in (forward, backward)
        ]

    calls, nbytes = (n - 1) + (n - 2), (n - 1) * block + n - 2
    for forward, backward in run_ranks(program, n):
        assert forward == dict.fromkeys(("send", "recv"), (calls, nbytes))
        assert backward == dict.fromkeys(("send", "recv"), (2 * calls, 2 * nbytes))


def test_messages_and_bytes_of_an_all_to_all():
    def program():
        own = UlyssesAttention()
        q, k, v = normal(3, 8, 4, 4), normal(3, 8, 2, 4), normal(3, 8, 2, 4)
        with dist.profile() as profile:
            own.backward(own(q, k, v))
        return [(row.kind, row.calls, row.nbytes) for row in profile.summaries()]

    whole = 3 * 8 * 4 * 8 * (4 + 2 * 2) + 3 * 8 * 4 * 4 * 8
    assert run_ranks(program, 2) == [[("all_to_all", 4, 2 * whole)]] * 2


def peak_of_a_rank(n, kind):
    """Return the peak of memory of all ranks over their number, in units of a rank's keys."""
    gate = threading.Barrier(n, timeout=30)
    shape = 1, 16, 2, 256

    def program():
        own = KINDS[kind](None, True)
        q, k, v = (normal(*shape, seed=seed) for seed in range(3))
        own.backward(own(q, k, v))  # links are made, and groups
        gate.wait()
        if dist.get_rank() == 0:
            tracemalloc.start()
        gate.wait()
        own.backward(own(q, k, v))
        gate.wait()
        if dist.get_rank() == 0:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak / n / k.nbytes
        return 0

    return max(run_ranks(program, n))


def test_memory_of_a_rank_does_not_grow_with_the_ring():
    """Sixteen ranks' gathered keys and values would be 32 units, and their gradients as many."""
    assert peak_of_a_rank(2, "ring") < 28
    assert peak_of_a_rank(16, "ring") < 28


def test_bad_arguments_name_themselves_before_a_byte_moves():
    def program():
        x = np.ones((1, 3, 3, 4))
        with dist.profile() as profile:
            with pytest.raises(ValueError, match="2 ranks has 3 places of a sequence of 6, which"):
                RingAttention()(x, x, x)
            with pytest.raises(ValueError, match="3 heads here, which do not divide by the 2 ran"):
                UlyssesAttention()(x, x, x)
            with pytest.raises(ValueError, match=r"dim 1 of x is 6 long, .* the 4 chunks"):
                split_sequence(np.ones((2, 6)))
            with pytest.raises(ValueError, match="dim 1 of x is 5 long, which does not divide by"):
                split_sequence(np.ones((2, 5)), zigzag=False)
            with pytest.raises(ValueError, match=r"\[2, 5\] has no dim 2"):
                split_sequence(np.ones((2, 5)), dim=2)
            with pytest.raises(TypeError, match="v must have the dtype of k, float64, got float32"):
                RingAttention()(x[:, :2], x[:, :2], x[:, :2].astype("f4"))
            layer = nn.MultiHeadAttention(12, 6, 3, rng=np.random.default_rng(0))
            with pytest.raises(ValueError, match=r"3 kv_heads in '1', which do not divide by"):
                context_parallel(nn.Sequential(nn.ReLU(), layer), method="all_to_all")
            assert type(layer.core) is nn.DotProductAttention
            with pytest.raises(ValueError, match="ReLU has no attention"):
                context_parallel(nn.ReLU())
            with pytest.raises(ValueError, match="method must be 'ring' or 'all_to_all', got 'x'"):
                context_parallel(layer, method="x")
            with pytest.raises(ValueError, match="zigzag is for method='ring'"):
                context_parallel(layer, method="all_to_all", zigzag=True)
            with pytest.raises(TypeError, match="'core' must be a DotProductAttention, is a Ring"):
                context_parallel(context_parallel(layer))
        assert not profile.summaries()

    run_ranks(program, 2)
