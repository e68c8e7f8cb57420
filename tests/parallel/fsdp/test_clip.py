"""Clipping by the norm of gradients whose parts lie on several ranks."""

import math

import numpy as np
import pytest

from parallel import nn
from parallel.fsdp import clip_grad_norm_
from tests.support.parallel.fsdp_training import (
    assert_equal,
    backward,
    gradients,
    make_mlp,
    make_transformer,
    on_mesh,
    shard,
    tokens_batch,
)


@pytest.mark.parametrize("norm_type", [2, 1, 3.5, math.inf])
@pytest.mark.parametrize(
    ("names", "shape"),
    [(("dp_shard",), (4,)), (("dp_replicate", "dp_shard"), (2, 2)), (("dp_shard", "tp"), (2, 2))],
)
def test_clipping_by_the_norm_of_all_parts(names, shape, norm_type):
    model = make_transformer()
    backward(model, batches=tokens_batch)
    flat = np.concatenate([p.grad.ravel() for p in model.parameters()])
    norm = (
        np.abs(flat).max()
        if norm_type == math.inf
        else np.sum(np.abs(flat) ** norm_type) ** (1 / norm_type)
    )
    expected = {path: g * (0.1 / (norm + 1e-6)) for path, g in gradients(model).items()}

    def program(mesh):
        tp = mesh["tp"] if "tp" in names else None
        data = mesh["dp_shard"] if tp is not None else mesh
        model = shard(make_transformer(tp=tp), data)
        place = data.process_group.rank()
        backward(model, place, data.size(), batches=tokens_batch)
        total = clip_grad_norm_(model.parameters(), 0.1, norm_type)
        got = gradients(model)
        assert clip_grad_norm_(model.parameters(), 1000.0, norm_type) == pytest.approx(0.1, 1e-4)
        assert_equal(gradients(model), got, 0)
        return total, got

    results = on_mesh(program, 4, names, shape)
    assert len({total for total, _ in results}) == 1
    for total, got in results:
        assert total == pytest.approx(norm, rel=1e-12)
        assert_equal(got, expected)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"max_norm": -1.0}, ValueError, "max_norm must be at least 0, got -1"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number, got '1'"),
        ({"max_norm": 2.0}, ValueError, "has option max_norm=2.0 where rank 0 has option max_norm"),
        ({"error_if_nonfinite": True}, ValueError, "has option error_if_nonfinite=True where"),
    ],
)
def test_what_one_rank_asks_for_is_told_to_all(norm_type, change, kind, text):
    def program(mesh):
        model = shard(make_mlp(), mesh)
        backward(model, mesh.get_local_rank(), 2)
        before = gradients(model)
        arguments = {"max_norm": 0.1, "norm_type": norm_type}
        own = change if mesh.get_local_rank() == 1 else {}
        with pytest.raises(kind) as error:
            clip_grad_norm_(model.parameters(), **(arguments | own))
        assert text in str(error.value)
        assert_equal(gradients(model), before, 0)
        return clip_grad_norm_(model.parameters(), **arguments)  # nothing is broken

    results = on_mesh(program, 2)
    assert results[0] == results[1] > 0


def test_a_wrong_parameter_of_one_rank_is_told_to_all():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        listed = [*model.parameters(), *([3] if mesh.get_local_rank() else [])]
        with pytest.raises(TypeError, match=r"parameters\[8\] must be a Parameter, such as"):
            clip_grad_norm_(listed, 1.0)

    on_mesh(program, 2)


def test_a_norm_that_is_not_finite():
    parameter = nn.Parameter(np.ones(3))
    parameter.grad = np.array([1.0, np.nan, 2.0])
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert parameter.grad[0] == 1
    assert math.isnan(clip_grad_norm_(parameter, 1.0))
