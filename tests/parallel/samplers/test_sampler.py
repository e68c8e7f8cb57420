"""The sampler: PyTorch's shares, exactly-once resume, and the permutation behind it."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel import DistributedSampler
from parallel.samplers import (
    DistributedBatchSampler,
    LengthGroupedSampler,
    Permutation,
    WeightedDistributedSampler,
)
from parallel.samplers._orders import derive


def reference(order, replicas, rank, drop_last):
    """PyTorch's rule for one replica's share of ``order``."""
    order = list(order)
    if drop_last:
        per = (
            math.ceil((len(order) - replicas) / replicas)
            if len(order) % replicas
            else (len(order) // replicas)
        )
        order = order[: per * replicas]
    else:
        per = math.ceil(len(order) / replicas)
        missing = per * replicas - len(order)
        order += (order * math.ceil(missing / len(order)))[:missing]
    return order[rank : per * replicas : replicas]


sizes = st.integers(1, 200)
replica_counts = st.integers(1, 12)


@given(sizes, replica_counts, st.booleans(), st.booleans(), st.integers(0, 3))
def test_shares_are_those_of_pytorch(size, replicas, shuffle, drop_last, epoch):
    size = max(size, replicas)
    order = range(size)
    if shuffle:
        order = Permutation(size, derive(5, epoch)).apply(np.arange(size)).tolist()
    for rank in range(replicas):
        sampler = DistributedSampler(
            size, replicas, rank, shuffle=shuffle, seed=5, drop_last=drop_last
        )
        sampler.set_epoch(epoch)
        assert len(sampler) == len(reference(order, replicas, rank, drop_last))
        assert list(sampler) == reference(order, replicas, rank, drop_last)


@given(sizes, replica_counts, st.booleans())
def test_evaluation_sees_every_sample_exactly_once(size, replicas, shuffle):
    seen = Counter()
    for rank in range(replicas):
        sampler = DistributedSampler(size, replicas, rank, shuffle=shuffle, evaluation=True)
        share = list(sampler)
        assert len(share) == len(sampler) == sampler.num_valid
        seen.update(share)
    assert seen == Counter(range(size))


@given(
    st.integers(12, 200),
    st.lists(st.tuples(replica_counts, st.integers(0, 20)), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(["pad", "drop", "evaluation"]),
)
def test_resume_on_other_numbers_of_replicas_sees_every_sample_once(size, legs, shuffle, mode):
    """Each leg runs some steps on some replicas; the last one runs to the end."""
    options = {
        "shuffle": shuffle,
        "drop_last": mode == "drop",
        "evaluation": mode == "evaluation",
    }
    seen, state, valid = Counter(), None, 0
    for leg, (replicas, steps) in enumerate(legs):
        samplers = [DistributedSampler(size, replicas, r, **options) for r in range(replicas)]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        if samplers[0].epoch:  # the epoch ended within an earlier leg
            break
        last = leg == len(legs) - 1
        count = len(samplers[0]) if last else steps
        for sampler in samplers:
            for number, index in enumerate(itertools.islice(sampler, count)):
                if number < sampler.num_valid:
                    seen[index] += 1
                    valid += 1
        # Replica 0 has the longest share, so it stands for the others at the end of an epoch.
        state = samplers[0].state_dict()
    assert max(seen.values(), default=1) == 1
    # A sampler that ran to its end has begun the next epoch, or stands at the end of this one.
    fresh = DistributedSampler(size, 1, 0, **options)
    fresh.load_state_dict(state)
    if mode == "drop":
        assert size - valid < max(replicas for replicas, _ in legs) or not fresh.epoch
    elif fresh.epoch:
        assert valid == size
    rest = Counter() if fresh.epoch else Counter(fresh)
    assert not (set(rest) & set(seen))
    if mode != "drop":
        assert seen + rest == Counter(range(size))


def test_resume_within_an_epoch_continues_the_same_order():
    whole = list(DistributedSampler(100, 1, 0))
    sampler = DistributedSampler(100, 4, 2)
    walk = iter(sampler)
    assert [next(walk) for _ in range(10)] == whole[2:40:4]
    state = sampler.state_dict()
    assert state["cursor"] == 40
    assert DistributedSampler(100, 4, 0).state_dict(num_consumed=10) == state
    resumed = DistributedSampler(100, 3, 1)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert len(resumed) == 20
    assert list(resumed) == whole[41::3]
    assert (resumed.epoch, len(resumed)) == (1, 34)


@given(st.integers(8, 100), st.integers(1, 8), st.integers(1, 8), st.integers(1, 7), st.data())
def test_a_loader_may_draw_ahead_to_the_end(size, before, after, batch, data):
    """The used samples count, even if the sampler itself is in the next epoch already."""
    samplers = [DistributedSampler(size, before, r, evaluation=True) for r in range(before)]
    batches = [DistributedBatchSampler(sampler, batch) for sampler in samplers]
    drawn = [list(own) for own in batches]
    number = data.draw(st.integers(0, len(drawn[0])))
    seen = Counter(i for own in drawn for b in own[:number] for i in b.indices[: b.valid])
    used = min(number * batch, samplers[0].longest)
    states = [sampler.state_dict(num_consumed=used) for sampler in samplers]
    states += [own.state_dict(num_batches=number) for own in batches]
    assert all(state == states[0] for state in states)
    assert samplers[0].epoch == 1
    assert samplers[0].state_dict()["epoch"] == batches[0].state_dict()["epoch"] == 1
    resumed = [DistributedSampler(size, after, r, evaluation=True) for r in range(after)]
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    if number == len(drawn[0]):
        assert (resumed[0].epoch, len(resumed[0])) == (1, -(-size // after))
    else:
        assert seen + Counter(i for sampler in resumed for i in sampler) == Counter(range(size))
    samplers[0].set_epoch(1)  # the pass is over for the loader, too
    assert samplers[0].state_dict(num_consumed=0)["epoch"] == 1


def test_batches_are_counted_in_the_pass_under_way():
    batches = DistributedBatchSampler(DistributedSampler(20, 2, 0), 3)
    next(iter(batches))
    assert batches.state_dict()["cursor"] == 6
    batches.sampler.set_epoch(4)
    assert batches.state_dict()["cursor"] == 0


def test_the_epoch_is_kept_by_itself():
    sampler = DistributedSampler(50, 2, 0, seed=3)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    again = iter(sampler)
    next(again)
    assert list(sampler) == second  # a pass that was left begins again


def test_a_billion_samples_take_no_memory():
    tracemalloc.start()
    try:
        sampler = DistributedSampler(10**9, 64, 17)
        some = list(itertools.islice(sampler, 10_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(some)) == 10_000
    assert max(some) > 9 * 10**8
    assert peak < 5_000_000


@given(st.integers(1, 5000), st.integers())
def test_permutation_is_a_bijection(size, key):
    order = Permutation(size, key)
    image = order.apply(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))
    assert order[size // 2] == image[size // 2]


def test_permutation_is_the_same_for_ever():
    """Checkpoints hold cursors into this order: it must never change."""
    assert Permutation(10, 1).apply(np.arange(10)).tolist() == [5, 6, 4, 9, 0, 2, 8, 3, 1, 7]
    assert Permutation(10**9, 2).apply(np.arange(3)).tolist() == [739476378, 872141879, 169842940]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_few_is_equally_likely(size):
    times = 100
    keys = range(times * math.factorial(size))
    counts = Counter(tuple(Permutation(size, k).apply(np.arange(size)).tolist()) for k in keys)
    orders = list(itertools.permutations(range(size)))
    chi = sum((counts[order] - times) ** 2 / times for order in orders)
    freedom = len(orders) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_places_are_uniform_and_neighbours_independent():
    size, keys = 40, 4000
    images = np.stack([Permutation(size, k).apply(np.arange(size)) for k in range(keys)])
    counts = np.stack([np.bincount(images[:, i], minlength=size) for i in range(size)])
    expected = keys / size
    freedom = (size - 1) ** 2
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    steps = np.bincount((images[:, 1] - images[:, 0]) % size, minlength=size)[1:]
    expected = keys / (size - 1)
    chi = ((steps - expected) ** 2 / expected).sum()
    assert chi < (size - 2) + 5 * math.sqrt(2 * (size - 2))


# Other orders


def test_weighted_draws_follow_the_weights_and_resume_on_other_replicas():
    weights = [1, 0, 3, 0, 0]
    whole = list(WeightedDistributedSampler(weights, 4000, 1, 0, seed=1))
    counts = Counter(whole)
    assert set(counts) == {0, 2}
    assert abs(counts[0] - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)
    sampler = WeightedDistributedSampler(weights, 4000, 4, 3, seed=1)
    assert list(itertools.islice(sampler, 100)) == whole[3:400:4]
    resumed = WeightedDistributedSampler(weights, 4000, 3, 0, seed=1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == whole[400::3]
    assert list(resumed) != whole[::3]  # the next epoch draws anew


def test_a_state_of_another_order_is_refused():
    lengths = np.arange(40) % 7
    grouped = LengthGroupedSampler(lengths, 10, 1, 0)
    weighted = WeightedDistributedSampler(lengths, 40, 1, 0)
    LengthGroupedSampler(lengths.astype("f4"), 10, 2, 0).load_state_dict(grouped.state_dict())
    for other, state, text in (
        (LengthGroupedSampler(lengths, 20, 1, 0), grouped, "group_size was 10 and is now 20"),
        (LengthGroupedSampler(lengths[::-1], 10, 1, 0), grouped, "lengths was CRC-32 .* now"),
        (WeightedDistributedSampler(lengths + 1, 40, 1, 0), weighted, "weights was CRC-32"),
        (DistributedSampler(40, 1, 0), weighted, "weights was .* and is now not given"),
        (grouped, DistributedSampler(40, 1, 0), "group_size was not given and is now 10"),
    ):
        with pytest.raises(ValueError, match=f"cannot resume: {text}"):
            other.load_state_dict(state.state_dict())


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [[1.0]], [1, math.nan]])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="weights must be"):
        WeightedDistributedSampler(weights, 4, 1, 0)


@given(st.lists(st.integers(0, 9), min_size=8, max_size=200), st.integers(1, 50), st.integers(1, 8))
def test_length_grouping_sorts_windows_of_a_permutation(lengths, group, replicas):
    order = list(LengthGroupedSampler(lengths, group, 1, 0))
    assert sorted(order) == list(range(len(lengths)))
    shuffled = list(DistributedSampler(len(lengths), 1, 0))
    for begin in range(0, len(order), group):
        window = order[begin : begin + group]
        assert sorted(window) == sorted(shuffled[begin : begin + group])
        assert [lengths[i] for i in window] == sorted((lengths[i] for i in window), reverse=True)
    share = list(LengthGroupedSampler(lengths, group, replicas, replicas - 1, drop_last=True))
    assert share == order[replicas - 1 :: replicas][: len(lengths) // replicas]


@pytest.mark.parametrize("dtype", ["u1", "i1", "f4", "?"])
def test_length_grouping_puts_the_longest_first_whatever_the_dtype(dtype):
    lengths = np.array([0, 2, 1, 0, 1], dtype)
    order = list(LengthGroupedSampler(lengths, 5, 1, 0))
    assert lengths[order].tolist() == sorted(lengths.tolist(), reverse=True)


# Batches


@given(sizes, replica_counts, st.integers(1, 7), st.sampled_from(["pad", "drop", "evaluation"]))
def test_batches_are_equally_many_and_valid_ones_are_exact(size, replicas, batch_size, mode):
    size = max(size, replicas) if mode != "evaluation" else size
    options = {"drop_last": mode == "drop", "evaluation": mode == "evaluation"}
    passes = []
    for rank in range(replicas):
        sampler = DistributedSampler(size, replicas, rank, **options)
        batches = DistributedBatchSampler(sampler, batch_size)
        passes.append(list(batches))
        assert sampler.epoch == 1
        assert batches.state_dict()["cursor"] == 0
    assert len({len(found) for found in passes}) == 1
    for step in zip(*passes, strict=True):
        assert len({len(batch.indices) for batch in step}) == 1
        assert all(0 <= batch.valid <= len(batch.indices) <= batch_size for batch in step)
    seen = Counter(i for found in passes for b in found for i in b.indices[: b.valid])
    if mode == "drop":
        assert max(seen.values()) == 1
        assert size - len(seen) < replicas
    else:
        assert seen == Counter(range(size))


@given(
    st.integers(12, 200),
    replica_counts,
    replica_counts,
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 30),
    st.booleans(),
)
def test_batches_resume_with_other_replicas_and_sizes(
    size, before, after, batch, other, stop, evaluation
):
    def start(replicas, batch_size):
        return [
            DistributedBatchSampler(
                DistributedSampler(size, replicas, rank, evaluation=evaluation), batch_size
            )
            for rank in range(replicas)
        ]

    seen, states = Counter(), []
    for sampler in start(before, batch):
        for found in itertools.islice(sampler, stop):
            seen.update(found.indices[: found.valid])
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    rest = Counter()
    for sampler in start(after, other):
        sampler.load_state_dict(states[0])
        if sampler.sampler.epoch == 0:
            for found in sampler:
                rest.update(found.indices[: found.valid])
    assert seen + rest == Counter(range(size))


def test_dropped_batches_do_not_come_back_on_resume():
    batches = DistributedBatchSampler(DistributedSampler(10, 1, 0), 4, drop_last=True)
    walk = iter(batches)
    assert [len(next(walk).indices) for _ in range(len(batches))] == [4, 4]
    assert batches.state_dict()["cursor"] == 10
    assert batches.state_dict(num_batches=1)["cursor"] == 4
    assert next(walk, None) is None
    assert batches.sampler.epoch == 1


def test_bad_batches():
    sampler = DistributedSampler(10, 2, 0, evaluation=True)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        DistributedBatchSampler(sampler, 0)
    with pytest.raises(ValueError, match="evaluation needs all"):
        DistributedBatchSampler(sampler, 2, drop_last=True)
    with pytest.raises(ValueError, match=r"num_batches must be in \[0, 3\], got 4"):
        DistributedBatchSampler(sampler, 2).state_dict(4)
    with pytest.raises(ValueError, match="group_size"):
        LengthGroupedSampler([1, 2], 0, 1, 0)
    with pytest.raises(ValueError, match=r"one number per sample, got shape \[1, 2\]"):
        LengthGroupedSampler([[1, 2]], 1, 1, 0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="dataset has 3 samples for 4 replicas"):
        DistributedSampler([1, 2, 3], 4, 0)
    with pytest.raises(ValueError, match="dataset has 0 samples"):
        DistributedSampler([], 1, 0, evaluation=True)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\), got 4"):
        DistributedSampler(10, 4, 4)
    with pytest.raises(ValueError, match="num_replicas=4, rank=None"):
        DistributedSampler(10, 4)
    with pytest.raises(ValueError, match="evaluation needs all"):
        DistributedSampler(10, 2, 0, drop_last=True, evaluation=True)
    with pytest.raises(ValueError, match="got -1"):
        DistributedSampler(10, 2, 0).set_epoch(-1)
    state = DistributedSampler(10, 2, 0).state_dict()
    with pytest.raises(ValueError, match="the dataset's size was 10 and is now 11"):
        DistributedSampler(11, 2, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        DistributedSampler(10, 2, 0, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"num_consumed must be in \[0, 5\], got 6"):
        DistributedSampler(10, 2, 0).state_dict(num_consumed=6)


def test_arguments_of_another_type_are_named():
    with pytest.raises(TypeError, match="a length or be an integer, got <generator"):
        DistributedSampler((i for i in range(4)), 2, 0)
    with pytest.raises(TypeError, match="epoch must be a whole number, got 'a'"):
        DistributedSampler(4, 2, 0).set_epoch("a")
    with pytest.raises(TypeError, match="num_replicas must be a whole number, got '2'"):
        DistributedSampler(4, "2", 0)
    with pytest.raises(TypeError, match=r"rank must be a whole number, got 0\.0"):
        DistributedSampler(4, 2, 0.0)
    with pytest.raises(TypeError, match="seed must be a whole number, got 'a'"):
        DistributedSampler(4, 2, 0, seed="a")
    with pytest.raises(TypeError, match="batch_size must be a whole number, got '2'"):
        DistributedBatchSampler(DistributedSampler(4, 2, 0), "2")
    with pytest.raises(TypeError, match="group_size must be a whole number, got '2'"):
        LengthGroupedSampler([1, 2], "2", num_replicas=2, rank=0)


def test_what_is_no_state_is_refused():
    sampler = DistributedSampler(4, 2, 0)
    state = sampler.state_dict()
    with pytest.raises(TypeError, match=r"state must be the result of .*, got None"):
        sampler.load_state_dict(None)
    with pytest.raises(TypeError, match="the state's cursor must be a whole number, got None"):
        sampler.load_state_dict({k: v for k, v in state.items() if k != "cursor"})
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        sampler.load_state_dict(state | {"epoch": -1})
