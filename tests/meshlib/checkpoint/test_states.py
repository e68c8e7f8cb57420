"""States of other classes than the plain ones: restored as what they were, or refused by name."""

import collections
import dataclasses
import enum
import json
import types

import numpy as np
import pytest

from meshlib.checkpoint import load, save
from meshlib.sharding import DArray, P, Sharding
from meshlib.testing import run_ranks


@dataclasses.dataclass
class Computed:
    x: float
    double: float = dataclasses.field(init=False)

    def __post_init__(self):
        self.double = 2 * self.x


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: np.ndarray
    label: str = "a"


class Named(dict):
    """A dict that may have attributes."""


class Pair(tuple):
    """A tuple without names."""

    __slots__ = ()


Point = collections.namedtuple("Point", "x y")


class Tagged(np.ndarray):
    """An array with what it may have besides."""


class Color(enum.IntEnum):
    RED = 1


def changed(value):
    """Return a tree like ``value`` with other values."""
    if isinstance(value, dict):
        made = value.copy() if not isinstance(value, Named) else Named(value)
        for key in made:
            made[key] = type(made[key])(9)
        return made
    return value


KEPT = {
    "counter": collections.Counter({"a": 3, "b": 1}),
    "default": collections.defaultdict(int, {"a": 1}),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "named": Named(a=1),
    "proxy": types.MappingProxyType({"a": 1}),
    "pair": Pair([1, 2]),
    "point": Point(1, 2),
    "large": [1 << 63, -(1 << 20000)],
    "odd keys": {"zarr.json": 1, "\udc80": 2, "__claim-": 3},
}


@pytest.mark.parametrize("name", KEPT)
def test_other_classes_come_back(tmp_path, name):
    state = KEPT[name]
    save(tmp_path, state, step=1)
    back = load(tmp_path, changed(state))
    assert type(back) is type(state)
    assert back == state
    if name == "default":
        assert back["new"] == 0
    plain = load(tmp_path)
    assert plain == (dict(state) if isinstance(state, dict) else plain)


def test_dataclasses_with_computed_and_frozen_fields(tmp_path):
    computed = Computed(1.0)
    computed.double = 5.0  # which is not what the constructor gives
    save(tmp_path, {"a": computed, "b": Frozen(np.arange(3), "b")}, step=1)
    back = load(tmp_path, {"a": Computed(0.0), "b": Frozen(np.zeros(3, int))})
    assert back["a"] == computed
    assert back["b"].label == "b"
    assert back["b"].x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("key", ["zarr.json", "__claim-x", "\udc80", "c.0", "step-1"])
def test_any_key_names_an_array(tmp_path, key):
    save(tmp_path, {key: np.arange(3), "more": {key: np.arange(2)}}, step=1)
    back = load(tmp_path, {key: np.zeros(3, int), "more": ...})
    assert back[key].tolist() == [0, 1, 2]
    assert back["more"][key].tolist() == [0, 1]


def test_big_endian_arrays_come_back_so(tmp_path):
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    save(tmp_path, {"x": x}, step=1)
    back = load(tmp_path, {"x": np.zeros((2, 3), ">f4")})["x"]
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)
    assert load(tmp_path, {"x": np.zeros((2, 3), "f4")})["x"].dtype == np.dtype("f4")
    assert json.loads((tmp_path / "step-1/x/zarr.json").read_text())["data_type"] == "float32"


def test_big_endian_parts_of_global_arrays(tmp_path):
    import meshlib as dist

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        lies = Sharding(mesh, P("a"))
        x = DArray(np.full(1, dist.get_rank(), ">f4"), lies, (2,), ">f4")
        save(tmp_path, [x], step=1)
        (back,) = load(tmp_path, [x])
        return back.dtype == back.to_local().dtype == x.dtype, back.to_local().tolist()

    assert run_ranks(program, 2) == [(True, [0]), (True, [1])]


def with_attribute():
    made = Named(a=1)
    made.note = "lost"
    return made


def endless():
    tree = []
    tree.append(tree)
    return tree


REFUSED = {
    "layers": (lambda: collections.ChainMap({"a": 1}, {"b": 2}), r"collections\.ChainMap"),
    "user dict": (lambda: collections.UserDict(a=1), r"collections\.UserDict"),
    "attributes": (with_attribute, r"Named.*attributes \['note'\]"),
    "enum": (lambda: Color.RED, r"Color"),
    "enum as key": (lambda: {Color.RED: 1}, r"has the key <Color.RED"),
    "text": (lambda: np.str_("text"), r"dtype <U4"),
    "masked": (lambda: np.ma.masked_array([1, 2], [0, 1]), r"MaskedArray"),
    "subclass": (lambda: np.ones(2).view(Tagged), r"Tagged"),
    "endless": (endless, r"deeper than 100 levels"),
    "set": (lambda: {1, 2}, r"builtins\.set"),
    "deque": (lambda: collections.deque([1]), r"collections\.deque"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_come_back_is_refused_by_name(tmp_path, case):
    make, message = REFUSED[case]
    with pytest.raises(TypeError, match=message) as caught:
        save(tmp_path, {"model": {"part": make()}}, step=1)
    assert "part" in str(caught.value)
    assert not list(tmp_path.iterdir())
