"""Decoders that nest: a hierarchy is one `Speculative` inside another, down to a leaf.

The leaf is an `Autoregressive`, or a `Lookup`, which has no model. Verification is exact: a level
writes by its model's law, and so it is a valid proposer for the level above it (TriForce, arXiv
2404.11912, section 4.2, with Leviathan's residual redraw at every level).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.speculation.coroutines import Steps
from decoding.speculation.draft_length import MAX_CATCH_UP, DraftLength, RoundStats
from decoding.speculation.randomness import Randomness
from decoding.speculation.rejection_sampler import Draft, to_host
from decoding.speculation.sampling import Sampling
from decoding.speculation.sequence import TokenSequence, common_prefix
from offload.cache.base import Cache
from parallel.execution.batched_forward import ForwardFn, ForwardRequest
from parallel.ranks.process_group import ints_to_device_async


@dataclass
class LevelStats:
    """The counts of one level since it was made."""

    forwards: int = 0  # forward passes of its model
    proposed: int = 0  # tokens put before it by the level below
    accepted: int = 0  # of which stood
    produced: int = 0  # tokens it handed on

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def drafted_per_forward(self) -> float | None:
        return self.proposed / self.forwards if self.forwards else None

    @property
    def tokens_per_forward(self) -> float | None:
        return self.produced / self.forwards if self.forwards else None


class Proposer(ABC):
    """A level that proposes tokens to the level above it.

    What it knows is `text` up to `position`, and behind it the tokens `ahead`: proposals of this
    level and of those above it, which may yet be taken back.
    """

    def __init__(self, name: str, text: TokenSequence, position: int):
        self.name, self.text, self.position = name, text, position
        self.unverified: list[int] = []
        self.stats = LevelStats()

    @abstractmethod
    def propose(self, n: int) -> Steps[Draft]:
        """Append up to n >= 1 tokens to `ahead`, by passes; a model appends all n.

        Row i of the draft's probs is the exact law token i was drawn from.
        """

    def sync(self, ahead: Sequence[int]) -> None:
        """Read the text to its end, behind which the levels above propose the tokens `ahead`."""
        self.position, self.unverified = len(self.text), list(ahead)

    def levels(self) -> list[Proposer]:
        """Return this level and those below it, outermost first."""
        return [self]


class Decoder(Proposer):
    """One model on one cache, which holds all of what the level knows but a pending end."""

    def __init__(
        self,
        name: str,
        model: ForwardFn,
        cache: Cache,
        text: TokenSequence,
        sampling: Sampling,
        chance: Randomness,
    ):
        """Start where `cache` stands, which has read `text` so far."""
        super().__init__(name, text, cache.length)
        self.model, self.cache = model, cache
        self.sampling, self.chance = sampling, chance
        # told of the logits (n, V) of the n tokens that each of its passes makes
        self.on_logits: Callable[[Tensor], None] | None = None
        self.rounds: list[RoundStats] = []  # of a level that verifies

    @abstractmethod
    def round(self, limit: int) -> Steps[list[int]]:
        """Append 1 to `limit` tokens of this level's law to the text, by passes; return them.

        For the outermost level: one pass of its model decides what stands.
        """

    def sync(self, ahead: Sequence[int]) -> None:
        now = [*self.text.tokens_from(self.position), *ahead]
        known = self.position + common_prefix(self.unverified, now)
        super().sync(ahead)
        # at least one token is pending: a pass needs a row
        self.cache.crop(min(known, len(self.text) + len(ahead) - 1))

    def _pending(self) -> Tensor:
        """Return the tokens (P,) whose KV the cache lacks."""
        start = self.cache.length
        tokens = [*self.text.tokens_from(start), *self.unverified[max(0, start - len(self.text)) :]]
        return ints_to_device_async(tokens, self.chance.device)

    def _forward(self, tokens: Tensor, rows: int) -> ForwardRequest:
        """Return the pass that reads tokens (T,) behind what the cache holds."""
        return ForwardRequest(self.model, self.cache, tokens, rows)

    def _commit(self, tokens: list[int]) -> list[int]:
        self.text.append(tokens)
        self.position = len(self.text)
        return tokens


class Autoregressive(Decoder):
    """A level that makes one token a pass, each drawn from the model's law after all before it."""

    def propose(self, n: int) -> Steps[Draft]:
        draft = yield from self._sample(n)
        self.unverified += draft.tokens.tolist()
        return draft

    def round(self, limit: int) -> Steps[list[int]]:
        draft = yield from self._sample(1)
        return self._commit(to_host(draft.tokens, draft.probs))

    def _sample(self, n: int) -> Steps[Draft]:
        tokens, laws = list[Tensor](), list[Tensor]()
        position = len(self.text) + len(self.unverified)
        rows = yield from self._catch_up()
        for _ in range(n):
            logits = yield self._forward(rows, 1)
            law = self.chance.probs(self.sampling, logits)  # (1, V)
            if self.on_logits:
                self.on_logits(logits)
            self.cache.advance(len(rows))
            # (1,), on the device: no waiting until the draft is done
            rows = self.chance.draw(law[0], position + len(tokens))
            tokens.append(rows)
            laws.append(law)
        self.stats.forwards += n
        self.stats.produced += n
        return Draft(torch.cat(tokens), torch.cat(laws))

    def _catch_up(self) -> Steps[Tensor]:
        """Read pending tokens until the rest fit one pass, and return these.

        A level that was not asked for long has many.
        """
        rows = self._pending()
        while len(rows) > MAX_CATCH_UP:
            yield self._forward(rows[:MAX_CATCH_UP], 1)
            self.cache.advance(MAX_CATCH_UP)
            rows = rows[MAX_CATCH_UP:]
        return rows


class Speculative(Decoder):
    """A level that draws from its model's law, faster.

    `inner` drafts some tokens, as many as `length` says, and one pass verifies them all.
    """

    def __init__(
        self,
        name: str,
        model: ForwardFn,
        cache: Cache,
        inner: Proposer,
        length: DraftLength,
        sampling: Sampling,
        chance: Randomness,
    ):
        """Start on the text of `inner`, where `cache` stands in it."""
        super().__init__(name, model, cache, inner.text, sampling, chance)
        self.inner, self.length = inner, length
        self.clock: Callable[[], float] = time.perf_counter  # of seconds, by which lengths go

    def propose(self, n: int) -> Steps[Draft]:
        start, laws = len(self.unverified), []
        while (missing := n - (len(self.unverified) - start)) > 0:
            tokens, law = yield from self._verify(missing)
            self.unverified += tokens
            laws.append(law)
        return Draft(
            ints_to_device_async(self.unverified[start:], self.chance.device), torch.cat(laws)
        )

    def round(self, limit: int) -> Steps[list[int]]:
        tokens, _ = yield from self._verify(limit)
        return self._commit(tokens)

    def levels(self) -> list[Proposer]:
        return [self, *self.inner.levels()]

    def _verify(self, limit: int) -> Steps[tuple[list[int], Tensor]]:
        """Make one round: draft, verify, and return the 1 to `limit` tokens that stand.

        With them come the laws (A + 1, V) they are draws of.
        """
        started, known = self.clock(), len(self.unverified)
        draft = yield from self._draft(min(self.length.next(), limit - 1))
        # every draft ends on the host, so no compute of it is still under way
        drafted = self.clock()
        pending = self._pending()  # (P,)
        rows = torch.cat((pending, draft.tokens))
        logits = yield self._forward(rows, len(draft.tokens) + 1)
        laws = self.chance.probs(self.sampling, logits)  # (N + 1, V)
        accepted, following = self.chance.rejection_sample(draft, laws, len(self.text) + known)
        if self.on_logits:
            self.on_logits(logits[: accepted + 1])
        draft_s, verify_s = drafted - started, self.clock() - drafted
        past = RoundStats(len(draft.tokens), accepted, len(rows), draft_s, verify_s)
        self.rounds.append(past)
        self.length.record(past)
        self.cache.advance(len(pending) + accepted)
        self.stats.forwards += 1
        self.stats.proposed += len(draft.tokens)
        self.stats.accepted += accepted
        self.stats.produced += accepted + 1
        stood = self.inner.unverified[known : known + accepted]
        return [*stood, following], laws[: accepted + 1]

    def _draft(self, n: int) -> Steps[Draft]:
        if n == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=self.chance.device)
            return Draft(nothing, torch.empty(0, 0, device=self.chance.device))
        self.inner.sync(self.unverified)
        return (yield from self.inner.propose(n))
