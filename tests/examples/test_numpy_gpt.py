"""A GPT of ``parallel.nn`` modules: the same losses on every mesh, within 1e-9 in float64.

After 20 steps on all meshes with ``make test-meshes``; after 7 on the main ones otherwise.
"""

import re

import numpy as np
import pytest
from numpy_gpt.config import Config

from meshlib.testing import RankError
from tests.examples.numpy_gpt_runs import EVERYTHING, name_of, run, some, write_config

pytestmark = pytest.mark.timeout(240)

MESHES = [
    {"dp_shard": 2},
    {"dp_shard": 4},
    {"dp_replicate": 2},
    {"dp_replicate": 4},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2},
    {"cp": 4},
    {"cp": 2, "tp": 2},
    {"dp_replicate": 2, "cp": 2},
    {"dp_shard": 2, "cp": 2},
    {"pp": 2, "cp": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
]
MAIN = [{"pp": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2}]
WITH_EXPERTS = [
    {"ep": 2},
    {"ep": 4},
    {"dp_replicate": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"pp": 2, "ep": 2},
    {"cp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 2},
]
MAIN_WITH_EXPERTS = [{"dp_shard": 2, "ep": 2}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    losses = {}

    def of(**settings):
        key = tuple(settings.items())
        if key not in losses:
            path = write_config(tmp_path_factory.mktemp("gpt"), **settings)
            losses[key] = path, run(path, {"dp_shard": 1})[0]
        return losses[key]

    return of


def check(reference, dims, **settings):
    path, expected = reference(**settings)
    assert expected[-1] < expected[0] - 0.5
    steps = len(expected) if EVERYTHING else 7
    for losses in run(path, dims, stop_after=steps):
        np.testing.assert_allclose(losses, expected[:steps], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dims", some(MESHES, MAIN))
def test_losses_are_those_of_one_process(dims, reference):
    check(reference, dims, layers=4 if dims.get("pp") == 4 else 2, microbatches=2)


@pytest.mark.parametrize("dims", some(WITH_EXPERTS, MAIN_WITH_EXPERTS))
def test_with_experts(dims, reference):
    check(reference, dims, experts=4, microbatches=2)


@pytest.mark.parametrize("experts", [0, 2] if EVERYTHING else [2])
def test_tensor_parallel_without_sequence_parallel(experts, reference):
    check(reference, {"tp": 2}, experts=experts, sequence="false", microbatches=2)


ALL_TO_ALL = [{"cp": 2}, {"cp": 4}, {"dp_shard": 2, "cp": 2}, {"pp": 2, "cp": 2, "tp": 2}]


@pytest.mark.parametrize("dims", some(ALL_TO_ALL, [{"cp": 2}]))
def test_context_parallel_over_heads(dims, reference):
    check(reference, dims, attention='"all_to_all"', microbatches=2)


SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Eager1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES if EVERYTHING else ["ZBVZeroBubble"])
def test_schedules(schedule, reference, tmp_path):
    settings = {"layers": 4, "microbatches": 4, "experts": 2}
    _, expected = reference(**settings)
    path = write_config(
        tmp_path, pipeline=f'"{schedule}"', stages_per_rank=SCHEDULES[schedule], **settings
    )
    for losses in run(path, {"pp": 2, "dp_shard": 2}, stop_after=5):
        np.testing.assert_allclose(losses, expected[:5], rtol=0, atol=1e-9)


CHANGES = [
    ({"tp": 2, "ep": 2}, {"pp": 2, "dp_shard": 2}),
    ({"dp_shard": 2, "ep": 2}, {"ep": 4}),
    ({"ep": 2}, {"dp_shard": 2, "tp": 2}),
    ({"pp": 2}, {"dp_replicate": 2, "ep": 2}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES if EVERYTHING else CHANGES[:1], ids=name_of)
def test_a_run_goes_on_over_another_mesh(before, after, reference, tmp_path):
    _, expected = reference(experts=4, microbatches=2)
    path = write_config(tmp_path, experts=4, microbatches=2, every=3)
    run(path, before, folder=str(tmp_path / "run"), stop_after=3)
    for losses in run(path, after, folder=str(tmp_path / "run"), stop_after=7):
        np.testing.assert_allclose(losses, expected[:7], rtol=0, atol=1e-9)


BAD = [
    ({"dp": 2}, {}, "the mesh has dim 'dp'; expected some of pp, dp_replicate, dp_shard, cp"),
    ({"pp": 3}, {}, "[model] layers is 2, fewer than the 3 stages of pp"),
    ({"dp_shard": 3}, {}, "[data] batch_size is 8, which does not divide by 3"),
    ({"dp_shard": 4}, {"microbatches": 4}, "[data] batch_size is 8, which does not divide by 16"),
    ({"tp": 3}, {}, "[model] vocabulary is 128, which does not divide by 3 (ranks of tp)"),
    ({"tp": 2}, {"kv_heads": 1}, "[model] kv_heads is 1, which does not divide by 2 (ranks of tp)"),
    ({"cp": 3}, {}, "[model] context is 16, which does not divide by 6"),
    (
        {"cp": 2, "tp": 2},
        {"kv_heads": 2, "attention": '"all_to_all"'},
        "[model] kv_heads is 2, which does not divide by 4 (ranks of tp × cp)",
    ),
    ({"ep": 2}, {}, "[model] experts is 0, and the mesh has ep = 2; expected some"),
    ({"ep": 2}, {"experts": 3}, "[model] experts is 3, which does not divide by 2 (ranks of ep)"),
    ({"pp": 2}, {"stages_per_rank": 2}, "[model] layers is 2, fewer than the 4 stages of pp"),
    (
        {"pp": 2},
        {"pipeline": '"2F2B"'},
        "[parallel] pipeline is '2F2B', with pp = 2: schedule_name",
    ),
    ({"pp": 2}, {"pipeline": '"ZBVZeroBubble"'}, "ZB-V has two stages a rank, got 1"),
    ({"pp": 2}, {"heads": 3}, "[model] width is 8, which does not divide by 3 (heads)"),
    ({"pp": 2}, {"dtype": '"float16"'}, "[precision] dtype is 'float16', expected 'float32' or"),
    ({"pp": 2}, {"experts": 2, "top_k": 3}, "[model] top_k is 3, of 2 experts"),
]


@pytest.mark.parametrize(("dims", "settings", "message"), BAD)
def test_what_does_not_fit_is_named_before_anything_is_sent(dims, settings, message, tmp_path):
    path = write_config(tmp_path, **settings)
    with pytest.raises((ValueError, RankError), match=re.escape(message)):
        run(path, dims)


def test_a_config_is_checked_without_ranks(tmp_path):
    path = write_config(tmp_path, heads=3)
    with pytest.raises(ValueError, match=r"gpt.toml: \[model\] width is 8, which does not divide"):
        Config(path)
