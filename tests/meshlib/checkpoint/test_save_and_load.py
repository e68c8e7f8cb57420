"""States saved by ranks as threads, and loaded by other numbers of ranks in other shardings."""

import dataclasses
import json
import random
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import CheckpointError, latest_step, load, save
from meshlib.checkpoint import _checkpointer as checkpointer
from meshlib.checkpoint._files import layout
from meshlib.checkpoint._files.folder import find
from meshlib.checkpoint._files.layout import aligned
from meshlib.checkpoint._files.local import LocalStorage
from meshlib.checkpoint._loading import ChunkReader
from meshlib.sharding import DArray, P, Sharding, full, ones, zeros
from meshlib.testing import RankError, run_ranks
from tests.support.meshlib.sharding_cases import (
    draw_sharding,
    made_by_hand,
    named_mesh,
    value_by_hand,
)

SHAPES = [(), (7,), (8, 6), (5, 1), (3, 4, 5), (0, 4), (2, 3), (13, 9)]
Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Counts:
    steps: int
    seen: np.ndarray


@pytest.fixture
def small_chunks(monkeypatch):
    """Arrays of some bytes are cut and shared as if they had megabytes."""
    monkeypatch.setattr(layout, "MOST_BYTES", 64)
    monkeypatch.setattr(layout, "LEAST_BYTES", 16)


def drawn(mesh, seed):
    chance = random.Random(seed)
    return {
        f"{i} {shape}": (shape, draw_sharding(chance, mesh, len(shape)))
        for i, shape in enumerate(SHAPES * 2)
    }


def written_files(folder):
    return {
        path.relative_to(folder): path.stat().st_size
        for path in folder.rglob("c*")
        if path.name == "c" or path.name.startswith("c.")
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("saved_on", "loaded_on"), [((2, 2), (4,)), ((4,), (2, 3)), ((2, 3), (1,)), ((1,), (2, 2))]
)
def test_any_sharding_on_any_mesh(tmp_path, small_chunks, seed, saved_on, loaded_on):
    before, after = named_mesh(*saved_on), named_mesh(*loaded_on)
    first, second = drawn(before, seed), drawn(after, seed + 100)

    def saving():
        state = {
            name: DArray(made_by_hand(shape, sharding, dist.get_rank()), sharding, shape, float)
            for name, (shape, sharding) in first.items()
        }
        save(tmp_path, state, step=seed)

    def loading():
        like = {name: sharding.reduced() for name, (_, sharding) in second.items()}
        return {name: x.to_local() for name, x in load(tmp_path, like).items()}

    run_ranks(saving, before.size())
    for rank, parts in enumerate(run_ranks(loading, after.size())):
        for name, (shape, sharding) in second.items():
            expected = value_by_hand(shape)[sharding.slices(shape, rank)]
            np.testing.assert_array_equal(parts[name], expected, err_msg=name)
    whole = load(tmp_path)  # without a job
    for name, (shape, _) in first.items():
        np.testing.assert_array_equal(whole[name], value_by_hand(shape))


def test_each_chunk_is_written_once_and_replicas_share_the_work(
    tmp_path, small_chunks, monkeypatch
):
    mesh = named_mesh(2, 3)
    written = {rank: [] for rank in range(6)}
    write = checkpointer.Save.write

    def noted(self, committed=None):
        written[dist.get_rank()] += [(p.array, p.index, p.grid.chunk_bytes) for p in self._pieces]
        return write(self, committed)

    monkeypatch.setattr(checkpointer.Save, "write", noted)
    shapes = {"replicated": (), "split": P("a"), "other": P(None, "b"), "both": P("a", "b")}

    def program():
        state = {name: full((12, 6), Sharding(mesh, spec), 1.0) for name, spec in shapes.items()}
        # On a slice of the mesh: the same array in all slices.
        state["slice"] = full((12, 6), Sharding(mesh["b"], P("b")), 1.0)
        save(tmp_path, {**state, "plain": np.ones((12, 6)), "scalar": np.ones(())}, step=1)

    run_ranks(program, 6)
    everything = [piece[:2] for pieces in written.values() for piece in pieces]
    assert len(set(everything)) == len(everything)
    files = written_files(tmp_path / "step-1")
    assert len(files) == len(everything)
    sizes = [sum(size for *_, size in pieces) for pieces in written.values()]
    assert max(sizes) <= 1.3 * min(sizes), sizes


def test_a_rank_reads_what_it_needs(tmp_path):
    mesh = named_mesh(4)
    shape = (64, 8)
    run_ranks(lambda: save(tmp_path, {"x": ones(shape, Sharding(mesh, P("a")))}, step=1), 4)
    found = find(tmp_path)
    assert found.grids["x"].chunk_shape == (16, 8)
    for verify, box, needed in [
        (True, (slice(16, 48), slice(0, 8)), 2 * 16 * 64),
        (True, (slice(0, 8), slice(0, 8)), 16 * 64),
        (False, (slice(4, 20), slice(0, 4)), 16 * 64),
    ]:
        reader = ChunkReader(found, verify=verify)
        assert reader.read("x", box).shape == (box[0].stop - box[0].start, box[1].stop)
        assert reader.bytes_read == needed


def test_parts_that_make_no_grid_are_gathered_first(tmp_path):
    mesh = named_mesh(2, 3)
    sharding = Sharding(mesh, P(("b", "a")))
    assert aligned(sharding, (12,)) == sharding
    assert aligned(sharding, (11,)) == sharding  # 2, 2, 2, 2, 2, 1
    assert aligned(sharding, (103,)) == Sharding(mesh, P("b"))

    def program():
        save(
            tmp_path,
            [DArray(made_by_hand((103,), sharding, dist.get_rank()), sharding, (103,), float)],
            step=0,
        )

    run_ranks(program, 6)
    np.testing.assert_array_equal(load(tmp_path)[0], value_by_hand((103,)))


DTYPES = ["?", "i1", "u1", "i8", "u4", "f2", "f4", "f8", "c8", "c16", ">f4", ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(tmp_path, dtype):
    x = (np.arange(24).reshape(4, 6) % 7).astype(dtype)
    save(tmp_path, {"x": x, "column": x[:, 1], "none": x[:0]}, step=3)
    back = load(tmp_path)
    assert back["x"].dtype == x.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back["x"], x)
    np.testing.assert_array_equal(back["column"], x[:, 1])
    assert back["none"].shape == (0, 6)


def test_values_and_trees_come_back_as_they_were(tmp_path):
    state = {
        "model": {
            "0.w": np.ones((2, 3)),
            "a/b": np.zeros(2),
            "": np.ones(1),
            "..": np.ones(1),
        },
        "optimizer": {"state": {0: {"exp_avg": np.ones(3)}, 1: {}}, "groups": [{"lr": 0.1}]},
        1: np.full(2, 1.0),
        "1": np.full(2, 2.0),
        "numbers": (1, True, None, -2.5, float("inf"), 1 << 100, 1 + 2j, "text", b"\0bytes"),
        "scalar": np.float32(0.1),
        "point": Point(np.arange(2), 7),
        "counts": Counts(3, np.arange(3)),
        "empty": {"list": [], "dict": {}, "tuple": ()},
        "x": np.ones(1),
        "x" * 300: np.zeros(1),
    }
    save(tmp_path, state, step=5)
    back = load(tmp_path)
    assert back["numbers"] == state["numbers"]
    assert list(map(type, back["numbers"])) == list(map(type, state["numbers"]))
    assert back["scalar"].dtype == np.float32
    assert back["scalar"] == np.float32(0.1)
    assert back["point"].keys() == {"x", "y"}
    assert back["empty"] == state["empty"]
    assert back["optimizer"]["state"].keys() == {0, 1}
    np.testing.assert_array_equal(back[1], [1, 1])
    np.testing.assert_array_equal(back["1"], [2, 2])
    like = load(tmp_path, state)
    assert isinstance(like["point"], Point)
    assert isinstance(like["counts"], Counts)
    assert like["counts"].steps == 3
    np.testing.assert_array_equal(like["counts"].seen, np.arange(3))
    assert like["model"]["0.w"] is not state["model"]["0.w"]
    assert json.loads((tmp_path / "step-5" / "zarr.json").read_text())["node_type"] == "group"


def test_nan_and_states_of_generators(tmp_path):
    rng = np.random.default_rng(5)
    save(tmp_path, {"rng": rng.bit_generator.state, "loss": float("nan")}, step=0)
    expected = rng.random(3)
    back = load(tmp_path)
    assert np.isnan(back["loss"])
    rng.bit_generator.state = back["rng"]
    np.testing.assert_array_equal(rng.random(3), expected)


def test_part_of_a_tree(tmp_path):
    save(tmp_path, {"model": {"w": np.ones(2)}, "optimizer": {"lr": 1.0, "m": np.ones(2)}}, step=0)
    back = load(tmp_path, {"model": {"w": np.zeros(2)}, "optimizer": ...})
    np.testing.assert_array_equal(back["model"]["w"], [1, 1])
    assert back["optimizer"]["lr"] == 1.0
    assert load(tmp_path, {"optimizer": {"lr": 0}}, strict=False) == {"optimizer": {"lr": 1.0}}


def test_shape_and_dtype_stand_for_an_array(tmp_path):
    jax = pytest.importorskip("jax")
    save(tmp_path, {"x": jax.numpy.arange(6.0), "y": np.ones(3)}, step=0)
    like = {"x": jax.ShapeDtypeStruct((6,), "float32"), "y": jax.numpy.zeros(3)}
    with pytest.raises(CheckpointError, match=r"\['y'\] has dtype float64, not float32"):
        load(tmp_path, like)
    back = load(tmp_path, {"x": like["x"], "y": ...})
    assert isinstance(back["x"], np.ndarray)
    assert isinstance(load(tmp_path, {"x": jax.numpy.zeros(6), "y": ...})["x"], jax.Array)


BAD_LIKES = [
    ({"a": {"w": np.ones((2, 3))}, "n": 1}, r"\['a'\]\['b'\] is only in the checkpoint"),
    (
        {"a": {"w": np.ones((2, 3)), "b": np.ones(3), "c": 0}, "n": 1},
        r"\['c'\] is missing in the checkpoint",
    ),
    ({"a": {"w": np.ones((3, 2)), "b": np.ones(3)}, "n": 1}, r"has shape \(2, 3\), not \(3, 2\)"),
    ({"a": {"w": np.ones((2, 3), "f4"), "b": np.ones(3)}, "n": 1}, "dtype float64, not float32"),
    ({"a": {"w": 1, "b": np.ones(3)}, "n": 1}, r"\['a'\]\['w'\] is an array, not a value"),
    ({"a": {"w": np.ones((2, 3)), "b": np.ones(3)}, "n": np.ones(1)}, "the value 1, not an array"),
    ({"a": [np.ones((2, 3)), np.ones(3)], "n": 1}, r"\['a'\]\[0\] is missing"),
    ({"a": ..., "n": {"x": 1}}, r"\['n'\] is the value 1, not a dict"),
    ([1], r"\[0\] is missing in the checkpoint; \['a'\] is only in the checkpoint"),
]


@pytest.mark.parametrize(("like", "message"), BAD_LIKES, ids=range(len(BAD_LIKES)))
def test_a_tree_that_differs_is_named_on_every_rank(tmp_path, like, message):
    save(tmp_path, {"a": {"w": np.ones((2, 3)), "b": np.ones(3)}, "n": 1}, step=1)
    good = {"a": {"w": np.ones((2, 3)), "b": np.ones(3)}, "n": 1}

    def program():
        # Only rank 1 is wrong.
        with pytest.raises(CheckpointError, match=message) as caught:
            load(tmp_path, like if dist.get_rank() == 1 else good)
        assert ("rank 1: " in str(caught.value)) == (dist.get_rank() != 1)
        return True

    assert all(run_ranks(program, 2))


def test_trees_that_differ_between_ranks_are_not_saved(tmp_path):
    cases = [
        (
            lambda rank: {"x": np.ones(2 + rank)},
            r"\['x'\] is an array of float64\[2\] on rank 0",
        ),
        (lambda rank: {"x": rank}, r"state\['x'\] is 0 on rank 0 and 1 on rank 1"),
        (lambda rank: {"x": 0, **({"y": 1} if rank else {})}, r"\['y'\] is nothing on rank 0"),
        (lambda rank: {"x": object() if rank else 1}, r"state\['x'\] is a builtins.object"),
        (lambda rank: {"x": np.array(["text"])}, r"array 'x' has dtype <U4"),
        (lambda rank: {("a", 1): 1}, r"key \('a', 1\)"),
    ]

    def program():
        for make, message in cases:
            with pytest.raises((CheckpointError, TypeError), match=message):
                save(tmp_path, make(dist.get_rank()), step=1)
        with pytest.raises(CheckpointError, match=r"step is 0 on rank 0 and 1 on rank 1"):
            save(tmp_path, {}, step=dist.get_rank())

    run_ranks(program, 2)
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"{path} is not a checkpoint and contains none"):
            load(path)
    save(tmp_path, {"x": 1}, step=4)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 5; it has 4"):
        load(tmp_path, step=5)
    assert load(tmp_path / "step-4") == {"x": 1}
    with pytest.raises(ValueError, match="step is -1"):
        save(tmp_path, {}, step=-1)
    with pytest.raises(TypeError, match="path is 5"):
        load(5)
    with pytest.raises(TypeError, match="group is 'dp'"):
        save(tmp_path, {}, step=1, group="dp")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "zarr.json").write_text('{"node_type": "group"}')
    with pytest.raises(CheckpointError, match="is a Zarr group's, but not a checkpoint's"):
        load(tmp_path / "other")


def test_arrays_on_ranks_that_do_not_take_part(tmp_path):
    mesh = named_mesh(2, 2)

    def program():
        x = ones((4,), Sharding(mesh, P("a")))
        with pytest.raises(CheckpointError, match=r"arrays on ranks \[\d, \d\]"):
            save(
                tmp_path / str(mesh["a"].slice_number(dist.get_rank())),
                [x],
                step=0,
                group=mesh["a"],
            )
        # A group of some ranks saves what is theirs.
        own = tmp_path / f"own{mesh['a'].slice_number(dist.get_rank())}"
        part = DArray(np.full(2, 1.0 * dist.get_rank()), Sharding(mesh["b"], P("b")), (4,), float)
        save(own, [mesh.get_coordinate()[1]], step=0, group=mesh["a"])
        del part
        return load(own, group=mesh["a"])[0]

    assert run_ranks(program, 4) == [0, 1, 0, 1]


def test_a_rank_that_cannot_write_leaves_no_checkpoint(tmp_path, monkeypatch):
    from meshlib.checkpoint._pieces import ChunkWrite

    write = ChunkWrite.write

    def failing(self, *args):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(self, *args)

    mesh = named_mesh(2)

    def program():
        save(
            tmp_path,
            [ones((4,), Sharding(mesh, P("a")))],
            step=1,
        )
        monkeypatch.setattr(ChunkWrite, "write", failing)
        with pytest.raises(OSError, match="No space left") as caught:
            save(tmp_path, [zeros((4,), Sharding(mesh, P("a")))], step=2)
        return str(caught.value)

    errors = run_ranks(program, 2)
    assert errors[0].startswith("rank 1: ")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert load(tmp_path)[0].tolist() == [1, 1, 1, 1]


def test_a_folder_that_is_not_the_same_on_all_ranks(tmp_path):
    mesh = named_mesh(2)

    def program():
        # As a path on each host's own disk.
        own = tmp_path / str(dist.get_rank())
        with pytest.raises(CheckpointError, match=r"rank 1 has written step-1/.*, but rank 0 find"):
            save(own, {"x": ones((4,), Sharding(mesh, P("a")))}, step=1)
        assert latest_step(own) is None

    run_ranks(program, 2)
    assert not list((tmp_path / "0").iterdir())


def test_a_bad_step_or_metric_of_one_rank_is_an_error_on_all(tmp_path):
    def program():
        bad = dist.get_rank() == 1
        for values, message in [
            ({"step": -1 if bad else 1}, "step is -1"),
            ({"step": 1, "metric": float("nan") if bad else 0.5}, "metric is nan"),
            ({"step": 1 + bad}, "state's step is 1 on rank 0 and 2 on rank 1"),
            (
                {"step": 1, "metric": 0.5 + bad},
                "state's metric is 0.5 on rank 0 and 1.5 on rank 1",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                save(tmp_path, {}, **values)

    run_ranks(program, 2)
    assert not list(tmp_path.iterdir())


def test_a_bad_argument_of_one_rank_is_named_on_all(tmp_path):
    save(tmp_path, {}, step=1)

    def program():
        bad = dist.get_rank() == 1
        path = 5 if bad else tmp_path
        of_path = "path is 5; expected a path or a URL"
        for call, kind, message in [
            (lambda: save(path, {}, step=2), TypeError, of_path),
            (lambda: load(path, {}), TypeError, of_path),
            (lambda: load(tmp_path, {}, step=-1 if bad else 1), ValueError, "step is -1"),
            (lambda: load(tmp_path, {}, step=7 if bad else 1), ValueError, "1 on rank 0 and 7 on"),
            (lambda: checkpointer.Checkpointer(path), TypeError, of_path),
            (
                lambda: checkpointer.Checkpointer(tmp_path, keep_last=0 if bad else 2),
                ValueError,
                "keep_last is 0",
            ),
        ]:
            with pytest.raises(kind, match=message):
                call()

    run_ranks(program, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_disk_that_fails_at_the_end_leaves_nothing(tmp_path, monkeypatch):
    publish = LocalStorage.publish

    def fails(self, folder, owner, data):
        publish(self, folder, owner, data)  # all is there, except for the last sync
        if folder.startswith("step-2"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalStorage, "publish", fails)

    def program():
        with checkpointer.Checkpointer(tmp_path) as checkpoints:
            checkpoints.save({"x": np.ones(3)}, step=1)
            with pytest.raises(OSError, match="Input/output error"):
                checkpoints.save({"x": np.ones(3)}, step=2)
            assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
            return checkpoints.latest()

    assert run_ranks(program, 2) == [1, 1]


def test_a_function_that_returns_no_layout(tmp_path):
    save(tmp_path, {"x": np.ones(3)}, step=1)
    with pytest.raises(CheckpointError, match=r"\['x'\] got None from .*expected a Sh"):
        load(tmp_path, {"x": lambda keys, shape: None})


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("again", [2, 3])
def test_the_save_after_one_that_failed_is_complete(tmp_path, monkeypatch, failing, again):
    from meshlib.checkpoint._pieces import ChunkWrite

    write = ChunkWrite.write

    def breaks(self, *args):
        if dist.get_rank() == failing and self.data.flat[0] == 2:
            raise MemoryError("no memory")
        return write(self, *args)

    monkeypatch.setattr(ChunkWrite, "write", breaks)
    mesh = named_mesh(2)

    def program():
        with checkpointer.Checkpointer(tmp_path) as checkpoints:
            for value, step in [(1.0, 1), (2.0, 2), (3.0, again)]:
                state = {"x": full((4,), Sharding(mesh, P("a")), value)}
                if value != 2:
                    checkpoints.save(state, step=step)
                    continue
                with pytest.raises((MemoryError, CheckpointError), match="no memory"):
                    checkpoints.save(state, step=step)
                dist.barrier()  # the first rank has removed what there was of it
                assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
                dist.barrier()
            return checkpoints.load()["x"].tolist()

    assert run_ranks(program, 2) == [[3.0] * 4] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", f"step-{again}"}


def test_run_ranks_reports_a_load_that_fails(tmp_path):
    with pytest.raises(RankError, match="is not a checkpoint"):
        run_ranks(lambda: load(tmp_path), 2)
