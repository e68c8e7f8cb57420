"""Vocab-parallel embedding and loss: equal to the whole ones, in few bytes."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.sharding import Shard
from meshlib.testing import run_ranks
from parallel import (
    RowwiseParallel,
    VocabParallelCrossEntropyLoss,
    nn,
    parallelize,
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("scattered", [True, False])
def test_embedding_is_the_whole_one(scattered):
    indices = np.array([[0, 7, 7, 3], [5, 4, 0, 1]])
    grad = rng(1).normal(size=(2, 4, 3))
    whole = nn.Embedding(8, 3, rng=rng(), dtype="f8")
    y = whole(indices)
    whole.backward(grad)

    def program():
        rank, layout = dist.get_rank(), Shard(1) if scattered else None
        part = slice(rank * 2, rank * 2 + 2) if scattered else slice(None)
        layer = nn.Embedding(8, 3, rng=rng(), dtype="f8")
        parallelize(layer, None, {"": RowwiseParallel(output_layouts=layout)})
        np.testing.assert_array_equal(layer(indices), y[:, part])
        layer.backward(grad[:, part])
        rows = slice(rank * 4, rank * 4 + 4)
        np.testing.assert_allclose(layer.weight.grad, whole.weight.grad[rows], atol=1e-15)
        with pytest.raises(IndexError, match=r"\[0, 8\), got 0 to 8"):
            layer(np.array([0, 8]))

    run_ranks(program, 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradient_are_the_whole_ones(reduction, smoothing):
    logits, targets = 30 * rng().normal(size=(2, 3, 8)), rng(1).integers(0, 8, (2, 3))
    loss = nn.CrossEntropyLoss(reduction, smoothing)
    value, grad = loss(logits, targets), loss.backward(0.5)

    def program():
        split = VocabParallelCrossEntropyLoss(None, reduction, smoothing)
        own = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
        got = split(logits[..., own], targets)
        np.testing.assert_allclose(split.backward(0.5), grad[..., own], atol=1e-13)
        split.eval()(logits[..., own], targets)
        assert split.outstanding == 0
        return got

    results = run_ranks(program, 4)
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(value, rel=1e-12)


def test_targets_are_of_all_classes():
    def program():
        loss = VocabParallelCrossEntropyLoss()
        with pytest.raises(ValueError, match=r"\[0, 6\), got 0 to 6"):
            loss(np.zeros((2, 3)), np.array([0, 6]))

    run_ranks(program, 2)
