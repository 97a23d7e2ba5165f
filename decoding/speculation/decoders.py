"""Nested decoders: a hierarchy is one `Speculative` inside another, down to a leaf.

The leaf is an `Autoregressive`, or a `PromptLookup`, which has no model. Verification is exact:
every level samples from its own model's distribution, which makes it a valid proposer for the level
above (TriForce, arXiv 2404.11912, section 4.2, with Leviathan's residual resampling at every
level).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoding.config.defaults import PROBS_ROWS
from decoding.speculation.coroutines import Steps
from decoding.speculation.draft_length import MAX_CATCH_UP, DraftLength, RoundStats
from decoding.speculation.logits_processors import LogitsProcessors
from decoding.speculation.randomness import Randomness
from decoding.speculation.rejection_sampler import Draft, concatenated, to_host
from decoding.speculation.sampling import Sampling
from decoding.speculation.sequence import TokenSequence, common_prefix
from offload.cache.base import Cache
from offload.layout import ceil_div, shares
from parallel.execution.batched_forward import ForwardFn, ForwardRequest
from parallel.ranks.process_group import ints_to_device_async


@dataclass
class LevelStats:
    """The counts of one level since its creation."""

    forwards: int = 0  # forward passes of its model
    proposed: int = 0  # draft tokens of the level below that it verified
    accepted: int = 0  # draft tokens that it accepted
    produced: int = 0  # tokens that it handed to the level above

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
    """A level that drafts tokens for the level above it.

    It has read `sequence` up to `position`, followed by the `unverified` tokens: drafts of this
    level and of those above it, which may still be rejected.
    """

    def __init__(self, name: str, sequence: TokenSequence, position: int):
        self.name, self.sequence, self.position = name, sequence, position
        self.processors = LogitsProcessors()  # one object, which all levels share
        self.unverified: list[int] = []
        self.stats = LevelStats()

    @abstractmethod
    def propose(self, n: int) -> Steps[Draft]:
        """Append up to n >= 1 draft tokens to `unverified`; a level with a model appends all n.

        Row i of the draft's probs is the exact distribution that token i was sampled from.
        """

    def propose_some(self, n: int) -> Steps[Draft]:
        """Append 1 to `n` draft tokens, as many as one forward of this level yields.

        A level without a model may append none.
        """
        return (yield from self.propose(n))

    def sync(self, unverified: Sequence[int]) -> None:
        """Move to the end of the sequence, followed by unverified tokens of the levels above."""
        self.position, self.unverified = len(self.sequence), list(unverified)

    def levels(self) -> list[Proposer]:
        """Return this level and those below it, outermost first."""
        return [self]


class Decoder(Proposer):
    """One model and its cache, which holds the level's tokens except the last, pending ones."""

    def __init__(
        self,
        name: str,
        model: ForwardFn,
        cache: Cache,
        sequence: TokenSequence,
        sampling: Sampling,
        randomness: Randomness,
    ):
        """Start at the end of `cache`, which holds the beginning of `sequence`."""
        super().__init__(name, sequence, cache.length)
        self.model, self.cache = model, cache
        self.sampling, self.randomness = sampling, randomness
        # called with the logits (n, V) of the n tokens that each forward produces, and with the
        # distributions (n, V) that they are sampled from
        self.on_logits: Callable[[Tensor, Tensor], None] | None = None
        self.rounds: list[RoundStats] = []  # filled by levels that verify

    @abstractmethod
    def round(self, limit: int) -> Steps[list[int]]:
        """Commit 1 to `limit` tokens of this level's distribution to the sequence; return them.

        For the outermost level: one forward of its model decides what is accepted.
        """

    def sync(self, unverified: Sequence[int]) -> None:
        tokens = [*self.sequence.tokens_from(self.position), *unverified]
        matched = self.position + common_prefix(self.unverified, tokens)
        matched = max(matched, self.cache.verified)
        super().sync(unverified)
        # at least one token stays pending: a forward needs a query token
        self.cache.crop(min(matched, len(self.sequence) + len(unverified) - 1))

    def _pending(self) -> list[int]:
        """Return the tokens whose KV the cache lacks."""
        start = self.cache.length
        unverified = self.unverified[max(0, start - len(self.sequence)) :]
        return [*self.sequence.tokens_from(start), *unverified]

    def _forward(self, tokens: Tensor, num_logits: int) -> ForwardRequest:
        """Return the request of a forward on tokens (T,), which follow the cached ones."""
        return ForwardRequest(self.model, self.cache, tokens, num_logits)

    def _forward_ids(self, ids: list[int], num_logits: int) -> ForwardRequest:
        """Return the request of a forward on tokens that the host knows."""
        tokens = ints_to_device_async(ids, self.randomness.device)
        request = self._forward(tokens, num_logits)
        return replace(request, ids=ids) if request.tokens is tokens else request

    def _probs(self, logits: Tensor, draft: Sequence[int]) -> Tensor:
        """Return the distributions (T, V) of logits (T, V).

        The last row follows the level's tokens and those of `draft`, and each row before it one
        token less.
        """
        new, tokens = list[int](), list[int]()
        if self.processors:
            new = self.sequence.tokens_from(self.processors.start)
            tokens = [*new, *self.unverified, *draft]

        def block_probs(block: Tensor, after: int) -> Tensor:
            if self.processors:
                block = self.processors.process(block, tokens, len(new), after)
            return self.randomness.probs(self.sampling, block)

        if len(logits) <= PROBS_ROWS:
            return block_probs(logits, 0)
        # the intermediate tensors of all rows at once would take much more memory than these
        probs, after = torch.empty_like(logits), len(logits)
        sizes = shares(len(logits), ceil_div(len(logits), PROBS_ROWS))
        for own_logits, own_probs in zip(logits.split(sizes), probs.split(sizes), strict=True):
            after -= len(own_logits)
            own_probs.copy_(block_probs(own_logits, after))
        return probs

    def _commit(self, tokens: list[int]) -> list[int]:
        self.sequence.append(tokens)
        self.position = len(self.sequence)
        return tokens


class Autoregressive(Decoder):
    """A level that samples one token per forward from its model's distribution."""

    def propose(self, n: int) -> Steps[Draft]:
        draft = yield from self._sample(n)
        self.unverified += draft.tokens.tolist()
        return draft

    def propose_some(self, n: int) -> Steps[Draft]:
        return (yield from self.propose(1))

    def round(self, limit: int) -> Steps[list[int]]:
        draft = yield from self._sample(1)
        return self._commit(to_host(draft.tokens, draft.probs))

    def _sample(self, n: int) -> Steps[Draft]:
        sampled, sampled_probs = list[Tensor](), list[Tensor]()
        draft = list[int]()  # the sampled tokens, if logits depend on them
        position = len(self.sequence) + len(self.unverified)
        request = self._forward_ids((yield from self._catch_up()), 1)
        for _ in range(n):
            if sampled:
                request = self._forward(sampled[-1], 1)
            logits = yield request
            probs = self._probs(logits, draft)  # (1, V)
            if self.on_logits:
                self.on_logits(logits, probs)
            self.cache.advance(len(request.tokens))
            # (1,), left on the device: no synchronization until the draft is complete
            tokens = self.randomness.draw(probs[0], position + len(sampled))
            if self.processors.reads_tokens:
                draft += tokens.tolist()
            sampled.append(tokens)
            sampled_probs.append(probs)
        self.stats.forwards += n
        self.stats.produced += n
        return Draft(torch.cat(sampled), torch.cat(sampled_probs))

    def _catch_up(self) -> Steps[list[int]]:
        """Prefill pending tokens until the rest fit into one forward, and return the rest.

        A level that has not drafted for a while has many pending tokens.
        """
        ids = self._pending()
        while len(ids) > MAX_CATCH_UP:
            yield self._forward_ids(ids[:MAX_CATCH_UP], 0)
            self.cache.advance(MAX_CATCH_UP)
            ids = ids[MAX_CATCH_UP:]
        return ids


class SelfPrediction(Autoregressive):
    """The target's multi-token-prediction block.

    A draft's second token and those after it are read with hidden states that the block predicted.
    Once the level above has verified them they are read again, with the target's weights' states.
    """

    _well_read: int | None = None  # the first tokens, none read with a predicted hidden state

    def sync(self, unverified: Sequence[int]) -> None:
        super().sync(unverified)
        if self._well_read is not None:  # it has drafted
            self.cache.crop(self._well_read)

    def propose(self, n: int) -> Steps[Draft]:
        self._well_read = len(self.sequence) + len(self.unverified)
        return (yield from super().propose(n))


class Speculative(Decoder):
    """A level that samples from its model's distribution in fewer forwards.

    `inner` drafts as many tokens as `length` says, and one forward verifies them all. If that waits
    for the host link, `inner` goes on in the meantime, as if all of the draft were accepted. If it
    is, the forward also verifies the first of these tokens, and the rest begin the next draft. This
    is PEARL's post-verify (Liu et al. 2024, arXiv 2408.11850, section 4.2), in the link's time in
    place of a second device's.
    """

    def __init__(
        self,
        name: str,
        model: ForwardFn,
        cache: Cache,
        inner: Proposer,
        length: DraftLength,
        sampling: Sampling,
        randomness: Randomness,
    ):
        """Start at the end of `cache`, which holds the beginning of the sequence of `inner`."""
        super().__init__(name, model, cache, inner.sequence, sampling, randomness)
        self.inner, self.length = inner, length
        self.clock: Callable[[], float] = time.perf_counter  # seconds, the basis of draft lengths
        self.max_ahead = 0  # tokens that are drafted during a verification, at most
        self._ahead = list[Draft]()  # the next draft's beginning

    def propose(self, n: int) -> Steps[Draft]:
        drafts, done = list[Draft](), 0
        while done < n:
            drafts.append((yield from self.propose_some(n - done)))
            done += len(drafts[-1].tokens)
        return concatenated(drafts)

    def propose_some(self, n: int) -> Steps[Draft]:
        tokens, probs = yield from self._verify(n)
        self.unverified += tokens
        # copied: a view would keep the memory of all of the round's rows
        return Draft(ints_to_device_async(tokens, self.randomness.device), probs.clone())

    def round(self, limit: int) -> Steps[list[int]]:
        tokens, _ = yield from self._verify(limit)
        return self._commit(tokens)

    def sync(self, unverified: Sequence[int]) -> None:
        super().sync(unverified)
        self._ahead = []

    def levels(self) -> list[Proposer]:
        return [self, *self.inner.levels()]

    def _verify(self, limit: int) -> Steps[tuple[list[int], Tensor]]:
        """Run one round: draft, verify, and return the 1 to `limit` resulting tokens.

        They are the A accepted draft tokens and the recovered or bonus token; with them come the
        distributions (A + 1, V) that they were sampled from.
        """
        started, num_unverified = self.clock(), len(self.unverified)
        draft, num_ahead = yield from self._draft(limit - 1)
        # every draft ends with a device synchronization, so none of its compute is left running
        drafted, count = self.clock(), len(draft.tokens)
        pending = self._pending()
        drafted_tokens = self.inner.unverified[num_unverified : num_unverified + count]
        ahead = list[Draft]()
        room = min(self.max_ahead, limit - 1 - count) if count else 0
        meanwhile = self._draft_ahead(room, ahead) if room > 0 else None
        request = self._forward_ids([*pending, *drafted_tokens], count + 1)
        logits = yield replace(request, meanwhile=meanwhile)
        if meanwhile is not None:
            meanwhile.close()
        target_probs = self._probs(logits, drafted_tokens)  # (N + 1, V)
        position = len(self.sequence) + num_unverified
        accepted, next_token = self.randomness.rejection_sample(draft, target_probs, position)
        self.cache.advance(len(pending) + accepted)
        result = [*drafted_tokens[:accepted], next_token]
        is_tested = accepted == count and bool(ahead)
        num_meanwhile = sum(len(each.tokens) for each in ahead)
        if is_tested:
            first, rest = ahead[0].split(1)
            is_accepted, result[-1] = self.randomness.verify_token(
                first, target_probs[count], position + count
            )
            if is_accepted:
                self._ahead = [rest, *ahead[1:]]
                accepted += 1
            count, num_ahead = count + 1, num_ahead + 1
        if self.on_logits:
            self.on_logits(logits[: len(result)], target_probs[: len(result)])
        draft_s, verify_s = drafted - started, self.clock() - drafted
        counts = count, accepted, len(request.tokens)
        stats = RoundStats(*counts, draft_s, verify_s, num_ahead, num_meanwhile, is_tested)
        self.rounds.append(stats)
        self.length.record(stats)
        self.stats.forwards += 1
        self.stats.proposed += count
        self.stats.accepted += accepted
        self.stats.produced += len(result)
        return result, target_probs[: len(result)]

    def _draft(self, limit: int) -> Steps[tuple[Draft, int]]:
        """Draft up to `limit` tokens; return how many of them were drafted in advance, too."""
        ahead, self._ahead = concatenated(self._ahead).split(limit)[0] if self._ahead else None, []
        count = 0 if ahead is None else len(ahead.tokens)
        n = min(self.length.next(), limit) - count
        if n <= 0 and ahead is None:
            empty = torch.empty(0, dtype=torch.int64, device=self.randomness.device)
            return Draft(empty, torch.empty(0, 0, device=self.randomness.device)), 0
        unverified = list(self.unverified)
        if ahead is not None:
            unverified += ahead.tokens.tolist()
        self.inner.sync(unverified)
        drafts = [] if ahead is None else [ahead]
        if n > 0:
            drafts.append((yield from self.inner.propose(n)))
        return concatenated(drafts), count

    def _draft_ahead(self, room: int, drafts: list[Draft]) -> Steps[None]:
        """Append drafts of up to `room` tokens to `drafts`, after the one under verification."""
        while room > 0:
            draft = yield from self.inner.propose_some(room)
            if not len(draft.tokens):
                return
            drafts.append(draft)
            room -= len(draft.tokens)
