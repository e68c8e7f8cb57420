"""Mixtures of experts inside ``jax.jit``: values and gradients of one process."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

import meshlib.jit as mj  # noqa: E402
from parallel.jax import _experts as ex  # noqa: E402

TOKENS, DIM, HIDDEN, EXPERTS = 24, 6, 10, 4

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.timeout(240)]


def make_params():
    rng = np.random.default_rng(0)
    shapes = {
        "router": (DIM, EXPERTS),
        "up": (EXPERTS, DIM, HIDDEN),
        "down": (EXPERTS, HIDDEN, DIM),
    }
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


X = np.random.default_rng(1).normal(size=(TOKENS, DIM))


def layer(params, x, ep=None, *, top_k=2, balance_over=None, **options):
    def networks(rows, counts):
        hidden = jnp.tanh(ex.grouped_matmul(rows, params["up"], counts))
        return ex.grouped_matmul(hidden, params["down"], counts)

    routes = ex.route(x, params["router"], top_k)
    y = ex.mixture(networks, x, *routes[:2], EXPERTS, ep, **options)
    return ex.with_loss(y, 0.1 * ex.balance_loss(routes, balance_over))


def loss(params, x, ep=None, **options):
    return jnp.sin(3 * layer(params, x, ep, **options)).mean()


def dense(params, x):
    """Every expert computes with every token."""
    scores = jax.nn.softmax(x @ params["router"])
    order = jnp.argsort(-scores, axis=-1)[:, :2]
    weights = jnp.take_along_axis(scores, order, axis=-1)
    weights /= weights.sum(axis=-1, keepdims=True)
    each = jnp.einsum(
        "eth,ehd->ted", jnp.tanh(jnp.einsum("td,edh->eth", x, params["up"])), params["down"]
    )
    y = (jnp.take_along_axis(each, order[..., None], axis=1) * weights[..., None]).sum(axis=1)
    counts = (order[..., None] == jnp.arange(EXPERTS)).sum(axis=(0, 1)) / order.size
    return jnp.sin(3 * y).mean() + 0.1 * EXPERTS * (counts * scores.mean(axis=0)).sum()


def train(step, params):
    losses = []
    for _ in range(20):
        value, grads = step(params)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    return np.array(losses), jax.tree.map(np.asarray, params)


def test_one_process_computes_what_dense_experts_do():
    params = make_params()
    ours = jax.grad(loss)(params, X)
    for name, grad in jax.grad(dense)(params, X).items():
        np.testing.assert_allclose(ours[name], grad, atol=1e-12)


@pytest.mark.parametrize("dims", [{"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_training_equals_one_process(dims):
    expected, trained = train(jax.jit(jax.value_and_grad(lambda p: loss(p, X))), make_params())

    def rank():
        mesh = dist.init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        ep, here = mesh["ep"], EXPERTS // mesh["ep"].size()
        first = mesh.get_local_rank("ep") * here
        whole = make_params()
        params = {"router": whole["router"]}
        params |= {name: whole[name][first : first + here] for name in ("up", "down")}
        rows = TOKENS // mesh.size()
        x = X[mesh.get_rank() * rows :][:rows]

        @jax.jit
        def step(params):
            value, grads = jax.value_and_grad(loss)(params, x, ep, balance_over=mesh)
            grads["router"] = mj.all_reduce(grads["router"], dist.ReduceOp.AVG, mesh)
            for name in ("up", "down"):
                grads[name] /= ep.size()
                if "dp" in dims:
                    grads[name] = mj.all_reduce(grads[name], dist.ReduceOp.AVG, mesh["dp"])
            return mj.all_reduce(value, dist.ReduceOp.AVG, mesh), grads

        losses, params = train(step, params)
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(params["router"], trained["router"], atol=1e-9)
        for name in ("up", "down"):
            np.testing.assert_allclose(params[name], trained[name][first : first + here], atol=1e-9)

    run_ranks(rank, int(np.prod(list(dims.values()))), timeout=120)


def by_loops(params, x, top_k, score, normalize, capacity):
    """Return the layer's output by a loop over the choices of each token, and how many it drops.

    Each expert takes ``capacity`` choices: all first ones in the order of tokens, then all second
    ones.
    """
    logits = x @ params["router"]
    scores = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
    y, taken, dropped = np.zeros_like(x), [0] * EXPERTS, 0
    for choice in range(top_k):
        for token, row in enumerate(x):
            e = order[token, choice]
            taken[e] += 1
            if taken[e] > capacity:
                dropped += 1
                continue
            weight = scores[token, e] / (scores[token, order[token]].sum() if normalize else 1)
            y[token] += weight * (np.tanh(row @ params["up"][e]) @ params["down"][e])
    return y, dropped


LAYERS = {
    "softmax": {},
    "switch": {"top_k": 1},
    "sigmoid": {"score": "sigmoid"},
    "not normalized": {"normalize": False},
    "normalized one": {"top_k": 1, "normalize": True, "score": "sigmoid"},
    "all": {"top_k": EXPERTS},
}


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("kind", LAYERS)
def test_two_ranks_compute_what_loops_over_tokens_do(kind, factor):
    """Also which choices are dropped, with a capacity of each rank's tokens."""
    options = {"top_k": 2, "score": "softmax", "normalize": None} | LAYERS[kind]
    top_k, score, normalize = options.values()

    def rank():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        me, whole = dist.get_rank(), make_params()
        own = {name: x[2 * me : 2 * me + 2] for name, x in whole.items() if name != "router"}

        @jax.jit
        def apply(params, x):
            def networks(rows, counts):
                hidden = jnp.tanh(ex.grouped_matmul(rows, params["up"], counts))
                return ex.grouped_matmul(hidden, params["down"], counts)

            routes = ex.route(x, whole["router"], top_k, score=score, normalize=normalize)
            ep, factors = mesh["ep"], {"capacity_factor": factor}
            return ex.mixture(networks, x, *routes[:2], EXPERTS, ep, **factors)

        x = np.random.default_rng(me).normal(size=(TOKENS, DIM))
        most = TOKENS * top_k if factor is None else int(factor * top_k * TOKENS / EXPERTS)
        divided = top_k > 1 if normalize is None else normalize
        expected, dropped = by_loops(whole, x, top_k, score, divided, most)
        np.testing.assert_allclose(apply(own, x), expected, rtol=0, atol=1e-12)
        assert (dropped > 0) is (factor is not None)

    run_ranks(rank, 2, timeout=120)


def test_a_capacity_takes_first_choices_then_first_tokens():
    chosen = jnp.array([[0, 1], [0, 1], [1, 0], [0, 2]])
    # Rows are choice * 4 + token: expert 0 takes tokens 0 and 1, expert 1 token 2's first choice
    # and token 0's second one.
    rows, counts = ex.rows_by_expert(chosen, 3, 2)
    assert rows[: counts.sum()].tolist() == [0, 1, 2, 4, 7]
    assert counts.tolist() == [2, 2, 1]
    assert ex.rows_by_expert(chosen, 3, None)[1].tolist() == [4, 3, 1]


def test_balance_is_1_where_all_are_equally_busy_and_n_where_one_has_all():
    even = ex.Routes(jnp.ones((8, 1)), jnp.arange(8)[:, None] % 4, jnp.full((8, 4), 0.25))
    assert float(ex.balance_loss(even)) == pytest.approx(1)
    one = jnp.zeros((8, 1), int)
    crowded = ex.Routes(jnp.ones((8, 1)), one, jax.nn.one_hot(one[:, 0], 4))
    assert float(ex.balance_loss(crowded)) == pytest.approx(4)


def test_equal_scores_choose_the_first_experts():
    assert ex.route(np.zeros((2, 3)), np.ones((3, 4)), 2).chosen.tolist() == [[0, 1]] * 2


def test_only_rows_that_an_expert_takes_travel():
    def rank():
        me = dist.get_rank()
        x = jnp.arange(5.0)[:, None] + 10 * me
        out_of, into = ((2, 1), (2, 3)) if me == 0 else ((3, 1), (1, 1))
        move = jax.jit(lambda x: ex.exchange(x, jnp.array(out_of), jnp.array(into), None, 6))
        came = np.asarray(move(x))[:, 0]
        assert came.tolist() == [[0, 1, 10, 11, 12, 0], [2, 13, 0, 0, 0, 0]][me]
        grad = jax.grad(lambda x: (move(x) * (1 + me)).sum())(x)[:, 0]
        assert grad.tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 2, 0]][me]

    run_ranks(rank, 2, timeout=60)


def test_rows_for_which_there_is_no_room_are_an_error():
    def rank():
        move = jax.jit(lambda x: ex.exchange(x, jnp.array([1, 1]), jnp.array([1, 1]), None, 1))
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="2 rows to receive and 2 to send; expected at"
        ):
            jax.block_until_ready(move(jnp.ones((3, 2))))

    run_ranks(rank, 2, timeout=60)


def test_bad_arguments_are_named_while_tracing():
    params = make_params()
    with pytest.raises(ValueError, match="top_k is 5; expected 1 to the number of experts, 4"):
        layer(params, X, top_k=5)
    with pytest.raises(ValueError, match="score must be 'softmax' or 'sigmoid', got 'max'"):
        ex.route(X, params["router"], 2, score="max")
    with pytest.raises(ValueError, match=r"shapes \(24, 6\), \(24, 2\), \(23, 2\); expected"):
        ex.mixture(lambda x, _: x, X, np.ones((24, 2)), np.ones((23, 2), int), EXPERTS)

    def rank():
        with pytest.raises(ValueError, match="experts is 4, which is not divisible by the 3 ranks"):
            layer(params, X, dist.init_device_mesh("cpu", (3,)))

    run_ranks(rank, 3, timeout=60)
