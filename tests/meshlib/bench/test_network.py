"""On which levels groups go over a network that was measured: by the rules of the groups."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from meshlib._bench.network import HostNetwork, levels_in_words, levels_of_groups
from meshlib._bench.network import Path as Way
from meshlib._explain.command import main

NEAR, FAR = Way(0.0002, 1e9), Way(0.0101, 1e8)


def network(hosts: str, sites: str = "", per_host: int = 2) -> HostNetwork:
    """Hosts of which those with the same letter are near each other; ``sites`` names theirs."""
    ranks = [tuple(range(per_host * i, per_host * (i + 1))) for i in range(len(hosts))]
    pairs = combinations(range(len(hosts)), 2)
    paths = {pair: NEAR if hosts[pair[0]] == hosts[pair[1]] else FAR for pair in pairs}
    return HostNetwork(tuple(ranks), tuple(sites) or ("",) * len(hosts), paths)


@pytest.mark.parametrize(
    ("hosts", "sites", "ranks", "words"),
    [
        ("aabb", "", [0, 1], "one level: shared memory on one host"),
        ("aabb", "", [0, 2], "one level: all 2 ranks over TCP"),
        ("aabb", "", [0, 1, 2, 3], "two levels: between 2 hosts, and inside each"),
        ("aabb", "", [0, 6], "one level: all 2 ranks over TCP"),
        ("aabb", "xxyy", [0, 2, 4, 6], "between 2 sites, and inside each one level: all 2 ranks"),
        ("aaaa", "", range(8), "two levels: between 4 hosts, and inside each"),
        # The names decide, whatever was measured.
        ("aaaa", "xxyy", range(8), "between 2 sites, and inside each two levels"),
        ("aabb", "", range(8), "two levels: between 4 hosts, and inside each"),
        ("ab", "xy", range(4), "between 2 sites, and inside each one level: shared memory"),
    ],
)
def test_levels(hosts: str, sites: str, ranks: list[int], words: str) -> None:
    found = network(hosts, sites)
    assert levels_in_words(found.placement(list(ranks))).startswith(words)


def test_a_file_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "network.json"
    file.write_text(network("aabb", "xxyy").encode())
    assert HostNetwork.load(file) == network("aabb", "xxyy")
    assert main(["mesh", "dp=4,tp=2", "--network", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    groups = {"dp": [[0, 2, 4, 6], [1, 3, 5, 7]], "tp": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    assert lines[-3:] == levels_of_groups(network("aabb", "xxyy"), groups)
    assert lines[-1] == "  tp  4 groups: one level: shared memory on one host"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "has no 'format'"),
        ('{"format": 2}', "format is 2, expected 1"),
        ('{"format": 1, "hosts": [{"ranks": [0, 2]}], "paths": []}', r"ranks \[0, 2\]"),
        (
            '{"format": 1, "hosts": [{"ranks": [0]}], "paths":'
            ' [{"hosts": [0, 1], "round_trip": 1}]}',
            "expected two hosts",
        ),
        ("[", "is not a network"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "network.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        HostNetwork.load(file)
    assert str(file) in str(caught.value)


def test_a_mesh_larger_than_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "network.json"
    file.write_text(network("aa").encode())
    assert main(["mesh", "dp=8", "--network", str(file)]) == 2
    assert "is on no host: there are 4 ranks" in capsys.readouterr().err
    assert main(["mesh", "dp=4", "--network", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
