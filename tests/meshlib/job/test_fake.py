"""A rank of N alone: every call returns, with defined contents, and is counted."""

import os

import numpy as np
import pytest

import meshlib as dist
from meshlib import rpc
from meshlib.testing import run_ranks
from transport import _environment as environment

SIZE, RANK = 4096, 17


@pytest.fixture
def alone(monkeypatch):
    for name in (environment.RANK, environment.WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group(backend="fake", world_size=SIZE, rank=RANK, timeout=20)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def mesh(alone):
    names = ("pp", "dp", "tp")
    return dist.init_device_mesh("cpu", (8, 16, 32), mesh_dim_names=names)


def test_this_rank_and_its_mesh(mesh):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (RANK, SIZE, "fake")
    assert mesh.get_coordinate() == [0, 0, RANK]
    assert mesh["dp"].process_group.ranks == tuple(range(RANK, 512, 32))
    assert mesh["pp", "tp"].size() == 256


def test_a_reduction_and_a_broadcast_leave_this_ranks_value(mesh):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.premul_sum(2.0)):
        x = np.arange(3.0)
        assert dist.all_reduce(x, op) is x
        dist.reduce(x, dst=RANK, op=op)
        assert (x == np.arange(3.0)).all()
    for src in (0, RANK):
        assert (mesh.broadcast(np.arange(3), group_src=src) == np.arange(3)).all()
    parts = mesh["tp"].reduce_scatter(np.empty(2), list(np.arange(64.0).reshape(32, 2)))
    assert (parts == [2 * RANK, 2 * RANK + 1]).all()


def test_a_gather_repeats_this_ranks_data(mesh):
    whole = mesh["tp"].all_gather_into_tensor(np.empty(64), np.array([1.0, 2.0]))
    assert (whole.reshape(32, 2) == [1.0, 2.0]).all()
    sizes = [3 if rank % 2 else 1 for rank in range(32)]
    sizes[RANK] = 2
    slots = mesh["tp"].all_gather([np.empty(n) for n in sizes], np.array([1.0, 2.0]))
    assert [slot.tolist() for slot in slots[15:19]] == [[1, 2, 1], [1], [1, 2], [1]]
    slots = dist.gather(np.ones(1), [np.empty(1) for _ in range(SIZE)], dst=RANK)
    assert (np.concatenate(slots) == 1).all()
    empty = mesh["dp"].all_gather([np.empty(n) for n in (0, *[2] * 15)], np.empty(0))
    assert (np.concatenate(empty) == 0).all()


def test_an_exchange_gives_back_what_was_sent(mesh):
    given = np.arange(32.0)
    assert (mesh["tp"].all_to_all_single(np.empty(32), given) == given).all()
    split = [2, *[1] * 30, 0]
    got = mesh["tp"].all_to_all_single(np.empty(32), given, split[::-1], split)
    assert got.tolist() == [*range(2, 32), 0, 0]  # the last member was sent nothing


def test_a_message_and_the_scatter_of_another_rank_are_zeros(alone):
    x = np.ones(2)
    assert dist.recv(x, src=3) == 3
    assert (x == 0).all()
    assert dist.recv(x) == RANK - 1  # from any source
    assert (dist.scatter(np.ones(2), src=0) == 0).all()
    rows = list(np.repeat(np.arange(SIZE), 2).reshape(SIZE, 2))
    assert (dist.scatter(np.ones(2, int), rows, src=RANK) == RANK).all()
    dist.send(np.ones(2), dst=3)
    dist.send(np.full(2, 5.0), dst=RANK)
    assert dist.recv(x, src=RANK) == RANK
    assert (x == 5).all()
    work = dist.irecv(np.ones(2), src=3)
    assert (work.result() == 0).all()


def test_objects(alone):
    assert dist.all_gather_object([None] * SIZE, {"rank": RANK}) == [{"rank": RANK}] * SIZE
    there = [None] * SIZE
    dist.gather_object("a", there, dst=RANK)
    assert there == ["a"] * SIZE
    for given in (["mine"], [None]):
        assert dist.broadcast_object_list(list(given), src=0) == given
        assert dist.recv_object_list(mine := list(given), src=0) == 0
        assert mine == given
        assert dist.scatter_object_list(list(given), None, src=0) == given[0]
    assert dist.scatter_object_list([None], list(range(SIZE)), src=RANK) == RANK
    dist.send_object_list(["a"], dst=0)


def test_calls_and_bytes_are_counted_by_kind_and_group(mesh):
    with dist.profile() as profile:
        for _ in range(3):
            mesh["tp"].all_reduce(np.ones(10, np.float32))
        mesh["dp"].all_reduce(np.ones(1), async_op=True).wait()
        dist.all_gather_into_tensor(np.empty(SIZE, np.int8), np.ones(1, np.int8))
        dist.barrier()
        dist.monitored_barrier()
    found = {(row.kind, row.group): (row.calls, row.nbytes) for row in profile.summaries()}
    assert found == {
        ("all_reduce", "tp"): (3, 120),
        ("all_reduce", "dp"): (1, 8),
        ("all_gather", "default"): (1, SIZE),
        ("barrier", "default"): (1, 0),
        ("monitored_barrier", "default"): (1, 0),
    }


def test_every_group_of_the_job_is_fake(alone):
    for backend in ("tcp", "auto", "fake", None):
        group = dist.new_group([RANK, 4000], backend=backend)
        assert group.backend == "cpu:fake"
        assert group.all_reduce(np.ones(1)) == 1
    mesh = dist.init_device_mesh("cpu", (SIZE,), backend="tcp")
    assert mesh.all_reduce(np.ones(1)) == 1
    assert dist.new_group([0, 1]).rank() == -1
    assert dist.new_group([RANK]).all_reduce(np.ones(1)) == 1
    with pytest.raises(ValueError, match="unknown"):
        dist.new_group(backend="no-such")


def test_what_the_ranks_agree_on_needs_no_other_rank(alone):
    dist.request_stop("enough")
    assert dist.should_stop(1)
    with pytest.raises(rpc.WorkerLostError, match="rank 0 has left the job"):
        rpc.init_rpc("alone")


def test_jax_arrays_and_calls_in_jit(mesh):
    jax = pytest.importorskip("jax")
    from meshlib import jit

    x = jax.numpy.arange(32.0)
    assert (dist.all_reduce(x) == x).all()

    @jax.jit
    def program(x):
        whole = jit.all_gather(jit.all_reduce(x, group=mesh["tp"]), group=mesh["dp"])
        return whole, jit.reduce_scatter(whole, group=mesh["dp"])

    whole, part = program(x)
    assert whole.shape == (16, 32)
    assert (part == x).all()


def test_symmetric_memory_and_halos(mesh):
    assert mesh.empty(5, np.int32).shape == (5,)
    field = np.ones((4, 4))
    mesh.exchange_halo(field, {"dp": 0, "tp": 1}, 1)
    assert (field[1:-1, 1:-1] == 1).all()
    assert (field[1:-1, 0] == 0).all()  # the neighbour's


def test_place_from_the_environment(monkeypatch):
    monkeypatch.setenv(environment.RANK, "3")
    monkeypatch.setenv(environment.WORLD_SIZE, "8")
    dist.init_process_group("fake")
    assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=5)
    assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"world_size": 4, "rank": 4}, ValueError, r"rank=4, world_size=4"),
        ({"world_size": 4, "rank": -2}, ValueError, r"rank=-2, world_size=4"),
        ({"world_size": 0, "rank": 0}, ValueError, r"rank=0, world_size=0"),
        ({"rank": 0}, ValueError, r"needs world_size, as an argument or in WORLD_SIZE"),
        ({"world_size": 4}, ValueError, r"needs rank, as an argument or in RANK"),
        ({"world_size": 4.5, "rank": 0}, TypeError, r"world_size"),
        (
            {"world_size": 4, "rank": 0, "init_method": "env://"},
            ValueError,
            r"init_method='env://'",
        ),
        ({"world_size": 4, "rank": 0, "store": object()}, ValueError, r"expected neither"),
        ({"world_size": 4, "rank": 0, "group_name": 3}, TypeError, r"group_name"),
        (
            {"world_size": 4, "rank": 0, "backend": "cpu:fake,cuda:nccl"},
            ValueError,
            r"'fake' alone",
        ),
        ({"world_size": 4, "rank": 0, "backend": "cuda:fake"}, ValueError, r"'fake' alone"),
    ],
)
def test_bad_input(monkeypatch, arguments, error, words):
    for name in (environment.RANK, environment.WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error, match=words):
        dist.init_process_group(**{"backend": "fake", **arguments})
    assert not dist.is_initialized()


def test_a_wrong_number_in_the_environment(monkeypatch):
    monkeypatch.setenv(environment.WORLD_SIZE, "many")
    with pytest.raises(ValueError, match="WORLD_SIZE is 'many'; expected a whole number"):
        dist.init_process_group("fake", rank=0)


def test_wrong_calls_are_refused_as_ever(alone):
    with pytest.raises(ValueError, match="dst"):
        dist.send(np.ones(1), dst=SIZE)
    with pytest.raises(TypeError, match="BAND"):
        dist.all_reduce(np.ones(1), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="output"):
        dist.all_gather_into_tensor(np.empty(SIZE + 1), np.ones(1))
    assert dist.all_reduce(np.ones(1)) == 1
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="not initialised"):
        dist.all_reduce(np.ones(1))


def test_a_job_with_other_processes_has_no_fake_group():
    def program():
        with pytest.raises(ValueError, match="init_process_group"):
            dist.new_group(backend="fake")
        return dist.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [2, 2]
    with pytest.raises(ValueError, match="in place of run_ranks"):
        run_ranks(program, 2, backend="fake")


def test_in_a_job_of_threads_each_may_be_alone():
    def program():
        dist.init_process_group("fake", world_size=100, rank=dist.get_rank())
        return dist.get_rank(), dist.get_world_size(), dist.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [(0, 100, 1), (1, 100, 1)]


def test_nothing_is_left_behind(alone):
    before = set(os.listdir("/proc/self/fd"))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("fake", world_size=SIZE, rank=RANK)
    dist.barrier()
    assert set(os.listdir("/proc/self/fd")) <= before
