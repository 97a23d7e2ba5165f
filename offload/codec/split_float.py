"""Split floats: 16-bit elements as a high byte, kept on the device, and the remaining low bits.

Let m be the lower 15 bits of an element's pattern, B the number of low bits, and

    y = m - offset + 2^(B-1)

The high byte is the element's sign and y >> B: m rounded to nearest. The low bits are
y & (2^B - 1). Both together give m exactly. A high byte is also a float8 number: e5m2 for float16,
with B = 8 and offset 0; e4m3fn for bfloat16, with B = 4 and an offset chosen so that the high bytes
cover fourteen octaves below the largest element of a head. Elements out of range are outliers
(`offload.codec.outliers`).

Source: ours. Others store fewer bits to draft with, and all bits elsewhere (VeriCache, arXiv
2605.17613; QuantSpec, 2502.10424); here high bytes and low bits together are the element.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from offload.codec.format import SplitFormat

_MAGNITUDE = 0x7FFF
_BLOCK = 1 << 18  # elements reconstructed at a time per CPU thread: temporaries fit its cache
_EXPONENTS = 15  # exponents of normal numbers in e4m3fn
_LARGEST_EXPONENT = 253  # bfloat16 exponent up to which no high byte decodes to infinity

Offsets = list[list[int]]  # keys by head, then values


@dataclass(frozen=True)
class SplitFloatCodec:
    """Splits keys and values into high bytes and low bits, and reconstructs them.

    There is a high byte for each element, (2, H, T, D) uint8. Low bits of bfloat16 (1, H, T, D)
    uint8 hold four bits of a key and, above them, four of the value; those of float16 (2, H, T, D)
    hold eight of each.
    """

    format: SplitFormat

    def offsets(self, kv: Tensor) -> Offsets:
        """Return the offset for each head of kv (2, H, T, D)."""
        if not self.format.min_high:
            zeros = [0] * kv.shape[1]
            return [zeros, zeros]
        magnitudes = kv.view(torch.int16) & _MAGNITUDE
        exponents = magnitudes.amax((2, 3)).int() >> 7
        exponents.clamp_(_EXPONENTS - 1, _LARGEST_EXPONENT)
        # rounding may lift the largest element into the next octave
        return ((exponents + 1 - _EXPONENTS) << 7).tolist()

    def split(self, kv: Tensor, offsets: Offsets | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return high bytes, low bits, and which elements of kv (2, H, T, D) are outliers.

        An outlier gets the nearest valid high byte. Offsets passed as a device tensor (2, H) int32
        avoid a synchronisation.
        """
        fmt = self.format
        pattern = kv.view(torch.int16).int()
        offset = torch.as_tensor(offsets, dtype=torch.int32, device=kv.device)
        y = pattern & _MAGNITUDE
        y += self.format.half
        y -= offset[..., None, None]
        high = y >> fmt.low_bits
        outliers = (high < fmt.min_high) | (high > fmt.max_high)
        high.clamp_(0, fmt.max_high)
        high |= (pattern >> 8) & 0x80  # the sign
        y &= (1 << fmt.low_bits) - 1
        if fmt.low_planes == 1:
            keys, values = y
            y = (keys | values << 4)[None]
        return high.to(torch.uint8), y.to(torch.uint8), outliers

    def reconstruct(self, high: Tensor, low: Tensor | None, offsets: Offsets, out: Tensor) -> None:
        """Write the elements of high bytes and low bits to out (2, H, T, D).

        Outliers are left undefined. Without low bits, the high bytes' own values are written.
        `offsets` are those of these heads.
        """
        bits = self.format.low_bits
        # a high byte is sign-extended and shifted to its place in y; this masks its bits
        mask = (0x7F << bits) - (1 << 15)
        patterns = out.view(torch.int16)
        heads, tokens, dim = out.shape[1:]
        step = max(1, torch.get_num_threads() * _BLOCK // dim)
        for part, head, start in product(range(2), range(heads), range(0, tokens, step)):
            block = slice(start, start + step)
            y = high[part, head, block].view(torch.int8).to(torch.int16)
            y <<= bits
            y &= mask
            constant = offsets[part][head]
            if low is not None:
                y |= self._low_bits(low[:, head, block], part)
                constant -= self.format.half
            torch.add(y, constant, out=patterns[part, head, block])

    def _low_bits(self, low: Tensor, part: int) -> Tensor:
        """Return the low bits (T, D) int16 of keys, `part` 0, or values, from low (P, T, D)."""
        if self.format.low_planes == 2:
            bits = low[part]
        elif part == 0:
            bits = low[0] & 0xF
        else:
            bits = low[0] >> 4
        return bits.to(torch.int16)
