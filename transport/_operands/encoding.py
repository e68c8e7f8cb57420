"""The encodings in which compressed reductions send float32 numbers.

``bf16`` is the upper half of a float32, rounded to even. ``fp8`` (e4m3) and ``int8`` use blocks of
``BLOCK`` numbers. Each block has a float32 scale, which maps its largest number to the largest
number of the encoding: 448 or 127. A frame has all its scales first, then a code for each number. A
block with an infinity or a NaN is decoded as NaN. Each encoding rounds once, to nearest, with the
same bits on every machine.

The code uses only NumPy, and works in pieces that stay in the cache.

Sources: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561 (scaled
blocks); Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (e4m3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from transport._operands.flat import Scratch
from transport._operands.operand import CODED, WIDENED
from transport._operands.reduce_op import Flat

BLOCK = 256
"""The number of values that share a scale."""

Floats = npt.NDArray[np.float32]
_Bits = npt.NDArray[np.uint32]

# Numbers processed at a time: a multiple of BLOCK, small enough for the second-level cache.
_PIECE = 32 << 10
# Below this, a block's scale or its inverse may leave the range of float32's normal numbers.
_TINY = np.float32(2.0**-110)
_LIFT = np.float32(2.0**64)
_MOST = np.finfo(np.float32).max
_F32 = np.dtype(np.float32)


class Encoding(ABC):
    """An encoding. Methods work on pieces: 1-D float32 ``values``, ``scales`` and ``codes``."""

    name: str
    scaled: bool
    dtype: np.dtype[Any]
    """The dtype of the codes."""

    def nbytes(self, count: int) -> int:
        """Return the encoded size of ``count`` numbers in bytes."""
        return 4 * self.scales(count) + self.dtype.itemsize * count

    def scales(self, count: int) -> int:
        """Return the number of scales for ``count`` numbers."""
        return -(-count // BLOCK) if self.scaled else 0

    @abstractmethod
    def encode(self, values: Floats, scales: Floats, codes: Flat, work: Floats) -> None:
        """Encode ``values`` into ``scales`` and ``codes``; ``work`` is scratch of the same size."""

    @abstractmethod
    def decode(self, scales: Floats, codes: Flat, values: Floats) -> None:
        """Decode ``scales`` and ``codes`` into ``values``."""


class _Bf16(Encoding):
    name, scaled, dtype = "bf16", False, np.dtype(np.uint16)

    def encode(self, values: Floats, scales: Floats, codes: Flat, work: Floats) -> None:
        bits, rounded = values.view(np.uint32), work.view(np.uint32)
        _round_to_even(bits, 16, rounded)
        np.copyto(codes, rounded, casting="unsafe")
        is_nan = np.isnan(values)
        if is_nan.any():
            codes[is_nan] = 0x7FC0  # Rounding may have overflowed a NaN's bits.

    def decode(self, scales: Floats, codes: Flat, values: Floats) -> None:
        np.left_shift(codes, np.uint32(16), out=values.view(np.uint32), dtype=np.uint32)


class _Blocks(Encoding):
    scaled = True
    largest: np.float32

    def encode(self, values: Floats, scales: Floats, codes: Flat, work: Floats) -> None:
        np.abs(values, out=work)
        whole = values.size - values.size % BLOCK
        found = scales[: whole // BLOCK]
        np.max(work[:whole].reshape(-1, BLOCK), axis=1, out=found)
        if whole < values.size:
            scales[-1] = work[whole:].max()
        finite, tiny = np.isfinite(scales), scales < _TINY
        factors = np.zeros_like(scales)
        np.divide(self.largest, scales, out=factors, where=finite & ~tiny)
        if not finite.all():
            # NaN and infinity times 0 are NaN, which cannot be rounded to an integer.
            values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        lifted = tiny & (scales > 0)
        exact = scales[lifted].astype(np.float64) / self.largest
        np.divide(scales, self.largest, out=scales)
        if lifted.any():
            values = self._lift(values, lifted, exact, scales, factors)
        _scale(values, factors, work)
        self._round(work, codes)
        # A scale that was rounded up would decode float32's largest number as infinity.
        np.minimum(scales, np.nextafter(_MOST / self.largest, _F32.type(0)), out=scales)
        scales[~finite] = np.nan

    def _lift(
        self,
        values: Floats,
        lifted: npt.NDArray[np.bool_],
        exact: npt.NDArray[np.float64],
        scales: Floats,
        factors: Floats,
    ) -> Floats:
        """Return ``values`` with the blocks ``lifted`` multiplied by ``_LIFT``; set these blocks'
        scales and factors. ``exact`` has the scales before rounding.

        Scales may be subnormal, with few bits. They are rounded up, so that no code is too large,
        and the codes are computed from the rounded scales.
        """
        rounded = exact.astype(np.float32)
        rounded = np.where(rounded < exact, np.nextafter(rounded, _MOST), rounded)
        scales[lifted] = rounded
        factors[lifted] = 1 / (rounded * _LIFT)
        found = np.empty_like(values)
        _scale(values, np.where(lifted, _LIFT, _F32.type(1)), found)
        return found

    @abstractmethod
    def _round(self, work: Floats, codes: Flat) -> None:
        """Round ``work``, numbers up to ``largest``, to ``codes``. May overwrite ``work``."""


class _Int8(_Blocks):
    name, dtype, largest = "int8", np.dtype(np.int8), np.float32(127)

    def _round(self, work: Floats, codes: Flat) -> None:
        np.rint(work, out=work)
        np.copyto(codes, work, casting="unsafe")

    def decode(self, scales: Floats, codes: Flat, values: Floats) -> None:
        _scale(codes, scales, values)


class _Fp8(_Blocks):
    """e4m3 in blocks. Multiplying by ``_down`` maps e4m3's exponents to float32's smallest ones, so
    that subnormals become subnormals.
    """

    name, dtype, largest = "fp8", np.dtype(np.uint8), np.float32(448)
    _down, _up = np.float32(2.0**-120), np.float32(2.0**120)

    def _round(self, work: Floats, codes: Flat) -> None:
        np.multiply(work, self._down, out=work)
        bits = work.view(np.uint32)
        signs = np.right_shift(bits, np.uint32(24)).astype(np.uint8)
        signs &= np.uint8(0x80)
        bits &= np.uint32(0x7FFFFFFF)
        _round_to_even(bits, 20, bits)
        np.copyto(codes, bits, casting="unsafe")
        codes |= signs

    def decode(self, scales: Floats, codes: Flat, values: Floats) -> None:
        bits = values.view(np.uint32)
        np.left_shift(codes, np.uint32(24), out=bits, dtype=np.uint32)
        signs = bits & np.uint32(0x80000000)
        bits ^= signs
        bits >>= np.uint32(4)
        bits |= signs
        values *= self._up
        _scale(values, scales, values)


def _round_to_even(bits: _Bits, dropped: int, out: _Bits) -> None:
    """Drop the last ``dropped`` bits of ``bits``, rounding to even; ``out`` may be ``bits``."""
    odd = np.right_shift(bits, np.uint32(dropped))
    odd &= np.uint32(1)
    odd += np.uint32((1 << (dropped - 1)) - 1)
    np.add(bits, odd, out=out)
    np.right_shift(out, np.uint32(dropped), out=out)


def _scale(numbers: Flat, factors: Floats, out: Floats) -> None:
    """Multiply each block of ``numbers`` by its factor into ``out``."""
    whole = numbers.size - numbers.size % BLOCK
    blocks = factors[: whole // BLOCK, None]
    into = out[:whole].reshape(-1, BLOCK)
    np.multiply(numbers[:whole].reshape(-1, BLOCK), blocks, out=into, dtype=np.float32)
    if whole < numbers.size:
        np.multiply(numbers[whole:], factors[-1], out=out[whole:], dtype=np.float32)


ENCODINGS: dict[str, Encoding] = {form.name: form for form in (_Bf16(), _Fp8(), _Int8())}


class Coder:
    """Encodes and decodes flat buffers with a group's scratch memory. One thread at a time."""

    def __init__(self, encoding: Encoding, scratch: Scratch) -> None:
        self._encoding = encoding
        self._scratch = scratch

    def nbytes(self, count: int) -> int:
        """Return the encoded size of ``count`` numbers in bytes."""
        return self._encoding.nbytes(count)

    def encode(self, source: Flat, residual: Floats | None = None) -> Flat:
        """Return ``source``, of any float dtype, encoded in new memory (uint8).

        ``residual`` is added first, and then replaced by the rounding error, which is NaN where the
        decoded value is NaN.
        """
        return self._encode(source, residual, residual, None, 1.0)

    def encode_sum(self, total: Floats, into: Flat, residual: Floats | None, scale: float) -> Flat:
        """Return ``total`` encoded in new memory (uint8), and write the decoded values to ``into``.

        ``residual`` receives the rounding error times ``scale``.
        """
        return self._encode(total, None, residual, into, scale)

    def _encode(
        self,
        source: Flat,
        added: Floats | None,
        error: Floats | None,
        into: Flat | None,
        scale: float,
    ) -> Flat:
        count, form = source.size, self._encoding
        data = np.empty(form.nbytes(count), np.uint8)
        most = min(count, _PIECE)
        work, other = (self._scratch.flat(slot, _F32, most) for slot in (CODED, WIDENED))
        for start, stop, scales, codes in _pieces(form, data, count):
            values, part = source[start:stop], other[: stop - start]
            if added is not None:
                values = np.add(values, added[start:stop], dtype=np.float32, casting="unsafe")
            elif values.dtype != _F32:
                values = values.astype(np.float32)
            form.encode(values, scales, codes, work[: stop - start])
            if error is None and into is None:
                continue
            form.decode(scales, codes, part)
            if error is not None:
                np.subtract(values, part, out=error[start:stop])
                error[start:stop] *= np.float32(scale)
            if into is not None:  # Last, because ``into`` may be the memory of ``values``.
                np.copyto(into[start:stop], part, casting="unsafe")
        return data

    def decode(self, data: Flat, into: Flat) -> None:
        """Decode ``data`` into all of ``into``, of any float dtype."""
        form = self._encoding
        if into.dtype == _F32:
            for start, stop, scales, codes in _pieces(form, data, into.size):
                form.decode(scales, codes, into[start:stop])
            return
        decoded = self._scratch.flat(WIDENED, _F32, min(into.size, _PIECE))
        for start, stop, scales, codes in _pieces(form, data, into.size):
            form.decode(scales, codes, decoded[: stop - start])
            np.copyto(into[start:stop], decoded[: stop - start], casting="unsafe")


def _pieces(form: Encoding, data: Flat, count: int) -> list[tuple[int, int, Floats, Flat]]:
    """Return the start and stop of each piece of ``count`` numbers, with its scales and codes."""
    head = 4 * form.scales(count)
    scales, codes = data[:head].view(np.float32), data[head:].view(form.dtype)
    found: list[tuple[int, int, Floats, Flat]] = []
    for start in range(0, count, _PIECE):
        stop = min(count, start + _PIECE)
        own = scales[start // BLOCK : -(-stop // BLOCK)]
        found.append((start, stop, own, codes[start:stop]))
    return found
