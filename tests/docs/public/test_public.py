"""Public objects show only documented members; private names stay in their package."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from tests.docs.pages import ROOT

COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "empty",
    "exscan",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "irecv",
    "isend",
    "monitored_barrier",
    "process_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scan",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "window",
}
DOCUMENTED = {
    "mesh": COLLECTIVES
    | {
        "concatenate",
        "coordinate_of",
        "described",
        "exchange_halo",
        "device_type",
        "flatten",
        "from_group",
        "from_shape",
        "neighbor_all_gather",
        "neighbor_all_to_all",
        "get_all_groups",
        "get_coordinate",
        "get_group",
        "get_local_rank",
        "get_rank",
        "mesh",
        "mesh_dim_names",
        "ndim",
        "permute",
        "rank_at",
        "shift",
        "shape",
        "size",
        "slice_count",
        "slice_number",
        "slices",
        "split",
        "to_jax",
        "unflatten",
        "with_ranks",
        "without",
        "worker",
    },
    "group": COLLECTIVES
    | {
        "abort",
        "backend",
        "backends",
        "compression",
        "get_group_store",
        "global_rank",
        "group_desc",
        "group_name",
        "group_rank",
        "id",
        "name",
        "rank",
        "ranks",
        "set_timeout",
        "size",
        "timeout",
    },
    "future": {
        "add_done_callback",
        "done",
        "exception",
        "set_exception",
        "set_result",
        "then",
        "value",
        "wait",
    },
    "message": {"group", "group_peer", "op", "peer", "tag", "tensor"},
    "work": {
        "exception",
        "get_future",
        "get_future_result",
        "is_completed",
        "is_success",
        "result",
        "source_rank",
        "synchronize",
        "wait",
    },
}


def shown():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    work = mesh.all_reduce(np.ones(1), async_op=True)
    found = {"mesh": dir(mesh), "group": dir(mesh.process_group), "work": dir(work)}
    found["future"] = dir(work.get_future())
    found["message"] = dir(dist.P2POp(dist.isend, np.ones(1), 0))
    work.wait()
    return {
        what: {name for name in names if not name.startswith("_")} for what, names in found.items()
    }


def test_objects_show_what_is_documented():
    for what, names in run_ranks(shown, 2)[0].items():
        assert names == DOCUMENTED[what], what


def test_parallel_may_import_the_public_rooms_of_meshlib():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (one for one in table["contracts"] if one["type"] == "forbidden")
    assert "ignore_imports" not in contract
    files = [*(ROOT / "meshlib").glob("*.py"), *(ROOT / "meshlib").glob("*/__init__.py")]
    rooms = {path.relative_to(ROOT / "meshlib").parts[0].removesuffix(".py") for path in files}
    rooms -= {"__init__", "__main__"}
    forbidden = {name.removeprefix("meshlib.") for name in contract["forbidden_modules"]}
    public = {
        *("checkpoint", "engines", "extend", "jit", "notebook", "rpc", "sharding", "testing"),
        "torch",
    }
    assert rooms - forbidden == public
    inner = {f"{room}.*" for room in public - {"extend", "testing"}}
    assert forbidden - rooms == {"transport", *inner}


def names_with_an_underscore(path, *, defined):
    """Return the attributes such as ``x._name`` in a file, or those of its own classes."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_own == defined:
                found.add(node.attr)
        elif defined and isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif defined and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if re.match(r"_(?!_)", name)} - {"_replace"}  # a NamedTuple's


@pytest.mark.parametrize("package", ["parallel", "examples"])
def test_what_stands_above_uses_no_private_name_of_meshlib(package):
    files = sorted((ROOT / package).rglob("*.py"))
    own = set().union(*(names_with_an_underscore(path, defined=True) for path in files))
    used = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in names_with_an_underscore(path, defined=False) - own
    }
    assert not used


MESH = """
import meshlib as dist
from meshlib import ReduceOp
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("dist.", set(dist.__all__)),
        ('mesh["dp"].', DOCUMENTED["mesh"]),
        ('mesh["dp", "tp"].flatten().', DOCUMENTED["mesh"]),
        ("mesh.get_group('dp').", DOCUMENTED["group"]),
        ("ReduceOp.", {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}),
    ],
)
def test_jedi_completes(begun, expected):
    jedi = pytest.importorskip("jedi", reason="jedi is not installed")
    names = {one.name for one in jedi.Script(MESH + begun).complete()}
    assert expected <= names


def test_jedi_shows_the_whole_documentation():
    jedi = pytest.importorskip("jedi", reason="jedi is not installed")
    (found,) = jedi.Script(MESH + "dist.all_reduce").help(5, 10)
    assert inspect.getdoc(dist.all_reduce) in found.docstring()
    assert Path(found.module_path).name == "arrays.py"
