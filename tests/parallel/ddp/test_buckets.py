"""Buckets of gradients: how they are assigned, when they leave, and in which order."""

import numpy as np

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, nn
from parallel._core.assignment import assign_buckets
from parallel._core.comm_hooks import allreduce_hook
from tests.support.parallel.training import make_model, train


def test_buckets_are_closed_at_the_cap():
    sizes = [4, 4, 4, 4, 4, 4]
    same = ["f4"] * 6
    assert assign_buckets(range(5, -1, -1), sizes, same, 4, 8) == [[5], [4, 3], [2, 1], [0]]
    assert assign_buckets(range(6), sizes, same, 5, 8) == [[0, 1], [2, 3], [4, 5]]
    large = [4, 100, 4, 4, 4, 4]
    assert assign_buckets(range(6), large, same, 4, 8) == [[0], [1], [2, 3], [4, 5]]
    # Each dtype has buckets and a small first one of its own; they leave in the order in which
    # they are complete.
    mixed = ["f4", "f8", "f4", "f8", "f4", "f4"]
    assert assign_buckets(range(6), sizes, mixed, 4, 8) == [[0], [1], [3], [2, 4], [5]]


def test_buckets_are_rebuilt_in_the_order_in_which_gradients_came():
    class Backwards(nn.Module):
        """Registers its layers in the reverse of the order in which it uses them."""

        def __init__(self):
            super().__init__()
            rng = np.random.default_rng(0)
            self.last = nn.Linear(4, 4, bias=False, rng=rng, dtype="f8")
            self.first = nn.Linear(4, 4, bias=False, rng=rng, dtype="f8")

        def forward(self, x):
            return self.last(self.first(x))

        def backward(self, grad):
            return self.first.backward(self.last.backward(grad))

    def job():
        model = DistributedDataParallel(
            Backwards(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True
        )
        seen = [model.buckets]
        for _ in range(2):
            model(np.ones((1, 4)))
            model.backward(np.ones((1, 4)))
            seen.append(model.buckets)
        # Without zero_grad the gradients moved to the new buckets and doubled.
        grad = model.module.last.weight.grad
        return seen, np.abs(grad - 2 * np.ones((4, 1)) * model.module.first(np.ones((1, 4)))).max()

    for seen, error in run_ranks(job, 2):
        assert seen[0] == seen[1] == [["first.weight"], ["last.weight"]]
        assert seen[2] == [["last.weight"], ["first.weight"]]
        assert error < 1e-12


def test_communication_starts_while_the_backward_pass_runs():
    """Buckets leave before the first layer's gradient is there, in the same order on all ranks."""

    def job():
        events = []
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0001)
        for path, parameter in model.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, path=path: events.append(path))

        def hook(group, bucket):
            events.append(bucket.index())
            return allreduce_hook(group, bucket)

        model.register_comm_hook(model.process_group, hook)
        train(model, dist.get_rank(), 2, steps=2)
        return events, len(model.buckets)

    results = run_ranks(job, 2)
    for events, buckets in results:
        second = events[len(events) // 2 :]
        launched = [event for event in second if isinstance(event, int)]
        assert launched == list(range(buckets))
        assert second.index(launched[-2]) < second.index("0.weight")
        assert second.index(0) < second.index("3.weight")
    assert results[0] == results[1]


def test_buckets_leave_in_order_even_if_gradients_come_in_another():
    """The ranks use two independent branches in opposite orders; the calls still match."""

    class Branches(nn.Module):
        def __init__(self, flip):
            super().__init__()
            rng = np.random.default_rng(0)
            self.a = nn.Linear(8, 8, rng=rng, dtype="f8")
            self.b = nn.Linear(8, 8, rng=rng, dtype="f8")
            self.flip = flip

        def forward(self, x):
            return self.a(x) + self.b(x)

        def backward(self, grad):
            first, second = (self.a, self.b) if self.flip else (self.b, self.a)
            return first.backward(grad) + second.backward(grad)

    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(Branches(rank == 1), bucket_cap_mb=0.0001)
        for _ in range(3):
            model.zero_grad()
            model(np.full((1, 8), rank + 1.0))
            model.backward(np.ones((1, 8)))
        return model.module.a.weight.grad, model.buckets

    (grad, order), (other, other_order) = run_ranks(job, 2)
    np.testing.assert_array_equal(grad, np.full((8, 8), 1.5))
    np.testing.assert_array_equal(other, grad)
    assert order == other_order


def test_dtypes_do_not_share_a_bucket():
    def job():
        rng = np.random.default_rng(0)
        model = nn.Sequential(nn.Linear(3, 3, rng=rng, dtype="f8"), nn.Linear(3, 3, rng=rng))
        model[1].weight.data = model[1].weight.data.astype("f8")
        ddp = DistributedDataParallel(model)
        ddp(np.ones((1, 3)))
        # Only the float32 bias is left of the second layer's single precision.
        model[1].bias.accumulate_grad(np.full(3, dist.get_rank(), "f4"))
        model[1].weight.accumulate_grad(np.zeros((3, 3)))
        return ddp.buckets

    assert run_ranks(job, 1) == [[["1.bias"], ["1.weight", "0.bias", "0.weight"]]]
