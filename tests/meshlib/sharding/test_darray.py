"""``DArray``: made of whole arrays, of parts, of nothing; what it is and what it refuses."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.sharding import (
    DArray,
    P,
    Sharding,
    ShardingError,
    distribute_array,
    full,
    ones,
    random,
    zeros,
)
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import named_mesh

MESH = named_mesh(2, 2)
WHOLE = np.arange(35.0).reshape(5, 7)
SPECS = [P(), P("a"), P(None, "b"), P(("b", "a")), P("b", "a")]


@pytest.mark.parametrize("partial", [None, "a"])
@pytest.mark.parametrize("src", [None, 0, 3])
def test_distribute_array_gives_each_rank_its_part(src, partial):
    specs = [P(), P("b"), P(None, "b")] if partial else SPECS

    def program():
        mine = WHOLE if src is None or dist.get_rank() == src else None
        made = [
            distribute_array(mine, Sharding(MESH, s, partial), src_data_rank=src) for s in specs
        ]
        return [(x.to_local(), x.full_array(), x.sharding) for x in made]

    for rank, results in enumerate(run_ranks(program, 4)):
        for spec, (local, whole, sharding) in zip(specs, results, strict=True):
            assert sharding == Sharding(MESH, spec, partial)
            np.testing.assert_array_equal(whole, WHOLE)
            if partial is None:
                np.testing.assert_array_equal(local, WHOLE[sharding.slices(WHOLE.shape, rank)])


def test_of_parts_with_a_check_and_without():
    def program():
        sharding = Sharding(MESH, P(("a", "b")))
        part = WHOLE[sharding.slices((5, 7))]
        checked = DArray.from_local(part, sharding)
        given = DArray.from_local(part, sharding, (5, 7), run_check=False)
        even = DArray.from_local(np.ones((3, 2)), sharding, run_check=False)
        assert checked.to_local().base is part.base or np.shares_memory(checked.local, part)
        np.testing.assert_array_equal(checked.full_array(), WHOLE)
        np.testing.assert_array_equal(given.full_array(), WHOLE)
        with pytest.raises(
            ValueError, match=r"of \(6, 7\).*has \(2, 7\)|of \(6, 7\).*has \(1, 7\)"
        ):
            DArray.from_local(np.ones((5, 7)), sharding, (6, 7), run_check=False)
        return checked.shape, even.shape

    assert run_ranks(program, 4) == [((5, 7), (12, 2))] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: (np.ones((2 - (rank == 2), 3)), None), "rank 2: local has shape"),
        (lambda rank: (np.ones(2, int if rank == 1 else float), None), "rank 1 has dtype int64"),
        (lambda rank: ([1, 2] if rank == 3 else np.ones(2), None), "rank 3: local is a"),
        (lambda rank: (np.ones((2,) * (1 + (rank == 1))), None), "rank 1: local has shape"),
        (lambda rank: (np.ones(2), (8 + (rank == 1),)), r"rank 1 has shape \(9,\)"),
        (lambda rank: (np.ones(2), (9,)), "rank 0: local has shape"),
    ],
)
def test_parts_that_make_up_no_array_are_an_error_on_every_rank(make, message):
    def program():
        local, shape = make(dist.get_rank())
        with pytest.raises(ValueError, match=message):
            DArray.from_local(local, Sharding(MESH, P(("a", "b"))), shape)

    run_ranks(program, 4)


def test_to_local_is_a_view():
    def program():
        x = zeros((4, 3), Sharding(MESH, P("a")))
        x.to_local()[...] = 2
        return x.full_array().sum()

    assert run_ranks(program, 4) == [24.0] * 4


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_ones_and_full(spec):
    def program():
        sharding = Sharding(MESH, spec)
        arrays = [
            zeros((5, 7), sharding),
            ones((5, 7), sharding, np.int32),
            full((5, 7), sharding, 2.5, np.float32),
        ]
        return [(x.dtype, x.full_array()) for x in arrays]

    for results in run_ranks(program, 4):
        for (dtype, whole), value in zip(results, (0, 1, 2.5), strict=True):
            assert dtype == whole.dtype
            assert whole.shape == (5, 7)
            assert (whole == value).all()


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_random_values_are_the_same_on_any_mesh(distribution, dtype):
    shape = (6, 50, 7)
    options = {"seed": 3, "dtype": dtype, "distribution": distribution}

    def on(mesh, spec):
        def program():
            return random(shape, Sharding(mesh, spec), **options).full_array()

        return run_ranks(program, mesh.size())[-1]

    alone = on(named_mesh(1), P())
    assert alone.dtype == dtype
    for mesh, spec in [
        (MESH, P("a", "b")),
        (MESH, P(None, None, ("b", "a"))),
        (named_mesh(3), P(None, "a")),
    ]:
        np.testing.assert_array_equal(on(mesh, spec), alone)
    values = alone.astype(float)
    assert len(np.unique(values)) > values.size / 3
    if distribution == "uniform":
        assert values.min() >= 0
        assert values.max() < 1
        assert abs(values.mean() - 0.5) < 0.03
    else:
        assert abs(values.mean()) < 0.1
        assert abs(values.std() - 1) < 0.05


def test_random_values_of_a_part_that_lies_in_many_pieces():
    from meshlib.sharding._draws import draw_part

    shape = (3, 300, 400)
    whole = draw_part(shape, tuple(slice(0, n) for n in shape), 7, np.dtype(float), "uniform")
    for box in [
        (slice(1, 3), slice(0, 300), slice(390, 400)),
        (slice(0, 3), slice(7, 9), slice(0, 400)),
        (slice(2, 2), slice(0, 300), slice(0, 400)),
    ]:
        drawn = draw_part(shape, box, 7, np.dtype(float), "uniform")
        np.testing.assert_array_equal(drawn, whole[box])
    other = draw_part(shape, box, 8, np.dtype(float), "uniform")
    assert not np.array_equal(other, whole[box]) or not other.size


def test_a_rank_outside_has_no_part_and_may_receive_one():
    mesh, later = dist.DeviceMesh("cpu", [0, 1]), dist.DeviceMesh("cpu", [[3], [1]])

    def program():
        x = ones((4,), Sharding(mesh, P(0)))
        outside = x.to_local() is None
        if outside:
            with pytest.raises(ValueError, match="is not in"):
                x + 1
        y = x.redistribute(Sharding(later, P(0)))
        return outside, None if y.to_local() is None else y.full_array().tolist()

    assert run_ranks(program, 4) == [
        (False, None),
        (False, [1.0] * 4),
        (True, None),
        (True, [1.0] * 4),
    ]


def test_bad_input_is_named_on_every_rank():
    def program():
        with pytest.raises(TypeError, match="array is a list on rank 1"):
            distribute_array([1, 2], Sharding(MESH, P("a")), src_data_rank=1)
        with pytest.raises(ValueError, match="src_data_rank is 4"):
            distribute_array(WHOLE, Sharding(MESH, P("a")), src_data_rank=4)
        with pytest.raises(ValueError, match="has 1 dims"):
            distribute_array(np.ones(3), Sharding(MESH, P(None, "a")))
        with pytest.raises(ValueError, match="dtype is int64"):
            random((2,), Sharding(MESH, P()), seed=0, dtype=int)
        with pytest.raises(ValueError, match="'gauss'"):
            random((2,), Sharding(MESH, P()), seed=0, distribution="gauss")
        with pytest.raises(ValueError, match="seed is -1"):
            random((2,), Sharding(MESH, P()), seed=-1)
        x = zeros((2,), Sharding(MESH, P("a")))
        with pytest.raises(ShardingError, match="full_array"):
            np.asarray(x)
        with pytest.raises(TypeError):
            iter(x)
        with pytest.raises(ValueError, match="expected one"):
            float(x)
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4


def test_a_spec_alone_is_no_sharding():
    def program():
        makers = [
            lambda: distribute_array(WHOLE, P("a")),
            lambda: DArray.from_local(WHOLE, P("a")),
            lambda: DArray.from_local(WHOLE, P("a"), run_check=False),
            lambda: zeros((5, 7), P("a")),
            lambda: random((5, 7), P("a"), seed=0),
        ]
        for make in makers:
            with pytest.raises(TypeError, match=r"sharding is P\('a'\); expected a Sharding"):
                make()

    run_ranks(program, 1)


def test_a_shape_that_is_none_on_one_rank_is_an_error_on_all():
    def program():
        shape = 5 if dist.get_rank() == 2 else (5, 7)
        with pytest.raises(ValueError, match="rank 2: shape must be a list"):
            DArray.from_local(WHOLE, Sharding(MESH), shape)

    run_ranks(program, 4)


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_arguments_of_one_rank_that_differ_are_named_on_all(bad):
    flat = dist.DeviceMesh("cpu", [0, 1, 2, 3])
    prefix = f"rank {bad} has" if bad else "rank 1 has"

    def program():
        here = dist.get_rank() == bad
        for sharding in (Sharding(MESH, P(None, "a")), Sharding(flat, P(0))):
            mine = sharding if here else Sharding(MESH, P("a"))
            with pytest.raises(ValueError, match=f"{prefix} sharding"):
                distribute_array(WHOLE, mine)
            part = np.ones(mine.local_shape(WHOLE.shape))
            with pytest.raises(ValueError, match=f"{prefix} sharding"):
                DArray.from_local(part, mine, WHOLE.shape)
        for source, message in [
            (1, f"{prefix} src_data_rank"),
            (4, "src_data_rank is 4; expected 0 to 3"),
        ]:
            with pytest.raises(ValueError, match=message):
                distribute_array(WHOLE, Sharding(MESH), src_data_rank=source if here else 0)
        with pytest.raises(TypeError, match="src_data_rank must be"):
            distribute_array(WHOLE, Sharding(MESH), src_data_rank="0" if here else 0)
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4
