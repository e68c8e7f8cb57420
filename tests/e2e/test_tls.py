"""``meshrun`` with TLS: a whole job inside it, and settings that make no sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.net.certificates import LONG_AGO, Authority

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

MEET = (PROGRAMS / "meet_inside_tls.py").read_text()


@pytest.fixture
def settings(meshrun):
    """The variables, with paths relative to where the launchers are started."""
    files = Authority(meshrun.folder / "certificates").issue("rank")
    return {
        name: str(type(files.ca)(path).relative_to(meshrun.folder))
        for name, path in files.variables.items()
    }


def test_a_job_of_one_node(meshrun, settings):
    result = meshrun.run("--nproc-per-node", "3", meshrun.script(MEET), env=settings)
    assert result.code == 0, result.err
    assert result.out.split("\n")[:3] == ["inside TLS"] * 3


def start_two(meshrun, port, first, second):
    where = ("--nnodes=2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    script = meshrun.script(MEET)
    return [
        meshrun.start(*where, f"--node-rank={rank}", script, env=env)
        for rank, env in enumerate((first, second))
    ]


def test_a_job_of_two_nodes(meshrun, free_port, settings):
    for node in start_two(meshrun, free_port, settings, settings):
        result = meshrun.finish(node)
        assert result.code == 0, result.err
        assert "inside TLS" in result.out


def test_a_node_without_tls(meshrun, free_port, settings):
    with_tls, without = start_two(meshrun, free_port, settings, {})
    result = meshrun.finish(without)
    assert result.code != 0
    assert "the other end speaks TLS and this end does not" in result.err
    assert "MESHLIB_TLS_CERT" in result.err
    with_tls.terminate()
    assert meshrun.finish(with_tls).code != 0


def test_half_a_setting_is_an_error_before_anything_starts(meshrun, settings):
    del settings["MESHLIB_TLS_KEY"]
    result = meshrun.run(meshrun.script("print('started')"), env=settings)
    assert result.code == 2
    assert "MESHLIB_TLS_KEY not set" in result.err
    assert result.out == ""


RANK_OF_ITS_OWN = """
    import os
    if os.environ["RANK"] == "1":
        os.environ.update(OTHER)
    import meshlib as dist
    dist.init_process_group("tcp", timeout=20)
    dist.barrier()
"""


@pytest.mark.parametrize("wrong", ["expired", "of another authority"])
def test_a_rank_whose_certificate_is_wrong(meshrun, wrong):
    folder = meshrun.folder / "certificates"
    if wrong == "expired":
        authority = Authority(folder / "both")
        good, bad = authority.issue("rank"), authority.issue("late", LONG_AGO)
    else:
        good, bad = (Authority(folder / name).issue("rank") for name in ("ours", "theirs"))
        bad = replace(bad, ca=good.ca)
    script = meshrun.script(RANK_OF_ITS_OWN.replace("OTHER", repr(bad.variables)))
    result = meshrun.run("--nproc-per-node", "2", script, env=good.variables)
    assert result.code == 1
    assert "rank 1 on" in result.err
    assert "the other end refused our certificate" in result.err
    if wrong == "expired":
        assert "expired" in result.err
