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

from decoding.speculation.coroutines import Passes
from decoding.speculation.draft_length import CATCH_UP, DraftLength, RoundStats
from decoding.speculation.randomness import Chance
from decoding.speculation.rejection_sampler import Draft, read
from decoding.speculation.sampling import Sampling
from decoding.speculation.sequence import Text, common_prefix
from offload.cache.base import Cache
from parallel.execution.batched_forward import Pass, Reader
from parallel.ranks.process_group import on_device


@dataclass
class LevelStats:
    """The counts of one level since it was made."""

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
    """A level that proposes tokens to the level above it.

    What it knows is `text` up to `position`, and behind it the tokens `ahead`: proposals of this
    level and of those above it, which may yet be taken back.
    """

    def __init__(self, name: str, text: Text, position: int):
        self.name, self.text, self.position = name, text, position
        self.ahead: list[int] = []
        self.stats = LevelStats()

    @abstractmethod
    def propose(self, n: int) -> Passes[Draft]:
        """Append up to n >= 1 tokens to `ahead`, by passes; a model appends all n.

        Row i of the draft's probs is the exact law token i was drawn from.
        """

    def sync(self, ahead: Sequence[int]) -> None:
        """Read the text to its end, behind which the levels above propose the tokens `ahead`."""
        self.position, self.ahead = len(self.text), list(ahead)

    def levels(self) -> list[Proposer]:
        """Return this level and those below it, outermost first."""
        return [self]


class Decoder(Proposer):
    """One model on one cache, which holds all of what the level knows but a pending end."""

    def __init__(
        self,
        name: str,
        model: Reader,
        cache: Cache,
        text: Text,
        sampling: Sampling,
        chance: Chance,
    ):
        """Start where `cache` stands, which has read `text` so far."""
        super().__init__(name, text, cache.length)
        self.model, self.cache = model, cache
        self.sampling, self.chance = sampling, chance
        # told of the logits (n, V) of the n tokens that each of its passes makes
        self.observe: Callable[[Tensor], None] | None = None
        self.rounds: list[RoundStats] = []  # of a level that verifies

    @abstractmethod
    def round(self, limit: int) -> Passes[list[int]]:
        """Append 1 to `limit` tokens of this level's law to the text, by passes; return them.

        For the outermost level: one pass of its model decides what stands.
        """

    def sync(self, ahead: Sequence[int]) -> None:
        now = [*self.text.since(self.position), *ahead]
        known = self.position + common_prefix(self.ahead, now)
        super().sync(ahead)
        # at least one token is pending: a pass needs a row
        self.cache.crop(min(known, len(self.text) + len(ahead) - 1))

    def _pending(self) -> Tensor:
        """Return the tokens (P,) whose KV the cache lacks."""
        start = self.cache.length
        tokens = [*self.text.since(start), *self.ahead[max(0, start - len(self.text)) :]]
        return on_device(tokens, self.chance.device)

    def _read(self, tokens: Tensor, rows: int) -> Pass:
        """Return the pass that reads tokens (T,) behind what the cache holds."""
        return Pass(self.model, self.cache, tokens, rows)

    def _stand(self, tokens: list[int]) -> list[int]:
        self.text.append(tokens)
        self.position = len(self.text)
        return tokens


class Autoregressive(Decoder):
    """A level that makes one token a pass, each drawn from the model's law after all before it."""

    def propose(self, n: int) -> Passes[Draft]:
        draft = yield from self._drawn(n)
        self.ahead += draft.tokens.tolist()
        return draft

    def round(self, limit: int) -> Passes[list[int]]:
        draft = yield from self._drawn(1)
        return self._stand(read(draft.tokens, draft.probs))

    def _drawn(self, n: int) -> Passes[Draft]:
        tokens, laws = list[Tensor](), list[Tensor]()
        position = len(self.text) + len(self.ahead)
        rows = yield from self._caught_up()
        for _ in range(n):
            logits = yield self._read(rows, 1)
            law = self.chance.law(self.sampling, logits)  # (1, V)
            if self.observe:
                self.observe(logits)
            self.cache.advance(len(rows))
            # (1,), on the device: no waiting until the draft is done
            rows = self.chance.draw(law[0], position + len(tokens))
            tokens.append(rows)
            laws.append(law)
        self.stats.passes += n
        self.stats.produced += n
        return Draft(torch.cat(tokens), torch.cat(laws))

    def _caught_up(self) -> Passes[Tensor]:
        """Read pending tokens until the rest fit one pass, and return these.

        A level that was not asked for long has many.
        """
        rows = self._pending()
        while len(rows) > CATCH_UP:
            yield self._read(rows[:CATCH_UP], 1)
            self.cache.advance(CATCH_UP)
            rows = rows[CATCH_UP:]
        return rows


class Speculative(Decoder):
    """A level that draws from its model's law, faster.

    `inner` drafts some tokens, as many as `length` says, and one pass verifies them all.
    """

    def __init__(
        self,
        name: str,
        model: Reader,
        cache: Cache,
        inner: Proposer,
        length: DraftLength,
        sampling: Sampling,
        chance: Chance,
    ):
        """Start on the text of `inner`, where `cache` stands in it."""
        super().__init__(name, model, cache, inner.text, sampling, chance)
        self.inner, self.length = inner, length
        self.clock: Callable[[], float] = time.perf_counter  # of seconds, by which lengths go

    def propose(self, n: int) -> Passes[Draft]:
        start, laws = len(self.ahead), []
        while (missing := n - (len(self.ahead) - start)) > 0:
            tokens, law = yield from self._verified(missing)
            self.ahead += tokens
            laws.append(law)
        return Draft(on_device(self.ahead[start:], self.chance.device), torch.cat(laws))

    def round(self, limit: int) -> Passes[list[int]]:
        tokens, _ = yield from self._verified(limit)
        return self._stand(tokens)

    def levels(self) -> list[Proposer]:
        return [self, *self.inner.levels()]

    def _verified(self, limit: int) -> Passes[tuple[list[int], Tensor]]:
        """Make one round: draft, verify, and return the 1 to `limit` tokens that stand.

        With them come the laws (A + 1, V) they are draws of.
        """
        started, known = self.clock(), len(self.ahead)
        draft = yield from self._draft(min(self.length.next(), limit - 1))
        # every draft ends on the host, so no compute of it is still under way
        drafted = self.clock()
        pending = self._pending()  # (P,)
        rows = torch.cat((pending, draft.tokens))
        logits = yield self._read(rows, len(draft.tokens) + 1)
        laws = self.chance.law(self.sampling, logits)  # (N + 1, V)
        accepted, following = self.chance.verify(draft, laws, len(self.text) + known)
        if self.observe:
            self.observe(logits[: accepted + 1])
        draft_s, verify_s = drafted - started, self.clock() - drafted
        past = RoundStats(len(draft.tokens), accepted, len(rows), draft_s, verify_s)
        self.rounds.append(past)
        self.length.record(past)
        self.cache.advance(len(pending) + accepted)
        self.stats.passes += 1
        self.stats.proposed += len(draft.tokens)
        self.stats.accepted += accepted
        self.stats.produced += accepted + 1
        stood = self.inner.ahead[known : known + accepted]
        return [*stood, following], laws[: accepted + 1]

    def _draft(self, n: int) -> Passes[Draft]:
        if n == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=self.chance.device)
            return Draft(nothing, torch.empty(0, 0, device=self.chance.device))
        self.inner.sync(self.ahead)
        return (yield from self.inner.propose(n))
