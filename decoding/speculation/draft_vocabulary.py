"""A draft model whose vocabulary has more or fewer rows than the target's, of one tokenizer.

Published pairs differ so: Qwen2.5-7B is padded to 152,064 rows, Qwen2.5-0.5B to 151,936. Tokens
that only one of the two has get no probability from the draft (`Sampling.over`). Tokens that the
draft lacks it still has to read: it reads token 0 in their place. That shifts what it proposes and
nothing else, for verification is exact whatever is proposed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from decoding.speculation.decoders import Autoregressive
from parallel.execution.batched_forward import ForwardRequest


def clamp_to_vocab(tokens: Tensor, rows: int, vocab: int) -> Tensor:
    """Return tokens (T,) of a target's `vocab` as a draft of so many `rows` can read them."""
    return tokens if rows >= vocab else tokens.masked_fill(tokens >= rows, 0)


class PaddedVocabDraft(Autoregressive):
    """A draft model of so many `rows`, for a target of `vocab` tokens."""

    def __init__(self, rows: int, vocab: int, *arguments: Any):
        """`arguments`: those of an `Autoregressive`."""
        super().__init__(*arguments)
        self.rows, self.vocab = rows, vocab

    def _forward(self, tokens: Tensor, rows: int) -> ForwardRequest:
        return super()._forward(clamp_to_vocab(tokens, self.rows, self.vocab), rows)
