"""Wrong arguments of what makes and asks: the error names the argument and what it got."""

import pytest

import meshlib as dist
from meshlib import DeviceMesh, Layout, MeshConfig
from meshlib.testing import run_ranks

GRID = Layout.row_major((2, 3))


def mesh():
    return dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))


IN_A_JOB = [
    (lambda: dist.new_group(["1"]), r"ranks\[0\] must be a whole number, got '1' of type str"),
    (lambda: dist.new_group([0, 0.5]), r"ranks\[1\] must be a whole number, got 0\.5"),
    (lambda: dist.new_group("01"), "ranks must be a list of whole numbers, got '01' of type str"),
    (lambda: dist.new_group(1), "ranks must be a list of whole numbers, got 1 of type int"),
    (lambda: dist.new_group(backend=3), "backend must be a string such as 'tcp', got 3"),
    (lambda: dist.get_group_rank(None, "1"), "global_rank must be a whole number, got '1'"),
    (lambda: dist.get_group_rank(None, 2), "global rank 2 is not in group 'default' of 2 ranks"),
    (lambda: dist.get_global_rank(None, 0.0), "group_rank must be a whole number, got 0.0"),
    (lambda: dist.get_global_rank(None, 2), "group_rank is 2; expected 0 to 1 in group 'default'"),
    (lambda: dist.new_subgroups("2"), "group_size must be a whole number, got '2'"),
    (
        lambda: dist.new_subgroups_by_enumeration([0, 1]),
        r"ranks_per_subgroup_list\[0\] must be a list of whole numbers, got 0",
    ),
    (
        lambda: dist.new_subgroups_by_enumeration([[0], [7]]),
        r"ranks_per_subgroup_list\[1\] is \[7\]; expected one or more ranks from 0 to 1",
    ),
    (lambda: dist.split_group(None, 3), "split_ranks must be a list, got int"),
    (lambda: dist.split_group(None, [["0"]]), r"split_ranks\[0\]\[0\] must be a whole number"),
    (lambda: dist.destroy_process_group("x"), "group must be a ProcessGroup, a DeviceMesh or None"),
    (lambda: dist.breakpoint("0"), "rank must be a whole number, got '0'"),
    (lambda: dist.breakpoint(0, 1.5), "skip must be a whole number, got 1.5"),
    (lambda: dist.breakpoint(timeout_s="1"), "timeout_s must be a number of seconds >= 0"),
    (lambda: DeviceMesh.from_group(None, "cpu"), "group has None; expected a ProcessGroup"),
    (
        lambda: dist.init_device_mesh("cpu", (2,), mesh_dim_names=2),
        "mesh_dim_names 2 is not a sequence; expected 1 names",
    ),
    (
        lambda: dist.init_device_mesh("cpu", (2,), backend_override="tcp"),
        "backend_override is 'tcp'; expected a dict by dims' names or numbers",
    ),
    (
        lambda: dist.init_device_mesh("cpu", (2,), timeout_override={0.5: 1}),
        r"timeout_override has 0\.5; expected dims' names",
    ),
    (lambda: mesh().rank_at("0"), "place must be a whole number, got '0'"),
    (lambda: mesh().rank_at(0, None), "slice_number must be a whole number, got None"),
    (lambda: mesh().slice_number("0"), "rank must be a whole number, got '0'"),
    (lambda: mesh().coordinate_of(0.5), "rank must be a whole number, got 0.5"),
    (lambda: mesh().flatten(3), "mesh_dim_name 3 is not a non-empty string"),
    (lambda: DeviceMesh.concatenate(mesh()), "meshes is DeviceMesh.*; expected a list of meshes"),
    (lambda: DeviceMesh.concatenate([3]), r"meshes is \[3\]; expected a list of meshes"),
]


def test_in_a_job():
    def program():
        for call, message in IN_A_JOB:
            with pytest.raises((TypeError, ValueError), match=message):
                call()
        # None of them has made a group, or counted as a call.
        return dist.get_world_size(dist.new_group([0, 1]))

    assert run_ranks(program, 2) == [2, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MeshConfig.from_string(3), "the mesh is 3; expected NAME=DEGREE pairs"),
        (lambda: MeshConfig.parse(3), "text is 3; expected the name of a file"),
        (lambda: MeshConfig.from_dict({"dp": "x"}), "'dp' is 'x'.*flatten, options$"),
        (
            lambda: MeshConfig.from_string("dp=2").options_for("pd"),
            "'pd' is neither a dim nor a flattened name; expected one of dp",
        ),
        (lambda: Layout.row_major(3), "sizes must be a list of whole numbers, got 3"),
        (lambda: Layout.row_major((2, "3")), r"sizes\[1\] must be a whole number, got '3'"),
        (lambda: Layout.from_strides((2,), (1.0,)), r"strides\[0\] must be a whole number"),
        (lambda: GRID.index(3), "coordinates must be a list of whole numbers, got 3"),
        (lambda: GRID.at(0, "1"), "coordinate must be a whole number, got '1'"),
        (lambda: GRID.select(1), "positions must be a list of whole numbers, got 1"),
        (lambda: GRID.flatten(["0"]), r"positions\[0\] must be a whole number, got '0'"),
        (lambda: GRID.split(1, (1.5, 2)), r"sizes\[0\] must be a whole number, got 1\.5"),
        (lambda: GRID.complement(0), "size must be at least 1, got 0"),
        (
            lambda: dist.ReduceOp("SUM"),
            "kind must be a RedOpType, got 'SUM'; use an op such as ReduceOp.SUM",
        ),
        (lambda: dist.Future().then(3), "callback must be callable, got 3"),
        (lambda: dist.Future().add_done_callback(3), "callback must be callable, got 3"),
        (lambda: dist.Future().set_exception(3), "exception must be an exception, got 3"),
        (lambda: dist.spawn(print, nprocs=1.5), r"nprocs must be a whole number, got 1\.5"),
        (lambda: dist.spawn(print, args=3), "args must be a tuple of arguments for fn, got 3"),
        (lambda: run_ranks(3, 2), "fn must be callable, got int"),
        (lambda: run_ranks(print, 1.5), r"world_size must be a whole number, got 1\.5"),
        (lambda: run_ranks(print, 1, call_timeout="x"), "call_timeout must be a number of seconds"),
        (lambda: dist.init_process_group("inproc", 3), "init_method must be a URL .*, got 3"),
        (
            lambda: dist.init_process_group("inproc", group_name=3),
            "group_name must be a str, got 3",
        ),
    ],
)
def test_without_a_job(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
