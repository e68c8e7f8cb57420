"""Arrays of NumPy's subclasses and of a user's own: their elements travel, and nothing else."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from transport._operands.flat import as_bytes

# It is old, and met in programs all the same.
pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
SIZE = 2


class Stubborn(np.ndarray):
    """A user's own, which means something else by nearly everything."""

    def __len__(self):
        return 1

    def ravel(self, order="C"):
        raise AssertionError("not for others")

    flatten = reshape = ravel

    def __getitem__(self, key):
        raise AssertionError("not for others")

    __setitem__ = __getitem__

    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", "m")


def record(values):
    """A field of a record array: its elements do not lie side by side."""
    rows = np.zeros(4, [("name", "i4"), ("x", "f8")]).view(np.recarray)
    rows.x[:] = values
    return rows


MAKE = {
    "matrix": lambda values: np.matrix(values.reshape(2, 2)),
    "column": lambda values: np.matrix(values.reshape(4, 1)),
    "turned": lambda values: np.matrix(values.reshape(2, 2)).T,
    "masked": lambda values: np.ma.array(values, mask=[True, False, False, True]),
    "masked rows": lambda values: np.ma.array(values.repeat(2), mask=[1, 0] * 4)[::2],
    "recarray": lambda values: values.view(np.recarray),
    "field": lambda values: record(values).x,
    "own": lambda values: values.copy().view(Stubborn),
    "own rows": lambda values: values.repeat(2)[::2].view(Stubborn),
}


@pytest.mark.parametrize("backend", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("case", MAKE)
def test_every_collective_takes_any_subclass(case, backend):

    def make(values):
        return MAKE[case](values.copy())

    def program():
        rank = dist.get_rank()
        mine = np.arange(4.0) + 10 * rank
        first, both = np.arange(4.0), 2 * np.arange(4.0) + 10
        for call, expected in (
            (dist.all_reduce, both),
            (lambda x: dist.all_reduce(x, async_op=True).result(), both),
            (lambda x: dist.broadcast(x, 0), first),
            (lambda x: dist.all_gather([x, make(mine)], make(mine))[0], first),
            (lambda x: dist.scatter(x, [make(mine)] * 2 if rank == 0 else None, 0), first),
            (lambda x: dist.reduce_scatter(x, [make(mine)] * 2), both),
            (lambda x: dist.all_to_all([x, make(mine)], [make(mine)] * 2)[0], first),
        ):
            x = make(mine)
            assert call(x) is x
            assert type(x) is type(make(mine))
            np.testing.assert_array_equal(np.sort(x.view(np.ndarray), axis=None), np.sort(expected))
            if isinstance(x, np.ma.MaskedArray):
                np.testing.assert_array_equal(x.mask, make(mine).mask)
        x = make(mine)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        np.testing.assert_array_equal(np.sort(x.view(np.ndarray), axis=None), first)
        if isinstance(x, Stubborn):
            assert x.unit == "m"

    run_ranks(program, SIZE, backend=backend)


def test_elements_keep_their_places():
    def program():
        x = np.matrix([[1.0, 2.0], [3.0, 4.0]]).T
        y = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[0, 1], [1, 0]]).T
        dist.all_reduce_coalesced([x, y])
        return x.tolist(), y.data.tolist(), y.mask.tolist()

    twice = [[2.0, 6.0], [4.0, 8.0]]
    for x, y, mask in run_ranks(program, SIZE):
        assert x == y == twice
        assert mask == [[False, True], [True, False]]


def test_a_buffer_s_bytes_have_one_dimension():
    for flat in (np.matrix([[1.0, 2.0]]), np.zeros(3), np.zeros(0)):
        view = as_bytes(flat)
        assert len(view) == view.nbytes == flat.nbytes
