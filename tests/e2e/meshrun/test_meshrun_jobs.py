"""Whole jobs under ``meshrun``: ranks that meet, compute together, and lose one another."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes


def test_hello_world(meshrun):
    script = meshrun.script("""
        import meshlib as dist
        dist.init_process_group()
        dist.barrier()
        print("hello from", dist.get_rank(), "of", dist.get_world_size())
    """)
    result = meshrun.run("--nproc-per-node", "2", script)
    assert (result.code, result.err) == (0, "")
    assert sorted(result.out.splitlines()) == ["hello from 0 of 2", "hello from 1 of 2"]


def test_the_mesh_of_the_command_line_is_found(meshrun):
    script = meshrun.script("""
        import meshlib as dist
        mesh = dist.init_device_mesh()
        print(mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate())
    """)
    result = meshrun.run("--mesh", "dp=1,tp=2", script)
    assert (result.code, result.err) == (0, "")
    assert len(result.out.splitlines()) == 2
    assert all("dp" in line and "tp" in line for line in result.out.splitlines())


MEET_UNTIL_A_RANK_FAILS = """
    import os, signal
    import numpy as np
    import meshlib as dist

    dist.init_process_group()
    x = np.ones(4)
    for step in range(1000):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        if step == 3 and dist.get_rank() == 1:
            {failure}
"""


@pytest.mark.parametrize(
    ("failure", "code", "last"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os._exit(4)", 4, "failed: exit code 4"),
    ],
)
def test_the_failing_rank_is_named_by_all(meshrun, failure, code, last):
    script = meshrun.script(MEET_UNTIL_A_RANK_FAILS.format(failure=failure))
    result = meshrun.run("--nproc-per-node", "3", script, env=meshrun.long_windows())
    assert result.code == code
    assert result.err.rstrip().endswith(last)
    assert "rank 1 on" in result.err
    echoes = [line for line in result.err.splitlines() if "RankFailedError" in line]
    assert echoes, result.err
    assert all("rank 1 " in line.partition("RankFailedError")[2] for line in echoes)


def test_a_rank_that_ends_without_coming_is_named_at_once(meshrun):
    script = meshrun.script("""
        import os
        if os.environ["RANK"] != "0":
            import meshlib as dist
            try:
                dist.init_process_group(timeout=60)
            except dist.RankFailedError as error:
                print(error.rank, error)
    """)
    result = meshrun.run("--nproc-per-node", "3", script)
    assert (result.code, result.err) == (0, "")
    assert result.out == "0 rank 0 ended with exit code 0 and has not joined\n" * 2


def test_a_job_that_is_started_again_meets_again(meshrun):
    script = meshrun.script("""
        import os
        import numpy as np
        import meshlib as dist

        dist.init_process_group()
        x = np.ones(2)
        dist.all_reduce(x)
        if os.environ["MESHLIB_RESTART_COUNT"] == "0":
            if dist.get_rank() == 0:
                raise ValueError("once")
            dist.barrier()
        dist.barrier()
        print("met", int(x[0]))
    """)
    result = meshrun.run("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert result.code == 0, result.err
    assert result.out == "met 2\nmet 2\n"


def test_a_program_may_set_its_own_address(meshrun, free_port):
    script = meshrun.script("""
        import os, sys
        import meshlib as dist

        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
        dist.init_process_group()
        dist.barrier()
        print("met")
    """)
    result = meshrun.run("--nproc-per-node", "2", script, str(free_port))
    assert result.code == 0, result.err
    assert result.out == "met\nmet\n"
