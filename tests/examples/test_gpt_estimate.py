"""``meshlib explain estimate``: the step of one rank alone is that rank's step in a real run."""

import re
import runpy

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from gpt_runs import EXAMPLE, write_config  # noqa: E402

from meshlib import _cli as cli  # noqa: E402
from meshlib import init_device_mesh  # noqa: E402
from meshlib._explain.estimate import estimate  # noqa: E402
from meshlib.testing import run_ranks  # noqa: E402

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("double_precision")]


def test_calls_and_what_is_held_are_those_of_a_real_run(tmp_path, capsys):
    path = write_config(tmp_path, layers=1, width=32, hidden=64, microbatches=2)
    make_step = runpy.run_path(str(EXAMPLE))["make_step"]

    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        return estimate(make_step, path, mesh)

    real = run_ranks(program, 4, timeout=200)[3]
    assert {row.over for row in real.calls} == {"dp_shard", "tp"}
    assert cli.main(["explain", "estimate", str(EXAMPLE), str(path), "--rank", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.partition("calls of a step")[2] == str(real).partition("calls of a step")[2]
    for name in ("parameters", "gradients", "optimizer"):
        assert re.search(rf"^  {name} +{real.memory[name] / 1e6:.3f}$", shown, re.MULTILINE)


def test_a_later_stage_of_a_pipeline_says_that_it_cannot(tmp_path, capsys):
    path = write_config(tmp_path)
    given = ["explain", "estimate", str(EXAMPLE), str(path), "--over", "pp=2", "--rank", "1"]
    assert cli.main(given) == 2
    assert "stage 1 needs its inputs' shapes from stage 0" in capsys.readouterr().err
