"""Several writers in one folder: no checkpoint has values of two of them, whoever is faster."""

import json
import re
import shutil
import threading

import numpy as np
import pytest

from meshlib.checkpoint import Checkpointer, CheckpointError, load, save
from meshlib.checkpoint._files import folder
from meshlib.checkpoint._pieces import ChunkWrite

STATES = [{"x": np.full(3, value), "y": np.full(3, value)} for value in range(3)]


def in_thread(call):
    """Call in a thread; return a function that waits for the result, an exception as such."""
    result = []

    def run():
        try:
            result.append(call())
        except Exception as error:  # noqa: BLE001 (given to the test)
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait():
        thread.join(60)
        assert not thread.is_alive()
        return result[0]

    return wait


@pytest.fixture(params=["x", "y"])
def slow(monkeypatch, request):
    """A writer of values 1, which waits before its first or its second array."""
    reached, go_on, write = threading.Event(), threading.Event(), ChunkWrite.write

    def waiting(self, *args):
        if self.data[0] == 1 and self.array == request.param:
            reached.set()
            assert go_on.wait(60)
        return write(self, *args)

    monkeypatch.setattr(ChunkWrite, "write", waiting)
    yield reached, go_on
    go_on.set()


@pytest.mark.parametrize("step", [1, 2])
def test_two_writers_of_one_process(tmp_path, slow, step):
    reached, go_on = slow
    first = in_thread(lambda: save(tmp_path, STATES[1], step=1))
    assert reached.wait(60)
    second = save(tmp_path, STATES[2], step=step)
    go_on.set()
    for path, value in [(first(), 1), (second, 2)]:
        if step == 1 and value == 1:  # the other was begun later, and replaces it
            continue
        assert {name: x[0] for name, x in load(path).items()} == {"x": value, "y": value}
    assert load(tmp_path)["y"].tolist() == [2, 2, 2]


def test_a_save_beside_one_in_the_background(tmp_path, slow):
    reached, go_on = slow
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.async_save(STATES[1], step=1)
        assert reached.wait(60)
        save(tmp_path, STATES[2], step=2)
        go_on.set()
        assert load(checkpoints.wait())["y"].tolist() == [1, 1, 1]
        assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("url", ["{}", "memory://writers{}"])
def test_a_job_that_is_overtaken_publishes_nothing(tmp_path, slow, monkeypatch, url):
    if "://" in url:
        pytest.importorskip("fsspec")
    path = url.format(tmp_path)
    reached, go_on = slow
    overtaken = in_thread(lambda: save(path, STATES[1], step=1))
    assert reached.wait(60)
    monkeypatch.setattr(folder, "_PROGRAM", "another", raising=False)  # a job in another process
    save(path, STATES[2], step=1)
    go_on.set()
    error = overtaken()
    assert isinstance(error, CheckpointError)
    assert "step-1 was removed or published by another job" in str(error)
    assert load(path)["x"].tolist() == load(path)["y"].tolist() == [2, 2, 2]
    # What it wrote after that goes with the next save.
    save(path, STATES[0], step=5)
    if path == str(tmp_path):
        assert {one.name for one in tmp_path.iterdir()} == {"step-1.1", "step-5.1"}


def test_a_job_that_publishes_in_time_is_left_alone(tmp_path, slow, monkeypatch):
    reached, go_on = slow
    slower = in_thread(lambda: save(tmp_path, STATES[1], step=1))
    assert reached.wait(60)
    monkeypatch.setattr(folder, "_PROGRAM", "another", raising=False)
    write = ChunkWrite.write

    def and_then_the_other(self, *args):
        if self.data[0] == 5:
            go_on.set()
            assert slower() == str(tmp_path / "step-1")
        return write(self, *args)

    monkeypatch.setattr(ChunkWrite, "write", and_then_the_other)
    save(tmp_path, {"x": np.full(3, 5)}, step=7)
    assert load(tmp_path, step=1)["x"].tolist() == [1, 1, 1]


def test_a_chunk_of_another_step_or_array_or_place_is_named(tmp_path):
    for step in (1, 2):
        state = {"x": np.full(3, step), "y": np.full(3, -step)}
        save(tmp_path, state | {"long": np.full((40, 1 << 19), float(step))}, step=step)
    top = tmp_path / "step-2"
    chunks = [path.name for path in sorted((top / "long").glob("c.*"))]
    assert len(chunks) > 1
    # Places of one array differ here, too.
    marked = np.full((40, 1 << 19), 2.0)
    marked[0, 0] = 3
    save(tmp_path, {"x": np.full(3, 2), "y": np.full(3, -2), "long": marked}, step=2)
    top = tmp_path / "step-2.1"
    for source, target in [
        (tmp_path / "step-1" / "x" / "c.0", top / "x" / "c.0"),
        (top / "y" / "c.0", top / "x" / "c.0"),
        (top / "long" / "c.0.0", top / "long" / chunks[-1]),
    ]:
        kept = target.read_bytes()
        shutil.copy(source, target)
        with pytest.raises(CheckpointError, match=re.escape(f"{target} is not the chunk that was")):
            load(tmp_path)
        target.write_bytes(kept)
    load(tmp_path)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9")
    with pytest.raises(CheckpointError, match=r"step-9 is the checkpoint of step 1"):
        load(tmp_path, step=9)


def test_the_description_has_the_checksums(tmp_path):
    save(tmp_path, {"x": np.arange(3), "none": np.ones((0, 2))}, step=1)
    own = json.loads((tmp_path / "step-1" / "zarr.json").read_text())["attributes"]["meshlib"]
    stored = (tmp_path / "step-1" / "x" / "c.0").read_bytes()[-4:]
    assert own["checksums"] == {"x": [int.from_bytes(stored, "little")], "none": []}


@pytest.mark.parametrize("url", ["{}", "file://{}", "memory://torn{}"])
def test_a_document_is_published_by_renaming_it(tmp_path, monkeypatch, url):
    fsspec = pytest.importorskip("fsspec")
    path = url.format(tmp_path)
    save(path, {"x": 1}, step=1)

    def dies(*_args, **_options):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", dies)
        patch.setattr(fsspec.get_filesystem_class("memory"), "mv", dies)
        with pytest.raises(OSError, match="Input/output error"):
            save(path, {"x": 2}, step=2)
    assert load(path) == {"x": 1}
