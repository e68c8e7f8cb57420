"""The GPT example in JAX: the same losses on every mesh, within 1e-9 in float64.

After 20 steps on all meshes with ``make test-meshes``; after 5 on the main ones otherwise.
"""

import re
from itertools import combinations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from gpt_config import Config  # noqa: E402

from meshlib.testing import RankError  # noqa: E402
from tests.examples.gpt_runs import EVERYTHING, name_of, run, some, write_config  # noqa: E402

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("double_precision")]

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
ALONE = [{name: 2} for name in NAMES]
PAIRS = [dict.fromkeys(pair, 2) for pair in combinations(NAMES, 2)]
MORE = [
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
]
MAIN = [{"tp": 2}, {"pp": 2}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    losses = {}

    def of(**settings):
        key = tuple(settings.items())
        if key not in losses:
            path = write_config(tmp_path_factory.mktemp("gpt"), **settings)
            losses[key] = path, run(path, {"dp_shard": 1}, 20 if EVERYTHING else 5)[0]
        return losses[key]

    return of


def check(reference, dims, **settings):
    path, expected = reference(**settings)
    assert expected[-1] < expected[0] - 0.1
    for losses in run(path, dims, len(expected)):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dims", some([d for d in ALONE + PAIRS + MORE if "ep" not in d], MAIN))
def test_losses_are_those_of_one_process(dims, reference):
    check(reference, dims, microbatches=2)


WITH_EXPERTS = [d for d in ALONE + PAIRS if "ep" in d]


@pytest.mark.parametrize("dims", some(WITH_EXPERTS, [{"ep": 2}]))
def test_with_experts(dims, reference):
    check(reference, dims, experts=4, microbatches=2)


@pytest.mark.skipif(not EVERYTHING, reason="minutes: make test-meshes")
@pytest.mark.parametrize("experts", [0, 2])
def test_tensor_parallel_without_sequence_parallel(experts, reference):
    check(reference, {"tp": 2}, experts=experts, sequence="false", microbatches=2)


@pytest.mark.skipif(not EVERYTHING, reason="minutes: make test-meshes")
@pytest.mark.parametrize("dims", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=name_of)
def test_context_parallel_over_heads(dims, reference):
    check(reference, dims, attention='"all_to_all"', microbatches=2)


SCHEDULES = {
    "GPipe": 1,
    "Eager1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@pytest.mark.skipif(not EVERYTHING, reason="minutes: make test-meshes")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, reference, tmp_path):
    settings = {"layers": 4, "microbatches": 4, "experts": 2}
    _, expected = reference(**settings)
    path = write_config(
        tmp_path, pipeline=f'"{schedule}"', stages_per_rank=SCHEDULES[schedule], **settings
    )
    for losses in run(path, {"pp": 2, "dp_shard": 2}, 5):
        np.testing.assert_allclose(losses, expected[:5], rtol=0, atol=1e-9)


CHANGES = [
    ({"tp": 2}, {"dp_shard": 2}),
    ({"pp": 2}, {"ep": 2}),
    ({"tp": 2, "ep": 2}, {"pp": 2, "dp_shard": 2}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES if EVERYTHING else CHANGES[:1], ids=name_of)
def test_a_run_goes_on_over_another_mesh(before, after, reference, tmp_path):
    path, expected = reference(experts=4, microbatches=2)
    run(path, before, 2, tmp_path / "run")
    for losses in run(path, after, 5, tmp_path / "run"):
        np.testing.assert_allclose(losses, expected[2:5], rtol=0, atol=1e-9)


BAD = [
    ({"dp": 2}, {}, "the mesh has dim 'dp'; expected some of pp, dp_replicate, dp_shard, cp"),
    ({"pp": 3}, {}, "[model] layers is 2, fewer than the 3 stages of pp"),
    ({"dp_shard": 3}, {}, "[data] batch_size is 8, which is not divisible by 3"),
    ({"tp": 3}, {}, "[model] vocabulary is 128, which is not divisible by 3 (ranks of tp)"),
    (
        {"tp": 2},
        {"kv_heads": 1},
        "[model] kv_heads is 1, which is not divisible by 2 (ranks of tp)",
    ),
    ({"cp": 3}, {}, "[model] context is 16, which is not divisible by 6"),
    (
        {"cp": 2, "tp": 2},
        {"kv_heads": 2, "attention": '"all_to_all"'},
        "[model] kv_heads is 2, which is not divisible by 4 (ranks of tp × cp)",
    ),
    ({"ep": 2}, {}, "[model] experts is 0, and the mesh has ep = 2; expected some"),
    ({"ep": 2}, {"experts": 3}, "[model] experts is 3, which is not divisible by 2 (ranks of ep)"),
    (
        {"pp": 2},
        {"pipeline": '"2F2B"'},
        "[parallel] pipeline is '2F2B', with pp = 2: schedule_name",
    ),
]


@pytest.mark.parametrize(("dims", "settings", "message"), BAD)
def test_what_does_not_fit_is_named_before_anything_is_sent(dims, settings, message, tmp_path):
    path = write_config(tmp_path, **settings)
    with pytest.raises((ValueError, RankError), match=re.escape(message)):
        run(path, dims, 1)


WRONG = [
    ({"heads": 3}, "[model] width is 8, which is not divisible by 3 (heads)"),
    ({"dtype": '"float16"'}, "[run] dtype is 'float16', expected 'float32' or 'float64'"),
    ({"experts": 2, "top_k": 3}, "[model] top_k is 3, of 2 experts"),
    ({"steps": 1.5}, "[run] steps is 1.5, expected a value of type int"),
    ({"every": -1}, "[run] every is -1, expected 0 or more"),
    ({"keep": '2\nkept = "no"'}, "[run] kept: expected one of steps, warmup, final"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_config_is_checked_without_ranks(settings, message, tmp_path):
    path = write_config(tmp_path, **settings)
    with pytest.raises(ValueError, match=re.escape(f"gpt.toml: {message}")):
        Config(path)
