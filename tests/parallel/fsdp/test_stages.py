"""ZeRO's stages: one loop, the same result, and what each costs."""

import pytest
from fsdp_training import MODELS, assert_equal, make_mlp, mlp_batch, on_mesh, train, whole

import meshlib as dist
from meshlib import extend
from parallel import DistributedDataParallel, optim, zero_redundancy


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_all_stages_train_as_one_process(stage, name):
    make, batches = MODELS[name]
    expected = make()
    train(expected, batches)

    def program(mesh):
        model, optimizer = zero_redundancy(make(), optim.AdamW, mesh, stage=stage, lr=0.01)
        train(model, batches, dist.get_rank(), 2, optimizer=optimizer)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        states = getattr(optimizer, "local_optimizer", optimizer).state
        moments = sum(values["exp_avg"].size for values in states.values())
        return moments, whole(inner.state_dict())

    results = on_mesh(program, 2)
    for _, got in results:
        assert_equal(got, expected.state_dict())
    total = sum(p.size for p in expected.parameters())
    assert sum(moments for moments, _ in results) == (total if stage else 2 * total)


def test_calls_of_the_stages():
    """What ranks ask each other for in a step; the bytes of each call are counted elsewhere."""

    def program(mesh):
        counts = {}
        for stage in (0, 1, 2, 3):
            model, optimizer = zero_redundancy(make_mlp(), optim.SGD, mesh, stage=stage)
            train(model, mlp_batch, dist.get_rank(), 2, optimizer=optimizer, steps=2)
            seen = counts[stage] = {}

            def observe(group, header, device, run, seen=seen):
                seen[header.kind.name] = seen.get(header.kind.name, 0) + header.elements
                return run

            with extend.observe(mesh.process_group, observe):
                train(model, mlp_batch, dist.get_rank(), 2, optimizer=optimizer, steps=1)
        return counts

    total = sum(p.size for p in make_mlp().parameters())
    for counts in on_mesh(program, 2):
        assert counts == {
            0: {"ALL_REDUCE": total},
            1: {"ALL_REDUCE": total, "ALL_GATHER": total},
            2: {"ALL_GATHER": total, "REDUCE_SCATTER": total},
            3: {"ALL_GATHER": 2 * total, "REDUCE_SCATTER": total},
        }


def test_bad_stages():
    def program(mesh):
        for stage in (4, True, "3"):
            with pytest.raises(ValueError, match=r"rank \d: stage must be 0, 1, 2 or 3, got"):
                zero_redundancy(make_mlp(), optim.SGD, mesh, stage=stage)
        with pytest.raises(ValueError, match=r"rank \d: layers is \[\], which stage 1 has no use"):
            zero_redundancy(make_mlp(), optim.SGD, mesh, stage=1, layers=[])

    on_mesh(program, 2)


@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_stage_of_one_rank_is_told_to_all(others):
    def program(mesh):
        stage = others if dist.get_rank() else 4
        with pytest.raises(ValueError, match="rank 0: stage must be 0, 1, 2 or 3, got 4"):
            zero_redundancy(make_mlp(), optim.SGD, mesh, stage=stage, lr=0.1)
        stage = others if dist.get_rank() else (3 if others < 2 else 0)
        with pytest.raises(ValueError, match="not the same on all ranks"):
            zero_redundancy(make_mlp(), optim.SGD, mesh, stage=stage, lr=0.1)

    on_mesh(program, 2)
