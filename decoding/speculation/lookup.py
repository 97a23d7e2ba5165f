"""Prompt lookup: what stood behind these tokens the last time is proposed again. A proposer with no
model.
"""

from __future__ import annotations

import numpy as np
import torch

from decoding.speculation.decoders import Proposer
from decoding.speculation.verify import Draft
from parallel.group import on_device


class Lookup(Proposer):
    """Proposes what followed the text's last tokens earlier in the text. Its law is one-hot, so
    verification is exact.

    Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). Of
    all places where the last `ngram` tokens occur it takes the one where most tokens before them
    agree too; of equals the latest that n tokens follow. Where they occur nowhere else, `inner`
    proposes; without one, nothing is proposed, and the level above makes one token.
    """

    _AGREE = 32  # tokens before the n-gram that are compared, at most

    def __init__(
        self,
        tokens: list[int],
        ngram: int,
        vocab: int,
        device: torch.device,
        inner: Proposer | None = None,
    ):
        super().__init__("lookup", tokens)
        if ngram < 1:
            raise ValueError(f"a lookup needs an n-gram of at least 1 token, found {ngram}")
        self.ngram, self.vocab, self.device, self.inner = ngram, vocab, device, inner
        # `tokens` again, with room behind: searched without a copy
        self._text = np.array(tokens, dtype=np.int64)
        self._known = len(tokens)  # tokens that the inner level has too

    def propose(self, n: int) -> Draft:
        found = self._find(n)
        if not found and self.inner is not None:
            self.inner.sync(self.tokens, self._known)
            draft = self.inner.propose(n)
            self._append(self.inner.tokens[len(self.tokens) :])
            self._known = len(self.tokens)
            return draft
        self._append(found)
        self.stats.passes += bool(found)
        self.stats.produced += len(found)
        tokens = on_device(found, self.device)
        law = torch.zeros(len(found), self.vocab, device=self.device)
        return Draft(tokens, law.scatter_(1, tokens[:, None], 1.0))

    def sync(self, tokens: list[int], since: int) -> None:
        self._known = min(self._known, self._agree(tokens, since))
        self._write(tokens[since:], since)

    def levels(self) -> list[Proposer]:
        return [self, *(self.inner.levels() if self.inner else [])]

    def _find(self, n: int) -> list[int]:
        """Up to n tokens, those behind the best earlier place of the last n-gram."""
        size, text = self.ngram, self._text[: len(self.tokens)]
        if len(text) <= size:
            return []
        # places that something follows
        ends = np.flatnonzero(text[size - 1 : -1] == text[-1]) + size - 1
        for back in range(1, size):
            ends = ends[text[ends - back] == text[-1 - back]]
        if not len(ends):
            return []
        for back in range(size, min(size + self._AGREE, len(text))):
            longer = ends[(ends >= back) & (text[ends - back] == text[-1 - back])]
            if not len(longer):
                break
            ends = longer
        # in a text that repeats itself the latest place is soon at the end
        enough = ends[ends < len(text) - n]
        start = int(enough[-1] if len(enough) else ends[0]) + 1
        return text[start : start + n].tolist()

    def _append(self, tokens: list[int]) -> None:
        self._write(tokens, len(self.tokens))
        self.tokens += tokens

    def _write(self, tokens: list[int], at: int) -> None:
        if at + len(tokens) > len(self._text):
            self._text = np.concatenate(
                (self._text, np.zeros(max(1024, len(tokens)), dtype=np.int64))
            )
        self._text[at : at + len(tokens)] = tokens
