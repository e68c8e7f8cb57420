"""Operations of random chains: each picks arrays and arguments by the chain's ``chance``."""

import contextlib
import operator

import numpy as np

from meshlib.sharding import DArray
from tests.meshlib.sharding.numpy_chains import DTYPES, is_tame

UNARY = [
    *(np.negative, np.positive, np.conjugate, np.abs, np.square, np.sqrt, np.reciprocal, np.sign),
    *(np.isfinite, np.isnan, np.logical_not, np.invert, np.signbit, np.floor, np.modf, np.spacing),
]
BINARY = [
    *(np.add, np.subtract, np.multiply, np.true_divide) * 4,
    *(np.floor_divide, np.remainder, np.power, np.maximum, np.minimum, np.copysign, np.arctan2),
    *(np.logical_and, np.equal, np.less, np.bitwise_or, np.divmod, np.fmax, np.hypot, np.ldexp),
]
REDUCTIONS = [np.sum, np.prod, np.max, np.min, np.any, np.all, np.mean, np.var, np.std]
UFUNC_REDUCTIONS = [np.add, np.multiply, np.maximum, np.minimum, np.logical_or, np.logical_and]


def _finite(x):
    return x.dtype.kind not in "fc" or bool(np.isfinite(x).all())


def _axis(chance, ndim):
    kind = chance.random()
    if kind < 0.25:
        return None
    if kind < 0.7 or not ndim:
        return (
            chance.randrange(-ndim - (kind < 0.3), ndim + 1 - (kind < 0.6))
            if ndim
            else chance.choice([0, -1, 1])
        )
    return tuple(chance.sample(range(-ndim, 0), chance.randrange(ndim + 1)))


def unary(chain):
    i = chain.pick()
    ufunc = chain.chance.choice(UNARY)
    chain.check(ufunc, chain.pool[i])


def binary(chain):
    i = chain.pick()
    pair = [chain.pool[i], chain.other(i)]
    if chain.chance.random() < 0.3:
        pair.reverse()
    ufunc = chain.chance.choice(BINARY)
    if ufunc is np.power and any(np.asarray(w).dtype.kind == "c" for _, w in pair):
        ufunc = np.copysign
    chain.check(ufunc, *pair)


def with_dtype(chain):
    i = chain.pick()
    dtype = np.dtype(chain.chance.choice(DTYPES))
    ufunc = chain.chance.choice([np.add, np.multiply, np.subtract])
    chain.check(
        lambda x, y: ufunc(x, y, dtype=dtype),
        chain.pool[i],
        chain.other(i),
        label=f"{ufunc} {dtype}",
    )


def with_out(chain):
    i, chance = chain.pick(), chain.chance
    ufunc = chance.choice([np.add, np.subtract, np.multiply, np.true_divide, np.maximum])
    (x, whole), other = chain.pool[i], chain.other(i)
    dtype = chance.choice([whole.dtype, whole.dtype, "i8", "f8"])
    y, values = chain.drawn(whole.shape, dtype)
    with contextlib.suppress(TypeError):
        y = y.redistribute(x.sharding if chance.random() < 0.7 else x.sharding.reduced())
    if chance.random() < 0.3:
        y, values = x, whole
    chain.check(
        lambda x, z, out: ufunc(x, z, out=out.copy()),
        (x, whole),
        other,
        (y, values),
        label=f"{ufunc.__name__} out=",
    )


def in_place(chain):
    i = chain.pick()
    op = chain.chance.choice([operator.iadd, operator.isub, operator.imul, operator.itruediv])
    chain.check(lambda x, y: op(x.copy(), y), chain.pool[i], chain.other(i), label=op.__name__)


def reduction(chain):
    i, chance = chain.pick(), chain.chance
    x, whole = chain.pool[i]
    function = chance.choice([*REDUCTIONS, np.sum, np.sum, np.linalg.norm])
    options = {"axis": _axis(chance, whole.ndim)}
    if chance.random() < 0.5:
        options["keepdims"] = chance.choice([True, False])
    if function in (np.sum, np.prod, np.mean, np.var) and chance.random() < 0.4:
        dtype = np.dtype(chance.choice(DTYPES))
        if dtype.kind in "iu" and not _finite(whole):
            dtype = whole.dtype
        options["dtype"] = dtype
    if function in (np.var, np.std) and chance.random() < 0.3:
        options["ddof"] = chance.choice([1, 2, 0.5])
    if function is np.linalg.norm and chance.random() < 0.5:
        options["ord"] = chance.choice([2, np.inf, 1])
    if function not in (np.linalg.norm,) and chance.random() < 0.1:
        options["where"] = True
    if chance.random() < 0.2 and function in (np.sum, np.prod):
        options["initial"] = 3
    half = np.float16 in (whole.dtype, options.get("dtype"))
    if (
        half
        and (function is not np.mean or "dtype" in options)
        and np.abs(whole[np.isfinite(whole)]).max(initial=0) > 5
    ):
        return  # NumPy rounds and overflows between elements
    if function in (np.prod,) and whole.size > 20:
        return
    chain.check(
        lambda x: function(x, **options),
        (x, whole),
        label=f"{function.__name__} {options}",
        exact=False,
    )


def ufunc_reduction(chain):
    i, chance = chain.pick(lambda x: x.dtype != np.float16 and x.size < 20), chain.chance
    pair = chain.pool[i]
    ufunc = chance.choice(UFUNC_REDUCTIONS)
    if pair[1].dtype == np.float16 or pair[1].size >= 20:
        return
    options = {} if chance.random() < 0.3 else {"axis": _axis(chance, pair[1].ndim)}
    if chance.random() < 0.2 and _finite(pair[1]):
        options["dtype"] = np.dtype(chance.choice(["i8", "f8"]))
    chain.check(
        lambda x: ufunc.reduce(x, **options),
        pair,
        label=f"{ufunc.__name__}.reduce {options}",
        exact=False,
    )


def product(chain):
    i, chance = chain.pick(lambda x: x.ndim > 0), chain.chance
    x, whole = chain.pool[i]
    function = chance.choice(
        [np.matmul, np.dot, np.vdot, np.tensordot, "einsum", "einsum", "einsum"]
    )
    kind = chance.choice([whole.dtype, whole.dtype, None])
    if function in (np.matmul, np.dot) and whole.ndim:
        n = whole.shape[-1] + (chance.random() < 0.1)
        other = chain.drawn([n, 3] if chance.random() < 0.6 else [n], kind)
        if chance.random() < 0.2:
            other = chain.other(i)
        chain.check(function, (x, whole), other, exact=False)
    elif function is np.vdot:
        shape = list(whole.shape)
        if chance.random() < 0.3:
            shape = shape[::-1]
        elif chance.random() < 0.3:
            shape = [*shape, 1]
        chain.check(function, (x, whole), chain.drawn(shape, kind), exact=False)
    elif function is np.tensordot:
        axes = chance.choice(
            [0, 1, 2, 3, ([-1], [0]), ([0, 1], [1, 0]), (0, 1), ([0, 0], [0, 1]), ([5], [0])]
        )
        other = chain.drawn(whole.shape[::-1], kind) if chance.random() < 0.6 else chain.other(i)
        chain.check(
            lambda a, b: np.tensordot(a, b, axes),
            (x, whole),
            other,
            label=f"tensordot {axes}",
            exact=False,
        )
    else:
        letters = [chance.choice("ijk") for _ in range(whole.ndim)]
        if len({*letters}) < len({*zip(letters, whole.shape, strict=True)}):
            return  # of which NumPy reads past the end
        lengths = dict(zip(letters, whole.shape, strict=True))
        inputs, pairs = ["".join(letters)], [(x, whole)]
        for _ in range(chance.randrange(3)):
            own = [chance.choice("ijkl") for _ in range(chance.randrange(1, 3))]
            shape = [1 if chance.random() < 0.05 else lengths.setdefault(c, 2) for c in own]
            inputs.append("".join(own))
            pairs.append(chain.drawn(shape, kind))
        used = sorted({*"".join(inputs)})
        out = "".join(chance.sample(used, chance.randrange(len(used) + 1)))
        text = ",".join(inputs) + (f"->{out}" if chance.random() < 0.8 else "")
        chain.check(
            lambda *arrays: np.einsum(text, *arrays), *pairs, label=f"einsum {text}", exact=False
        )


def each(chain):
    i, chance = chain.pick(), chain.chance
    pair, other, third = chain.pool[i], chain.other(i), chain.other(i)
    number = chance.choice([0, 1, -1])
    name, function, arguments = chance.choice(
        [
            ("where", lambda x, y: np.where(x, y, number), [pair, other]),
            ("where 3", np.where, [pair, other, third]),
            ("where 1", lambda x: np.where(x)[0], [pair]),
            ("clip", lambda x, y: np.clip(x, number, y), [pair, other]),
            ("clip 2", lambda x, y: np.clip(x, None, y), [pair, other]),
            ("clip 3", lambda x: np.clip(x, min=number), [pair]),
            ("clip 4", lambda x: np.clip(x, max=number, min=None), [pair]),
            ("clip 5", lambda x: np.clip(x, 1, 2, min=3), [pair]),
            ("clip 6", lambda x: np.clip(x, -1, 1, out=x.copy()), [pair]),
            ("clip 7", lambda x: np.clip(x, -1, 1, x.copy()), [pair]),
            ("round", lambda x: np.round(x, number), [pair]),
            ("round out", lambda x: np.round(x, out=x.copy()), [pair]),
            ("isclose", lambda x, y: np.isclose(x, y, equal_nan=True), [pair, other]),
            ("allclose", lambda x, y: np.allclose(x, y, 0.1), [pair, other]),
            ("array_equal", np.array_equal, [pair, other]),
            ("nan_to_num", lambda x: np.nan_to_num(x, nan=number), [pair]),
            ("real", np.real, [pair]),
            ("imag", np.imag, [pair]),
            ("copy", np.copy, [pair]),
            ("sum of list", lambda x: x.sum(-1), [pair]),
            ("mean method", lambda x: x.mean(dtype="f8"), [pair]),
            ("ndim", lambda x: (np.ndim(x), np.shape(x), np.size(x)), [pair]),
        ]
    )
    chain.check(
        function,
        *arguments,
        label=f"{name} {number}",
        exact=name not in ("sum of list", "mean method"),
    )


def single(chain):
    i = chain.pick(lambda x: x.ndim == 0)
    if chain.pool[i][1].ndim == 0:
        chain.check(chain.chance.choice([complex, bool]), chain.pool[i])


def shape(chain):
    i, chance = chain.pick(), chain.chance
    pair = _x, whole = chain.pool[i]
    n = whole.ndim
    any_axis = chance.randrange(-n - 1, n + 1)
    order = chance.sample(range(n), n)
    lengths = list(whole.shape)
    if n > 1 and chance.random() < 0.5:
        d = chance.randrange(n - 1)
        lengths[d : d + 2] = [lengths[d] * lengths[d + 1]]
    elif lengths:
        d = chance.randrange(n)
        k = next((k for k in (2, 3) if lengths[d] % k == 0), 1)
        lengths[d : d + 1] = [k, lengths[d] // k]
    if lengths and chance.random() < 0.3:
        lengths[chance.randrange(len(lengths))] = -1
    joined = (
        chain.drawn(whole.shape, chance.choice([whole.dtype, None]))
        if chance.random() < 0.5
        else chain.other(i)
    )
    if not isinstance(joined[0], DArray):
        joined = pair
    name, function, arguments = chance.choice(
        [
            (f"transpose {order}", lambda x: np.transpose(x, order), [pair]),
            (f"transpose {any_axis}", lambda x: np.transpose(x, any_axis), [pair]),
            ("transpose method", lambda x: x.transpose(*order), [pair]),
            ("T", lambda x: x.T, [pair]),
            (f"swapaxes {any_axis}", lambda x: np.swapaxes(x, any_axis, 0), [pair]),
            (f"moveaxis {any_axis}", lambda x: np.moveaxis(x, any_axis, -1), [pair]),
            (f"expand_dims {any_axis}", lambda x: np.expand_dims(x, (any_axis, 0)), [pair]),
            ("expand_dims", lambda x: np.expand_dims(x, any_axis), [pair]),
            ("squeeze", np.squeeze, [pair]),
            (f"squeeze {any_axis}", lambda x: np.squeeze(x, any_axis), [pair]),
            (f"reshape {lengths}", lambda x: np.reshape(x, lengths), [pair]),
            (f"reshape method {lengths}", lambda x: x.reshape(*lengths or [()]), [pair]),
            ("ravel", np.ravel, [pair]),
            (
                f"concatenate {any_axis}",
                lambda x, y: np.concatenate([x, y], any_axis),
                [pair, joined],
            ),
            ("concatenate None", lambda x, y: np.concatenate([x, y], axis=None), [pair, joined]),
            (f"stack {any_axis}", lambda x, y: np.stack([x, y], any_axis), [pair, joined]),
            ("full_like", lambda x: np.full_like(x, 2), [pair]),
            ("full_like of others", lambda x: np.full_like(x, np.arange(2)), [pair]),
            ("zeros_like", lambda x: np.zeros_like(x, dtype="f4"), [pair]),
        ]
    )
    chain.check(function, *arguments, label=name)


def _index(chance, lengths):
    entries = []
    for n in lengths:
        whole = chance.random() < 0.6
        entries.append(
            slice(None)
            if whole
            else chance.choice(
                [
                    slice(1, None),
                    slice(None, None, -1),
                    slice(0, n, 2),
                    chance.randrange(-n - 1, n + 1),
                ]
            )
        )
    entries = entries[: chance.randrange(len(entries) + 1)]
    for extra in (None, ...):
        if chance.random() < 0.2:
            entries.insert(chance.randrange(len(entries) + 1), extra)
    return tuple(entries)


def index(chain):
    i, chance = chain.pick(), chain.chance
    entries = _index(chance, chain.pool[i][1].shape)
    chain.check(lambda x: x[entries], chain.pool[i], label=f"[{entries}]")


def assignment(chain):
    i, chance = chain.pick(), chain.chance
    x, whole = chain.pool[i]
    entries = _index(chance, whole.shape)
    try:
        shape = list(whole[entries].shape)
    except IndexError:
        shape = [1]
    if chance.random() < 0.3 and (shape or ... in entries):
        shape = [1, *shape]
    elif shape and chance.random() < 0.4:
        shape[0] = chance.choice([1, shape[0] + 1])
    value = chain.drawn(shape, whole.dtype)
    if chance.random() < 0.2:
        value = (2, 2)

    def assigned(x, value):
        y = x.copy()
        y[entries] = value
        return y

    chain.check(assigned, (x.reduced(), whole), value, label=f"[{entries}] = ")


def elsewhere(chain):
    i = chain.pick()
    chain.check(
        lambda x: chain.elsewhere(x) if isinstance(x, DArray) else x,
        chain.pool[i],
        label="redistribute",
    )


def as_other_type(chain):
    i = chain.pick(_finite)
    dtype = np.dtype(chain.chance.choice(DTYPES))
    if dtype.kind in "iu" and not (
        _finite(chain.pool[i][1]) and is_tame(chain.pool[i][1]) and dtype.itemsize == 8
    ):
        return
    chain.check(lambda x: x.astype(dtype), chain.pool[i], label=f"astype {dtype}")


OPERATIONS = {
    f.__name__: f
    for f in (
        *(unary, binary, with_dtype, with_out, in_place, reduction, ufunc_reduction, product),
        *(each, single, shape, index, assignment, elsewhere, as_other_type),
    )
}
