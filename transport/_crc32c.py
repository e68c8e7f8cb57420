"""CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and Zarr's ``crc32c``: RFC 3720, appendix B.4.

Without the compiled core, NumPy computes the CRCs of many stretches of the data in parallel, two
bytes of each per step, and combines them at the end. A CRC is linear over GF(2): appending zero
bytes to the data multiplies it by a matrix of 32 × 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from transport._native import core

_POLYNOMIAL = 0x82F63B78
_LANES = 1 << 13
# With fewer steps, the stretches would be too short to be worth combining.
_LEAST_STEPS = 16
_MASK = 0xFFFFFFFF

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


class Crc32c(Protocol):
    """The type of ``crc32c``."""

    def __call__(self, data: Any, crc: int = 0, /) -> int:
        """Return the CRC-32C of the buffer ``data``; ``crc`` is that of the preceding bytes."""
        ...


def crc32c_in_python(data: Any, crc: int = 0, /) -> int:
    """Return the same checksum as the core. See ``Crc32c``."""
    octets: Bytes = np.frombuffer(data, np.uint8)
    register = ~crc & _MASK
    steps = octets.size // (2 * _LANES)
    if steps >= _LEAST_STEPS:
        whole = 2 * _LANES * steps
        register = _many_lanes(octets[:whole].reshape(_LANES, 2 * steps), register)
        octets = octets[whole:]
    return ~_one_lane(octets, register) & _MASK


crc32c: Crc32c = crc32c_in_python if core is None else core.crc32c


@cache
def _byte_table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ _POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


@cache
def _byte_list() -> list[int]:
    return _byte_table().tolist()


@cache
def _pair_table() -> Words:
    """Return the table for two bytes at once; the first is the lower byte of the index."""
    once = _byte_table()[np.arange(1 << 16) & 255] ^ (np.arange(1 << 16, dtype=np.uint32) >> 8)
    return (once >> 8 ^ _byte_table()[once & 255]).astype(np.uint32)


def _one_lane(octets: Bytes, register: int) -> int:
    table = _byte_list()
    for octet in octets.tolist():
        register = register >> 8 ^ table[(register ^ octet) & 255]
    return register


def _many_lanes(rows: Bytes, register: int) -> int:
    """Return the register after the consecutive ``rows``; their number is a power of two."""
    table = _pair_table()
    registers: npt.NDArray[Any] = np.zeros(len(rows), np.uint32)
    registers[0] = register
    # Transposed, so that each step reads contiguous memory.
    pairs = np.ascontiguousarray(rows.view("<u2").T)
    for pair in pairs:
        registers = table[(registers ^ pair) & 0xFFFF] ^ registers >> 16
    length = rows.shape[1]
    while len(registers) > 1:
        registers = _after_zeros(length)(registers[0::2]) ^ registers[1::2]
        length *= 2
    return int(registers[0])


@cache
def _after_zeros(count: int) -> Callable[[Words], Words]:
    """Return a function that appends ``count`` zero bytes to registers: a product over GF(2)."""
    matrix = _columns(count)

    def apply(registers: Words) -> Words:
        result = np.zeros_like(registers)
        for bit, column in enumerate(matrix):
            result ^= np.where(registers >> np.uint32(bit) & 1, np.uint32(column), np.uint32(0))
        return result

    return apply


def _columns(count: int) -> list[int]:
    """Return, for each bit of a register, the register after ``count`` zero bytes."""
    table = _byte_list()
    power = [(1 << bit) >> 8 ^ table[(1 << bit) & 255] for bit in range(32)]
    result = [1 << bit for bit in range(32)]
    while count:
        if count & 1:
            result = [_times(power, column) for column in result]
        power = [_times(power, column) for column in power]
        count >>= 1
    return result


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            total ^= column
    return total
