"""The newest checkpoint, the kept ones, and the files that removal leaves alone."""

import os

import numpy as np
import pytest

from meshlib.checkpoint import Checkpointer, latest_step, load, save


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path):
    with Checkpointer(tmp_path, keep_last=2, sync=False) as checkpoints:
        for step in (100, 200, 300):
            checkpoints.save({"step": step}, step=step)
    with Checkpointer(tmp_path, keep_last=2, sync=False) as checkpoints:
        path = checkpoints.save({"step": 150}, step=150)
        assert load(path) == {"step": 150}
        assert checkpoints.load() == {"step": 150}
        assert checkpoints.latest() == latest_step(tmp_path) == 150
        assert checkpoints.steps() == [300, 150]
        checkpoints.save({"step": 250}, step=250)
        assert checkpoints.steps() == [150, 250]
        path = checkpoints.save({"step": -300}, step=300)
        assert checkpoints.steps() == [250, 300]
        assert load(tmp_path, step=300) == load(path) == {"step": -300}


def test_the_best_goes_by_the_metric_that_was_saved_last(tmp_path):
    with Checkpointer(tmp_path, keep_best=1, sync=False) as checkpoints:
        for step, metric in [(1, 0.5), (2, 0.9), (3, 0.8), (2, 0.01), (4, 0.7)]:
            checkpoints.save({"metric": metric}, step=step, metric=metric)
        assert checkpoints.steps() == [2, 4]
        assert checkpoints.load(step=2) == {"metric": 0.01}


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_removal_does_not_follow_links(tmp_path, scheme):
    archive, run = tmp_path / "archive", tmp_path / "run"
    save(archive, {"x": np.ones(3)}, step=1)
    run.mkdir()
    os.symlink(archive / "step-1", run / "step-1")
    with Checkpointer(f"{scheme}{run}", keep_last=1, sync=False) as checkpoints:
        assert checkpoints.load()["x"].tolist() == [1, 1, 1]
        checkpoints.save({"x": np.zeros(3)}, step=1)  # replaces it
        assert checkpoints.steps() == [1]
        os.symlink(archive / "step-1", run / "step-0")
        checkpoints.save({"x": np.zeros(3)}, step=2)  # keep_last removes it
        assert checkpoints.steps() == [2]
    assert load(archive)["x"].tolist() == [1, 1, 1]


def test_what_was_just_saved_stays_beside_a_newer_one(tmp_path, monkeypatch):
    from meshlib.checkpoint._pieces import ChunkWrite

    write = ChunkWrite.write

    def nested(self, *args):
        if self.data[0] == 1:  # another save begins and ends meanwhile
            save(tmp_path, {"x": np.full(3, 2)}, step=2)
        return write(self, *args)

    monkeypatch.setattr(ChunkWrite, "write", nested)
    with Checkpointer(tmp_path, keep_last=1, sync=False) as checkpoints:
        path = checkpoints.save({"x": np.full(3, 1)}, step=1)
        assert load(path)["x"].tolist() == [1, 1, 1]
        assert checkpoints.latest() == 2
