"""Acceptance rate of a retrieval cache's drafts, without the noise of sampling them.

Tokens are sampled once from the target, or taken from the book, and every policy follows them.

The target's distribution p, and the distribution q of the same model on a retrieval cache, are both
known at every token. A draft token is accepted with probability sum_x min(p(x), q(x)), the overlap,
exactly (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5). Along tokens sampled from p, the
first k - 1 tokens of a draft are accepted with the mean of prod min(1, q(x_i) / p(x_i)), so that a
draft of n tokens yields

    1 + sum_k prod_(i<k) min(1, q(x_i) / p(x_i)) . overlap_k

tokens on average: an unbiased estimate, for a selection after every n tokens, without sampling
noise. (In the engine, a selection follows the accepted tokens and observes rejected ones, too:
`python -m bench grid` measures whole runs.) Draft forward, verification and selection are the
engine's own. Memory is equal right after a selection; the static policy's window grows afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Generator, Tensor

from decoding import Sampling
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.speculation.sampling import draw
from offload.cache.base import Cache
from offload.layout import KVLayout
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.policy_specs import PolicySpec
from offload.retrieval.selection import POLICIES, QuerySample, SelectionPolicy
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache

V = TypeVar("V")
C = TypeVar("C", bound=Cache)


class Window(SelectionPolicy):
    """The most recent chunks and the sinks, as in a cache without retrieval.

    Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2).
    """

    spec = PolicySpec()

    def scores(self, sample: QuerySample, layer: int, head: int, chunk: int) -> Tensor:
        heads, tokens, _ = sample.keys.shape
        chunks = tokens // chunk
        ages = torch.arange(chunks, dtype=torch.float32, device=sample.keys.device)
        ages[0] = torch.inf
        return ages.repeat(heads, 1)


MEASURED = POLICIES | {"window": Window}


@dataclass(frozen=True)
class Variant:
    """A use of the device memory of `budget` tokens per head in 16 bits."""

    policy: str
    budget: int  # equivalent number of tokens in 16 bits
    chunk: int = 8
    bits: int = 16  # per element of selected tokens

    @property
    def name(self) -> str:
        name = f"{self.policy}, chunk {self.chunk}"
        return name if self.bits == 16 else f"{name}, {self.bits} bits"

    def tokens(self, layout: KVLayout) -> int:
        """Return the tokens per head that fit in its memory, for a layout's layers in 16 bits."""
        if self.bits == 16:
            return self.budget
        layout = replace(layout, dtype=torch.bfloat16)
        layout = layout.with_full_attention(layout.full_layers)
        whole = RetrievalCacheSpec.of(self.budget, self.chunk, self.budget, 1, 0)
        memory, tokens = whole.device_bytes(layout), 2 * self.budget
        while replace(whole, budget=tokens, quantised=True).device_bytes(layout) > memory:
            tokens -= self.chunk
        return tokens


STATIC = Variant("static", 768)  # the published policy
WHOLE = Variant("attention", 768)
OURS = replace(WHOLE, bits=8)  # the engine's default
ALL = [STATIC, Variant("window", 768), WHOLE, OURS]


@dataclass(frozen=True)
class Chain:
    """The tokens between two selections, as a draft of one policy."""

    overlap: Tensor  # (n,) probability of acceptance, by tokens since the selection
    ratios: Tensor  # (n,) min(1, q(x) / p(x)) of the followed tokens

    @property
    def tokens(self) -> float:
        """The expected tokens of one verification of all n draft tokens."""
        survival = torch.cat((torch.ones(1), self.ratios[:-1])).cumprod(0)
        return 1 + float((survival * self.overlap).sum())


def rejected(by_interval: Mapping[int, Sequence[Chain]]) -> dict[int, float]:
    """Return the share of rejected draft tokens, by selection interval."""
    return {
        n: 1 - statistics.fmean(float(chain.overlap.mean()) for chain in chains)
        for n, chains in by_interval.items()
    }


def expected_tokens(by_interval: Mapping[int, Sequence[Chain]]) -> dict[int, float]:
    """Return the tokens per verification of a draft as long as the interval, by that."""
    return {
        n: statistics.fmean(chain.tokens for chain in chains) for n, chains in by_interval.items()
    }


class Trace(Generic[V, C]):
    """A prefilled prompt, with a cache for every variant V that follows the target along tokens."""

    def __init__(
        self,
        runtime: Runtime,
        prompt: Sequence[int],
        new_tokens: int,
        rows: int,
        make: Callable[[TieredCache], Mapping[V, C]],
    ):
        """Prefill the prompt, with room for `new_tokens` and forwards over `rows` more.

        `make` returns the caches of a target, which it is given without observers. They, or what
        they are built from, observe it from then on.
        """
        self.session = SequenceState(runtime, list(prompt), new_tokens + rows + 1)
        self.model, self.target = runtime.target, self.session.target
        del self.session.levels[1:]
        self.target.observers.clear()  # those of the session
        self.caches = make(self.target)
        self.first = self.session.prefill()  # (1, V)
        caches: list[Cache] = [self.target, *self.caches.values()]
        self._start = [cache.snapshot() for cache in caches]

    def rewind(self) -> None:
        """Reset all caches to the end of the prompt."""
        caches: list[Cache] = [self.target, *self.caches.values()]
        for cache, state in zip(caches, self._start, strict=True):
            cache.restore(state)

    def sample(self, count: int, sampling: Sampling) -> Tensor:
        """Return the next tokens (count,), sampled from the target alone."""
        generator = Generator(self.first.device).manual_seed(sampling.seed)
        observers, self.target.observers = self.target.observers, []
        tokens, logits = [], self.first
        for _ in range(count):
            tokens.append(draw(sampling.probs(logits)[0], generator))
            logits = self.model(tokens[-1], self.target, 1)
            self.target.advance(1)
        self.target.observers = observers
        self.rewind()
        return torch.cat(tokens)

    def chains(self, tokens: Tensor, interval: int, sampling: Sampling) -> dict[V, list[Chain]]:
        """Verify `interval` tokens at a time, after a draft by each variant."""
        chains: dict[V, list[Chain]] = {variant: [] for variant in self.caches}
        for start in range(0, len(tokens) - interval, interval):
            inputs = tokens[start : start + interval]
            next_tokens = tokens[start + 1 : start + interval + 1, None]
            draft_probs = {
                variant: sampling.probs(self.model(inputs, cache, interval))
                for variant, cache in self.caches.items()
            }
            # (n, V); the observers of this forward reselect
            target_probs = sampling.probs(self.model(inputs, self.target, interval))
            self.target.advance(interval)
            p = target_probs.gather(1, next_tokens)
            for variant, probs in draft_probs.items():
                # a token at the edge of the nucleus may be outside of it in a forward that rounds
                # differently: 0 / 0
                ratios = (probs.gather(1, next_tokens) / p).clamp(max=1).nan_to_num(nan=1.0)
                overlap = torch.minimum(target_probs, probs).sum(1)
                chains[variant].append(Chain(overlap, ratios.squeeze(1)))
        self.rewind()
        return chains


class PolicyTrace(Trace[Variant, RetrievalCache]):
    """A trace of retrieval caches."""

    def __init__(
        self,
        runtime: Runtime,
        prompt: Sequence[int],
        new_tokens: int,
        variants: Sequence[Variant],
        rows: int,
    ):
        """Make a cache for each of the `variants`; the rest as in `Trace`."""

        def make(target: TieredCache) -> dict[Variant, RetrievalCache]:
            caches = {each: _retrieval_cache(target, each, new_tokens, rows) for each in variants}
            target.observers += caches.values()
            return caches

        super().__init__(runtime, prompt, new_tokens, rows, make)


def _retrieval_cache(
    target: TieredCache, variant: Variant, new_tokens: int, rows: int
) -> RetrievalCache:
    spec = RetrievalCacheSpec.of(
        variant.tokens(target.layout),
        variant.chunk,
        target.shape.capacity,
        rows,
        new_tokens + rows,
    )
    spec = replace(
        spec,
        quantised=variant.bits == 8,
        window=target.shape.recent,
        block=target.shape.block,
    )
    policy = MEASURED[variant.policy]()
    return RetrievalCache(target.layout.in_pairs, spec, policy, target.rotary, target.link.device)
