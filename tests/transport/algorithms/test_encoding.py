"""Compressed reductions: how far their encodings change numbers, and how NaN is kept."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport._operands.encoding import BLOCK, ENCODINGS, Coder
from transport._operands.flat import Scratch

SCALED = ["fp8", "int8"]
LEAST = 2.0**-149
"""The smallest number of float32."""


def there_and_back(name: str, values: np.ndarray) -> np.ndarray:
    coder = Coder(ENCODINGS[name], Scratch())
    with np.errstate(all="ignore"):
        data = coder.encode(values)
        assert data.nbytes == coder.nbytes(values.size)
        found = np.empty_like(values)
        coder.decode(data, found)
    return found


def block_maxima(values: np.ndarray) -> np.ndarray:
    """The largest number of each element's block."""
    blocks = np.arange(values.size) // BLOCK
    largest = np.zeros(values.size // BLOCK + 1)
    np.maximum.at(largest, blocks, np.abs(values.astype(np.float64)))
    return largest[blocks]


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    """Finite numbers of random signs, and of magnitudes far apart."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 3 * BLOCK))
    spread, middle = draw(st.integers(0, 60)), draw(st.integers(-40, 38))
    exponents = np.clip(middle + rng.uniform(-spread, 0, size), -44, 38.5)
    signs = rng.choice([-1.0, 0.0, 1.0], size, p=[0.5, 0.1, 0.4])
    return (signs * 10**exponents).astype(np.float32)


@settings(max_examples=60)
@given(numbers())
def test_int8_moves_a_number_by_half_a_step_of_its_block(values: np.ndarray) -> None:
    moved = np.abs(there_and_back("int8", values).astype(np.float64) - values)
    assert (moved <= block_maxima(values) / 254 * (1 + 1e-5) + LEAST).all()


@settings(max_examples=60)
@given(numbers())
def test_fp8_moves_a_number_by_a_sixteenth_or_little_of_its_block(values: np.ndarray) -> None:
    moved = np.abs(there_and_back("fp8", values).astype(np.float64) - values)
    # Half of 2 ** -3 of the number; subnormals are 2 ** -9 apart on a scale of 448.
    apart = block_maxima(values) / 448 * 2.0**-10
    assert (moved <= np.maximum(np.abs(values) / 16, apart) * (1 + 1e-5) + LEAST).all()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 300))
def test_bf16_is_that_of_ml_dtypes(seed: int, size: int) -> None:
    """Of any 32 bits: infinities, and NaNs of all kinds."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size, np.uint32)
    bits[::3] |= np.uint32(0x7F800000)
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(there_and_back("bf16", values), expected)


def test_fp8_is_that_of_ml_dtypes() -> None:
    """On a block whose largest number is 448, so that the scale is 1: all codes, and ties."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.unique(np.abs(codes[np.isfinite(codes)]))
    between = (grid[:-1] + grid[1:]) / 2
    for sign, numbers in ((1, grid), (-1, grid), (1, between), (-1, between)):
        values = np.append(sign * numbers, np.float32(448)).astype(np.float32)
        expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert there_and_back("fp8", values).tobytes() == expected.tobytes()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCALED)
def test_the_largest_number_stays_finite(name: str) -> None:
    values = np.full(BLOCK + 1, np.finfo("f4").max)
    values[1::2] *= -1
    coder = Coder(ENCODINGS[name], Scratch())
    found = np.empty_like(values)
    coder.decode(coder.encode(values), found)
    np.testing.assert_allclose(found, values, rtol=1e-6)
    again = np.empty_like(values)
    coder.decode(coder.encode(found), again)
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_spoil_only_their_block(name: str, strange: float) -> None:
    values = np.ones(3 * BLOCK + 5, np.float32)
    values[BLOCK + 7] = strange
    found = there_and_back(name, values)
    assert np.isnan(found[BLOCK : 2 * BLOCK]).all()
    assert (found[:BLOCK] == 1).all()
    assert (found[2 * BLOCK :] == 1).all()


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("size", [0, 1, BLOCK, 40_001])
def test_what_was_encoded_is_encoded_to_itself(name: str, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    once = there_and_back(name, values)
    np.testing.assert_allclose(there_and_back(name, once), once, rtol=3e-7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [2.0**-149, 1e-43, 1e-40, 1.01e-36, 1.5e-36, 2e-36, 1e-34])
def test_numbers_near_the_limits_of_float32_are_as_exact_as_others(name: str, value: float) -> None:
    """Where a scale, or its inverse, is none that float32 has; beside blocks of other sizes."""
    values = np.ones(3 * BLOCK + 10, np.float32)
    values[BLOCK : 2 * BLOCK] = np.linspace(-value, value, BLOCK)
    values[2 * BLOCK : 3 * BLOCK] = 0
    values[3 * BLOCK :] = -value
    found = there_and_back(name, values)
    share = 1 / 254 if name == "int8" else 1 / 16
    moved = np.abs(found.astype(np.float64) - values)
    assert (moved <= block_maxima(values) * share * (1 + 1e-5) + LEAST).all()
    assert np.count_nonzero(found[3 * BLOCK :]) == 10
    assert (found[:BLOCK] == 1).all()
    assert not found[2 * BLOCK : 3 * BLOCK].any()


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_residual_is_what_was_rounded_away(name: str) -> None:
    rng = np.random.default_rng(0)
    values, residual = (rng.standard_normal(70_000).astype(np.float32) for _ in range(2))
    before, coder = values + residual, Coder(ENCODINGS[name], Scratch())
    sent = np.empty_like(values)
    coder.decode(coder.encode(values, residual), sent)
    np.testing.assert_array_equal(residual, before - sent)
    into, kept = np.empty_like(before), np.empty_like(before)
    data = coder.encode_sum(before, into, kept, 2.0)
    coder.decode(data, sent)
    np.testing.assert_array_equal(into, sent)
    np.testing.assert_array_equal(kept, 2 * (before - sent))
