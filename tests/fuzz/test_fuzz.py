"""Every fuzz target, briefly: bytes at random, and text that looks like what is expected."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS
from transport._channel.frames import pack
from transport._store.commands import Op
from transport._store.tcp.wire import pack_request
from transport._tcp.frame import PREFIX_BYTES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
).map(lambda value: json.dumps(value).encode())
NUMBERED_JSON = st.tuples(st.binary(min_size=1, max_size=1), JSON).map(b"".join)
MESHES = st.text("dptp=,-012: \t\n\u0661", max_size=30).map(str.encode)
REQUESTS = st.builds(
    pack_request,
    st.integers(0, 2**32 - 1),
    st.sampled_from(Op) | st.integers(0, 255),
    st.floats(),
    st.lists(st.binary(max_size=12), max_size=4),
)
FRAMES = st.binary(min_size=PREFIX_BYTES, max_size=3 * PREFIX_BYTES)
CALLS = st.tuples(
    st.integers(0, 255).map(lambda step: bytes([step])),
    st.lists(
        st.builds(
            lambda kind, call, body, parts, flags: b"".join(
                pack(kind, call, body, [*map(memoryview, parts)], [0] * len(parts), flags)
            ),
            st.integers(1, 8),
            st.integers(0, 2**64 - 1),
            st.binary(max_size=40) | st.just(bytes(70_000)),
            st.lists(st.binary(max_size=20), max_size=3),
            st.integers(0, 255),
        ),
        max_size=3,
    ).map(b"".join),
    st.binary(max_size=30),
).map(b"".join)
INPUTS = st.one_of(st.binary(max_size=200), FRAMES, JSON, NUMBERED_JSON, MESHES, REQUESTS, CALLS)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=150, deadline=None)
@given(data=INPUTS)
def test_accepts_or_refuses_anything(target: str, data: bytes) -> None:
    TARGETS[target](data)


FINDINGS = [
    ("flight_record", b"[" * 100_000),
    ("address", b"[" * 100_000),
    ("address", b'{"host": 1, "port": 2, "token": "00", "machine": "m"}'),
    ("address", b'{"host": "h", "port": "x", "token": "00", "machine": "m"}'),
    ("fields_of_a_flight_record", b'\x02"zero"'),
]


@pytest.mark.parametrize(("target", "data"), FINDINGS)
def test_what_fuzzing_has_found(target: str, data: bytes) -> None:
    TARGETS[target](data)
