"""Layouts against what NumPy's reshape, transpose and moveaxis do to an array of indices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshlib._mesh.layout import Dim, Layout, join

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


def _numbers(shape):
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def layouts(draw):
    """A layout that was through several operations, with the array that NumPy gets likewise."""
    shape = draw(shapes)
    layout, array = Layout.row_major(shape), _numbers(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["permute", "flatten", "split", "at"]))
        dims = range(array.ndim)
        if kind == "permute":
            order = draw(st.permutations(dims))
            layout, array = layout.permute(order), array.transpose(order)
        elif kind == "flatten":
            chosen = draw(st.lists(st.sampled_from(dims), min_size=1, unique=True))
            layout, array = layout.flatten(chosen), _flatten(array, chosen)
        elif kind == "split":
            i = draw(st.sampled_from(dims))
            inner = draw(st.sampled_from([n for n in range(1, 100) if array.shape[i] % n == 0]))
            sizes = (array.shape[i] // inner, inner)
            try:
                layout = layout.split(i, sizes)
            except ValueError:
                assume(False)
            array = array.reshape(array.shape[:i] + sizes + array.shape[i + 1 :])
        elif array.ndim > 1:
            i = draw(st.sampled_from(dims))
            coordinate = draw(st.integers(0, array.shape[i] - 1))
            layout, array = layout.at(i, coordinate), array.take(coordinate, i)
    return layout, array


def _flatten(array, chosen):
    place = min(chosen)
    together = np.moveaxis(array, chosen, range(array.ndim - len(chosen), array.ndim))
    kept = together.shape[: array.ndim - len(chosen)]
    return np.moveaxis(together.reshape((*kept, -1)), -1, place)


@given(layouts())
def test_operations_do_what_numpy_does(made):
    layout, array = made
    assert layout.shape == array.shape
    np.testing.assert_array_equal(layout.indices(), array)


@given(layouts())
def test_index_and_coordinates_are_inverse(made):
    layout, array = made
    for coordinates in np.ndindex(*array.shape):
        index = layout.index(coordinates)
        assert index == array[coordinates]
        assert layout.coordinates(index) == coordinates
    for index in set(range(-2, int(array.max()) + 3)) - set(array.ravel().tolist()):
        assert layout.coordinates(index) is None
        assert index not in layout


@given(layouts(), st.data())
def test_select_leaves_the_others_at_0(made, data):
    layout, array = made
    chosen = data.draw(st.lists(st.sampled_from(range(array.ndim)), unique=True))
    rest = [i for i in range(array.ndim) if i not in chosen]
    expected = array.transpose([*rest, *chosen])[(0,) * len(rest)]
    np.testing.assert_array_equal(layout.select(chosen).indices(), expected)


@given(layouts(), st.data())
def test_concatenate_undoes_select(made, data):
    layout, array = made
    order = data.draw(st.permutations(range(array.ndim)))
    cut = data.draw(st.integers(0, array.ndim))
    base = Layout(layout.dims)
    joined = base.select(order[:cut]).concatenate(base.select(order[cut:]))
    np.testing.assert_array_equal(joined.shifted(layout.origin).indices(), array.transpose(order))


@given(shapes, st.data())
def test_complement_counts_the_copies_that_cover_everything(shape, data):
    whole = Layout.row_major(shape)
    chosen = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    part = whole.select(chosen)
    rest = part.complement(whole.size)
    np.testing.assert_array_equal(
        np.sort(np.add.outer(rest.indices().ravel(), part.indices().ravel()).ravel()),
        np.arange(whole.size),
    )
    assert rest.indices().ravel().tolist() == sorted(rest.indices().ravel().tolist())
    others = whole.select([i for i in range(len(shape)) if i not in chosen])
    assert set(rest.indices().ravel()) == set(others.indices().ravel())


@given(shapes, st.data())
def test_equal_dims_are_equal_however_they_were_made(shape, data):
    whole = Layout.row_major(shape)
    (flat,) = whole.flatten().dims
    assert flat == Dim.of([(math.prod(shape), 1)])
    cut = data.draw(st.integers(0, len(shape)))
    assert join([join(whole.dims[:cut]), join(whole.dims[cut:])]) == flat
    assert Layout((flat,)).split(0, shape) == whole
    assert hash(Layout((flat,)).split(0, shape)) == hash(whole)


@given(shapes, st.data())
def test_covers_means_that_slices_lie_in_slices(shape, data):
    whole = Layout.row_major(shape)
    subset = st.lists(st.sampled_from(range(len(shape))), unique=True)
    outer, inner = data.draw(subset), data.draw(subset)
    real = {i for i in inner if shape[i] > 1}
    covered = whole.select(outer).covers(join(whole.dims[i] for i in inner))
    assert covered == (real <= set(outer))


def test_covers_refuses_a_part_that_straddles():
    six = Layout(Dim.of([(24, 1)]).split((4, 6))[1:])
    four = Dim.of([(24, 1)]).split((6, 4))[1]
    assert not six.covers(four)
    assert six.covers(Dim.of([(3, 2)]))
    assert six.covers(Dim.of([(2, 1)]))


def test_a_million_indices_cost_nothing_until_asked_for():
    layout = Layout.row_major((64, 128, 128))
    assert layout.index((63, 127, 127)) == 2**20 - 1
    assert layout.coordinates(2**20 - 2) == (63, 127, 126)
    assert layout.select([2, 0]).indices().shape == (128, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.row_major((2, 0)), "(2, 0) must all be at least 1"),
        (lambda: Layout.from_strides((2, 2), (1,)), "differ in length"),
        (lambda: Layout.from_strides((2, 2), (0, 1)), "size 2 and stride 0"),
        (lambda: Layout.from_strides((2, 3), (2, 1)), "overlap: stride 2 is not a multiple of 3"),
        (lambda: Layout.from_strides((2, 2), (1, 1)), "overlap"),
        (lambda: Layout.row_major((2, 2)).permute((0,)), "(0,) must name each of the 2 dims"),
        (lambda: Layout.row_major((2, 2)).permute((0, 0)), "dim 0 is named twice"),
        (lambda: Layout.row_major((2, 2)).select((2,)), "dim 2 does not exist"),
        (lambda: Layout.row_major((2, 2)).select((1, -1)), "dim -1 is named twice"),
        (lambda: Layout.row_major((2, 2)).index((2, 0)), "(2, 0) do not lie in the shape (2, 2)"),
        (lambda: Layout.row_major((2, 2)).index((0,)), "(0,) do not lie"),
        (lambda: Layout.row_major((2, 2)).at(0, -1), "coordinate -1 of dim 0"),
        (lambda: Layout.row_major((4,)).split(0, (3, 2)), "product 6, expected sizes >= 1"),
        (lambda: Layout.row_major((4,)).split(0, (-2, -2)), "expected sizes >= 1"),
        (lambda: Layout.row_major((4,)).complement(6), "6 indices are not covered"),
        (
            lambda: Layout.row_major((4, 5, 6)).flatten((0, 2)).split(0, (6, 4)),
            "4 and 6 do not divide one another",
        ),
        (
            lambda: Layout.row_major((2, 2)).concatenate(Layout.row_major((2,))),
            "overlap",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError) as raised:
        make()
    assert message in str(raised.value)
