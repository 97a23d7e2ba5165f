"""A draft model whose vocabulary is padded to another size than the target's.

The tokenizer is the same: Qwen2.5-7B is padded to 152,064 tokens, Qwen2.5-0.5B to 151,936. A token
that only one of the two models has gets no draft probability (`Sampling.padded_to`). Where the
sequence has a token that the draft model lacks, the draft model reads token 0 instead. That only
affects what it drafts: verification is exact for any draft.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from decoding.speculation.decoders import Autoregressive
from parallel.execution.batched_forward import ForwardRequest


def clamp_to_vocab(tokens: Tensor, draft_vocab: int, vocab: int) -> Tensor:
    """Return tokens (T,) of the target's `vocab`, with 0 for those not in `draft_vocab`."""
    return tokens if draft_vocab >= vocab else tokens.masked_fill(tokens >= draft_vocab, 0)


class PaddedVocabDraft(Autoregressive):
    """A draft model with `draft_vocab` tokens, for a target with `vocab` tokens."""

    def __init__(self, draft_vocab: int, vocab: int, *arguments: Any):
        """`arguments`: those of `Autoregressive`."""
        super().__init__(*arguments)
        self.draft_vocab, self.vocab = draft_vocab, vocab

    def _forward(self, tokens: Tensor, num_logits: int) -> ForwardRequest:
        tokens = clamp_to_vocab(tokens, self.draft_vocab, self.vocab)
        return super()._forward(tokens, num_logits)
