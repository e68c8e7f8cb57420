"""Tuning tables: what a file may hold, which entry holds, and that all ranks have the same."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.transport.rank_threads import LONG, run_threads
from transport import _environment as environment
from transport._choosing.choice import DEFAULT, Thresholds
from transport._choosing.cost import Cost
from transport._choosing.tuning import (
    TransportTuning,
    Tuning,
    agree,
    from_environment,
    load,
    shipped,
)
from transport._communicators.runtime import Membership, Runtime
from transport._inproc.communicator import InprocCommunicator
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore

COST = Cost(1e-5, 1e-9, 1e-10, 2.0)
TWO, EIGHT = Thresholds(all_reduce_doubling=2), Thresholds(all_reduce_doubling=8)
TUNING = Tuning("a test", {"tcp": TransportTuning(COST, ((2, TWO), (8, EIGHT)))})


@pytest.mark.parametrize(
    ("size", "table"), [(1, TWO), (2, TWO), (7, TWO), (8, EIGHT), (3000, EIGHT)]
)
def test_the_table_of_the_most_ranks_that_are_no_more(size: int, table: Thresholds) -> None:
    assert TUNING.thresholds("tcp", size) == table
    assert TUNING.thresholds("another", size) == DEFAULT


tables = st.builds(
    Thresholds,
    all_reduce_doubling=st.integers(-1, 1 << 40),
    one_slice=st.integers(0, 1 << 30),
    segment=st.integers(1, 1 << 30),
)
costs = st.builds(Cost, *[st.floats(1e-12, 1e3)] * 4)
entries = st.builds(
    TransportTuning,
    st.none() | costs,
    st.dictionaries(st.integers(1, 4096), tables, max_size=4).map(
        lambda found: tuple(sorted(found.items(), key=lambda item: item[0]))
    ),
)


@given(st.text(max_size=20), st.dictionaries(st.text(max_size=8), entries, max_size=3))
def test_what_is_written_is_read(source: str, transports: dict[str, TransportTuning]) -> None:
    tuning = Tuning(source, transports)
    read = Tuning.decode(tuning.encode(), "a file")
    assert read == tuning
    assert read.fingerprint == tuning.fingerprint


def document(**changes: Any) -> dict[str, Any]:
    found = json.loads(TUNING.encode())
    found.update(changes)
    return found


def with_tcp(**changes: Any) -> dict[str, Any]:
    found = document()
    found["transports"]["tcp"].update(changes)
    return found


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "here is not a tuning file: Expecting"),
        ("[]", "mapping, not list"),
        (document(format=2), "format is 2, expected 1"),
        (document(source=3), "source is 3, expected text"),
        (document(more=1), "'more'"),
        ({"format": 1}, "'source' and 'transports'"),
        (with_tcp(cost=3), "'int'"),
        (with_tcp(cost={"alpha": 1}), "'beta'"),
        (
            with_tcp(cost={"alpha": 0, "beta": 1, "gamma": 1, "parallelism": 1}),
            "alpha is 0, expected a positive number",
        ),
        (with_tcp(thresholds={"two": {}}), "'two'"),
        (with_tcp(thresholds={"0": {}}), "for 1 or more ranks, got 0"),
        (with_tcp(thresholds={"2": {"speed": 3}}), "'speed'"),
        (
            with_tcp(thresholds={"2": {"segment": 0}}),
            "segment is 0, piece 65536, expected at least 1",
        ),
        (with_tcp(thresholds={"2": {"segment": True}}), "segment is True"),
        (with_tcp(thresholds={"2": {"segment": 1.5}}), "segment is 1.5, expected an integer"),
    ],
)
def test_another_content_is_refused_by_name(content: Any, complaint: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ValueError, match=complaint):
        Tuning.decode(text, "here")


def test_a_file_is_chosen_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.TUNING, raising=False)
    assert from_environment() is shipped()
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(environment.TUNING, str(path))
    with pytest.raises(ValueError, match=r"MESHLIB_TUNING=.*tuning.json: No such file"):
        from_environment()
    path.write_text(TUNING.encode())
    assert from_environment() == TUNING
    assert load(str(path)) == TUNING


def test_the_shipped_table_names_its_machine_and_the_cost_of_messages() -> None:
    tuning = shipped()
    assert tuning.source.startswith("meshlib tune, 20")
    for transport in ("tcp", "shm"):
        cost = tuning.transports[transport].cost
        assert cost is not None
        assert 1e-6 < cost.alpha < 1e-2
        assert 1e8 < 1 / cost.beta < 1e12


def test_a_communicator_takes_the_table_of_its_transport_and_size() -> None:
    table = Thresholds(segment=12345)
    tuning = Tuning("a test", {"inproc": TransportTuning(None, ((1, TWO), (3, table)))})
    store = HashStore()
    for size, expected in ((2, TWO), (3, table), (5, table)):
        runtime = Runtime(tuning=tuning)
        ranks = tuple(range(size))
        comm = InprocCommunicator(
            Membership(f"group {size}", 0, ranks, PrefixStore(f"{size}", store), runtime)
        )
        assert comm.table == expected
        comm.close()
        runtime.close()
    store.close()


def test_ranks_with_other_thresholds_are_refused() -> None:
    store = HashStore()
    other = Tuning("another", {"tcp": TransportTuning(COST, ((2, EIGHT),))})
    costlier = Tuning(
        "the first", {"tcp": TransportTuning(None, TUNING.transports["tcp"].thresholds)}
    )
    first = threading.Event()

    def rank(number: int) -> None:
        mine = store.clone()
        if number == 0:
            agree(TUNING, mine, 0)
            first.set()
        else:
            assert first.wait(LONG)
            if number == 1:
                agree(costlier, mine, 1)  # costs decide nothing
            else:
                with pytest.raises(
                    ValueError, match="rank 2 has the tuning 'another', rank 0 'a t"
                ):
                    agree(other, mine, 2)
        mine.close()

    run_threads([lambda number=number: rank(number) for number in range(3)])
    store.close()
