"""Samplers behind other data loaders; those that are not installed are skipped."""

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel import DistributedBatchSampler, DistributedSampler, LengthGroupedSampler
from parallel.samplers import EpochIndices, EpochView, GrainSampler, IndexBatches

SIZE = 103
DATA = [np.full(2, 10 * i, "f4") for i in range(SIZE)]


def numbers(batches):
    """Return which samples are in batches of DATA."""
    return [int(x) // 10 for batch in batches for x in np.asarray(batch)[:, 0]]


@given(
    size=st.integers(1, 5000),
    replicas=st.integers(1, 5),
    used=st.integers(0, 3000),
    evaluation=st.booleans(),
)
def test_random_access_gives_what_iteration_gives(size, replicas, used, evaluation):
    replicas = min(replicas, size)
    for rank in range(replicas):
        sampler = DistributedSampler(size, replicas, rank, seed=3, evaluation=evaluation)
        before = DistributedSampler(size, replicas, rank, seed=3, evaluation=evaluation)
        sampler.load_state_dict(before.state_dict(min(used, sampler.longest)))
        indices = EpochIndices(sampler)
        copied = pickle.loads(pickle.dumps(indices))
        expected = list(sampler)
        assert len(indices) == len(expected)
        assert list(indices) == list(copied) == indices[:] == expected
        assert list(reversed(indices)) == expected[::-1]


def test_it_is_a_value():
    sampler = LengthGroupedSampler(np.arange(2000) % 37, 100, 2, 1)
    indices, text = EpochIndices(sampler), repr(EpochIndices(sampler))
    expected = list(sampler)
    assert sampler.epoch == 1
    assert list(indices) == expected
    assert repr(indices) == text
    assert repr(EpochIndices(sampler)) != text
    with pytest.raises(IndexError, match="index 1000 is out of range for 1000 indices"):
        indices[1000]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(indices.__getitem__, range(1000))) == expected


def test_a_view_is_the_dataset_in_the_samplers_order():
    sampler = DistributedSampler(SIZE, 3, 1, seed=5)
    view = EpochView(DATA, sampler)
    assert len(view) == len(sampler)
    assert numbers([view[2:5]]) == list(sampler)[2:5]
    assert "EpochView(list, EpochIndices(epoch=0" in repr(EpochView(DATA, sampler)).replace(
        "epoch=1", "epoch=0"
    )


def test_batches_as_lists():
    batches = DistributedBatchSampler(DistributedSampler(SIZE, 2, 1, evaluation=True), 10)
    lists = IndexBatches(batches)
    seen = list(lists)
    assert len(lists) == len(seen) == 6
    assert [lists.valid(number) for number in range(6)] == [10] * 5 + [1]
    assert [len(entry) for entry in seen] == [10] * 5 + [2]


# PyTorch


def check_resume(read, batch=4, used=5):
    """Read ``used`` batches on 2 replicas, the rest on 3: every sample is seen exactly once."""
    seen = Counter()
    for rank in range(2):
        sampler = DistributedSampler(SIZE, 2, rank, seed=9, evaluation=True)
        first = read(sampler, batch)
        batches = [np.asarray(next(first)) for _ in range(used)]
        seen.update(numbers(batches))
        state = sampler.state_dict(num_consumed=used * batch)
        first.close() if hasattr(first, "close") else None
    for rank in range(3):
        sampler = DistributedSampler(SIZE, 3, rank, seed=9, evaluation=True)
        sampler.load_state_dict(state)
        seen.update(numbers(read(sampler, batch)))
    assert seen == Counter(range(SIZE))


@pytest.mark.parametrize("workers", [0, 2])
def test_pytorchs_loader_with_the_sampler(workers):
    data = pytest.importorskip("torch.utils.data")

    def read(sampler, batch):
        return iter(data.DataLoader(DATA, batch, sampler=sampler, num_workers=workers))

    check_resume(read)


def test_pytorchs_loader_with_batches_and_with_a_view():
    data = pytest.importorskip("torch.utils.data")

    def batches(sampler, batch):
        lists = IndexBatches(DistributedBatchSampler(sampler, batch))
        loader = data.DataLoader(DATA, batch_sampler=lists)
        for number, rows in enumerate(loader):
            yield rows[: lists.valid(number)]

    check_resume(batches)
    check_resume(lambda sampler, batch: iter(data.DataLoader(EpochView(DATA, sampler), batch)))


# grain


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 4), st.integers(1, 7))
def test_grains_workers_are_dealt_whole_batches(size, replicas, workers, batch):
    """As grain does it: worker w reads the indices w, w + W, …; batches leave them in turn."""
    sampler = DistributedSampler(size, replicas, replicas - 1, evaluation=True)
    dealt = [GrainSampler(sampler, batch, workers)._reordered(i) for i in range(len(sampler))]
    own = [dealt[worker::workers] for worker in range(workers)]
    rounds = range(0, len(own[0]), batch)
    batches = [part[begin : begin + batch] for begin in rounds for part in own]
    assert [i for found in batches for i in found] == list(range(len(sampler)))


@pytest.mark.parametrize("workers", [0, 2])
def test_grains_loader(workers):
    grain = pytest.importorskip("grain.python")
    # Its workers read absl's flags, which a program of absl's would have parsed.
    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()

    def read(sampler, batch):
        loader = grain.DataLoader(
            data_source=DATA,
            sampler=GrainSampler(sampler, batch, workers),
            shard_options=grain.NoSharding(),
            operations=[grain.Batch(batch)],
            worker_count=workers,
        )
        return iter(loader)

    check_resume(read)
    # grain's own checkpoints go on as well, on the same number of replicas.
    sampler = DistributedSampler(SIZE, 2, 1, seed=9)
    whole = numbers(read(sampler, 4))
    assert sorted(whole) == sorted(EpochIndices(sampler))
    first = read(sampler, 4)
    begun = numbers([next(first) for _ in range(3)])
    state = first.get_state()
    again = read(sampler, 4)
    again.set_state(state)
    assert begun + numbers(again) == whole
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match="Sampler in checkpoint does not match"):
        read(sampler, 4).set_state(state)


def test_grains_dataset():
    grain = pytest.importorskip("grain.python")

    def read(sampler, batch):
        source = grain.MapDataset.source(EpochView(DATA, sampler))
        return iter(source.batch(batch).to_iter_dataset())

    check_resume(read)


def test_grains_random_transforms_do_not_depend_on_the_replicas():
    grain = pytest.importorskip("grain.python")

    class Noise(grain.RandomMapTransform):
        def random_map(self, element, rng):
            return element[0], rng.random()

    def draws(replicas):
        found = {}
        for rank in range(replicas):
            loader = grain.DataLoader(
                data_source=DATA,
                sampler=GrainSampler(DistributedSampler(SIZE, replicas, rank, evaluation=True)),
                shard_options=grain.NoSharding(),
                operations=[Noise()],
            )
            found.update(loader)
        return found

    two, three = draws(2), draws(3)
    assert two == three
    assert len(set(two.values())) == SIZE
