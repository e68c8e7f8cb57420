"""``meshlib bench --between``: what it prints, on ranks that are threads and hosts pretended."""

from __future__ import annotations

import argparse
import re
import socket

import pytest

import meshlib as dist
from meshlib._bench import between
from meshlib._bench.between import Between, Row, header, interface_of, line, own_address
from meshlib._bench.cases import COLLECTIVES
from meshlib._bench.cli import main
from meshlib.testing import run_ranks


def arguments(**options: object) -> argparse.Namespace:
    known = {"collectives": COLLECTIVES, "sizes": [8, 4096], "rounds": 1, "vs": [], "backend": []}
    known["write_network"] = None
    return argparse.Namespace(**known | options)


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "_RATE_BYTES", 1 << 16)


def run(hosts: str, capsys: pytest.CaptureFixture[str], **options: object) -> str:
    def rank() -> None:
        Between(dist, arguments(**options), hosts[dist.get_rank()]).run()

    run_ranks(rank, len(hosts))
    return capsys.readouterr().out


def test_each_pair_of_hosts_and_each_collective(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("abc", capsys)
    assert text.startswith("3 ranks on 3 hosts, ")
    pairs = re.findall(r"rank (\d) to rank (\d): round trip ([\d.]+) ms, ([\d.]+) Gb/s", text)
    assert [pair[:2] for pair in pairs] == [("0", "1"), ("0", "2"), ("1", "2")]
    assert all(float(number) >= 0 for pair in pairs for number in pair[2:])
    rows = [row.split() for row in text.splitlines() if row.split()[:1] != []]
    for name in COLLECTIVES:
        found = [row for row in rows if row[0] == name]
        assert [row[1:3] for row in found] == (
            [["0", "B"]] if name == "barrier" else [["8", "B"], ["4", "KiB"]]
        )
        # The model knows what has no root to wait for, and the broadcast.
        assert all(len(row) == (6 if name in between.KINDS else 4) for row in found)


def test_hosts_with_several_ranks_have_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("aab", capsys, collectives=["all_reduce"])
    assert "3 ranks on 2 hosts" in text
    assert "rank 0 to rank 2" in text
    assert "model ms" not in text
    assert "the model needs hosts with one rank each" in text


def test_many_hosts_are_not_all_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "_MOST_HOSTS", 2)
    text = run("abcd", capsys, collectives=["barrier"])
    assert "the first 2 hosts" in text
    assert text.count("round trip") == 1


def test_a_line_compares_medians_with_the_peer_and_the_model() -> None:
    row = Row("all_reduce", 1 << 20, {"meshlib": [0.002, 0.001, 0.009], "gloo": [0.004]})
    expected = "all_reduce 1 MiB 2.000 4.000 0.50 1.000 0.50"
    assert line(row, 0.001).split() == expected.split()
    assert header(["meshlib", "gloo"], True).split()[-4:] == ["gloo", "model", "ms", "ratio"]


def test_it_is_for_ranks_of_a_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--between"]) == 2
    assert "start meshrun --nnodes 2 ... --nproc-per-node 1 -m meshlib bench --between" in (
        capsys.readouterr().err
    )
    monkeypatch.setenv("RANK", "0")
    assert main(["--between", "--vs", "openmpi"]) == 2
    assert "only gloo can be measured there" in capsys.readouterr().err


def test_an_address_and_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHLIB_HOST", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("198.51.100.7") is None
    monkeypatch.setenv("MESHLIB_HOST", "127.0.0.3")
    assert own_address() == "127.0.0.3"
