"""Prompt lookup: what stood behind these tokens before is proposed again, with no model."""

from __future__ import annotations

import numpy as np
import torch

from decoding.speculation.coroutines import Steps
from decoding.speculation.decoders import Proposer
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sequence import TokenSequence
from parallel.ranks.process_group import ints_to_device_async

_MAX_AGREE = 32  # tokens before the n-gram that are compared


class PromptLookup(Proposer):
    """A level that proposes what followed the text's last tokens earlier in the text.

    Its law is one-hot, so verification is exact. Source: prompt lookup decoding (Saxena 2023,
    github.com/apoorvumang/prompt-lookup-decoding). Of all places where the last `ngram` tokens
    occur it takes the one where most tokens before them agree too; of equals the latest that n
    tokens follow. Where they occur nowhere else, `inner` proposes; without one, nothing is
    proposed, and the level above makes one token.
    """

    def __init__(
        self,
        text: TokenSequence,
        ngram: int,
        vocab: int,
        device: torch.device,
        inner: Proposer | None = None,
    ):
        super().__init__("prompt_lookup", text, len(text))
        if ngram < 1:
            raise ValueError(f"a lookup needs an n-gram of at least 1 token, found {ngram}")
        self.ngram, self.vocab, self.device, self.inner = ngram, vocab, device, inner

    def propose(self, n: int) -> Steps[Draft]:
        continuation = self._find(n)
        if not continuation and self.inner is not None:
            self.inner.sync(self.unverified)
            draft = yield from self.inner.propose(n)
            self.unverified += self.inner.unverified[len(self.unverified) :]
            return draft
        self.unverified += continuation
        self.stats.forwards += bool(continuation)
        self.stats.produced += len(continuation)
        tokens = ints_to_device_async(continuation, self.device)
        law = torch.zeros(len(continuation), self.vocab, device=self.device)
        return Draft(tokens, law.scatter_(1, tokens[:, None], 1.0))

    def levels(self) -> list[Proposer]:
        return [self, *(self.inner.levels() if self.inner else [])]

    def _find(self, n: int) -> list[int]:
        """Return up to n tokens, those behind the best earlier place of the last n-gram."""
        size, text = self.ngram, self.text.with_draft(self.unverified)
        if len(text) <= size:
            return []
        # places that something follows
        ends = np.flatnonzero(text[size - 1 : -1] == text[-1]) + size - 1
        for back in range(1, size):
            ends = ends[text[ends - back] == text[-1 - back]]
        if not len(ends):
            return []
        for back in range(size, min(size + _MAX_AGREE, len(text))):
            longer = ends[(ends >= back) & (text[ends - back] == text[-1 - back])]
            if not len(longer):
                break
            ends = longer
        # in a text that repeats itself the latest place is soon at the end
        enough = ends[ends < len(text) - n]
        start = int(enough[-1] if len(enough) else ends[0]) + 1
        return text[start : start + n].tolist()
