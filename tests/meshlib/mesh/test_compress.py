"""``compress`` of a mesh dim: where it is said, whose calls it holds for, and what a slip gives."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib import Compression, MeshConfig
from meshlib.testing import run_ranks

SIZE = 20_000
INT8 = Compression("int8")
FEEDBACK = Compression("int8", error_feedback=True)


def values(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal(SIZE).astype(np.float32)


def config(options: Any) -> MeshConfig:
    return MeshConfig.from_dict({"dp": 2, "tp": 2, "options": {"dp": options}})


def test_the_reductions_of_that_dim_are_compressed_and_no_others() -> None:
    def program() -> None:
        mesh = dist.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), compress={"dp": "int8"}
        )
        along = {name: mesh[name].mesh.tolist() for name in ("dp", "tp")}
        for name in ("dp", "tp"):
            exact = sum(values(rank) for rank in along[name])
            found = mesh[name].all_reduce(values(dist.get_rank()))
            assert np.array_equal(found, exact) == (name == "tp")
            np.testing.assert_allclose(found, exact, atol=0.1)
            bits = found.tobytes()
            everybody: list[Any] = [None] * 2
            mesh[name].all_gather_object(everybody, bits)
            assert everybody == [bits] * 2
            work = mesh[name].all_reduce(values(dist.get_rank()), async_op=True)
            assert work.result().tobytes() == bits
        whole = mesh.all_reduce(values(dist.get_rank()))
        np.testing.assert_allclose(whole, sum(map(values, range(4))), rtol=0, atol=1e-5)
        assert mesh["dp"].process_group.compression == INT8
        assert mesh["tp"].process_group.compression is None
        again = pickle.loads(pickle.dumps(mesh))
        assert again["dp"].process_group is mesh["dp"].process_group
        flat = mesh.flatten("dp_tp", compress=FEEDBACK)
        assert flat.process_group.compression == FEEDBACK

    run_ranks(program, 4)


def test_a_config_says_it() -> None:
    assert config({"compress": "int8"}).options_for("dp").compress == INT8
    table = {"format": "int8", "error_feedback": True}
    parsed = config({"compress": table, "timeout": 30})
    assert parsed.options_for("dp").compress == FEEDBACK
    assert parsed.options_for("tp").compress is None
    assert MeshConfig.parse(parsed.to_text()) == parsed

    def program() -> None:
        mesh = parsed.build()
        assert mesh["dp"].process_group.compression == FEEDBACK
        assert mesh["tp"].process_group.compression is None

    run_ranks(program, 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int4", "compress is 'int4'; expected one of 'bf16', 'fp8', 'int8'"),
        (8, "compress is 8; expected one of"),
        ({"error_feedback": True}, "a table with format and optionally error_feedback"),
        ({"format": "fp8", "error_feedback": 1}, "error_feedback is 1; expected True or False"),
        ({"format": "fp8", "feedback": True}, "a table with format and optionally error_feedback"),
    ],
)
def test_a_slip_is_told(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config({"compress": value})
    with pytest.raises(ValueError, match=message):
        dist.DeviceMesh("cpu", [0, 1], compress={0: value})


def test_arrays_on_gpus_travel_as_they_are() -> None:
    with pytest.raises(ValueError, match="arrays on GPUs travel as they are"):
        dist.DeviceMesh("cuda", [0, 1], mesh_dim_names=("dp",), compress={"dp": "int8"})


def test_ranks_that_say_different_things_are_told() -> None:
    def program() -> str:
        compress = {"dp": "int8"} if dist.get_rank() else None
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), compress=compress)
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            mesh["dp"].all_reduce(values(0))
        return str(caught.value)

    for text in run_ranks(program, 2):
        assert "reductions as int8" in text


def test_error_feedback_is_for_all_reduce_of_as_many_elements() -> None:
    def program() -> None:
        residual = np.zeros((SIZE // 2, 2), np.float32)
        op = dist.error_feedback(dist.ReduceOp.AVG, residual)
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), compress={"dp": "int8"})
        mesh.all_reduce(values(dist.get_rank()), op)
        assert residual.any()
        with pytest.raises(ValueError, match=r"residual .* has 20000 elements; expected 5"):
            mesh.all_reduce(np.zeros(5, np.float32), op)
        with pytest.raises(ValueError, match="error feedback, which is for all_reduce"):
            mesh.reduce_scatter_tensor(np.zeros(SIZE // 2, np.float32), values(0), op)
        kept = residual.copy()
        dist.all_reduce(values(0), op)  # over all ranks, which do not compress
        assert (residual == kept).all()

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("op", "residual", "error"),
    [
        (dist.ReduceOp.MAX, np.zeros(3, np.float32), ValueError),
        (dist.ReduceOp.SUM, np.zeros(3), TypeError),
        (dist.ReduceOp.SUM, np.zeros((3, 3), np.float32).T[:2], TypeError),
        (dist.ReduceOp.SUM, [0.0], TypeError),
    ],
)
def test_a_residual_is_an_array_that_can_be_kept(op: Any, residual: Any, error: Any) -> None:
    with pytest.raises(error):
        dist.error_feedback(op, residual)
