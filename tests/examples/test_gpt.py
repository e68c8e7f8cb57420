"""The GPT example: the same losses on every mesh."""

import numpy as np
import pytest
from gpt_runs import name_of, run, write_config

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
    {"pp": 2, "dp_shard": 2, "tp": 2},
]
WITH_EXPERTS = [
    {"ep": 2},
    {"ep": 4},
    {"dp_replicate": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"pp": 2, "ep": 2},
]


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
    for losses in run(path, dims):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dims", MESHES, ids=name_of)
def test_losses_are_those_of_one_process(dims, reference):
    check(reference, dims, layers=4, microbatches=2)


@pytest.mark.parametrize("dims", WITH_EXPERTS, ids=name_of)
def test_with_experts(dims, reference):
    check(reference, dims, experts=4, microbatches=2)


@pytest.mark.parametrize("sequence", ["true", "false"])
@pytest.mark.parametrize("experts", [0, 2])
def test_tensor_parallel_with_and_without_sequence_parallel(experts, sequence, reference):
    settings = {"experts": experts, "sequence": sequence, "microbatches": 2}
    check(reference, {"tp": 2}, **settings)


SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, reference, tmp_path):
    settings = {"layers": 4, "microbatches": 4, "experts": 2}
    _, expected = reference(**settings)
    path = write_config(
        tmp_path, pipeline=f'"{schedule}"', stages_per_rank=SCHEDULES[schedule], **settings
    )
    for losses in run(path, {"pp": 2, "dp_shard": 2}, stop_after=6):
        np.testing.assert_allclose(losses, expected[:6], rtol=0, atol=1e-9)


CHANGES = [
    ({"dp_shard": 2, "ep": 2}, {"ep": 4}),
    ({"ep": 2}, {"dp_shard": 2}),
    ({"pp": 2}, {"dp_shard": 2, "tp": 2}),
    ({"tp": 2, "ep": 2}, {"pp": 2, "dp_replicate": 2}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=name_of)
def test_a_run_goes_on_over_another_mesh(before, after, reference, tmp_path):
    path, expected = reference(experts=4, microbatches=2)
    run(path, before, folder=str(tmp_path / "run"), stop_after=10)
    for losses in run(path, after, folder=str(tmp_path / "run")):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
