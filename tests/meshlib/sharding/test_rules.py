"""NumPy on DArrays: the same values as on whole arrays, or an error that says what to do."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.sharding import DArray, P, Sharding, ShardingError, distribute_array
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import named_mesh

MESH = named_mesh(2, 2)
CHANCE = np.random.default_rng(0)
A = CHANCE.standard_normal((5, 6))
B = CHANCE.standard_normal((5, 6))
ROW = CHANCE.standard_normal((6,))
W = CHANCE.standard_normal((6, 8))
STACK = CHANCE.standard_normal((4, 5, 6))
INTS = CHANCE.integers(-9, 9, (5, 6))
FEW = CHANCE.standard_normal((1, 6))
V5 = CHANCE.standard_normal(5)


def partial(spec, along="b"):
    return (spec, along)


def distributed(array, spec):
    spec, along = spec if isinstance(spec, tuple) and not isinstance(spec, P) else (spec, None)
    return distribute_array(array, Sharding(MESH, spec, along), src_data_rank=None)


def check(function, arrays, specs, sharding=None):
    """Compare ``function`` of DArrays with that of the whole arrays, on every rank."""
    expected = function(*arrays)

    def program():
        result = function(*(distributed(x, s) for x, s in zip(arrays, specs, strict=True)))
        if isinstance(result, DArray):
            assert result.to_local().shape == result.sharding.local_shape(result.shape)
            if sharding is not None:
                assert result.sharding == sharding, result.sharding
            return result.dtype, result.full_array()
        return None, result

    for dtype, whole in run_ranks(program, 4):
        if dtype is not None:
            assert dtype == np.asarray(expected).dtype
            assert np.shape(whole) == np.shape(expected)
        np.testing.assert_allclose(whole, expected, rtol=1e-12, atol=1e-12)


def on(spec, along=None):
    return Sharding(MESH, spec, along)


ELEMENTWISE = [
    (lambda x: -x, [A], [P("a")], on(P("a"))),
    (lambda x: -x, [A], [partial(P("a"))], on(P("a"))),
    (lambda x: -x, [INTS], [partial(P("a"))], on(P("a"), "b")),
    (lambda x: x * 2 + 1, [A], [P("a", "b")], on(P("a", "b"))),
    (lambda x: 0.3 * x / 2, [A], [partial(P("a"))], on(P("a"), "b")),
    (lambda x: 3 * x, [A], [partial(P("a"))], on(P("a"))),
    (lambda x: x / 0.3, [A], [partial(P("a"))], on(P("a"))),
    (lambda x: 0.3 * x, [A + 1j], [partial(P("a"))], on(P("a"))),
    (lambda x: 2 / (x + 9), [A], [partial(P("a"))], on(P("a"))),
    (lambda x: x + 1, [A], [partial(P("a"))], on(P("a"))),
    (np.exp, [A], [partial(P("a"))], on(P("a"))),
    (lambda x, y: x + y, [A, B], [P("a"), P("a")], on(P("a"))),
    (lambda x, y: x + y, [A, B], [P("a"), P()], on(P("a"))),
    (lambda x, y: x - y, [A, B], [P("a"), P(("a", "b"))], on(P(("a", "b")))),
    (lambda x, y: x - y, [A, B], [P("a"), P(None, "b")], on(P("a", "b"))),
    (lambda x, y: x + y, [A, B], [partial(P("a")), partial(P("a"))], on(P("a"), "b")),
    (lambda x, y: x + y, [A, B], [partial(P("a")), P("a")], on(P("a"))),
    (lambda x, y: x * y, [A, B], [partial(P("a")), P("a")], on(P("a"))),
    (lambda x, y: x * y, [A, B], [partial(P("a")), partial(P("a"))], on(P("a"))),
    (lambda x, y: x * y, [A, B], [partial(P("a")), P("a", "b")], on(P("a", "b"))),
    (lambda x, y: x + y, [A, ROW], [P("a", "b"), P("b")], on(P("a", "b"))),
    (lambda x, y: x + y, [A, ROW], [P("a"), P()], on(P("a"))),
    (lambda x, y: x * y, [A, FEW], [P("a"), P(None, "b")], on(P("a", "b"))),
    (lambda x, y: x > y, [A, B], [P("b", "a"), P("b", "a")], on(P("b", "a"))),
    (lambda x, y: np.where(x > 0, x, y), [A, B], [P("a"), P("a")], on(P("a"))),
    (lambda x: np.clip(x, -0.5, None), [A], [P(None, "a")], on(P(None, "a"))),
    (lambda x: np.round(x, 1), [A], [P("a")], on(P("a"))),
    (lambda x: x.astype(np.float32), [A], [P("a")], on(P("a"))),
    (lambda x: np.divmod(x, 2)[1], [INTS], [P("a")], on(P("a"))),
    (lambda x: np.full_like(x, 3), [A], [partial(P("a"))], on(P("a"))),
]


@pytest.mark.parametrize("case", range(len(ELEMENTWISE)))
def test_element_by_element(case):
    check(*ELEMENTWISE[case])


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean", "var", "std", "any", "all"])
def test_reductions(name, axis):
    function = getattr(np, name)
    for spec in [P(), P("a"), P(None, ("b", "a")), P("a", "b"), partial(P("a"))]:
        check(lambda x: function(x, axis=axis), [A], [spec])
        check(lambda x: function(x, axis=axis, keepdims=True), [INTS], [spec])


def test_what_a_reduction_leaves_partial():
    check(lambda x: x.sum(0), [A], [P("a", "b")], on(P("b"), "a"))
    check(lambda x: x.sum(), [A], [partial(P("a"))], on(P(), ("a", "b")))
    check(lambda x: x.mean(1), [A], [P("a", "b")], on(P("a"), "b"))
    check(lambda x: x.max(0), [A], [P("a")], on(P(), {"a": "max"}))
    check(np.add.reduce, [A], [P("a")], on(P(), "a"))
    check(np.linalg.norm, [A], [P("a", "b")])
    check(lambda x: np.linalg.norm(x, axis=0), [A], [P("a", "b")])


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.bool_])
def test_empty_parts_do_not_count_in_max_and_min(dtype):
    mesh = named_mesh(4)

    def program():
        ones = np.ones((1, 2))
        signed = ones if dtype is np.bool_ else -ones
        x = distribute_array(signed.astype(dtype), Sharding(mesh, P("a")))
        return x.max(0).full_array().tolist(), x.min(0).full_array().tolist()

    value = dtype(-1).item() if dtype is not np.bool_ else True
    assert run_ranks(program, 4) == [([value] * 2, [value] * 2)] * 4


PRODUCTS = [
    (lambda x, w: x @ w, [A, W], [P("a"), P(None, "b")], on(P("a", "b"))),
    (lambda x, w: x @ w, [A, W], [P("a", "b"), P("b")], on(P("a"), "b")),
    (lambda x, w: x @ w, [A, W], [P("a", "b"), P()], on(P("a"), "b")),
    (lambda x, w: x @ w, [A, W], [P(None, ("a", "b")), P(("a", "b"))], on(P(), ("a", "b"))),
    (lambda x, w: x @ w, [A, W], [partial(P("a")), P()], on(P("a"))),
    (lambda x, w: x @ w, [A, W], [partial(P("a")), P(None, "b")], on(P("a", "b"))),
    (lambda x, w: x @ w, [STACK, W], [P("a"), P(None, "b")], on(P("a", None, "b"))),
    (lambda x, v: x @ v, [A, ROW], [P("a", "b"), P("b")], on(P("a"), "b")),
    (lambda v, x: v @ x, [V5, A], [P("a"), P("a", "b")], on(P("b"), "a")),
    (lambda v, w: v @ w, [ROW, ROW], [P("a"), P("a")], on(P(), "a")),
    (np.dot, [A, W], [P("a"), P()], on(P("a"))),
    (np.vdot, [A, B], [P("a"), P("a")], on(P(), "a")),
    (lambda x, y: np.einsum("ij,kj->ik", x, y), [A, B], [P("a"), P("b")], on(P("a", "b"))),
    (lambda x, y: np.einsum("ij,ij->j", x, y), [A, B], [P("a"), P()], on(P(), "a")),
    (lambda x, y: np.einsum("bij,ij", x, y), [STACK, A], [P("b"), P("a")], on(P("b"), "a")),
    (lambda x: np.einsum("ij->ji", x), [A], [partial(P("a"))], on(P(None, "a"), "b")),
    (lambda x, w: np.tensordot(x, w, 1), [A, W], [P(None, "a"), P("a")], on(P(), "a")),
    (lambda x, y: np.tensordot(x, y, ([1, 0], [1, 0])), [A, B], [P("a"), P("a")], on(P(), "a")),
]


@pytest.mark.parametrize("case", range(len(PRODUCTS)))
def test_products(case):
    check(*PRODUCTS[case])


SHAPES = [
    (lambda x: x.T, [STACK], [P("a", None, "b")], on(P("b", None, "a"))),
    (lambda x: np.swapaxes(x, 0, 2), [STACK], [P("a")], on(P(None, None, "a"))),
    (lambda x: np.moveaxis(x, 0, -1), [STACK], [P("a", "b")], on(P("b", None, "a"))),
    (lambda x: np.expand_dims(x, 0), [A], [P("a")], on(P(None, "a"))),
    (np.squeeze, [FEW], [P(None, "a")], on(P("a"))),
    (lambda x: x.reshape(20, 6), [STACK], [P("a", None, "b")], on(P("a", "b"))),
    (lambda x: x.reshape(4, 5, 3, 2), [STACK], [P(("a", "b"))], on(P(("a", "b")))),
    (lambda x: x.reshape(2, 2, 30), [STACK], [partial(P("a"))], on(P("a"), "b")),
    (lambda x: x.reshape(1, 5, 6, 1), [A], [P("a", "b")], on(P(None, "a", "b"))),
    (np.ravel, [STACK], [P("b")], on(P("b"))),
    (lambda x: x.reshape(-1, 6), [A], [P("a")], on(P("a"))),
    (lambda x: x[:, 1:3, None, 2], [STACK], [P("a")], on(P("a"))),
    (lambda x: x[..., -1], [STACK], [P("a", "b")], on(P("a", "b"))),
    (lambda x: x[:, ::-2], [A], [partial(P("a"))], on(P("a"), "b")),
    (lambda x: x[None], [A], [P("a")], on(P(None, "a"))),
    (lambda x: x[0], [ROW], [P()], on(P())),
    (lambda x, y: np.concatenate([x, y], 1), [A, B], [P("a"), P("a")], on(P("a"))),
    (lambda x, y: np.concatenate([x, y], 1), [A, B], [P("a"), P()], on(P("a"))),
    (lambda x, y: np.stack([x, y]), [A, B], [P("a"), P("a")], on(P(None, "a"))),
    (np.shape, [A], [P("a")], None),
    (np.array_equal, [A, A], [P("a"), P()], None),
    (np.allclose, [A, B], [P("a"), P()], None),
]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_shapes(case):
    check(*SHAPES[case])


def test_reshape_keeps_no_elements():
    check(lambda x: x.reshape(4, 0, 2), [np.ones((4, 0, 7))], [P("a")], on(P("a")))


REFUSED = [
    (lambda x, y: x + y, [A, B], [P("a"), P("b")], r"np.add|add.*redistribute\(P\('a'\)\)"),
    (lambda x, y: x + y, [A, B], [P("a"), P(None, "a")], "mesh dim 'a' splits"),
    (lambda x, y: x + y, [A, FEW], [P("a"), P("a")], "is repeated, is split"),
    (lambda x, w: x @ w, [A, W], [P("a"), P("a")], r"redistribute\(P\(\)\)"),
    (lambda x: x[0], [A], [P("a")], "dim 0 of .* is split"),
    (lambda x: x[1:], [A], [P("a")], "redistribute it first"),
    (lambda x: x[np.array([0, 1])], [A], [P()], "no rule"),
    (lambda x: x[x > 0], [A], [P()], "no rule"),
    (lambda x: x.reshape(-1), [A], [P(None, "a")], "such as to P()"),
    (lambda x: x.reshape(-1), [A], [P("a")], "dim 0 is split 2 ways"),
    (np.sort, [A], [P()], r"numpy.sort has no rule.*full_array\(\)"),
    (np.argmax, [A], [P()], "argmax has no rule"),
    (np.max, [A + 1j], [P("a")], r"complex numbers have no order.*full_array\(\)"),
    (np.add.accumulate, [A], [P()], "add.accumulate"),
    (lambda x: np.sum(x, where=True), [A], [P()], "where"),
    (lambda x: np.einsum("i...->i", x), [A], [P()], "a letter for each dim"),
    (lambda x: np.einsum("ii->i", x), [np.eye(4)], [P("a")], "have the same label"),
    (lambda x: x + B, [A], [P("a")], "belongs to no mesh"),
    (lambda x: x @ W, [A], [P("a")], "belongs to no mesh.*distribute_array"),
    (lambda x: np.concatenate([x, x]), [A], [P("a")], "dim 0 of .* is split"),
    (lambda x, y: np.add(x, y, out=x), [A, B], [P(), P("a")], "but out is"),
    (lambda x: np.linalg.norm(x, 1), [A], [P()], "no rule"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_has_no_rule_says_so_on_every_rank(case):
    function, arrays, specs, message = REFUSED[case]

    def program():
        operands = [distributed(x, s) for x, s in zip(arrays, specs, strict=True)]
        with pytest.raises(ShardingError, match=message):
            function(*operands)
        return MESH.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 4) == [4.0] * 4


def test_in_place():
    def program():
        x, y = distributed(A, P("a")), distributed(B, P())
        local = x.local
        x += y
        x *= 2
        x[:, 0] = 7
        x[:, 1] = distributed(V5, P("a"))
        assert np.shares_memory(local, x.local)
        with pytest.raises(ShardingError, match="partial"):
            distributed(A, partial(P("a")))[:, 0] = 1
        with pytest.raises(ShardingError, match="is split where"):
            distributed(A, P())[:, 0] = distributed(V5, P("a"))
        return x.full_array()

    expected = 2 * (A + B)
    expected[:, 0], expected[:, 1] = 7, V5
    for whole in run_ranks(program, 4):
        np.testing.assert_array_equal(whole, expected)


def test_single_values():
    def program():
        x = distributed(A, P("a", "b"))
        return (
            float(x.sum()),
            int(distributed(INTS, P("a")).sum()),
            bool((x > -99).all_() if 0 else np.all(x > -99)),
        )

    for total, count, true in run_ranks(program, 4):
        assert total == pytest.approx(A.sum())
        assert (count, true) == (INTS.sum(), True)


def test_operands_on_two_meshes():
    other = named_mesh(4)

    def program():
        with pytest.raises(ShardingError, match=r"operand 0 is on .* and operand 1 on"):
            distributed(A, P()) + distribute_array(A, Sharding(other, P()))

    run_ranks(program, 4)


def test_a_layer_learns_as_in_one_process():
    """Two layers, tensor parallel over b and data parallel over a: forward and backward."""
    x, w1, w2 = A, W, CHANCE.standard_normal((8, 3))

    def step(x, w1, w2):
        h = np.maximum(x @ w1, 0)
        y = h @ w2
        dy = 2 * y / y.size
        dw2 = h.T @ dy
        dh = (dy @ w2.T) * (h > 0)
        return np.sum(y * y) / y.size, x.T @ dh, dw2

    expected = step(x, w1, w2)

    def program():
        operands = [distributed(x, P("a")), distributed(w1, P(None, "b")), distributed(w2, P("b"))]
        loss, dw1, dw2 = step(*operands)
        assert dw1.sharding == on(P(None, "b"), "a")
        return float(loss), dw1.full_array(), dw2.full_array()

    for result in run_ranks(program, 4):
        for one, other in zip(result, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_dist_is_enough():
    assert dist.DArray is DArray


def test_dims_that_are_not_there():
    calls = [
        lambda x: np.transpose(x, (0, 4)),
        lambda x: np.squeeze(x[:1], axis=2),
        lambda x: np.squeeze(x.sum(), axis=1),
        lambda x: np.swapaxes(x, 0, 2),
        lambda x: np.concatenate([x, x], axis=3),
        lambda x: np.stack([x, x], axis=-4),
    ]

    def program():
        for call in calls:
            with pytest.raises(np.exceptions.AxisError, match="is out of bounds"):
                call(distributed(A, P(None, "b")))
        with pytest.raises(ValueError, match="without dims"):
            np.concatenate([distributed(A, P()).sum()] * 2)

    run_ranks(program, 4)


def test_means_and_norms_do_not_overflow():
    check(np.mean, [np.full((5, 40000), 3, "f2")], [P("a", "b")], on(P()))
    check(np.linalg.norm, [np.array([100, -128, 3], "i1")], [P("a")])
    check(np.linalg.norm, [np.full((2, 2), 200, "u1")], [P("a", "b")])


def test_partial_integers_that_wrapped_are_reduced_before_they_are_widened():
    def program():
        mesh = dist.DeviceMesh("cpu", [0, 1], mesh_dim_names=["a"])
        split = Sharding(mesh, P(), partial="a")
        mine = dist.get_rank()

        def parts(values, dtype="u1"):
            return DArray.from_local(np.array([values[mine]] * 3, dtype), split, (3,))

        less = parts([5, 100]) - parts([10, 20])  # 251 and 80: together 75, as bytes
        assert less.sharding.partial == {"a": "sum"}
        other = parts([1, 2], "i8")
        for got, expected in (
            (less, 75),
            (np.sum(less), 225),
            (less * 2.0, 150),
            (less / 2, 37.5),
            (less + other, 78),
            (np.concatenate([less, other])[:3], 75),
            (less @ DArray.from_local(np.ones(3, "i8"), Sharding(mesh), (3,)), 225),
        ):
            assert np.all(np.asarray(got.full_array()) == expected), (got, got.full_array())

    run_ranks(program, 2)


def test_vdot_is_of_the_type_of_its_operands():
    check(np.vdot, [np.arange(5, dtype="i4")] * 2, [P("a"), P("a")], on(P(), "a"))
