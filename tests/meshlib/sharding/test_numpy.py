"""DArrays are NumPy's arrays: fixed cases of dtypes, edges, shapes and arguments; random chains."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as dist
from meshlib.sharding import DArray, P, Sharding, ShardingError, distribute_array, full
from meshlib.testing import run_ranks
from tests.meshlib.sharding.numpy_chains import Chain
from tests.meshlib.sharding.numpy_operations import OPERATIONS
from tests.support.meshlib.sharding_cases import named_mesh

MESH = named_mesh(4)
MESHES = [named_mesh(4), named_mesh(2, 2), named_mesh(6), named_mesh(2, 3)]
BIG = np.repeat(np.array([40000, -40000], "f2"), 4)
HUGE = np.full(4, 2**62, "i8") + np.arange(4)
TRUE = np.ones((2, 4), bool)

DTYPES = {
    "einsum of two dtypes": lambda d: np.einsum(
        "ij,il->", d(np.ones((2, 2), "f4")), d(np.full((2, 4), 100, "i1"))
    ),
    "einsum of bools": lambda d: np.einsum("ij,il->", d(np.ones((2, 2), "i8")), d(TRUE)),
    "sum of a product of bools": lambda d: np.sum(d(TRUE[0]) @ d(TRUE[0])),
    "product of bools and a number": lambda d: d(TRUE[0]) @ d(TRUE[0]) + 1,
    "vdot of bool and int8": lambda d: np.vdot(d(TRUE[0]), d(np.ones(4, "i1"))),
    "vdot of bools as int8": lambda d: np.vdot(d(TRUE[0]), d(TRUE[0])).astype("i1"),
    "bool sum": lambda d: np.sum(d(TRUE), dtype=bool) + 1,
    "mean of int64": lambda d: np.mean(d(HUGE)),
    "var of int64": lambda d: np.var(d(HUGE)),
    "mean as int": lambda d: np.mean(d(np.arange(8)), dtype=int),
    "sum as int": lambda d: np.sum(d(np.array([0.5, 1.5, 2.5, 3.5])), dtype=int),
    "sum of a half": lambda d: np.sum(d(BIG)),
    "product of halves": lambda d: d(BIG) @ d(np.ones(8, "f2")),
    "mean of halves": lambda d: np.mean(d(BIG), dtype="f2"),
    "prod of a half": lambda d: np.prod(d(np.repeat(np.array([16, 1 / 16], "f2"), 4)), dtype="f2"),
}


@pytest.mark.parametrize("case", DTYPES)
def test_dtypes(case):
    _same(DTYPES[case], P())
    _same(DTYPES[case], P(), "a")
    _same(DTYPES[case], P("a"), refusable=True)
    _same(DTYPES[case], P(None, "a"), refusable=True)


def _same(function, split, partial=None, *, refusable=False):
    """Compare ``function`` of a way to make arrays of arrays: as they are, and sharded.

    ``refusable``: the arrays may lie so that there is no rule.
    """
    with np.errstate(all="ignore"):
        expected = np.asarray(function(np.asarray))

    def program():
        def made(array):
            spec = P(*split[: array.ndim])
            fits = Sharding(MESH, spec) if not partial else Sharding(MESH, P(), partial)
            return distribute_array(np.asarray(array), fits, src_data_rank=None)

        with np.errstate(all="ignore"):
            try:
                result = function(made)
            except ShardingError:
                assert refusable
                return None
            return result.dtype, result.full_array()

    for dtype, whole in filter(None, run_ranks(program, 4)):
        assert dtype == expected.dtype
        np.testing.assert_allclose(whole, expected, rtol=1e-6)
        assert whole.shape == expected.shape
        if dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(whole), np.signbit(expected))


def _parts(values, dtype=None):
    """Return an array of three equal values that the ranks' ``values`` add up to."""
    mine = np.full(3, values[dist.get_rank()], dtype)
    return DArray.from_local(mine, Sharding(MESH, P(), "a"), (3,))


PARTIAL = {
    "sum as int": ([0.5, 0.5, 0.5, 0.5], "f8", lambda x: np.sum(x, dtype=int), 6),
    "prod as int": ([0.5, 0.5, 0.5, 0.5], "f8", lambda x: np.prod(x, dtype=int), 8),
    "a half that overflows": ([6e4, -6e4, 6e4, -6e4], "f2", lambda x: np.sum(x + x), 0),
    "multiple of a half": ([6e4, -6e4, 6e4, -6e4], "f2", lambda x: x * 2, 0),
    "a multiple that overflows": ([1e308, -1e308, 0, 0], "f8", lambda x: x * 10, 0),
    "by zero": ([1, 0, 0, 0], "f8", lambda x: x / 0.0, np.inf),
    "by a zero array": ([1, 0, 0, 0], "f8", lambda x: x / (x - x), np.inf),
    "times inf": ([1, 0, 0, 0], "f8", lambda x: x * np.inf, np.inf),
    "inf times": ([1, 0, 0, 0], "f8", lambda x: np.inf * x, np.inf),
    "times infinities": ([1, 0, 0, 0], "f8", lambda x: x * np.full_like(x, np.inf), np.inf),
    "a product with infinities": (
        [1, 0, 0, 0],
        "f8",
        lambda x: x @ np.full_like(x, np.inf),
        np.inf,
    ),
    "by inf": ([1, -3, 0, 0], "f8", lambda x: np.copysign(1, x / np.inf), -1),
    "complex by zero": ([1, 0, 0, 0], "D", lambda x: np.real(x / 0), np.inf),
    "complex times inf": ([1, 0, 0, 0], "D", lambda x: np.isnan(np.real(x * np.inf)), False),
    "power": ([2, 1, 0, 0], "f8", lambda x: x**2, 9),
    "power of zero": ([1, -1, 0, 0], "f8", lambda x: x**-1.0, np.inf),
    "copysign of minus zero": ([1, -1, 0, 0], "f8", lambda x: np.copysign(1, -x), -1),
    "copysign of a multiple": ([1, -1, 0, 0], "f8", lambda x: np.copysign(1, x * -1.0), -1),
    "copysign of times zero": ([1, -3, 0, 0], "f8", lambda x: np.copysign(1, x * 0.0), -1),
    "copysign of a conjugate": (
        [1, -1, 0, 0],
        "D",
        lambda x: np.copysign(1, np.imag(np.conjugate(x))),
        -1,
    ),
}


@pytest.mark.parametrize("case", PARTIAL)
def test_partial_values_at_the_edge(case):
    values, dtype, function, expected = PARTIAL[case]

    def program():
        with np.errstate(all="ignore"):
            return function(_parts(values, dtype)).full_array()

    for whole in run_ranks(program, 4):
        np.testing.assert_array_equal(whole, np.full(np.shape(whole), expected))


def test_minus_zero_stays_so_where_it_becomes_partial():
    _same(lambda d: np.copysign(1, d(np.array([-0.0, 0.0]))), P(), "a")
    _same(lambda d: np.copysign(1, d(np.array(-0.0))), P(), "a")
    _same(lambda d: np.copysign(1, np.imag(d(np.array([complex(-0.0, -0.0)])))), P(), "a")


def test_out_of_a_wider_dtype_is_written_in_the_operands_own():
    def program():
        x, out = _parts([60, 60, 0, 0], "i1"), _parts([0, 0, 0, 0], "i2")
        with pytest.raises(ShardingError, match="but out is"):
            np.add(x, x, out=out)  # whose values would be sums in the wider one
        out = out.reduced()
        assert np.add(x, x, out=out) is out
        return out.full_array().tolist()

    assert run_ranks(program, 4) == [[-16] * 3] * 4


@pytest.mark.parametrize("split", [P(), P("a")])
@pytest.mark.parametrize("ord", [None, 2])
def test_norm_of_nothing_is_zero(ord, split):
    _same(lambda d: np.linalg.norm(d(np.zeros(0)), ord), split)
    _same(lambda d: np.linalg.norm(d(np.zeros((3, 0))), ord, axis=1), split)


def test_greatest_magnitude_of_nothing_is_zero():
    def program():
        x = full((0, 3), Sharding(MESH, P("a")), 1.0)
        return np.linalg.norm(x, np.inf, axis=0).full_array().tolist()

    assert run_ranks(program, 4) == [[0.0] * 3] * 4


def test_norm_of_complex_infinity():
    _same(lambda d: np.linalg.norm(d(np.array([1 + 2j, np.inf]))), P("a"))
    _same(lambda d: np.var(d(np.array([1 + 2j, 3, 4j]))), P("a"))


RAISES = [
    (ValueError, np.vdot, (2, 3), (3,)),
    (ValueError, np.vdot, (4,), (1,)),
    (ValueError, lambda x, y: np.tensordot(x, y, 1), (2, 4), (1, 2)),
    (IndexError, lambda x, y: np.tensordot(x, y, 3), (2, 4), (2, 4)),
    (IndexError, lambda x, y: np.tensordot(x, y, ([5], [0])), (2, 4), (4, 2)),
    (ValueError, lambda x, y: np.tensordot(x, y, ([0, 0], [0, 1])), (2, 2), (2, 2)),
    (ValueError, lambda x, y: x @ y, (2, 4), (1, 4)),
    (ValueError, lambda x, y: np.einsum("ii,i", x, y), (1, 4), (4,)),
    (ValueError, lambda x, y: np.einsum("ij,j->ii", x, y), (4, 4), (4,)),
    (ValueError, lambda x, y: x.__setitem__(..., y), (4,), (2, 4)),
    (ValueError, lambda x, y: x.__setitem__(..., y), (1, 4), (2, 4)),
    (ValueError, lambda x, y: x.__setitem__((), y), (), (1,)),
    (ValueError, lambda x, y: x.__setitem__(0, y), (4,), (1,)),
    (ValueError, lambda x, y: np.full_like(x, [1, 2, 3]), (2, 4), ()),
    (ValueError, lambda x, y: np.full_like(x, np.ones((3, 2, 4))), (2, 4), ()),
    (
        ValueError,
        lambda x, y: (
            full((8,), x.sharding, [1, 2]) if isinstance(x, DArray) else np.full(8, [1, 2])
        ),
        (8,),
        (),
    ),
    (ValueError, lambda x, y: np.transpose(x, 0), (2, 4), ()),
    (ValueError, lambda x, y: np.reshape(x, (-2, -4)), (8,), ()),
    ((ValueError, TypeError), lambda x, y: np.clip(x, 0, 1, min=2), (4,), ()),
    (ValueError, lambda x, y: np.sum(x, axis=(0, 0)), (4,), ()),
    (TypeError, lambda x, y: np.subtract(x > 0, y > 0), (4,), ()),
]


@pytest.mark.parametrize("case", range(len(RAISES)))
def test_what_numpy_refuses_is_refused_on_every_rank(case):
    kind, function, *shapes = RAISES[case]
    with pytest.raises(kind):
        function(*map(np.ones, shapes))

    def program():
        for spec in (P(), P("a"), P(None, "a")):
            operands = [
                distribute_array(
                    np.ones(shape), Sharding(MESH, P(*spec[: len(shape)])), src_data_rank=None
                )
                for shape in shapes
            ]
            with pytest.raises(kind):
                function(*operands)
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4


def test_values_of_another_shape_are_not_repeated_in_each_part():
    def program():
        x, row = full((8,), Sharding(MESH, P("a")), 0.0), full((2,), Sharding(MESH), 1.0)
        with pytest.raises(ValueError, match=r"assigning: .* does not fit"):
            x[...] = row
        with pytest.raises(ValueError, match=r"assigning: .* does not fit"):
            x[...] = full((2, 8), Sharding(MESH, P(None, "a")), 1.0)
        with pytest.raises(ValueError, match="broadcast"):
            np.full_like(x, [1.0, 2.0])
        with pytest.raises(ValueError, match="do not fit"):
            np.vdot(x, row)
        x[...] = full((1, 1, 8), Sharding(MESH, P(None, None, "a")), 1.0)
        return x.full_array().sum()

    assert run_ranks(program, 4) == [8.0] * 4


VALUES = np.arange(12.0).reshape(3, 4) - 5
RIGHT = {
    "clip by a keyword": lambda d: np.clip(d(VALUES), a_max=2, a_min=None),
    "clip between arrays": lambda d: np.clip(d(VALUES), d(VALUES[:1] * 0), a_max=3),
    "transpose by a number": lambda d: np.transpose(d(VALUES[0]), 0),
    "transpose method": lambda d: d(VALUES[0]).transpose(-1),
    "vdot of other shapes": lambda d: np.vdot(d(np.ones((4, 1))), d(np.ones(4))),
    "full_like of a row": lambda d: np.full_like(d(VALUES), [1, 2, 3, 4], dtype=int),
    "concatenate flat": lambda d: np.concatenate([d(np.ones(4))[None], d(np.ones(4))], axis=None),
    "max from a value": lambda d: np.max(d(VALUES), axis=0, initial=4),
    "sum over no dims": lambda d: np.sum(d(np.ones(5, "i1")), axis=()),
    "sum over dim 0 of none": lambda d: np.sum(d(np.ones(5)).sum(), axis=0),
    "einsum that repeats": lambda d: np.einsum("ij,jk->ik", d(np.ones((2, 1))), d(np.ones((4, 3)))),
}


if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
    RIGHT["dot of a number"] = lambda d: np.dot(d(np.ones(4, "i1")), 2)
    RIGHT["clip min"] = lambda d: np.clip(d(VALUES), min=-1)
    RIGHT["clip max"] = lambda d: np.clip(d(VALUES), max=2, min=None)


@pytest.mark.parametrize("case", RIGHT)
def test_arguments_that_have_a_rule(case):
    _same(RIGHT[case], P())
    _same(RIGHT[case], P("a"), refusable=True)


def test_a_complex_number():
    def program():
        x = distribute_array(np.array([1j, 2]), Sharding(MESH, P("a")))
        return complex(np.sum(x)), complex(np.sum(np.real(x)))

    assert run_ranks(program, 4) == [(2 + 1j, 2 + 0j)] * 4


REFUSED = [
    (lambda x: np.sum(x, where=x > 0), "where="),
    (lambda x: np.sum(x, initial=1.0), "initial="),
    (lambda x: np.sum(x, None, None, x), "out="),
    (lambda x: np.max(x, out=x), "out="),
    (lambda x: np.add.reduce(x, initial=1.0), "initial="),
    (lambda x: np.maximum.reduce(x, dtype="f4"), "dtype="),
    (lambda x: np.std(x, where=x > 0), "where="),
    (lambda x: np.var(x, dtype=int), "dtype="),
    (np.where, "where: without x and y"),
    (lambda x: np.where(x)[0], "where: without x and y"),
    (lambda x: np.concatenate([x, x], 0, x), "out=|too many positional"),
    (lambda x: np.stack([x, x], dtype="f4"), "dtype="),
    (lambda x: np.einsum("i->", x, dtype="f4"), "dtype="),
    (lambda x: np.dot(x, x, x), "out=|too many positional"),
    (lambda x: np.zeros_like(x, shape=(3,)), "shape="),
    (lambda x: np.size(x, 0), "axis="),
    (lambda x: np.clip(x, np.arange(4), 1), "belongs to no mesh"),
    (lambda x: np.array_equal(x, x, equal_nan=True), "equal_nan="),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_arguments_without_a_rule_are_named_on_every_rank(case):
    function, message = REFUSED[case]

    def program():
        x = distribute_array(np.arange(5.0), Sharding(MESH, P("a")), src_data_rank=None)
        with pytest.raises(ShardingError, match=message):
            function(x)
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4


def test_powers_that_are_no_integers_are_refused_on_every_rank():
    def program():
        x = distribute_array(np.array([1]), Sharding(MESH, P("a")), src_data_rank=None)
        with pytest.raises(ValueError, match="negative integer powers"):
            x**-3
        with pytest.raises(ShardingError, match="signed exponents"):
            x**-x
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4


def test_an_average_of_integers_is_refused_where_it_is_made():
    def program():
        average = Sharding(MESH, P(), {"a": "avg"})
        ints = np.ones(3, int)
        makers = [
            lambda: DArray.from_local(ints, average, (3,)),
            lambda: DArray.from_local(ints, average, (3,), run_check=False),
            lambda: distribute_array(ints, average),
            lambda: distribute_array(ints, average, src_data_rank=None),
            lambda: full((3,), average, 1),
            lambda: full((3,), Sharding(MESH), 1).redistribute(average),
            lambda: full((3,), Sharding(MESH), 1j).redistribute(P(), {"a": "max"}),
        ]
        for make in makers:
            with pytest.raises(TypeError, match=r"AVG|MAX"):
                make()
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4


def test_read_only_parts_are_gathered():
    def program():
        part = np.full(1, dist.get_rank())
        part.flags.writeable = False
        return DArray.from_local(part, Sharding(MESH, P("a"))).full_array().tolist()

    assert run_ranks(program, 4) == [[0, 1, 2, 3]] * 4


@pytest.mark.skipif(np.__version__ < "2", reason="before NumPy 2 a dtype depends on values")
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40)
@given(
    mesh=st.sampled_from(MESHES),
    seed=st.integers(0, 2**32),
    steps=st.lists(
        st.tuples(st.sampled_from([*OPERATIONS]), st.integers(0, 2**32)), min_size=10, max_size=20
    ),
)
def test_random_chains_are_numpys(mesh, seed, steps):
    def program():
        chain = Chain(mesh, seed)
        for name, number in steps:
            chain.step(OPERATIONS[name], number)
        return chain.compared

    run_ranks(program, mesh.size())
