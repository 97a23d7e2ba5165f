"""Decoders that nest: hierarchy is one `Speculative` inside another, down to an `Autoregressive`
leaf.

Verification is exact, so a level's output law is its model's law, and a level is a valid proposer
for the level above it (TriForce, arXiv 2404.11912, section 4.2, with Leviathan's residual redraw at
every level).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from decoding.speculation.draft_length import CATCH_UP, DraftLength, RoundStats
from decoding.speculation.sampling import Sampling, draw
from decoding.speculation.verify import Draft, read, verify
from offload.cache import Cache
from parallel.group import on_device

# tokens (T,), their cache, rows -> logits (rows, V) of the last rows
Forward = Callable[[Tensor, Cache, int], Tensor]


@dataclass
class LevelStats:
    """What one level did since it was made."""

    passes: int = 0  # forward passes of its model
    proposed: int = 0  # tokens put before it by the level below
    accepted: int = 0  # of which stood
    produced: int = 0  # tokens it handed on

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def proposed_per_pass(self) -> float | None:
        return self.proposed / self.passes if self.passes else None

    @property
    def tokens_per_pass(self) -> float | None:
        return self.produced / self.passes if self.passes else None


class Proposer(ABC):
    """Whoever proposes tokens to a level above. `tokens` is the text as it knows it."""

    def __init__(self, name: str, tokens: list[int]):
        self.name, self.tokens = name, list(tokens)
        self.stats = LevelStats()

    @abstractmethod
    def propose(self, n: int) -> Draft:
        """Append up to n >= 1 tokens to `tokens`, a model all n; row i of probs is the exact law
        token i was drawn from.
        """

    def sync(self, tokens: list[int], since: int) -> None:
        """The text is `tokens` now; it may differ from what this level knows from index `since`
        on.
        """
        self._agree(tokens, since)

    def levels(self) -> list[Proposer]:
        """This level and those below it, outermost first."""
        return [self]

    def _agree(self, tokens: list[int], since: int) -> int:
        """Take over the text; how much of it was known before."""
        keep, end = since, min(len(self.tokens), len(tokens))
        while keep < end and self.tokens[keep] == tokens[keep]:
            keep += 1
        self.tokens[keep:] = tokens[keep:]
        return keep


class Decoder(Proposer):
    """One model on one cache, which holds all of the text but a pending end."""

    def __init__(
        self,
        name: str,
        forward: Forward,
        cache: Cache,
        prompt: list[int],
        sampling: Sampling,
        generator: Generator,
    ):
        """`prompt` is what the cache has read."""
        super().__init__(name, prompt)
        self.forward, self.cache, self.sampling, self.generator = (
            forward,
            cache,
            sampling,
            generator,
        )

    @abstractmethod
    def round(self, limit: int) -> list[int]:
        """One pass of this level's model as the outermost level: appends and returns 1 to `limit`
        tokens of its law.
        """

    def sync(self, tokens: list[int], since: int) -> None:
        keep = self._agree(tokens, since)
        # at least one token is pending: a pass needs a row
        self.cache.crop(min(keep, len(tokens) - 1))

    def _pending(self) -> Tensor:  # (P,) the tokens whose KV the cache lacks
        return on_device(self.tokens[self.cache.length :], self.generator.device)


class Autoregressive(Decoder):
    """One token a pass, each drawn from the model's law after all before it."""

    def propose(self, n: int) -> Draft:
        draft = self._drawn(n)
        self.tokens += draft.tokens.tolist()
        return draft

    def round(self, limit: int) -> list[int]:
        draft = self._drawn(1)
        self.tokens += read(draft.tokens, draft.probs)
        return self.tokens[-1:]

    def _drawn(self, n: int) -> Draft:
        tokens, laws = [], []
        rows = self._caught_up()
        for _ in range(n):
            law = self.sampling.law(self.forward(rows, self.cache, 1))  # (1, V)
            self.cache.advance(len(rows))
            # (1,), on the device: no waiting until the draft is done
            rows = draw(law[0], self.generator)
            tokens.append(rows)
            laws.append(law)
        self.stats.passes += n
        self.stats.produced += n
        return Draft(torch.cat(tokens), torch.cat(laws))

    def _caught_up(self) -> Tensor:
        """The pending tokens, few enough for one pass: a level that was not asked for long has
        many.
        """
        rows = self._pending()
        while len(rows) > CATCH_UP:
            self.forward(rows[:CATCH_UP], self.cache, 1)
            self.cache.advance(CATCH_UP)
            rows = rows[CATCH_UP:]
        return rows


class Speculative(Decoder):
    """Draws from the model's law, faster: `inner` drafts some tokens, as many as `length` says, and
    one pass verifies them all.
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        cache: Cache,
        prompt: list[int],
        inner: Proposer,
        length: DraftLength,
        sampling: Sampling,
        generator: Generator,
    ):
        super().__init__(name, forward, cache, prompt, sampling, generator)
        self.inner, self.length = inner, length
        self._shared = len(prompt)  # how much of `tokens` the inner level is known to have

    def propose(self, n: int) -> Draft:
        start, laws = len(self.tokens), []
        while (missing := n - len(self.tokens) + start) > 0:
            laws.append(self._verified(missing))
        return Draft(on_device(self.tokens[start:], self.generator.device), torch.cat(laws))

    def round(self, limit: int) -> list[int]:
        start = len(self.tokens)
        self._verified(limit)
        return self.tokens[start:]

    def sync(self, tokens: list[int], since: int) -> None:
        super().sync(tokens, since)
        self._shared = min(self._shared, since)

    def levels(self) -> list[Proposer]:
        return [self, *self.inner.levels()]

    def _verified(self, limit: int) -> Tensor:
        """One round: draft, verify, append the 1 to `limit` tokens that stand. Returns the laws (A
        + 1, V) they are draws of.
        """
        started, known = time.perf_counter(), len(self.tokens)
        draft = self._draft(min(self.length.next(), limit - 1))
        # every draft ends on the host, so no compute of it is still under way
        drafted = time.perf_counter()
        pending = self._pending()  # (P,)
        rows = torch.cat((pending, draft.tokens))
        # (N + 1, V)
        laws = self.sampling.law(self.forward(rows, self.cache, len(draft.tokens) + 1))
        accepted, following = verify(draft, laws, self.generator)
        self.length.record(
            RoundStats(
                len(draft.tokens),
                accepted,
                len(rows),
                drafted - started,
                time.perf_counter() - drafted,
            )
        )
        self.cache.advance(len(pending) + accepted)
        self.tokens += [*self.inner.tokens[known : known + accepted], following]
        self.stats.passes += 1
        self.stats.proposed += len(draft.tokens)
        self.stats.accepted += accepted
        self.stats.produced += accepted + 1
        return laws[: accepted + 1]

    def _draft(self, n: int) -> Draft:
        if n == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=self.generator.device)
            return Draft(nothing, torch.empty(0, 0, device=self.generator.device))
        self.inner.sync(self.tokens, self._shared)
        self._shared = len(self.tokens)
        return self.inner.propose(n)
