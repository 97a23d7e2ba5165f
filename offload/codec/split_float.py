"""16-bit elements in two slices: a code of 8 bits, which is near, and the bits that it lacks.

Let m be the lower 15 bits of an element's pattern, and B how many bits are cut off. Of

    y = m - offset + 2^(B-1)

the code is y >> B, with the element's sign before it: m rounded to nearest. The low bits are
y & (2^B - 1). Both together give m exactly. A code is also a number of its own, in float8: in
e5m2 for float16, where B is 8 and the offset 0; in e4m3fn for bfloat16, where B is 4 and the offset
makes room for fourteen octaves below the largest element of a head. What no code holds is an
outlier (`offload.codec.outliers`).

Source: ours. Others keep fewer bits to draft with and all of them elsewhere (VeriCache, arXiv
2605.17613; QuantSpec, 2502.10424); here the two together are the element.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from offload.codec.format import SplitFormat

_MAGNITUDE = 0x7FFF
_BLOCK = 1 << 18  # elements that a CPU's thread joins at a time: what is between stays in its cache
_EXPONENTS = 15  # of e4m3fn, beside that of zero and subnormal numbers
_LARGEST_EXPONENT = 253  # of bfloat16, so that no code stands for infinity

Offsets = list[list[int]]  # of keys and of values, by head


@dataclass(frozen=True)
class SplitFloatCodec:
    """Splits keys and values into codes and low bits, and joins them again.

    Codes (2, H, T, D) uint8 hold an element each. Low bits of bfloat16 (1, H, T, D) uint8 hold four
    bits of a key and, above them, four of the value; those of float16 (2, H, T, D) eight of each.
    """

    format: SplitFormat

    def offsets(self, kv: Tensor) -> Offsets:
        """Return the offsets that suit the heads of kv (2, H, T, D)."""
        if not self.format.min_code:
            zeros = [0] * kv.shape[1]
            return [zeros, zeros]
        magnitudes = kv.view(torch.int16) & _MAGNITUDE
        exponents = magnitudes.amax((2, 3)).int() >> 7
        exponents.clamp_(_EXPONENTS - 1, _LARGEST_EXPONENT)
        # rounding may lift the largest element into the next octave
        return ((exponents + 1 - _EXPONENTS) << 7).tolist()

    def split(self, kv: Tensor, offsets: Offsets | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, low bits, and which elements of kv (2, H, T, D) are outliers.

        An outlier has the nearest code that there is. Offsets (2, H) int32 in the device's memory
        spare a wait for it.
        """
        cut = self.format
        pattern = kv.view(torch.int16).int()
        offset = torch.as_tensor(offsets, dtype=torch.int32, device=kv.device)
        y = pattern & _MAGNITUDE
        y += self._half
        y -= offset[..., None, None]
        codes = y >> cut.low_bits
        outliers = (codes < cut.min_code) | (codes > cut.max_code)
        codes.clamp_(0, cut.max_code)
        codes |= (pattern >> 8) & 0x80  # the sign
        y &= (1 << cut.low_bits) - 1
        if cut.low_planes == 1:
            keys, values = y
            y = (keys | values << 4)[None]
        return codes.to(torch.uint8), y.to(torch.uint8), outliers

    def reconstruct(
        self, codes: Tensor, lows: Tensor | None, offsets: Offsets, out: Tensor
    ) -> None:
        """Write to out (2, H, T, D) the elements of these slices; of outliers anything.

        Without low bits, write the codes' own values. `offsets` are those of these heads.
        """
        bits = self.format.low_bits
        # of a code with its sign extended, once it is shifted to where it was in y
        sign_and_code = (0x7F << bits) - (1 << 15)
        patterns = out.view(torch.int16)
        heads, tokens, dim = out.shape[1:]
        step = max(1, torch.get_num_threads() * _BLOCK // dim)
        for part, head, start in product(range(2), range(heads), range(0, tokens, step)):
            at = slice(start, start + step)
            y = codes[part, head, at].view(torch.int8).to(torch.int16)
            y <<= bits
            y &= sign_and_code
            constant = offsets[part][head]
            if lows is not None:
                y |= self._low(lows[:, head, at], part)
                constant -= self._half
            torch.add(y, constant, out=patterns[part, head, at])

    @property
    def _half(self) -> int:
        return 1 << (self.format.low_bits - 1)

    def _low(self, lows: Tensor, part: int) -> Tensor:
        """Return the low bits (T, D) int16 of keys, `part` 0, or values from lows (P, T, D)."""
        if self.format.low_planes == 2:
            own = lows[part]
        elif part == 0:
            own = lows[0] & 0xF
        else:
            own = lows[0] >> 4
        return own.to(torch.int16)
