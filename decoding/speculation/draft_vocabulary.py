"""A draft model whose vocabulary is padded to another size than the target's.

The tokenizer is the same: Qwen2.5-7B is padded to 152,064 tokens, Qwen2.5-0.5B to 151,936. A token
that only one of the two models has gets no draft probability, or next to none under rules that may
forbid all others. Where the sequence has a token that the draft model lacks, the draft model reads
token 0 instead. That only affects what it drafts: verification is exact for any draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from decoding.speculation.decoders import Autoregressive
from parallel.execution.batched_forward import ForwardRequest

# the logit of a token that the draft model lacks, if the tokens it has may all be forbidden
_LACKING = -1e4


def clamp_to_vocab(tokens: Tensor, draft_vocab: int, vocab: int) -> Tensor:
    """Return tokens (T,) of the target's `vocab`, with 0 for those not in `draft_vocab`."""
    return tokens if draft_vocab >= vocab else tokens.masked_fill(tokens >= draft_vocab, 0)


class PaddedVocabDraft(Autoregressive):
    """A draft model with `draft_vocab` tokens, for a target with `vocab` tokens.

    Its distributions are over the target's, as verification requires.
    """

    def __init__(self, draft_vocab: int, vocab: int, *arguments: Any):
        """`arguments`: those of `Autoregressive`."""
        super().__init__(*arguments)
        self.draft_vocab, self.vocab = draft_vocab, vocab

    def _forward(self, tokens: Tensor, num_logits: int) -> ForwardRequest:
        tokens = clamp_to_vocab(tokens, self.draft_vocab, self.vocab)
        return super()._forward(tokens, num_logits)

    def _probs(self, logits: Tensor, draft: Sequence[int]) -> Tensor:
        missing = max(0, self.vocab - self.draft_vocab)
        lacking = _LACKING if self.processors else -math.inf
        logits = pad(logits[:, : self.vocab], (0, missing), value=lacking)
        return super()._probs(logits, draft)
