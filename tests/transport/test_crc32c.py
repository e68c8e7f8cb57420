"""CRC-32C: known values, any cut of the data, and the core and Python alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import _crc32c as module
from transport._crc32c import crc32c_in_python
from transport._native import core

WAYS = [crc32c_in_python] if core is None else [crc32c_in_python, core.crc32c]


@pytest.mark.parametrize("crc32c", WAYS)
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # RFC 3720, appendix B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_known_values(crc32c, data, expected):
    assert crc32c(data) == expected


def bit_by_bit(data):
    register = 0xFFFFFFFF
    for octet in data:
        register ^= octet
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_in_two_pieces(data, cut):
    for crc32c in WAYS:
        assert crc32c(data[cut:], crc32c(data[:cut])) == bit_by_bit(data)


# Around where streams, and lanes, begin and end.
@pytest.mark.parametrize("size", [4096 * 3 - 1, 4096 * 3, 4096 * 6 + 9, 1 << 18, (1 << 19) + 77])
def test_long_data(size):
    data = np.random.default_rng(size).bytes(size)
    pieces = 0
    for begin in range(0, size, 1000):  # too short for streams and lanes
        pieces = crc32c_in_python(data[begin : begin + 1000], pieces)
    for crc32c in WAYS:
        assert crc32c(data) == pieces
        assert crc32c(data[777:], crc32c(data[:777])) == pieces


def test_the_core_is_used_where_there_is_one():
    assert module.crc32c is WAYS[-1]
