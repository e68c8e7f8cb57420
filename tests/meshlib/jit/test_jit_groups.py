"""Groups inside ``jax.jit``: each has calls of its own, failures of its own, and one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world, install
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.xla_metadata import set_xla_metadata  # noqa: E402

from meshlib import jit as mj  # noqa: E402

PROGRAMS = Path(__file__).parent / "programs"

CALLS = 30

pytestmark = pytest.mark.usefixtures("double_precision")


def summed(group):
    return jax.jit(lambda x: mj.all_reduce(x, group=group))


def disagree(group):
    """Break ``group`` inside of jit: its two members make different calls."""
    dtype = np.float32 if dist.get_rank() else np.float64
    with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError") as error:
        summed(group)(jnp.ones(4, dtype)).block_until_ready()
    return str(error.value)


def in_threads(*functions):
    """Call each function in a thread of its own, as this rank, one after the other."""
    world, results = current_world(), []

    def run(function):
        install(world, thread_only=True)
        with set_xla_metadata(meshlib_rank=f"thread of {world.rank}"):
            try:
                results.append(function())
            except Exception as error:  # noqa: BLE001 (the test looks at it)
                results.append(error)

    for function in functions:
        thread = threading.Thread(target=run, args=(function,), name=f"of-{world.rank}")
        thread.start()
        thread.join()
    return results


def test_groups_of_the_same_ranks_do_not_share_their_calls():
    """The members call on two groups in different orders, as two threads of theirs may."""

    def rank():
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        programs = summed(one), summed(other)
        calls = [lambda: programs[0](1.0), lambda: programs[1](1000.0)]
        first, second = (0, 1) if dist.get_rank() == 0 else (1, 0)
        started = [None, None]
        world = current_world()

        def run(which):
            install(world, thread_only=True)
            with set_xla_metadata(meshlib_rank=f"{world.rank}.{which}"):
                started[which] = {float(calls[which]()) for _ in range(CALLS)}

        threads = [threading.Thread(target=run, args=(which,)) for which in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = {record.group for record in world.recorder.records()}
        return started, len(ids)

    for sums, groups in run_ranks(rank, 2):
        assert sums == [{2.0}, {2000.0}]
        assert groups == 2


def test_a_group_in_jit_is_one_threads():
    def rank():
        group, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1])
        program = summed(group)
        assert program(1.0) == 2

        # The program is compiled already: no trace would tell.
        (error,) = in_threads(lambda: float(program(1.0)))
        assert isinstance(error, RuntimeError), error
        assert "thread 'of-" in str(error)
        assert "group 'one in jit'" in str(error)
        assert "a group of its own" in str(error)

        # Nothing has happened, a group of its own will do, and what an ended thread had is free.
        assert in_threads(lambda: float(summed(other)(3.0))) == [6.0]
        return float(program(1.0)), float(summed(other)(1.0))

    assert run_ranks(rank, 2) == [(2, 2)] * 2


def test_after_a_failed_call_other_groups_go_on():
    def rank():
        broken = dist.new_group([0, 1], group_desc="broken")
        before = dist.new_group([0, 1])
        text = disagree(broken)
        assert "group 'broken in jit'" in text
        after = dist.new_group([0, 1], group_desc="broken")
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.block_until_ready(summed(broken)(1.0))
        # Outside of jit the same group goes on.
        return [float(summed(group)(1.0)) for group in (before, after)], broken.all_reduce(
            np.ones(1)
        )[0]

    assert run_ranks(rank, 2) == [([2, 2], 2)] * 2


def test_a_mesh_made_again_after_a_failed_call_is_whole_inside_of_jit():
    def rank():
        first = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        disagree(first["dp"])
        again = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        total = float(summed(again["dp"])(1.0))
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.block_until_ready(summed(first["dp"])(1.0))
        return total, first.all_reduce(np.ones(1))[0], again.all_reduce(np.ones(1))[0]

    assert run_ranks(rank, 2) == [(2, 2, 2)] * 2


PROGRAM = (PROGRAMS / "several_devices.py").read_text()


def test_a_program_over_several_devices_is_told_what_to_do():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
