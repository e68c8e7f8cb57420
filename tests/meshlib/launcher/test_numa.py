"""``--numa``: which CPUs a rank is bound to."""

from __future__ import annotations

import os

import pytest

from meshlib._launcher.options import numa


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with NUMA nodes, by their lists of CPUs."""

    def make(*lists, allowed=range(256)):
        for number, text in enumerate(lists):
            folder = tmp_path / f"node{number}"
            folder.mkdir()
            (folder / "cpulist").write_text(text + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
        return tmp_path

    return make


def numbers(ranks, nodes):
    return [node.number for node in numa.cpus_of_ranks(ranks, nodes)]


def test_ranks_are_spread_evenly(machine):
    nodes = machine("0-3,8-11", "4-7,12-15")
    assert numbers(4, nodes) == [0, 0, 1, 1]
    assert numbers(3, nodes) == [0, 0, 1]
    assert numbers(2, nodes) == [0, 1]
    assert numbers(1, nodes) == [0]
    assert numa.cpus_of_ranks(2, nodes)[1].cpus == (4, 5, 6, 7, 12, 13, 14, 15)


def test_only_cpus_that_the_process_may_use(machine):
    nodes = machine("0-3", "", "4-7", "8-11", allowed=[2, 3, 9])
    assert [node.cpus for node in numa.cpus_of_ranks(2, nodes)] == [(2, 3), (9,)]


def test_one_line_says_what_was_bound(machine):
    nodes = machine("0-3,8", "4-7")
    assert numa.describe(numa.cpus_of_ranks(2, nodes), 6) == (
        "NUMA: rank 6 to node 0 (CPUs 0-3,8), rank 7 to node 1 (CPUs 4-7)"
    )


def test_a_machine_without_nodes_is_refused(machine):
    nodes = machine()
    with pytest.raises(ValueError, match=r"--numa: .* lists no NUMA node"):
        numa.cpus_of_ranks(2, nodes)
