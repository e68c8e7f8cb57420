"""A forked child is no rank: what it asks of its parent's job is refused, and nobody notices it."""

from __future__ import annotations

from tests.support.meshlib.compiled import JOIN

# Of rank 0's children each prints what it got; what they did must change nothing for the parents.
FORKS = (
    JOIN
    + """
    import multiprocessing

    groups = [dist.new_group(backend=name, group_desc=name) for name in ("auto", "shm", "tcp")]
    stores = [group.get_group_store() for group in groups]
    for group in groups:
        for _ in range(3):
            dist.all_reduce(np.ones(4), group=group)  # past the first, where the core takes over

    def refused(call):
        try:
            got = call()
        except dist.DistError as error:
            said = str(error)
            assert f"process {parent} " in said and f"process {os.getpid()}" in said, said
            assert "expected" in said, said
            return
        raise AssertionError(f"a call was made: {got}")

    def in_child():
        begin = time.monotonic()
        assert dist.get_rank() == 0 and dist.get_world_size() == 2
        refused(pending.wait)
        for group, store in zip(groups, stores):
            refused(lambda: dist.all_reduce(np.full(4, 100.0), group=group))
            refused(lambda: dist.all_reduce(np.ones(100_000), group=group))
            refused(lambda: dist.all_reduce(np.ones(4), group=group, async_op=True))
            refused(lambda: dist.barrier(group=group))
            refused(lambda: dist.send(np.ones(4), 1, group=group))
            refused(lambda: dist.new_group().barrier())
            refused(lambda: store.get("key"))
        dist.destroy_process_group()
        assert not dist.is_initialized()
        assert time.monotonic() - begin < 30, time.monotonic() - begin

    def fork(work):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            if work is in_child:
                os._exit(0)
            sys.exit(0)  # the whole way out, over what runs at exit
        assert os.waitpid(child, 0)[1] == 0

    parent = os.getpid()
    if rank == 0:
        box = np.zeros(1)
        pending = dist.irecv(box, 1)  # under way, in a thread that no child has
        fork(in_child)
        fork(lambda: None)
        worker = multiprocessing.get_context("fork").Process(target=in_child)
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0, worker.exitcode
    for group in groups:
        x = dist.all_reduce(np.ones(4), group=group)
        assert (x == 2).all(), (group, x)
    if rank == 0:
        pending.wait()
        assert box[0] == 5
    else:
        dist.send(np.full(1, 5.0), 0)
    print("whole", flush=True)
    dist.destroy_process_group()
"""
)


def test_a_forked_child_is_refused_and_noticed_by_nobody(meshrun):
    result = meshrun.run("--nproc-per-node", "2", meshrun.script(FORKS))
    assert result.code == 0, result.err
    assert result.out.split() == ["whole"] * 2
