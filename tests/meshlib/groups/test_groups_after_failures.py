"""After a failure a mesh that is made again is whole: its members agree on the next group."""

from __future__ import annotations

import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world, derived_group
from meshlib.testing import run_ranks
from transport._errors import CollectiveMismatchError, CollectiveTimeoutError, DistBackendError

BACKENDS = ("inproc", "tcp")


def make_mesh():
    return dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def disagree(group):
    """Break ``group``: its two members make different calls."""
    with pytest.raises(CollectiveMismatchError):
        group.all_reduce(np.ones(2 + dist.get_rank()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mesh_made_again_is_whole_and_the_one_before_stays_broken(backend):
    def rank():
        first = make_mesh()
        disagree(first)
        again = make_mesh()
        total = again["dp"].all_reduce(np.ones(1))
        assert again == first
        assert hash(again) == hash(first)
        assert again.process_group.ranks == first.process_group.ranks
        with pytest.raises(CollectiveMismatchError):
            first.all_reduce(np.ones(1))
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(np.ones(1))  # the same ranks and options: the default group was shared
        assert make_mesh().process_group is again.process_group  # interned as ever
        return total[0], again.process_group.id

    (one, first_id), (other, second_id) = run_ranks(rank, 2, backend=backend)
    assert (one, other) == (2, 2)
    assert first_id == second_id


def test_a_group_that_broke_is_the_same_one_until_the_program_was_told():
    """Between a rank's knowing and its program's being told lie calls that the others have made."""

    def rank():
        mesh = make_mesh()
        mesh.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeoutError):
                mesh.all_reduce(np.ones(1), timeout=0.2)
        else:
            while call_queue_of(mesh.process_group).state.await_failure(1.0) is None:
                pass
            # Nobody but the watcher knows. A mesh that the program makes here, rank 0 made before.
            assert make_mesh().process_group is mesh.process_group
            with pytest.raises(CollectiveTimeoutError):
                make_mesh().all_reduce(np.ones(1))
        return make_mesh().all_reduce(np.ones(1))[0]

    assert run_ranks(rank, 2) == [2, 2]


def test_a_member_that_learns_late_comes_to_the_same_group():
    """Rank 0 gives up on the second group, too, before rank 1 has heard of the first."""

    def rank():
        attempts = 0
        while True:
            mesh = make_mesh()
            attempts += 1
            try:
                if dist.get_rank() == 1 and attempts == 1:
                    time.sleep(0.6)
                mesh.barrier(timeout=0.2 if attempts < 3 else 60)
                mesh.barrier()  # who comes late may find its own part of the first done
            except CollectiveTimeoutError:
                continue
            return mesh.process_group.id

    first, second = run_ranks(rank, 2)
    assert first == second


def test_an_asynchronous_call_tells_when_its_work_is_looked_at():
    def rank():
        mesh = make_mesh()
        work = mesh.all_reduce(np.ones(2 + dist.get_rank()), async_op=True)
        while call_queue_of(mesh.process_group).state.await_failure(1.0) is None:
            pass
        assert make_mesh().process_group is mesh.process_group
        with pytest.raises(CollectiveMismatchError):
            work.get_future().wait()
        return make_mesh().all_reduce(np.ones(1))[0]

    assert run_ranks(rank, 2) == [2, 2]


def test_the_lines_in_the_documentation_bring_every_rank_along():
    """One dim's group breaks; who is not in it hears by the other groups, which are aborted."""

    def rank():
        failures = 0

        def train(mesh):
            if failures == 0:
                mesh["dp"].all_reduce(np.ones(2 + (dist.get_rank() == 2)))
            return mesh["tp"].all_reduce(np.ones(1))[0] + mesh.all_reduce(np.ones(1))[0]

        while True:
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            try:
                return train(mesh), failures, [g.id for g in mesh.get_all_groups()]
            except dist.DistError as error:
                failures += 1
                for group in (mesh.process_group, *mesh.get_all_groups()):
                    group.abort(f"starting again after {type(error).__name__}")

    results = run_ranks(rank, 4)
    assert [(total, failures) for total, failures, _ in results] == [(6, 1)] * 4


def test_a_group_that_was_destroyed_is_followed_by_another():
    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        dim = dist.DeviceMesh("cpu", [0, 1], timeout=7)
        old = dim.process_group
        disagree(dim)
        dist.destroy_process_group(old)
        assert dim.process_group is not old
        assert dim.process_group.id != old.id
        return dim.all_reduce(np.ones(1))[0] + mesh.all_reduce(np.ones(1))[0]

    assert run_ranks(rank, 2) == [4, 4]


def test_a_derived_group_is_its_groups_own_and_ends_with_it():
    def rank():
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        beside, other = derived_group(first, "test"), derived_group(second, "test")
        assert beside is derived_group(first, "test")
        assert beside.id != other.id
        disagree(beside)
        assert not call_queue_of(second).state.retired
        assert call_queue_of(first).state.retired
        totals = [g.all_reduce(np.ones(1))[0] for g in (first, second, other)]
        first.abort("enough")
        with pytest.raises(DistBackendError, match="enough"):
            first.all_reduce(np.ones(1))
        dist.destroy_process_group(second)
        with pytest.raises(ValueError, match="was destroyed"):
            other.all_reduce(np.ones(1))
        with pytest.raises(ValueError, match="was destroyed"):
            derived_group(second, "test")
        assert second.id not in [group.id for group in current_world().groups()]
        return totals

    assert run_ranks(rank, 2) == [[2, 2, 2]] * 2


def test_messages_that_nobody_received_are_reported(caplog):
    def rank():
        group = dist.new_group([0, 1], group_desc="letters")
        if dist.get_rank() == 0:
            group.send(np.ones(1), 1, tag=7)
            group.send(np.ones(1), 1, tag=7)
            group.send(np.ones(1), 1)
        else:
            group.recv(np.ones(1), 0)
        group.barrier()
        dist.destroy_process_group(group)

    run_ranks(rank, 2)
    assert "2 from rank 0 under tag 7" in caplog.text
    assert "'letters'" in caplog.text
    assert caplog.text.count(" from rank ") == 1
