"""Sequence parallel and ring attention beside PyTorch's own, over Gloo, on the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import VocabParallelCrossEntropyLoss, parallelize
from parallel.state import global_state
from tests.pytorch.torch_ranks import run
from tests.support.parallel import small_gpt

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="needs PyTorch: pip install 'meshlib-spmd[torch]', or make test-torch",
    ),
    pytest.mark.processes,
    pytest.mark.timeout(300),
]
STEPS, BLOCKS = 20, 2


def normal(seed: int, heads: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, 16, heads, 8))


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """The results of PyTorch's ranks from the same inputs."""
    folder: Path = tmp_path_factory.mktemp("split_models")
    weights = {f"w.{path}": x for path, x in small_gpt.GPT(BLOCKS).state_dict().items()}
    tokens, targets = zip(*(small_gpt.batch(step) for step in range(STEPS)), strict=True)
    np.savez(
        folder / "given.npz",
        sizes=[BLOCKS, small_gpt.VOCABULARY, small_gpt.WIDTH, small_gpt.HEADS],
        tokens=tokens,
        targets=targets,
        **{name: normal(seed, 4) for seed, name in enumerate("qkvg")},
        **weights,
    )
    printed = run("split_models.py", 2, folder)
    assert all((folder / f"{rank}.npz").exists() for rank in range(2)), "\n".join(printed)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


def test_a_gpt_with_sequence_parallel_learns_the_same(peers):
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize(small_gpt.GPT(BLOCKS), mesh["tp"], small_gpt.sequence_parallel_plan())
        losses = small_gpt.train(model, VocabParallelCrossEntropyLoss(mesh["tp"]), steps=STEPS)
        state = global_state(model)["model"].items()
        return losses, {path: getattr(x, "full_array", lambda x=x: x)() for path, x in state}

    for losses, state in run_ranks(program, 2):
        for peer in peers:
            np.testing.assert_allclose(losses, peer["losses"], rtol=0, atol=1e-9)
            theirs = {path[2:]: x for path, x in peer.items() if path.startswith("w.")}
            small_gpt.assert_close(state, theirs)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("zigzag", [True, False])
def test_attention_is_that_of_pytorchs_ring(peers, zigzag):
    jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")
    from parallel.jax import (
        ring_attention,
        sequence_positions,
        split_sequence,
        ulysses_attention,
    )

    names = ("out", "gq", "gk", "gv")

    def attend(q, k, v):
        return ring_attention(q, k, v, None) if zigzag else ulysses_attention(q, k, v, None)

    def program():
        q, k, v, grad = (split_sequence(normal(seed, 4), zigzag=zigzag) for seed in range(4))
        out, back = jax.vjp(jax.jit(attend), q, k, v)
        results = out, *back(grad)
        return sequence_positions(8, zigzag=zigzag), dict(zip(names, results, strict=True))

    expected = {name: np.empty_like(normal(0, 4)) for name in names}
    for rank, peer in enumerate(peers):
        places = [*range(rank * 4, rank * 4 + 4), *range(12 - rank * 4, 16 - rank * 4)]
        for name in names:
            expected[name][:, places] = peer[name]
    for places, results in run_ranks(program, 2):
        for name in names:
            np.testing.assert_allclose(results[name], expected[name][:, places], atol=1e-12)
