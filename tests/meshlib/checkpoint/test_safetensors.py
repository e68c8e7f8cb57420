"""Safetensors: what we write the reference reads, and the other way; names, shards and index."""

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    SafetensorsFiles,
    export_safetensors,
    import_safetensors,
    load,
    save,
)
from meshlib.sharding import P, Sharding
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import named_mesh

MODEL = {
    "embed.weight": np.arange(40, dtype="f4").reshape(10, 4),
    "layers.0.bias": np.arange(4, dtype="f2"),
    "layers.0.mask": np.array([True, False, True]),
    "scale": np.array(2.5),
    "half": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "none": np.zeros((0, 2), "i8"),
}


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "run", {"model": MODEL, "optimizer": {"m": np.ones(3)}, "step": 1}, step=1)
    return tmp_path / "run"


def same(one, other):
    assert sorted(one) == sorted(other)
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        np.testing.assert_array_equal(array, other[name])


@pytest.mark.parametrize(("most", "files"), [(5_000_000_000, 1), (20, 3), (1, 6)])
def test_out_and_in_again(tmp_path, checkpoint, most, files):
    out = tmp_path / "out"
    names = export_safetensors(checkpoint, out, prefix="model/", max_shard_bytes=most)
    assert len(names) == files
    if files == 1:
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    else:
        assert names[0] == f"model-00001-of-{files:05}.safetensors"
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == MODEL.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in MODEL.values())
    same(SafetensorsFiles(out), MODEL)
    mesh = named_mesh(2)

    def program():
        import_safetensors(out, tmp_path / "in", step=3)
        like = {name: Sharding(mesh) for name in MODEL}
        like["embed.weight"] = Sharding(mesh, P("a"))
        return load(tmp_path / "in", {"model": like})["model"]["embed.weight"].to_local()

    parts = run_ranks(program, 2)
    np.testing.assert_array_equal(np.concatenate(parts), MODEL["embed.weight"])
    same(load(tmp_path / "in")["model"], MODEL)


def test_the_reference_reads_what_we_write_and_we_what_it_writes(tmp_path, checkpoint):
    reference = pytest.importorskip("safetensors.numpy")
    export_safetensors(checkpoint, tmp_path / "out", prefix="model/")
    names = [name for name in MODEL if name != "half"]  # which it wants another library for
    read = reference.load_file(tmp_path / "out" / "model.safetensors")
    same({name: read[name] for name in names}, {name: MODEL[name] for name in names})
    # Its writer has rules for the order of arrays and their alignment.
    reference.save_file(
        {name: np.ascontiguousarray(MODEL[name]) for name in names},
        tmp_path / "theirs.safetensors",
        metadata={"who": "they"},
    )
    same(SafetensorsFiles(tmp_path / "theirs.safetensors"), {n: MODEL[n] for n in names})


def test_renaming(tmp_path, checkpoint):
    def rename(name):
        return None if name.startswith("layers") else f"transformer.{name}"

    export_safetensors(checkpoint, tmp_path / "out", prefix="model/", rename=rename)
    names = set(SafetensorsFiles(tmp_path / "out"))
    assert names == {f"transformer.{n}" for n in MODEL if not n.startswith("layers")}
    import_safetensors(
        tmp_path / "out", tmp_path / "in", rename=lambda name: name.removeprefix("transformer.")
    )
    assert set(load(tmp_path / "in")["model"]) == {n for n in MODEL if not n.startswith("layers")}
    for function, source in (
        (export_safetensors, checkpoint),
        (import_safetensors, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="rename makes two arrays 'x'"):
            function(source, tmp_path / "twice", rename=lambda name: "x")


def test_what_is_not_there_or_torn_is_named(tmp_path, checkpoint):
    with pytest.raises(CheckpointError, match="has no arrays below 'modle/'"):
        export_safetensors(checkpoint, tmp_path / "out", prefix="modle/")
    with pytest.raises(CheckpointError, match="is not a safetensors file and contains none"):
        SafetensorsFiles(tmp_path / "nowhere")
    export_safetensors(checkpoint, tmp_path / "out", prefix="model/")
    path = tmp_path / "out" / "model.safetensors"
    data = path.read_bytes()
    broken = [
        data[:-1],
        data[:20],
        b"",
        struct.pack("<Q", 1 << 60) + data[8:],
        data.replace(b'"F32"', b'"F99"'),
        data.replace(b'"shape":[10,4]', b'"shape":[10,5]'),
        struct.pack("<Q", 4) + b"[1] " + data[8:],
    ]
    for one in broken:
        path.write_bytes(one)
        with pytest.raises(
            CorruptCheckpointError, match=f"{path} is torn or not a safetensors file"
        ):
            SafetensorsFiles(path)
    (tmp_path / "out" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "elsewhere.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"elsewhere.safetensors is missing"):
        SafetensorsFiles(tmp_path / "out")
    save(tmp_path / "complex", {"x": np.ones(2, "c16")}, step=0)
    with pytest.raises(
        CheckpointError, match="'x' has dtype complex128, which safetensors does not"
    ):
        export_safetensors(tmp_path / "complex", tmp_path / "out")


def test_several_ranks_share_an_import(tmp_path, checkpoint):
    export_safetensors(checkpoint, tmp_path / "out", prefix="model/")
    run_ranks(
        lambda: import_safetensors(tmp_path / "out", tmp_path / f"in{dist.get_world_size()}"), 3
    )
    same(load(tmp_path / "in3")["model"], MODEL)


def exported(run, out, value, most):
    save(run, {name: np.full(4, value) for name in "abc"}, step=1)
    return export_safetensors(run, out, max_shard_bytes=most)


@pytest.mark.parametrize(("before", "after"), [(1, 10**6), (10**6, 1), (1, 1), (1, 70), (70, 1)])
def test_an_export_replaces_the_one_before(tmp_path, before, after):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    exported(tmp_path / "run", out, 1.0, before)
    files = exported(tmp_path / "run", out, 2.0, after)
    read = SafetensorsFiles(out)
    assert {name: x.tolist() for name, x in read.items()} == dict.fromkeys("abc", [2.0] * 4)
    index = ["model.safetensors.index.json"] if len(files) > 1 else []
    assert sorted(path.name for path in out.iterdir()) == sorted(["config.json", *files, *index])


@pytest.mark.parametrize("before", [1, 10**6])
@pytest.mark.parametrize("after", [1, 10**6])
def test_an_export_that_dies_leaves_one_or_none(tmp_path, monkeypatch, before, after):
    """Whatever it does last: the old arrays, the new ones, or an error, never some of each."""
    replace, unlink, steps = Path.replace, Path.unlink, []

    def counted(method):
        def call(self, *args, **options):
            if self.parent.name.startswith("out"):
                steps.append(self.name)
                if len(steps) > most:
                    raise KeyboardInterrupt
            return method(self, *args, **options)

        return call

    seen, most = set(), 10**6
    for most in range(20):
        out = tmp_path / f"out{most}"
        exported(tmp_path / "run", out, 1.0, before)
        steps.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", counted(replace))
            patch.setattr(Path, "unlink", counted(unlink))
            try:
                exported(tmp_path / "run", out, 2.0, after)
                ended = True
            except KeyboardInterrupt:
                ended = False
        try:
            read = {name: x[0] for name, x in SafetensorsFiles(out).items()}
        except CheckpointError:
            seen.add("none")
        else:
            assert sorted(read) == ["a", "b", "c"]
            assert len(set(read.values())) == 1, (steps, read)
            seen.add(float(read["a"]))
        if ended:
            break
    assert ended
    assert seen >= {1.0, 2.0}


def test_an_array_is_read_from_the_file_that_the_index_says(tmp_path):
    for value, most in [(1.0, 10**6), (2.0, 70)]:
        exported(tmp_path / "run", tmp_path / f"out{value}", value, most)
    out = tmp_path / "out2.0"
    # Another file has arrays of the same names, and comes later.
    other = out / "zzz.safetensors"
    other.write_bytes((tmp_path / "out1.0" / "model.safetensors").read_bytes())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] = {"a": index["weight_map"]["a"], "c": "zzz.safetensors"}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: x[0] for name, x in SafetensorsFiles(out).items()} == {"a": 2.0, "c": 1.0}


def test_a_hostile_index_or_file_is_named(tmp_path):
    exported(tmp_path / "run", tmp_path / "out", 1.0, 10**6)
    out = tmp_path / "out"
    (tmp_path / "secret.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    index = out / "model.safetensors.index.json"
    os.mkfifo(out / "pipe.safetensors")
    for weight_map, message in [
        ({"a": "../secret.safetensors"}, r"'a' is in '../secret.safetensors'"),
        ({"a": str(tmp_path / "secret.safetensors")}, r"'a' is in '/"),
        ({"a": 5}, r"'a' is in 5"),
        ({"a": "pipe.safetensors"}, r"pipe.safetensors is missing or not a file"),
        ({"x": "model.safetensors"}, r"'x' is in 'model.safetensors', which lacks it"),
        ([], r"is torn or not an index"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            SafetensorsFiles(out)
    index.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is torn or not an index"):
        SafetensorsFiles(out)
