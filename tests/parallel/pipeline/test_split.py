"""Cutting a model into stages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import nn
from parallel.pipeline import split, split_by_cost
from tests.support.parallel.pipeline_training import make_layers


def model():
    return nn.Sequential(*make_layers())


def test_by_names_with_the_paths_of_the_whole():
    whole = model()
    parts = split(whole, ["1.1", "4", "7"])
    paths = [[path for path, _ in part.named_children()] for part in parts]
    assert paths == [
        ["0", "1.0"],
        ["1.1", "2", "3.0", "3.1"],
        ["4.0", "4.1", "5", "6.0", "6.1"],
        ["7"],
    ]
    states = [part.state_dict() for part in parts]
    together = {path: value for state in states for path, value in state.items()}
    assert list(together) == list(whole.state_dict())
    assert all(value is together[path] for path, value in whole.state_dict().items())
    x = np.random.default_rng(0).normal(size=(3, 6))
    expected = whole.eval()(x)
    for part in parts:
        x = part(x)
    np.testing.assert_array_equal(x, expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_by_cost_is_the_best_there_is(costs, data):
    stages = data.draw(st.integers(1, len(costs)))

    def dearest(starts):
        ends = [*starts[1:], len(costs)]
        return max(sum(costs[b:e]) for b, e in zip(starts, ends, strict=True))

    def every(left, begin):
        if left == 1:
            yield [begin]
            return
        for following in range(begin + 1, len(costs) - left + 2):
            yield from ([begin, *rest] for rest in every(left - 1, following))

    layers = nn.Sequential(*(nn.ReLU() for _ in costs))
    parts = split_by_cost(layers, stages, costs)
    assert [layer for part in parts for layer in part] == list(layers)
    assert all(len(part) for part in parts)
    got = max(sum(costs[list(layers).index(layer)] for layer in part) for part in parts)
    assert got == min(dearest(starts) for starts in every(stages, 0))


def test_by_cost_counts_parameters_unless_told_otherwise():
    assert [len(part) for part in split_by_cost(model(), 2)] == [6, 6]
    assert [len(part) for part in split_by_cost(model(), 2, lambda layer: 1.0)] == [6, 6]
    only_first = split_by_cost(model(), 2, [1, *[0] * 11])
    assert len(only_first[0]) + len(only_first[1]) == 12


@pytest.mark.parametrize(
    ("at", "error", "message"),
    [
        (["2", "9"], ValueError, r"at\[1\] is '9', which is not a layer; the layers are 0, 1.0, 1"),
        (["2", "2"], ValueError, r"at\[1\] is '2'; expected a layer after '2'"),
        (["4", "2"], ValueError, r"at\[1\] is '2'; expected a layer after '4.0'"),
        (["0"], ValueError, r"at\[0\] is '0'; expected a layer after '0'"),
        ("2", TypeError, "at must be a list of names"),
    ],
)
def test_wrong_names(at, error, message):
    with pytest.raises(error, match=message):
        split(model(), at)


def test_wrong_costs():
    for costs, message in [
        ([1, 2], "costs has 2 entries, but the model has 12 layers"),
        (lambda layer: -1.0, "the cost of layer 0 is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            split_by_cost(model(), 2, costs)
    with pytest.raises(ValueError, match="num_stages is 13, but the model has only 12 layers"):
        split_by_cost(model(), 13)
    with pytest.raises(TypeError, match="model must be a Sequential"):
        split_by_cost(nn.ReLU(), 1)
