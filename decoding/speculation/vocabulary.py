"""A draft model whose vocabulary has more or fewer rows than the target's, of one tokenizer.

Published pairs differ so: Qwen2.5-7B is padded to 152,064 rows, Qwen2.5-0.5B to 151,936. Tokens
that only one of the two has get no probability from the draft (`Sampling.over`). Tokens that the
draft lacks it still has to read: it reads token 0 in their place. That shifts what it proposes and
nothing else, for verification is exact whatever is proposed.
"""

from __future__ import annotations

from torch import Tensor

from decoding.speculation.decoders import Forward
from offload.cache import Cache


def readable(tokens: Tensor, rows: int, vocab: int) -> Tensor:
    """Return tokens (T,) of a target's `vocab` as a draft of so many `rows` can read them."""
    return tokens if rows >= vocab else tokens.masked_fill(tokens >= rows, 0)


def reading(forward: Forward, rows: int, vocab: int) -> Forward:
    """Return passes of a draft of so many `rows`, to be called with any token of `vocab`."""
    if rows >= vocab:
        return forward

    def read(tokens: Tensor, cache: Cache, last: int) -> Tensor:
        return forward(readable(tokens, rows, vocab), cache, last)

    return read
