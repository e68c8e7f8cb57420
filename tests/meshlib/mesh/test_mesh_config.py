"""MeshConfig: what people write, what they get, and what they are told when it is wrong."""

from __future__ import annotations

import math
import sys
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlib._mesh.config import MeshConfig
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._mesh.init import init_device_mesh
from meshlib._mesh.spec import CONVENTIONAL_NAMES, DimOptions
from meshlib.testing import run_ranks

FULL = """
[train]
lr = 0.1

[mesh]
pp = 2
dp_shard = -1
tp = 4
backend = "tcp"
timeout = "10m"

[mesh.flatten]
shards = ["pp", "dp_shard"]
all = ["tp", "dp_shard", "pp"]

[mesh.options.tp]
timeout = 0.5

[mesh.options.all]
backend = "inproc"

[data]
path = "digits"
"""


def write(tmp_path, text, name="train.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_full_config(tmp_path):
    config = MeshConfig.load(write(tmp_path, FULL))
    assert config.dims == (("pp", 2), ("dp_shard", -1), ("tp", 4))
    assert config.world_size is None
    assert config.flattened == (("shards", ("pp", "dp_shard")), ("all", ("tp", "dp_shard", "pp")))
    assert config.options_for("pp") == DimOptions("tcp", 600.0)
    assert config.options_for("tp") == DimOptions("tcp", 0.5)
    assert config.options_for("all") == DimOptions("inproc", 600.0)
    resolved = config.resolve(24)
    assert resolved.shape == (2, 3, 4)
    assert resolved.world_size == 24
    assert config.shape == (2, -1, 4)
    assert str(resolved) == "pp=2 × dp_shard=3 × tp=4"
    mesh = config.mesh_for(24)
    assert mesh == DeviceMesh.from_shape("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp_shard", "tp"))
    assert mesh["shards"].shape == (6,)
    assert mesh["all"].slices().tolist() == [mesh["tp", "dp_shard", "pp"].mesh.ravel().tolist()]


def test_the_mesh_that_is_built_has_the_options():
    config = MeshConfig.from_dict(
        {
            "dp": 2,
            "tp": 2,
            "timeout": 9,
            "flatten": {"all": ["dp", "tp"]},
            "options": {"tp": {"timeout": "250ms"}, "all": {"timeout": timedelta(minutes=1)}},
        }
    )

    def rank():
        mesh = config.build()
        assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        groups = [*mesh.get_all_groups(), mesh.process_group, mesh["all"].process_group]
        return [group.timeout.total_seconds() for group in groups]

    assert run_ranks(rank, 4) == [[9, 0.25, 9, 60]] * 4


def test_build_refuses_another_world_size():
    def rank():
        with pytest.raises(ValueError, match="mesh dp=2 × tp=2 needs 4 ranks, but the world"):
            MeshConfig.from_string("dp=2,tp=2").build()
        return True

    assert all(run_ranks(rank, 3))


@given(
    st.lists(
        st.tuples(st.sampled_from([*CONVENTIONAL_NAMES, "x", "sp", "expert2"]), st.integers(1, 9)),
        min_size=1,
        unique_by=lambda dim: dim[0],
    ),
    st.data(),
)
def test_every_spelling_gives_the_same_value(dims, data):
    table = dict(dims)
    text = ",".join(f"{name}={degree}" for name, degree in dims)
    config = MeshConfig.from_string(text)
    assert config == MeshConfig.from_dict(table) == MeshConfig.from_dict({"mesh": table})
    assert config == MeshConfig.from_dict({"mesh": text, "train": {}})
    assert hash(config) == hash(MeshConfig.from_dict(table))
    total = math.prod(table.values())
    assert config.world_size == total
    assert config.resolve(total) == config
    assert MeshConfig.parse(config.to_text()) == config
    open_ = data.draw(st.sampled_from(list(table)))
    assert MeshConfig.from_dict(table | {open_: -1}).resolve(total) == config


def test_numpys_integers_are_integers():
    config = MeshConfig.from_dict({"dp": np.int64(2), "tp": np.uint8(2)})
    assert config.resolve(np.int32(4)) == MeshConfig.from_string("dp=2,tp=2")
    for bad in (np.True_, "4", 4.0, None, True):
        with pytest.raises(ValueError, match="expected an integer >= 1"):
            config.resolve(bad)


def test_dims_settles_the_order_and_any_name():
    config = MeshConfig.from_dict({"dp_shrad": 2, "tp": 3, "dims": ["tp", "dp_shrad"]})
    assert config.dims == (("tp", 3), ("dp_shrad", 2))


def test_a_mesh_may_be_one_line_of_a_file(tmp_path):
    config = MeshConfig.load(write(tmp_path, 'mesh = "dp=2, tp=2"\n[train]\n'))
    assert config == MeshConfig.from_string("dp=2,tp=2")


@pytest.mark.parametrize("text", [FULL, 'mesh = "dp=2, tp=-1"', '[mesh]\ndims=["dq"]\ndq = 2'])
def test_what_was_read_is_handed_on_whole(tmp_path, text):
    config = MeshConfig.load(write(tmp_path, text))
    (tmp_path / "train.toml").unlink()
    again = MeshConfig.parse(config.to_text())
    assert again == config
    assert again.source == config.source


def test_json(tmp_path):
    path = write(tmp_path, '{"mesh": {"dp": 2, "timeout": "10m"}, "train": {}}', "m.JSON")
    assert MeshConfig.parse(str(path)) == MeshConfig.from_dict({"dp": 2, "timeout": 600})


def test_parse_tells_files_from_dims(tmp_path):
    assert MeshConfig.parse("dp=2") == MeshConfig.from_dict({"dp": 2})
    assert MeshConfig.parse(str(write(tmp_path, "[mesh]\ndp = 2", "a.TOML"))).world_size == 2


def test_yaml(tmp_path):
    pytest.importorskip("yaml")
    text = (
        "mesh:\n  pp: 2\n  dp_shard: -1\n  timeout: 10m\n  flatten: {all: [pp, dp_shard]}\n"
        "  options:\n    pp: {timeout: 5}\ntrain: {lr: 0.1}\n"
    )
    config = MeshConfig.load(write(tmp_path, text, "train.yaml"))
    assert config.dims == (("pp", 2), ("dp_shard", -1))
    assert config.options_for("pp") == DimOptions(None, 5.0)
    assert config.flattened == (("all", ("pp", "dp_shard")),)
    assert MeshConfig.load(write(tmp_path, "mesh: dp=2", "a.yml")).world_size == 2
    merged = "base: &base {dp: 2, tp: 2}\nmesh:\n  <<: *base\n  tp: 4\n"
    assert MeshConfig.load(write(tmp_path, merged, "m.yml")).dims == (("dp", 2), ("tp", 4))
    with pytest.raises(ValueError, match=r"b\.yml: key 'dp' comes twice"):
        MeshConfig.load(write(tmp_path, "mesh:\n  dp: 2\n  dp: 4\n", "b.yml"))
    with pytest.raises(ValueError, match=r"c\.yml: .*line 1"):
        MeshConfig.load(write(tmp_path, "mesh: [2", "c.yml"))
    with pytest.raises(ValueError, match=r"d\.yml: \[mesh\]: dim name True"):
        MeshConfig.load(write(tmp_path, "mesh: {yes: 2}", "d.yml"))
    with pytest.raises(ValueError, match=r"e\.yml: holds NoneType"):
        MeshConfig.load(write(tmp_path, "", "e.yml"))


def test_yaml_without_pyyaml_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = write(tmp_path, "mesh: {dp: 2}", "train.yaml")
    with pytest.raises(ImportError, match=r"train\.yaml: reading YAML needs PyYAML, which is not"):
        MeshConfig.load(path)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("[train]\nlr = 1", "t.toml", "there is no [mesh] table, only: train"),
        ("[msh]\ndp = 1", "t.toml", "is the mesh in 'msh'?"),
        ("", "t.toml", "there is no [mesh] table, only: nothing"),
        ("[mesh\ndp = 1", "t.toml", "t.toml: Expected ']'"),
        ("[mesh]\ndp = 1\ndp = 2", "t.toml", "t.toml: Cannot overwrite a value"),
        ("[mesh]", "t.toml", "[mesh]: there is no dim"),
        ("mesh = 4", "t.toml", "[mesh] is 4; expected a table"),
        ("[[mesh]]\ndp = 1", "t.toml", "[mesh] is [{'dp': 1}]; expected a table"),
        ("[mesh]\ndp = 2", "t.cfg", "suffix '.cfg'; expected .toml, .json, .yaml or .yml"),
        ("[mesh]\ndp = 2", "t", "suffix ''"),
        ('{"mesh": {"dp": 2}', "t.json", "t.json: Expecting ',' delimiter"),
        ('{"mesh": {"dp": 2, "dp": 3}}', "t.json", "t.json: key 'dp' comes twice"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, name, expected):
    with pytest.raises(ValueError) as raised:
        MeshConfig.load(write(tmp_path, text, name))
    message = str(raised.value)
    assert expected in message
    assert name in message
    assert "\n" not in message


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "t.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"t\.toml: 'utf-8' codec"):
        MeshConfig.load(path)
    with pytest.raises(FileNotFoundError):
        MeshConfig.load(tmp_path / "none.toml")
    directory = tmp_path / "d.toml"
    directory.mkdir()
    with pytest.raises(IsADirectoryError):
        MeshConfig.load(directory)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # Degrees.
        ({"dp": 0}, "the degree of 'dp' is 0; expected an integer >= 1, or -1"),
        ({"dp": -2}, "the degree of 'dp' is -2"),
        ({"dp": True}, "'dp' is True; expected the degree"),
        ({"dp": "2"}, "'dp' is '2'; expected the degree"),
        ({"dp": 2.0}, "'dp' is 2.0"),
        ({"dp": None}, "'dp' is None"),
        ({"mesh": None}, "'mesh' is None"),
        ([("dp", 2)], "config is [('dp', 2)]; expected a table"),
        ({"dp": -1, "tp": -1}, "2 degrees are -1; at most one can be inferred"),
        ({"dp": True, "dims": ["dp"]}, "the degree of 'dp' is True"),
        # Names.
        ({"dp_shrad": 2}, "'dp_shrad' is not a known key; did you mean 'dp_shard'?"),
        ({"dp_replciate": 2}, "did you mean 'dp_replicate'?"),
        ({"DP": 2}, "did you mean 'dp'?"),
        ({"dp-shard": 2}, "'dp-shard' is not an identifier; did you mean 'dp_shard'?"),
        ({"2d": 2}, "'2d' is not an identifier"),
        ({3: 2}, "dim name 3 is not an identifier"),
        ({"": 2}, "dim name '' is not an identifier"),
        # Other keys.
        ({"dp": 2, "timout": 60}, "'timout' is not a known key; did you mean 'timeout'?"),
        ({"dp": 2, "timout": "60s"}, "did you mean 'timeout'?"),
        ({"dp": 2, "flaten": {}}, "did you mean 'flatten'?"),
        ({"dp": 2, "option": {}}, "did you mean 'options'?"),
        ({"dp": 2, "backends": "tcp"}, "did you mean 'backend'?"),
        ({"dp": 2, "timeout": 0}, "timeout 0; expected a number of seconds > 0"),
        ({"dp": 2, "timeout": -5}, "timeout -5"),
        ({"dp": 2, "timeout": True}, "timeout True"),
        ({"dp": 2, "timeout": "5 minutes"}, "timeout '5 minutes'"),
        ({"dp": 2, "timeout": "s"}, "timeout 's'"),
        ({"dp": 2, "timeout": [5]}, "timeout [5]"),
        ({"dp": 2, "backend": "glo"}, "backend 'glo' is unknown; expected one of"),
        ({"dp": 2, "backend": 1}, "backend 1; expected a registered backend's name"),
        # dims.
        ({"dp": 2, "dims": ["dp", "tp"]}, "dims names 'tp', which has no degree"),
        ({"dp": 2, "tq": 2, "dims": ["dp"]}, "'tq' is not in dims"),
        ({"dp": 2, "dims": ["dp", "dp"]}, "dims names 'dp' twice"),
        ({"dp": 2, "dims": "dp"}, "dims is 'dp'; expected a list"),
        ({"dp": 2, "dims": []}, "dims is []"),
        # flatten.
        (
            {"dp": 2, "flatten": {"x": ["dq"]}},
            "x has 'dq', which is not a dim; expected some of dp",
        ),
        ({"dp": 2, "flatten": {"dp": ["dp"]}}, "'dp' is a dim already"),
        ({"dp": 2, "flatten": {"x": []}}, "flatten: x is []; expected a list"),
        ({"dp": 2, "flatten": {"x": "dp"}}, "flatten: x is 'dp'; expected a list"),
        ({"dp": 2, "flatten": {"x": ["dp", "dp"]}}, "names 'dp' twice"),
        ({"dp": 2, "flatten": {"x": [1]}}, "dim name 1 is not an identifier"),
        ({"dp": 2, "flatten": ["x"]}, "flatten is ['x']; expected a table"),
        # options.
        ({"dp": 2, "options": {"dq": {}}}, "'dq' is neither a dim nor a flattened name; expected"),
        ({"dp_in": 2, "options": {"dp_ni": {}}}, "expected some of dp_in; did you mean 'dp_in'?"),
        ({"dp": 2, "options": {"timeout": 5}}, "what holds for the whole mesh stands in [mesh]"),
        ({"dp": 2, "options": {"dp": {"time": 5}}}, "'time' is unknown; expected backend, timeout"),
        ({"dp": 2, "options": {"dp": {"timeout": 0}}}, "options: dp: timeout 0"),
        ({"dp": 2, "options": {"dp": 5}}, "options: dp is 5; expected a table"),
        ({}, "there is no dim"),
    ],
)
def test_tables_that_are_wrong(table, expected):
    with pytest.raises(ValueError) as raised:
        MeshConfig.from_dict(table)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    "name", ["sp", "x", "replicate", "shard", "dp2", "dp_shard_2", "ddp", "experts", "_a", "größe"]
)
def test_any_other_identifier_is_a_dim(name):
    assert MeshConfig.from_dict({name: 2}).names == (name,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "mesh '': '' is not a dim; expected NAME=DEGREE pairs such as 'dp=2,tp=2'"),
        ("dp", "'dp' is not a dim"),
        ("dp=", "'dp=' is not a dim"),
        ("dp=2,", "'' is not a dim"),
        ("dp=2.0", "'dp=2.0' is not a dim"),
        ("dp=--2", "'dp=--2' is not a dim"),
        ("dp=²", "is not a dim"),
        ("=2", "dim name '' is not an identifier"),
        ("dp=2,dp=4", "names 'dp' twice"),
        ("dp=0", "the degree of 'dp' is 0"),
        ("dp=-1,tp=-1", "2 degrees are -1"),
        ("dp-shard=2", "did you mean 'dp_shard'?"),
    ],
)
def test_strings_that_are_wrong(text, expected):
    with pytest.raises(ValueError) as raised:
        MeshConfig.from_string(text)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [
        ("dp=2,tp=4", 4, "mesh dp=2 × tp=4 needs 8 ranks, but the world size is 4"),
        ("dp=2,tp=2", 8, "mesh dp=2 × tp=2 needs 4 ranks, but the world size is 8"),
        ("dp=-1,tp=3", 4, "the other dims have the product 3, which does not divide 4"),
        ("dp=-1,tp=8", 4, "the other dims have the product 8, which does not divide 4"),
        ("dp=-1", 0, "world_size is 0; expected an integer >= 1"),
        ("dp=-1", -4, "world_size is -4"),
    ],
)
def test_world_sizes_that_do_not_fit(text, world_size, expected):
    with pytest.raises(ValueError) as raised:
        MeshConfig.from_string(text).resolve(world_size)
    assert expected in str(raised.value)


def test_errors_about_a_file_name_it(tmp_path):
    config = MeshConfig.load(write(tmp_path, "[mesh]\ndp = 2"))
    with pytest.raises(ValueError, match=r"train\.toml: \[mesh\] dp=2 needs 2 ranks"):
        config.resolve(3)


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        ("30s", 30), ("10m", 600), ("1.5h", 5400), ("500ms", 0.5), (" 2 s ", 2), (".5s", 0.5),
        (7, 7), (0.25, 0.25), (timedelta(minutes=1), 60),
    ],
)  # fmt: skip
def test_timeouts(timeout, seconds):
    assert MeshConfig.from_dict({"dp": 1, "timeout": timeout}).options.timeout == seconds
