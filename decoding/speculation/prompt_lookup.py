"""Prompt lookup: the continuation of an earlier occurrence of the last n-gram is the draft."""

from __future__ import annotations

import numpy as np
import torch

from decoding.speculation.coroutines import Steps
from decoding.speculation.decoders import Proposer
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sequence import TokenSequence
from parallel.ranks.process_group import ints_to_device_async

_MAX_CONTEXT = 32  # tokens preceding the n-gram that are compared


class PromptLookup(Proposer):
    """A level without a model that drafts what followed the last tokens earlier in the sequence.

    Its distribution is one-hot, so verification is exact. Source: prompt lookup decoding (Saxena
    2023, github.com/apoorvumang/prompt-lookup-decoding). Of all matches of the last `ngram` tokens
    it takes the one with the longest common context before them; on a tie, the latest that is
    followed by n tokens. Without a match `inner` drafts; without an `inner` the draft is empty, and
    the level above produces one token.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        ngram: int,
        vocab: int,
        device: torch.device,
        inner: Proposer | None = None,
    ):
        super().__init__("prompt_lookup", sequence, len(sequence))
        if ngram < 1:
            raise ValueError(f"a lookup needs an n-gram of at least 1 token, found {ngram}")
        self.ngram, self.vocab, self.device, self.inner = ngram, vocab, device, inner

    def propose(self, n: int) -> Steps[Draft]:
        return (yield from self._propose(n, is_whole=True))

    def propose_some(self, n: int) -> Steps[Draft]:
        return (yield from self._propose(n, is_whole=False))

    def levels(self) -> list[Proposer]:
        return [self, *(self.inner.levels() if self.inner else [])]

    def _propose(self, n: int, is_whole: bool) -> Steps[Draft]:
        continuation = self._possible(self._find(n))
        if not continuation and (inner := self.inner) is not None:
            inner.sync(self.unverified)
            draft = yield from (inner.propose(n) if is_whole else inner.propose_some(n))
            self.unverified += inner.unverified[len(self.unverified) :]
            return draft
        self.unverified += continuation
        self.stats.forwards += bool(continuation)
        self.stats.produced += len(continuation)
        tokens = ints_to_device_async(continuation, self.device)
        probs = torch.zeros(len(continuation), self.vocab, device=self.device)
        return Draft(tokens, probs.scatter_(1, tokens[:, None], 1.0))

    def _possible(self, continuation: list[int]) -> list[int]:
        """Return the beginning of a continuation that the request's processors allow."""
        if not self.processors:
            return continuation
        tokens = [*self.sequence.tokens_from(self.processors.start), *self.unverified]
        return continuation[: self.processors.count_possible(tokens, continuation)]

    def _find(self, n: int) -> list[int]:
        """Return up to n tokens that follow the best earlier match of the last n-gram."""
        size, tokens = self.ngram, self.sequence.with_draft(self.unverified)
        if len(tokens) <= size:
            return []
        # last indices of the matches, the n-gram at the very end left out
        ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size - 1
        for back in range(1, size):
            ends = ends[tokens[ends - back] == tokens[-1 - back]]
        if not len(ends):
            return []
        for back in range(size, min(size + _MAX_CONTEXT, len(tokens))):
            longer = ends[(ends >= back) & (tokens[ends - back] == tokens[-1 - back])]
            if not len(longer):
                break
            ends = longer
        # in a repetitive sequence, the latest match is followed by few tokens
        enough = ends[ends < len(tokens) - n]
        start = int(enough[-1] if len(enough) else ends[0]) + 1
        return tokens[start : start + n].tolist()
