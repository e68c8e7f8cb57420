"""Plans: a GPT split by one learns what the whole one learns, and wrong plans are refused."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.sharding import Partial, Replicate, Shard
from meshlib.testing import run_ranks
from parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    Module,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    VocabParallelCrossEntropyLoss,
    fully_shard,
    nn,
    parallelize,
)
from parallel.state import global_state
from tests.support.parallel.small_gpt import (
    BATCH,
    GPT,
    LENGTH,
    WIDTH,
    assert_close,
    sequence_parallel_plan,
    tensor_parallel_plan,
    train,
)

PLANS = {"sequence": sequence_parallel_plan, "tensor": tensor_parallel_plan}


@pytest.fixture(scope="module")
def alone():
    results = {}
    for tied in (False, True):
        model = GPT(tied=tied)
        results[tied] = train(model), model.state_dict()
    return results


def whole_state(model):
    return {
        path: x.full_array() if isinstance(x, dist.DArray) else x
        for path, x in global_state(model)["model"].items()
    }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("n", "tied"), [(2, True), (4, False)])
def test_training_equals_one_process(plan, n, tied, alone):
    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        model = parallelize(GPT(tied=tied), mesh["tp"], PLANS[plan]())
        losses = train(model, VocabParallelCrossEntropyLoss(mesh["tp"]))
        return losses, whole_state(model)

    losses, expected = alone[tied]
    for got, state in run_ranks(program, n):
        np.testing.assert_allclose(got, losses, rtol=0, atol=1e-9)
        assert_close(state, expected)


@pytest.mark.parametrize("sharded", [True, False])
def test_with_data_parallel_on_another_dim(sharded, alone):
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(GPT(), mesh["tp"], sequence_parallel_plan())
        if sharded:
            wrapped = fully_shard(model, mesh["dp"])
        else:
            wrapped = DistributedDataParallel(model, mesh["dp"])
        own = slice(mesh.get_local_rank("dp"), None, 2)
        losses = train(wrapped, VocabParallelCrossEntropyLoss(mesh["tp"]), lambda x: x[own])
        return mesh["dp"].all_reduce(np.array(losses), op=dist.ReduceOp.AVG), whole_state(model)

    losses, expected = alone[False]
    for got, state in run_ranks(program, 4):
        np.testing.assert_allclose(got, losses, rtol=0, atol=1e-9)
        assert_close(state, expected)


def test_what_is_whole_has_the_same_bits_on_all_ranks():
    def program():
        model = parallelize(GPT(dtype="f4"), None, sequence_parallel_plan())
        train(model, VocabParallelCrossEntropyLoss(), steps=3)
        whole = [path for path, p in model.named_parameters() if p.on_contribution]
        assert len(whole) == 2 * 3 + 1
        parameters = dict(model.named_parameters())
        return b"".join(parameters[path].data.tobytes() for path in whole)

    assert len(set(run_ranks(program, 2))) == 1


def test_gradients_accumulate_over_microbatches():
    """Only the contributions are summed over the ranks, not the earlier gradient."""

    def gradients(model, loss):
        for step in range(3):
            tokens = np.random.default_rng(step).integers(0, 24, (1, 5))
            loss(model(tokens[:, :-1]), tokens[:, 1:])
            model.backward(loss.backward())
        return {path: p.grad for path, p in model.named_parameters()}

    expected = gradients(GPT(), nn.CrossEntropyLoss())

    def program():
        model = parallelize(GPT(), None, sequence_parallel_plan())
        return gradients(model, VocabParallelCrossEntropyLoss())

    for got in run_ranks(program, 2):
        for path in ("norm.weight", "blocks.0.mlp_norm.bias", "blocks.1.down.bias"):
            np.testing.assert_allclose(got[path], expected[path], atol=1e-12, err_msg=path)


@pytest.mark.parametrize("plan", PLANS)
def test_calls_and_bytes_of_a_step(plan):
    """Sequence parallel moves as much as tensor parallel, except for three gathers of inputs
    again."""

    def program():
        model = parallelize(GPT(blocks=2), None, PLANS[plan]())
        with dist.profile() as profile:
            train(model, VocabParallelCrossEntropyLoss(), steps=1)
        return {row.kind: (row.calls, row.nbytes) for row in profile.summaries()}

    activations = BATCH * LENGTH * WIDTH * 8
    samples, norms = BATCH * LENGTH * 8, (2 * 3 + 1) * WIDTH * 8
    if plan == "tensor":  # a block: 2 forward, 2 backward; the embedding; the head
        expected = {"all_reduce": (4 * 2 + 2 + 2, (4 * 2 + 2) * activations + 3 * samples)}
    else:
        expected = {
            "all_reduce": (2 + 7, 3 * samples + norms),
            "reduce_scatter": (4 * 2 + 2, (4 * 2 + 2) * activations),
            "all_gather": (5 * 2 + 3, (5 * 2 + 3) * activations),
        }
    assert run_ranks(program, 2) == [expected] * 2


class Twice(Module):
    """What it is given and that again, each rank's in another part: for outputs of all kinds."""

    def forward(self, x, y):
        return x, y * 2

    def backward(self, x, y):
        return x, y * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_and_inputs_are_laid_out_anew(dim):
    """Each crossing is the transpose of what it is forward, counted over all ranks."""
    whole = np.random.default_rng(0).normal(size=(4, 6))
    parts = np.split(whole, 2, axis=dim)
    plans = {
        "gather": (Shard(dim), Replicate()),
        "split": (Replicate(), Shard(dim)),
        "reduce": (Partial(), Replicate()),
        "scatter": (Partial(), Shard(dim)),
    }

    def program():
        own, results = parts[dist.get_rank()], {}
        for name, (given, wanted) in plans.items():
            plan = {"": PrepareModuleOutput((None, given), (None, wanted))}
            model = parallelize(Twice(), None, plan)
            kept, out = model(own, own if name == "gather" else whole)
            back = model.backward(kept, out)
            assert kept is own
            assert back[0] is own
            results[name] = out, back[1]
        plan = {"": PrepareModuleInput((Replicate(), None), (Shard(dim), None))}
        model = parallelize(Twice(), None, plan)
        first, _ = model(whole, own)
        results["in"] = first, model.backward(first, own)[0]
        return results

    for rank, results in enumerate(run_ranks(program, 2)):
        own = parts[rank]
        wanted = {
            "gather": (whole * 2, own * 4),
            "split": (own * 2, whole * 4),
            "reduce": (whole * 4, whole * 8),
            "scatter": (own * 4, whole * 8),
            "in": (own, whole),
        }
        for name, pair in wanted.items():
            for got, expected in zip(results[name], pair, strict=True):
                np.testing.assert_allclose(got, expected, atol=1e-14, err_msg=name)


def refused(plan, error, match, n=2, model=GPT):
    """The error comes on each rank, before anything is changed or sent."""

    def program():
        made = model()
        before = {path: (p, p.data) for path, p in made.named_parameters()}
        with pytest.raises(error, match=match):
            parallelize(made, None, plan)
        for path, parameter in made.named_parameters():
            assert before[path][0] is parameter
            assert before[path][1] is parameter.data
        assert not [type(part) for part in made.modules() if "Parallel" in type(part).__name__]

    run_ranks(program, n)


def test_wrong_plans_are_refused_before_anything_happens():
    plan = tensor_parallel_plan()
    refused(
        {"head": ColwiseParallel(), "blocks.*.atention": SequenceParallel()},
        ValueError,
        r"'blocks\.\*\.atention', which no module has; similar names: 'blocks\.",
    )
    refused(
        {"blocks.*.up": ColwiseParallel(), "blocks.0.*": SequenceParallel()},
        ValueError,
        r"both 'blocks\.\*\.up' and 'blocks\.0\.\*' of plan match 'blocks.0.up'",
    )
    refused(
        {"norm": ColwiseParallel()}, TypeError, "splits an nn.Linear; 'norm' is of type RMSNorm"
    )
    refused({**plan, "head": 3}, TypeError, r"plan\['head'\] must be a ParallelStyle")
    refused([plan], TypeError, "plan must be a dict")
    refused(plan, ValueError, "num_embeddings of 'embedding' is 24, which is not divisible by", 5)
    tied = {"embedding": RowwiseParallel(), "head": RowwiseParallel()}

    def program():
        with pytest.raises(ValueError, match="along dim 0, another along dim 1; expected the same"):
            parallelize(GPT(tied=True), None, tied)
        model = parallelize(GPT(), None, plan)
        with pytest.raises(TypeError, match="'head' is of type ColumnParallelLinear"):
            parallelize(model, None, {"head": ColwiseParallel()})
        with pytest.raises(ValueError, match=r"'blocks\.0\.attention' is prepared by"):
            parallelize(model, None, {"blocks.0.attention": PrepareModuleInput(None, None)})

    run_ranks(program, 2)


def test_wrong_layouts_are_refused_where_the_style_is_made():
    with pytest.raises(TypeError, match=r"input_layouts must be Replicate\(\) or Shard\(dim\)"):
        ColwiseParallel(input_layouts=Partial())
    with pytest.raises(TypeError, match=r"output_layouts must be Replicate\(\), or None"):
        ColwiseParallel(output_layouts=Shard(1))
    with pytest.raises(ValueError, match=r"Shard\(dim=1\) cannot become .*Shard\(dim=0\)"):
        PrepareModuleInput(Shard(1), Shard(0))
    with pytest.raises(ValueError, match="output_layouts has 1 entries, desired_output_layouts 2"):
        PrepareModuleOutput(Shard(1), (Replicate(), None))
    with pytest.raises(ValueError, match="expected None in both"):
        PrepareModuleInput((Shard(1), None), (Replicate(), Replicate()))


def test_a_sequence_that_does_not_divide_is_named_before_a_byte_moves():
    def program():
        model = parallelize(GPT(), None, sequence_parallel_plan())
        with pytest.raises(ValueError, match=r"dim 1 of .* \[1, 5, 16\] is 5, which is not div"):
            model(np.zeros((1, 5), int))

    run_ranks(program, 2)
