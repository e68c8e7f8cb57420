"""Checkpoints that somebody made to do harm: each is an error that says what is wrong with it."""

import json
import os
import tracemalloc

import numpy as np
import pytest

from meshlib._cli import main
from meshlib.checkpoint import CheckpointError, latest_step, load, save
from meshlib.checkpoint._files.folder import entries_of
from meshlib.checkpoint._files.locations import open_storage
from transport._crc32c import crc32c

MOST_MEMORY = 20 << 20


@pytest.fixture
def top(tmp_path):
    save(tmp_path / "run", {"x": np.arange(6.0).reshape(2, 3), "n": [1, 2.5]}, step=1)
    return tmp_path / "run" / "step-1"


def forge(top, change):
    """Change what the description says, and make its checksum fit."""
    document = json.loads((top / "zarr.json").read_text())
    own = document["attributes"]["meshlib"]
    del own["crc32c"]
    change(own, document["consolidated_metadata"]["metadata"])
    own["crc32c"] = crc32c(json.dumps(document, sort_keys=True).encode())
    (top / "zarr.json").write_text(json.dumps(document))


def array(**values):
    def change(own, members):
        for key, value in values.items():
            if key == "chunks":
                members["x"]["chunk_grid"]["configuration"]["chunk_shape"] = value
            else:
                members["x"][key] = value

    return change


def tree(node):
    def change(own, members):
        own["tree"] = node

    return change


def named(name):
    def change(own, members):
        members[name] = members.pop("x")
        own.setdefault("checksums", {"x": [0]})[name] = own["checksums"].pop("x")
        own["tree"] = {"dict": [["x", {"array": name}]]}

    return change


def put(**values):
    def change(own, members):
        own.update(values)

    return change


def nested(depth):
    node = 1
    for _ in range(depth):
        node = {"list": [node]}
    return node


LARGE = 10**9
FORGED = {
    "name outside": (named("../../secret"), r"name '\.\./\.\./secret'"),
    "absolute name": (named("/etc/passwd"), r"name '/etc/passwd'"),
    "name with a dot": (named("a/./b"), r"name 'a/\./b'"),
    "name with zero": (named("a\0b"), r"name 'a\\x00b'"),
    "many chunks": (array(shape=[LARGE], chunks=[1]), r"'x' has 1000000000 chunks, but checks"),
    "large chunk": (array(shape=[LARGE, LARGE], chunks=[LARGE, LARGE]), r"is torn: it has"),
    "too large": (array(shape=[LARGE, LARGE, LARGE], chunks=[1, 1, 1]), r"'x' has the shape"),
    "chunk of nothing": (array(chunks=[0, 3]), r"'x' has a bad description: \[0, 3\]"),
    "larger chunk": (array(chunks=[2, LARGE]), r"'x' has the shape \(2, 3\) and chunks of"),
    "fewer dims": (array(chunks=[3]), r"'x' has the shape"),
    "many dims": (array(shape=[1] * 100, chunks=[1] * 100), r"'x' has the shape"),
    "negative": (array(shape=[-1, 3]), r"'x' has a bad description: \[-1, 3\]"),
    "fraction": (array(shape=[2.0, 3]), r"'x' has a bad description"),
    "no list": (array(shape="23"), r"'x' has a bad description"),
    "objects": (array(data_type="object"), r"arrays of 'object'"),
    "structure": (array(data_type="i4,i4"), r"arrays of 'i4,i4'"),
    "text": (array(data_type="S1000000000"), r"arrays of 'S1000000000'"),
    "no name": (array(data_type=None), r"arrays of None"),
    "a module's other name": (array(data_type="finfo"), r"arrays of 'finfo'"),
    "deep": (tree(nested(150)), r"more than 100 levels"),
    "bare list": (tree([1]), r"the bare list \[1\]"),
    "unknown node": (tree({"call": "os.system"}), r"the kind 'call'"),
    "two members": (tree({"list": [], "dict": []}), r"has invalid contents"),
    "no items": (tree({"dict": [5]}), r"has invalid contents"),
    "list as key": (tree({"dict": [[[1], 2]]}), r"has the key \[1\]"),
    "no array": (tree({"array": "y"}), r"array 'y', but not its description"),
    "bad scalar": (tree({"scalar": ["object", "AAAAAAAAAAA="]}), r"arrays of 'object'"),
    "long scalar": (tree({"scalar": ["int8", "AAAA"]}), r"has invalid contents"),
    "bad float": (tree({"float": [1]}), r"has invalid contents"),
    "bad step": (put(step="one"), r"step must be a whole number"),
    "bad metric": (put(metric=[1]), r"has invalid contents"),
    "other step": (put(step=7), r"step-1 is the checkpoint of step 7"),
    "no checksums": (put(checksums={}), r"has invalid contents"),
    "checksums of nothing": (put(checksums={"x": 5}), r"the checksums of array 'x' are 5"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_description_is_named(top, case, capsys):
    change, message = FORGED[case]
    forge(top, change)
    tracemalloc.start()
    try:
        for options in ({}, {"verify": False}):
            with pytest.raises(CheckpointError, match=message):
                load(top.parent, **options)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert main(["checkpoint", "verify", str(top.parent)]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_nothing_outside_the_folder_is_read(top):
    outside = top.parent.parent / "outside"
    outside.mkdir()
    chunk = top / "x" / "c.0.0"
    for link, target in [(chunk, chunk.name), (top / "x", "x")]:
        kept = link.rename(outside / target)
        os.symlink(kept, link)
        with pytest.raises(CheckpointError, match=r"c\.0\.0 is .*outside.*expected a regular file"):
            load(top)
        link.unlink()
        kept.rename(link)
    # Within the folder a link leads to what is checked as any file is.
    chunk.rename(top / "x" / "kept")
    os.symlink("kept", chunk)
    assert load(top)["x"].shape == (2, 3)


@pytest.mark.timeout(60)
def test_what_is_no_file_does_not_block(top):
    chunk = top / "x" / "c.0.0"
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CheckpointError, match=r"c\.0\.0 is .*expected a regular file"):
        load(top)
    (top / "zarr.json").unlink()
    os.mkfifo(top / "zarr.json")
    with pytest.raises(CheckpointError, match="is not a checkpoint and contains none"):
        load(top.parent)


def test_a_description_that_is_absurd_is_named(top):
    document = top / "zarr.json"
    document.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is torn or was changed"):
        load(top)
    document.write_text('{"attributes": {"meshlib": {"step": ' + "9" * 5000 + "}}}")
    with pytest.raises(CheckpointError, match="is torn or was changed"):
        load(top)
    os.truncate(document, 1 << 40)  # of which the disk has nothing
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes; expected 1 GiB at most"):
        load(top)


def test_names_of_folders_that_are_no_steps(tmp_path):
    for name in ("step-" + "9" * 200, "step-٣", "step-007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "zarr.json").write_text("{}")
    assert latest_step(tmp_path) is None
    assert not any(entries_of(open_storage(tmp_path)))
    save(tmp_path, {"x": 1}, step=7)
    assert (tmp_path / "step-007").exists()
    assert load(tmp_path) == {"x": 1}
