"""Wrong arguments of the package's public face: the error names them, and what was expected."""

import numpy as np
import pytest

from meshlib.testing import run_ranks
from parallel import (
    DistributedBatchSampler,
    DistributedDataParallel,
    DistributedSampler,
    Join,
    LengthGroupedSampler,
    MixedPrecision,
    WeightedDistributedSampler,
    ZeroRedundancyOptax,
    ZeroRedundancyOptimizer,
    averaging,
    comm_hooks,
    nn,
    optim,
    samplers,
)


def rng():
    return np.random.default_rng(0)


def linear(**options):
    return nn.Linear(4, 4, rng=rng(), **options)


def parameters():
    return linear().parameters()


def sgd(**options):
    return optim.SGD(parameters(), **options)


def adam(**options):
    return optim.Adam(parameters(), **options)


def load(state):
    sgd().load_state_dict({**sgd().state_dict(), **state})


def sampler(num_replicas=2, rank=0):
    return DistributedSampler(range(4), num_replicas, rank)


X = np.ones((2, 4), "f4")

TYPES = [
    (lambda: nn.Linear("a", 4, rng=rng()), "in_features must be a whole number, got 'a'"),
    (lambda: nn.Linear(4, 4, rng=3), "rng must be a Generator, such as .* got 3 of type int"),
    (lambda: linear(dtype="x"), "dtype must be a dtype, such as 'float32', got 'x'"),
    (lambda: linear()(3), r"Linear expects an input of shape \(..., 4\), got 3 of type int"),
    (lambda: nn.Embedding(2.5, 3, rng=rng()), "num_embeddings must be a whole number, got 2.5"),
    (lambda: nn.Embedding(3, 3, rng=rng())([1]), r"indices must be an array, got \[1\]"),
    (lambda: nn.LayerNorm("x"), "features must be a whole number, got 'x'"),
    (lambda: nn.LayerNorm(4, eps="x"), "eps must be a number, got 'x'"),
    (lambda: nn.LayerNorm(4)(3), "LayerNorm expects an input of shape .* got 3 of type int"),
    (lambda: nn.Dropout("x", rng=rng()), "p must be a number, got 'x' of type str"),
    (lambda: nn.Dropout(0.5, rng=rng())(3), "x must be an array of one of numpy, cupy, got 3 of"),
    (lambda: nn.GELU()([1]), r"x must be an array of one of numpy, cupy, got \[1\] of type list"),
    (lambda: nn.Sequential(linear(), nn.ReLU), r"layers\[1\] must be a Module, got <class"),
    (lambda: nn.CrossEntropyLoss(label_smoothing="x"), "label_smoothing must be a number, got 'x'"),
    (lambda: nn.CrossEntropyLoss()(X, [0, 1]), r"targets must be an array, got \[0, 1\]"),
    (lambda: nn.ComputeIn(3, "float16"), "module must be a Module, got 3"),
    (lambda: nn.Parameter(3), "data must be an array of one of numpy, cupy, got 3 of type int"),
    (lambda: nn.Parameter(X).set_grad_home(3), "home must be an array, got 3"),
    (lambda: linear().load_state_dict(3), r"state must be the result of state_dict\(\), got 3"),
    (
        lambda: linear().load_state_dict({"weight": 3, "bias": X}),
        r"state\['weight'\] must be an array, got 3",
    ),
    (lambda: MixedPrecision("x"), "param_dtype must be a dtype, such as 'float32', got 'x'"),
    (lambda: optim.SGD(3), r"params must be a list of Parameters, .* got 3 of type int"),
    (lambda: optim.SGD([{"lr": 1}]), "params must contain Parameters, or dicts .* got {'lr': 1}"),
    (lambda: optim.SGD([{"params": 3}]), "params must be a list of Parameters, .* got 3"),
    (lambda: optim.SGD([{"params": [], "lr": "x"}]), "lr must be a number, got 'x' of type str"),
    (lambda: sgd(lr="x"), "lr must be a number, got 'x' of type str"),
    (lambda: sgd(lr=[0.1]), r"lr must be a number, got \[0.1\] of type list"),
    (lambda: sgd(lr=np.ones(2)), "lr must be a number, got array"),
    (lambda: adam(betas=3), r"betas must be two numbers, such as .* got 3 of type int"),
    (lambda: adam(betas=(0.9, "x")), r"betas\[1\] must be a number, got 'x'"),
    (lambda: sgd().load_state_dict(3), r"state must be the result of state_dict\(\), got 3"),
    (lambda: load({"state": 3}), r"state\['state'\] must be a Mapping, got 3"),
    (
        lambda: load({"param_groups": [3]}),
        r"state\['param_groups'\]\[0\] must be the result of .* got 3",
    ),
    (lambda: DistributedBatchSampler(3, 2), "sampler must be a DistributedSampler, got 3"),
    (lambda: sampler().state_dict("x"), "num_consumed must be a whole number, got 'x'"),
    (
        lambda: DistributedBatchSampler(sampler(), 1).state_dict("x"),
        "num_batches must be a whole number, got 'x'",
    ),
    (lambda: sampler().load_state_dict(3), r"state must be the result of .*, got 3 of type int"),
    (
        lambda: LengthGroupedSampler([1, "a"], 1, 1, 0),
        r"lengths must be a sequence of numbers, got \[1, 'a'\]",
    ),
    (
        lambda: WeightedDistributedSampler("x", None, 1, 0),
        "weights must be a sequence of numbers, got 'x' of type str",
    ),
    (
        lambda: WeightedDistributedSampler([1, 2], "x", 1, 0),
        "num_samples must be a whole number, got 'x'",
    ),
    (lambda: samplers.EpochIndices(3), "sampler must be a DistributedSampler, got 3"),
    (lambda: samplers.EpochIndices(sampler())["x"], "index must be a whole number, got 'x'"),
    (lambda: samplers.GrainSampler(sampler(), "x"), "batch_size must be a whole number, got 'x'"),
    (lambda: samplers.IndexBatches(3), "batches must be a DistributedBatchSampler, got 3"),
    (lambda: samplers.Permutation("x", 0), "size must be a whole number, got 'x'"),
    (lambda: samplers.Permutation(5, "x"), "key must be a whole number, got 'x'"),
    (lambda: samplers.Permutation(5, 0)[1.5], "position must be a whole number, got 1.5"),
    (lambda: Join(3), r"joinables must be a list, such as \[model\], got 3 of type int"),
    (lambda: Join([3]), r"joinables\[0\] must be a Joinable, got 3 of type int"),
    (lambda: ZeroRedundancyOptax(3), "transformation must be an optax.GradientTransformation.* 3"),
    (lambda: comm_hooks.fp16_compress_wrapper(3), "hook must be callable, got 3"),
    (
        lambda: comm_hooks.PowerSGDState(None, "x"),
        "matrix_approximation_rank must be a whole number, got 'x'",
    ),
    (
        lambda: comm_hooks.PostLocalSGDState(None, None, "x"),
        "start_localSGD_iter must be a whole number, got 'x'",
    ),
    (lambda: averaging.PeriodicModelAverager("x"), "period must be a whole number, got 'x'"),
    (
        lambda: averaging.HierarchicalModelAverager(3),
        "period_group_dict must be a Mapping, such as .* got 3",
    ),
    (lambda: averaging.PostLocalSGDOptimizer(sgd(), 3), "averager must be a ModelAverager, got 3"),
]

VALUES = [
    (lambda: linear(dtype="int8"), "dtype must be floating, got int8"),
    (lambda: nn.LayerNorm(4, eps=-1), "eps must be at least 0, got -1"),
    (
        lambda: nn.CrossEntropyLoss(label_smoothing=2),
        r"label_smoothing must be in .*1\], got 2",
    ),
    (lambda: optim.SGD([{"params": [], "lr": -1}]), "lr must be at least 0, got -1"),
    (lambda: adam(betas=(0.9, 1)), r"betas must both be in \[0, 1\), got \(0.9, 1\)"),
    (
        lambda: load({"state": {7: {}}}),
        r"state has parameters \[7\], but this optimizer only has 0 to 1",
    ),
    (lambda: sampler(0), "num_replicas must be at least 1, got 0"),
    (lambda: WeightedDistributedSampler([1, -1], 2, 1, 0), r"weights\[1\] being -1.0"),
    (
        lambda: WeightedDistributedSampler([1, 2], 0, 1, 0),
        "num_samples must be at least 1, got 0",
    ),
    (lambda: samplers.Permutation(0, 0), "size must be at least 1, got 0"),
]


def check(cases, error):
    for make, message in cases:
        with pytest.raises(error, match=message):
            make()


def test_of_another_type():
    check(TYPES, TypeError)


def test_out_of_range():
    check(VALUES, ValueError)


def test_states_that_lack_something():
    check(
        [
            (
                lambda: sgd().load_state_dict({}),
                r"state lacks \['state', 'param_groups'\], has \[\]; expected the result of",
            ),
            (
                lambda: load({"param_groups": [{}]}),
                r"state\['param_groups'\]\[0\] lacks \['params'\]",
            ),
        ],
        KeyError,
    )


def test_nothing_is_changed_by_a_state_that_does_not_fit():
    optimizer = sgd(lr=1.0)
    state = sgd(lr=2.0).state_dict()
    with pytest.raises(ValueError, match="state has parameters"):
        optimizer.load_state_dict({**state, "state": {7: {}}})
    assert optimizer.param_groups[0]["lr"] == 1


def test_numbers_of_all_kinds_are_taken():
    for lr in (1, 0.5, np.float32(0.5), np.array(0.5)):
        sgd(lr=lr)
    assert adam(betas=[0.8, 0.9]).param_groups[0]["betas"] == (0.8, 0.9)
    assert len(DistributedSampler(np.int64(6), np.int64(2), np.int64(1))) == 3


def test_among_ranks():
    def job():
        zero = ZeroRedundancyOptimizer(parameters(), optim.SGD, lr=0.1)
        types = [
            (
                lambda: ZeroRedundancyOptimizer(parameters(), lambda params: 5),
                r"optimizer_class must make an optimizer when called, .* which makes 5",
            ),
            (lambda: ZeroRedundancyOptimizer(parameters(), optim.SGD, lr="x"), "lr must be a num"),
            (lambda: zero.load_state_dict(3), r"state must be the result of state_dict\(\), got 3"),
            (lambda: zero.consolidate_state_dict("x"), "to must be a whole number, got 'x'"),
            (
                lambda: DistributedDataParallel(linear()).join(optimizer=3),
                r"optimizer must have state_dict\(\) and load_state_dict\(\), got 3",
            ),
            (
                lambda: comm_hooks.PowerSGDState().load_state_dict(3),
                "state must be the result of state_dict",
            ),
        ]
        check(types, TypeError)
        check(
            [
                (lambda: zero.consolidate_state_dict(2), r"to must be in \[0, 2\) or None, got 2"),
                (lambda: comm_hooks.PowerSGDState(random_seed=-1), "random_seed must be at least"),
            ],
            ValueError,
        )
        check(
            [
                (lambda: zero.owner(3), "the optimizer does not have the parameter 3"),
                (lambda: zero.load_state_dict({}), r"state lacks \['state', 'param_groups'\]"),
                (lambda: comm_hooks.PowerSGDState().load_state_dict({}), "state lacks"),
            ],
            KeyError,
        )

    run_ranks(job, 2)


def test_what_join_hook_returns_is_checked():
    class Hookless(ZeroRedundancyOptimizer):
        def join_hook(self, **kwargs):
            return None

    def job():
        optimizer = Hookless(parameters(), optim.SGD)
        with (
            pytest.raises(TypeError, match=r"the result of Hookless.join_hook must be a JoinHook"),
            Join([optimizer]),
        ):
            pass
        assert optimizer.join_context is None

    run_ranks(job, 2)
