"""Files on disk: Zarr that others read; torn or changed files are named; other storage."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import CheckpointError, CorruptCheckpointError, latest_step, load, save
from meshlib.sharding import P, Sharding, distribute_array
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import named_mesh
from transport._crc32c import crc32c

STATE = {
    "model": {"0.weight": np.arange(35.0).reshape(5, 7), "bias": np.arange(3, dtype="i2")},
    "optimizer": {"state": {0: {"step": np.array(4), "flags": np.array([True, False])}}},
    "complex": np.arange(4) * (1 + 2j),
    "half": np.arange(6, dtype="f2"),
    "empty": np.zeros((0, 3)),
}


def save_sharded(folder):
    """Save STATE by 4 ranks, its first array over two dims, unevenly."""
    mesh = named_mesh(2, 2)

    def program():
        sharding = Sharding(mesh, P("a", "b"))
        weight = distribute_array(STATE["model"]["0.weight"], sharding)
        save(folder, {**STATE, "model": {**STATE["model"], "0.weight": weight}}, step=7)

    run_ranks(program, 4)
    return folder / "step-7"


def test_zarr_python_reads_it(tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(save_sharded(tmp_path), mode="r")
    np.testing.assert_array_equal(group["model/0.weight"][:], STATE["model"]["0.weight"])
    assert group["model/0.weight"].chunks == (3, 4)
    np.testing.assert_array_equal(group["model/bias"][:], STATE["model"]["bias"])
    assert group["optimizer/state/0/step"][()] == 4
    np.testing.assert_array_equal(group["optimizer/state/0/flags"][:], [True, False])
    np.testing.assert_array_equal(group["complex"][:], STATE["complex"])
    np.testing.assert_array_equal(group["half"][:], STATE["half"])
    assert group["empty"].shape == (0, 3)
    assert sorted(name for name, _ in group["model"].arrays()) == ["0.weight", "bias"]
    # Also without what the top says about all that lies below.
    alone = zarr.open_array(tmp_path / "step-7" / "model" / "0.weight", mode="r")
    np.testing.assert_array_equal(alone[1:4, 2:], STATE["model"]["0.weight"][1:4, 2:])
    plain = zarr.open_group(tmp_path / "step-7", mode="r", use_consolidated=False)
    np.testing.assert_array_equal(plain["model/bias"][:], STATE["model"]["bias"])


def test_tensorstore_reads_it(tmp_path):
    tensorstore = pytest.importorskip("tensorstore")
    top = save_sharded(tmp_path)

    def read(name):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{top}/{name}/"}}
        return tensorstore.open(spec, read=True).result()

    weight = read("model/0.weight")
    np.testing.assert_array_equal(weight.read().result(), STATE["model"]["0.weight"])
    np.testing.assert_array_equal(
        weight[1:4, 2:].read().result(), STATE["model"]["0.weight"][1:4, 2:]
    )
    assert weight.chunk_layout.read_chunk.shape == (3, 4)
    for name in ("complex", "half", "empty"):
        np.testing.assert_array_equal(read(name).read().result(), STATE[name])
    np.testing.assert_array_equal(read("model/bias").read().result(), STATE["model"]["bias"])
    (top / "model/0.weight/c.0.0").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"[Dd]igest mismatch"):
        read("model/0.weight").read().result()


def test_xarray_reads_it(tmp_path):
    pytest.importorskip("zarr")
    xarray = pytest.importorskip("xarray")
    tree = xarray.open_datatree(save_sharded(tmp_path), engine="zarr")
    weight = tree["model"]["0.weight"]
    np.testing.assert_array_equal(weight.values, STATE["model"]["0.weight"])
    assert weight.dims == ("0.weight.0", "0.weight.1")
    np.testing.assert_array_equal(tree["model"]["bias"].values, STATE["model"]["bias"])
    np.testing.assert_array_equal(tree["half"].values, STATE["half"])
    assert int(tree["optimizer/state/0"]["step"]) == 4
    alone = xarray.open_zarr(tmp_path / "step-7" / "model", consolidated=False)
    np.testing.assert_array_equal(alone["0.weight"].values, STATE["model"]["0.weight"])


def test_the_files_are_as_the_specification_says(tmp_path):
    top = save_sharded(tmp_path)
    document = json.loads((top / "model" / "0.weight" / "zarr.json").read_text())
    assert document["zarr_format"] == 3
    assert document["shape"] == [5, 7]
    assert document["data_type"] == "float64"
    assert document["chunk_grid"]["configuration"] == {"chunk_shape": [3, 4]}
    assert [codec["name"] for codec in document["codecs"]] == ["bytes", "crc32c"]
    chunk = (top / "model" / "0.weight" / "c.1.1").read_bytes()
    padded = np.zeros((3, 4))
    padded[:2, :3] = STATE["model"]["0.weight"][3:, 4:]
    assert chunk == padded.tobytes() + crc32c(padded).to_bytes(4, "little")
    consolidated = json.loads((top / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    for path in top.rglob("zarr.json"):
        if path.parent != top:
            name = str(path.parent.relative_to(top))
            assert json.loads(path.read_text()) == consolidated.pop(name)
    assert not consolidated


def test_what_numpy_does_not_have_goes_by_its_name(tmp_path):
    save(tmp_path, [np.arange(4).astype(ml_dtypes.float8_e4m3fn)], step=0)
    document = json.loads((tmp_path / "step-0" / "0" / "zarr.json").read_text())
    assert document["data_type"] == "float8_e4m3fn"
    assert "endian" not in json.dumps(document["codecs"])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def grow(path):
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "was changed: its checksum does not match"),
        (cut, "is torn: it has 97 bytes, not 100"),
        (grow, "is torn: it has 101 bytes, not 100"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_damaged_chunk_is_named_on_every_rank(tmp_path, damage, what):
    top = save_sharded(tmp_path)
    path = top / "model" / "0.weight" / "c.1.0"
    damage(path)
    message = re.escape(f"array 'model/0.weight', chunk [1, 0]: {path} {what}")
    mesh = named_mesh(2)

    def program():
        # Only rank 1 reads the rows that are in it.
        like = dict.fromkeys(STATE, ...) | {
            "model": {"0.weight": Sharding(mesh, P("a")), "bias": ...}
        }
        with pytest.raises(CorruptCheckpointError, match=message) as caught:
            load(tmp_path, like)
        return str(caught.value).startswith("rank 1: ")

    assert run_ranks(program, 2) == [True, False]
    with pytest.raises(CorruptCheckpointError, match=message):
        load(tmp_path)


def test_a_damaged_description_is_named(tmp_path):
    top = save_sharded(tmp_path)
    text = (top / "zarr.json").read_text()
    (top / "zarr.json").write_text(text.replace('"step": 7', '"step": 8'))
    with pytest.raises(CorruptCheckpointError, match=r"step-7/zarr.json was changed"):
        load(tmp_path)
    (top / "zarr.json").write_text(text[:-10])
    with pytest.raises(CorruptCheckpointError, match=r"step-7/zarr.json is torn"):
        load(tmp_path)


def test_only_what_is_complete_is_there(tmp_path):
    assert latest_step(tmp_path) is None
    for step in (3, 20, 100):
        save(tmp_path, {"x": np.full(3, step)}, step=step)
    assert latest_step(tmp_path) == 100
    (tmp_path / "step-100" / "zarr.json").unlink()  # as if it was killed before the end
    (tmp_path / "step-7x").mkdir()
    assert latest_step(tmp_path) == 20
    assert load(tmp_path)["x"][0] == 20
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 100; it has 3, 20 \(1 that"):
        load(tmp_path, step=100)
    save(tmp_path, {"x": np.full(3, 21)}, step=21)
    assert not (tmp_path / "step-100").exists()  # the next one tidies up
    assert (tmp_path / "step-7x").exists()


def test_a_step_that_is_saved_again_replaces_the_other(tmp_path):
    for value in range(3):
        save(tmp_path, {"x": np.full(3, value)}, step=5)
        assert load(tmp_path)["x"][0] == value
        assert len(list(tmp_path.iterdir())) == 1
    # Killed after the new one was complete, before the old one was gone.
    shutil.copytree(next(tmp_path.iterdir()), tmp_path / "step-5")
    assert load(tmp_path, step=5)["x"][0] == 2


@pytest.mark.parametrize("url", ["memory://checkpoints/{}", "file://{}"])
def test_other_storage_through_fsspec(tmp_path, url):
    pytest.importorskip("fsspec")
    url = url.format(tmp_path)
    mesh = named_mesh(2)

    def program():
        x = distribute_array(np.arange(10.0), Sharding(mesh, P("a")))
        for step in (1, 2):
            save(url, {"x": x * step, "n": step}, step=step)
        whole = load(url, {"x": Sharding(mesh), "n": 0}, verify=dist.get_rank() == 0)
        return whole["n"], whole["x"].to_local().tolist(), latest_step(url)

    assert run_ranks(program, 2) == [(2, [2.0 * i for i in range(10)], 2)] * 2
    assert load(url, step=1)["n"] == 1
    save(url, {"n": 3}, step=2)
    assert load(url) == {"n": 3}


def test_a_url_without_fsspec_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ImportError, match="'s3://bucket/run' is a URL, which needs fsspec: pip in"):
        save("s3://bucket/run", {}, step=0)
