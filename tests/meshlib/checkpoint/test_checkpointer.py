"""``Checkpointer``: saving in the background, errors that surface, keeping the newest and best."""

import subprocess
import sys
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import Checkpointer, CheckpointError, load
from meshlib.checkpoint._pieces import ChunkShares, ChunkWrite
from meshlib.checkpoint._saving import detach
from meshlib.sharding import DArray, P, Sharding, ones
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import named_mesh


@pytest.fixture
def gate(monkeypatch):
    """A gate: writers of chunks wait until it is opened."""
    opened, write = threading.Event(), ChunkWrite.write

    def waiting(self, *args):
        assert opened.wait(60)
        return write(self, *args)

    monkeypatch.setattr(ChunkWrite, "write", waiting)
    yield opened
    opened.set()


def test_the_program_goes_on_after_a_copy(tmp_path, gate):
    mesh = named_mesh(2)

    def program():
        x, plain = ones((6,), Sharding(mesh, P("a"))), np.ones(3)
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.async_save({"x": x, "plain": plain}, step=1)
            assert checkpoints.is_saving()
            x.to_local()[...] = 5
            plain[...] = 5
            # The job's own calls go on meanwhile.
            assert dist.all_reduce(np.ones(1))[0] == 2
            assert not (tmp_path / "step-1" / "zarr.json").exists()
            dist.barrier()
            gate.set()
            assert checkpoints.wait() == str(tmp_path / "step-1")
            assert checkpoints.wait() is None
            assert checkpoints.latest() == 1
            back = checkpoints.load({"x": Sharding(mesh), "plain": plain})
            return back["x"].to_local().tolist(), back["plain"].tolist()

    assert run_ranks(program, 2) == [([1] * 6, [1] * 3)] * 2


def test_one_is_under_way_at_most_and_memory_is_used_again(tmp_path, gate):
    checkpoints = Checkpointer(tmp_path)
    x = np.zeros(5)
    checkpoints.async_save({"x": x}, step=1)
    first = checkpoints._room
    threading.Timer(0.2, gate.set).start()
    x += 1
    checkpoints.async_save({"x": x}, step=2)  # waits for the first
    assert (tmp_path / "step-1" / "zarr.json").exists()
    assert checkpoints._room is first
    checkpoints.close()
    assert [load(tmp_path, step=step)["x"][0] for step in (1, 2)] == [0, 1]


def test_who_writes_what_is_worked_out_when_the_arrays_change(tmp_path, monkeypatch):
    made = []
    make = ChunkShares.__init__

    def noted(self, participants, arrays):
        made.append([tuple(kept) for kept in arrays])
        make(self, participants, arrays)

    monkeypatch.setattr(ChunkShares, "__init__", noted)
    checkpoints = Checkpointer(tmp_path, sync=False)
    states = [
        {"x": np.zeros(3), "step": 1},
        {"x": np.ones(3), "step": 2},
        {"y": np.ones(3), "step": 3},
        {"y": np.ones(3, np.float32), "step": 4},
        {"y": np.ones((1, 3), np.float32), "step": 5},
        {"y": np.zeros((1, 3), np.float32), "step": 6},
    ]
    for step, state in enumerate(states):
        checkpoints.async_save(state, step=step)
    checkpoints.async_save({"x": object()}, step=9)
    with pytest.raises(TypeError, match="state"):
        checkpoints.wait()
    for step, state in enumerate(states):
        np.testing.assert_equal(checkpoints.load(step=step), state)
    checkpoints.close()
    assert [names[0][0] for names in made] == ["x", "y", "y", "y"]


def test_a_copy_that_was_broken_off_is_no_checkpoint(tmp_path, monkeypatch):
    def interrupted(pieces, room):
        raise KeyboardInterrupt

    checkpoints = Checkpointer(tmp_path, sync=False)
    with monkeypatch.context() as patch:
        patch.setattr("meshlib.checkpoint._saving.detach", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.async_save({"x": np.ones(3)}, step=1)
    with pytest.raises(CheckpointError, match="the copy of the state was interrupted"):
        checkpoints.wait()
    checkpoints.save({"x": np.ones(3)}, step=2)
    assert checkpoints.steps() == [2]
    checkpoints.close()


def test_a_program_that_ends_at_once_still_gets_its_checkpoint(tmp_path):
    program = (
        "import numpy as np, sys; from meshlib.checkpoint import Checkpointer;"
        " Checkpointer(sys.argv[1]).async_save([np.ones(9 << 20), np.ones(3)], step=1)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
    assert [x.sum() for x in load(tmp_path, step=1)] == [9 << 20, 3]


def test_an_error_surfaces_at_the_next_call_on_all_ranks(tmp_path, monkeypatch):
    write = ChunkWrite.write

    def failing(self, storage, folder):
        if dist_rank() == 1 and folder == "step-2":
            raise OSError(28, "No space left on device")
        return write(self, storage, folder)

    mesh = named_mesh(2)
    ranks = {}

    def dist_rank():
        return ranks[threading.current_thread().name]

    def program():
        x = ones((4,), Sharding(mesh, P("a")))
        with Checkpointer(tmp_path) as checkpoints:
            for step in (1, 2):
                # The thread that writes has no rank of its own to ask.
                checkpoints.async_save([x], step=step)
                if step == 1:
                    checkpoints.wait()
            with pytest.raises(OSError, match="No space left"):
                checkpoints.async_save([x], step=3)
            assert checkpoints.latest() == 1
            checkpoints.save([x], step=3)
            return checkpoints.steps()

    start = threading.Thread.start

    def noted(self):
        if self.name.startswith("checkpoint-"):
            self.name = f"{self.name} of {dist.get_rank()}"
            ranks[self.name] = dist.get_rank()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    monkeypatch.setattr(
        ChunkWrite,
        "write",
        lambda self, *a: (
            failing(self, *a) if threading.current_thread().name in ranks else write(self, *a)
        ),
    )
    assert run_ranks(program, 2) == [[1, 3]] * 2


def test_keeping_the_last_and_the_best(tmp_path):
    losses = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0]

    def steps(**options):
        folder = tmp_path / "-".join(map(str, options.values()))
        with Checkpointer(folder, sync=False, **options) as checkpoints:
            for step, loss in enumerate(losses):
                checkpoints.async_save({"step": step}, step=step, metric=loss)
            return checkpoints.steps()

    assert steps(keep_last=2) == [4, 5]
    assert steps(keep_best=2) == [1, 3, 5]  # the newest always
    assert steps(keep_last=2, keep_best=1) == [1, 4, 5]
    assert steps(keep_last=1, keep_best=1, better="higher") == [5]
    # Those of an earlier job count, too.
    with Checkpointer(tmp_path / "2", keep_best=1) as checkpoints:
        checkpoints.save({}, step=9, metric=2.5)
        assert checkpoints.steps() == [1, 9]
        assert checkpoints.latest() == 9


def test_bad_arguments(tmp_path):
    for options, message in [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_best": -1}, "keep_best is -1"),
        ({"better": "best"}, "better is 'best'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Checkpointer(tmp_path, **options)
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(ValueError, match="metric is nan"):
        checkpoints.save({}, step=0, metric=float("nan"))


def test_a_closed_one_says_so(tmp_path):
    def program():
        checkpoints = Checkpointer(tmp_path)
        checkpoints.save({}, step=1)
        checkpoints.close()
        checkpoints.close()
        for call in (
            lambda: checkpoints.save({}, step=2),
            lambda: checkpoints.async_save({}, step=2),
            checkpoints.load,
            checkpoints.latest,
            checkpoints.steps,
            checkpoints.wait,
        ):
            with pytest.raises(ValueError, match=rf"the Checkpointer of {tmp_path} was closed"):
                call()
        return checkpoints.is_saving()

    assert run_ranks(program, 2) == [False, False]
    assert run_ranks(program, 1) == [False]


WRONG = {
    "step": (lambda bad: ({}, -1 if bad else 2), ValueError, "step is -1"),
    "value": (lambda bad: ({"x": object() if bad else 1}, 2), TypeError, r"state\['x'\] is a"),
    "other": (lambda bad: ({"x": bad}, 2), CheckpointError, r"state\['x'\] is false on rank 0"),
}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_state_is_raised_by_the_next_call_on_all_ranks(
    tmp_path, case, partial
):
    make, kind, message = WRONG[case]
    mesh = named_mesh(2)
    # Partial values are reduced first, for which the ranks have to agree before they go on.
    pending = Sharding(mesh, P(), "a" if partial else None)

    def program():
        state, step = make(dist.get_rank() == 1)
        state = {"array": DArray(np.ones(3), pending, (3,), float), **state}
        with Checkpointer(tmp_path, sync=False) as checkpoints:
            checkpoints.async_save(state, step=step)
            with pytest.raises(kind, match=message):
                checkpoints.latest()
            checkpoints.async_save({"array": state["array"]}, step=3)
            return checkpoints.load()["array"].tolist(), checkpoints.steps()

    assert run_ranks(program, 2) == [([1.0 + partial] * 3, [3])] * 2


def test_a_rank_without_memory_for_the_copy_is_told_to_all(tmp_path, monkeypatch):
    def without_memory(pieces, room):
        if dist.get_rank() == 1 and not tmp_path.joinpath("step-1").exists():
            raise MemoryError("no memory")
        return detach(pieces, room)

    monkeypatch.setattr("meshlib.checkpoint._saving.detach", without_memory)

    def program():
        with Checkpointer(tmp_path, sync=False) as checkpoints:
            checkpoints.async_save({"x": np.ones(3)}, step=2)
            with pytest.raises((MemoryError, CheckpointError), match="no memory"):
                checkpoints.wait()
            dist.barrier()
            checkpoints.save({"x": np.ones(3)}, step=1)
            checkpoints.async_save({"x": np.ones(3)}, step=2)
            return checkpoints.steps()

    assert run_ranks(program, 2) == [[1, 2]] * 2


def test_nothing_is_told_before_the_copy_is_made(tmp_path):
    mesh = named_mesh(2)

    def program():
        x = ones((6,), Sharding(mesh, P("a")))
        with Checkpointer(tmp_path, sync=False) as checkpoints:
            if dist.get_rank() == 0:  # does not wait for the other, who has not called yet
                checkpoints.async_save({"x": x}, step=1)
                x.to_local()[...] = 5
            dist.barrier()
            if dist.get_rank() == 1:
                checkpoints.async_save({"x": x}, step=1)
            return checkpoints.load()["x"].tolist()

    assert run_ranks(program, 2) == [[1.0] * 6] * 2
