"""What ``meshlib explain`` says a run will take, beside what it takes."""

import numpy as np
import pytest
from numpy_gpt.config import Config
from numpy_gpt.dims import Sizes
from numpy_gpt.estimate import Estimate, explain
from numpy_gpt.trainer import Trainer

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._mesh.config import MeshConfig
from meshlib.testing import run_ranks
from tests.examples.numpy_gpt_runs import EVERYTHING, FOLDER, some, write_config
from tests.support.transport.counting import Count, counting
from transport._choosing.choice import DEFAULT
from transport._communicators import backends

sent = {}


class Sent(Count):
    """Adds up in ``sent`` what a rank sends over the group of some ranks."""

    def __init__(self, ranks, rank):
        super().__init__()
        self.key = ranks, ranks[rank]

    def add(self, nbytes):
        sent[self.key] = sent.get(self.key, 0) + nbytes


@pytest.fixture(scope="session")
def counted():
    def make(membership):
        ranks = membership.ranks
        return counting(lambda rank, peer: Sent(ranks, rank))(membership, DEFAULT)

    backends.register("counted-gpt", make, ["cpu"])
    return "counted-gpt"


def arrays_in(value, found):
    """Add to ``found`` the memory of all arrays in what modules have saved."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        found[id(value)] = value.nbytes
    elif isinstance(value, dict):
        for one in value.values():
            arrays_in(one, found)
    elif isinstance(value, list | tuple):
        for one in value:
            arrays_in(one, found)
    elif hasattr(value, "rows"):  # a plan of a dispatch
        arrays_in(list(vars(value).values()), found)


def watch(trainer):
    """Return what becomes the most bytes that the stages keep between forward and backward."""
    most = [0]
    for stage in trainer.stages:

        def forward(*args, stage=stage, inner=stage.forward):
            result = inner(*args)
            found = {}
            for one in trainer.stages:
                arrays_in(list(one._contexts.values()), found)
            most[0] = max(most[0], sum(found.values()))
            return result

        stage.forward = forward
    return most


def groups_of(dims):
    """Return the ranks that an estimate calls so."""
    return {
        "pp": dims.pp,
        "dp_shard": dims.dp_shard,
        "tp": dims.tp,
        "ep": dims.ep,
        "cp": dims.cp,
        "copies": dims.dense[0],
        "tokens": dims.tokens,
    }


pytestmark = pytest.mark.timeout(240)

MESHES = [
    {"dp_shard": 2},
    {"tp": 2},
    {"pp": 2},
    {"ep": 2},
    {"cp": 2},
    {"cp": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "ep": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
]


MAIN = [{"pp": 2, "dp_shard": 2, "tp": 2}, {"ep": 2}, {"cp": 2}]


@pytest.mark.parametrize("dims", some(MESHES, MAIN))
@pytest.mark.parametrize("sequence", ["true", "false"] if EVERYTHING else ["true"])
def test_estimate(dims, sequence, tmp_path, counted):
    path = write_config(
        tmp_path,
        width=32,
        hidden=64,
        context=32,
        experts=4 if "ep" in dims else 0,
        expert_hidden=32,
        shared_hidden=32,
        batch_size=16,
        microbatches=2,
        sequence=sequence,
    )
    config = Config(path)
    sent.clear()

    def program():
        mesh = dist.init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        trainer = Trainer(config, mesh)
        most = watch(trainer)
        trainer.step(0)
        dist.barrier()
        if dist.get_rank() == 0:
            sent.clear()
        dist.barrier()
        recorder = call_queue_of(trainer.dims.pp.process_group).context.recorder
        records = recorder.follow()
        trainer.step(1)
        recorder.unfollow(records)
        dist.barrier()
        over = {}
        calls = {}
        for name, along in groups_of(trainer.dims).items():
            group = along.process_group
            if group.size() > 1:
                mine = [r for r in records if r.group == group.id and r.kind != "recv"]
                calls.setdefault(group.ranks, {})[name] = len(mine)
                messages = sum(r.nbytes for r in mine if r.kind == "send")
                links = sent.get((group.ranks, dist.get_rank()), 0)
                over.setdefault(group.ranks, [links + messages, []])[1].append(name)
        dist.barrier()
        values = [p.data.nbytes for p in trainer.model.parameters()]
        grads = [p.grad.nbytes for p in trainer.model.parameters()]
        states = [
            array.nbytes
            for state in trainer.optimizer.state.values()
            for array in state.values()
            if isinstance(array, np.ndarray)
        ]
        memory = {
            "parameters": sum(values),
            "gradients": sum(grads),
            "optimizer": sum(states),
            "activations": most[0],
        }
        return trainer.dims.pp.get_local_rank(), over, calls, memory

    ranks = int(np.prod(list(dims.values())))
    for place, over, calls, memory in run_ranks(program, ranks, backend=counted, timeout=200):
        estimate = Estimate(config, Sizes.of(dims), place)
        for name, value in memory.items():
            assert value == pytest.approx(estimate.memory[name], rel=0.1), name
        for value, names in over.values():  # of dims that are the same ranks together
            expected = sum(estimate.traffic.bytes[name] for name in names)
            assert value == pytest.approx(expected, rel=0.1, abs=500), names
        for ranks_of, counted_calls in calls.items():
            expected = sum(estimate.traffic.calls[name] for name in counted_calls)
            # Besides, some numbers: the loss, and the norm of the gradients.
            assert expected <= next(iter(counted_calls.values())) <= expected + 3, ranks_of


def test_the_page_shows_what_is_printed():
    mesh = MeshConfig.from_string("pp=2,dp_shard=2,tp=2").mesh_for(8)
    page = (FOLDER.parents[2] / "docs" / "which-dim.md").read_text()
    assert f"```text\n{explain(FOLDER / 'gpt.toml', mesh)}```" in page
