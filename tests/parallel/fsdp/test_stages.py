"""ZeRO's stages: one loop, the same result, and what each costs."""

import pytest

import meshlib as dist
from meshlib import extend
from parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard, optim
from tests.support.parallel.fsdp_training import (
    MODELS,
    assert_equal,
    make_mlp,
    mlp_batch,
    on_mesh,
    train,
    whole,
)


def at_stage(stage, module, kind, mesh, **defaults):
    """Return the model and the optimizer of a stage, as docs/parallelism/fsdp.md has them."""
    if stage < 2:
        model = DistributedDataParallel(module, mesh)
        if stage == 1:
            return model, ZeroRedundancyOptimizer(module.parameters(), kind, mesh, **defaults)
        return model, kind(module.parameters(), **defaults)
    for _, child in module.named_children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh, reshard_after_forward=stage == 3)
    # With stage 3 the outermost one's stay, as its backward comes at once.
    fully_shard(module, mesh, reshard_after_forward=None if stage == 3 else False)
    return module, kind(module.parameters(), **defaults)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_all_stages_train_as_one_process(stage, name):
    make, batches = MODELS[name]
    expected = make()
    train(expected, batches)

    def program(mesh):
        model, optimizer = at_stage(stage, make(), optim.AdamW, mesh, lr=0.01)
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
    """The calls of a step; other tests count the bytes of each call."""

    def program(mesh):
        counts = {}
        for stage in (0, 1, 2, 3):
            model, optimizer = at_stage(stage, make_mlp(), optim.SGD, mesh)
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
