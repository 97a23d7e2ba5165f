"""How often a retrieval cache's proposals would stand, without the noise of drawing them.

Texts are decoded once from the target, or read on in the book, and every policy follows along them.

The law p of the target and the law q of the same model on a retrieval cache are both known at every
token. A proposal stands with probability sum_x min(p(x), q(x)), the overlap, exactly (Leviathan et
al. 2023, arXiv 2211.17192, theorem 3.5). Along a text drawn from p, the first k - 1 proposals of a
chain stand with the mean of prod min(1, q(x_i) / p(x_i)), so a chain of n proposals yields

    1 + sum_k prod_(i<k) min(1, q(x_i) / p(x_i)) . overlap_k

tokens on average: an unbiased estimate, for a refresh after every n tokens of text, that needs no
luck of the draw. (In the engine a refresh comes after as many tokens as were accepted, and sees
rejected ones too: `python -m bench grid` counts whole runs.) Middle pass, verification and refresh
are the engine's own. Memory is equal right after a selection; the static policy's window grows on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from decoding import Sampling
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.speculation.sampling import draw
from offload.layout import KVLayout
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.policy_specs import PolicySpec
from offload.retrieval.selection import POLICIES, QuerySample, SelectionPolicy
from offload.retrieval.shape import RetrievalCacheSpec


class Window(SelectionPolicy):
    """The most recent chunks, and the sink: what a cache without retrieval keeps.

    Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2).
    """

    traits = PolicySpec()

    def scores(self, rows: QuerySample, layer: int, head: int, chunk: int) -> Tensor:
        heads, tokens, _ = rows.keys.shape
        chunks = tokens // chunk
        ages = torch.arange(chunks, dtype=torch.float32, device=rows.keys.device)
        return ages.repeat(heads, 1)


MEASURED = POLICIES | {"window": Window}


@dataclass(frozen=True)
class Variant:
    """A way to spend the device memory of `retrieval_budget` tokens a head."""

    policy: str
    budget: int  # tokens in 16 bits that take as much memory
    chunk: int = 8
    bits: int = 16  # of an element of selected tokens

    @property
    def name(self) -> str:
        name = f"{self.policy}, chunk {self.chunk}"
        return name if self.bits == 16 else f"{name}, {self.bits} bits"

    def tokens(self, layout: KVLayout) -> int:
        """Return how many tokens a head fit its memory, of a layout's layers in 16 bits."""
        if self.bits == 16:
            return self.budget
        layout = replace(layout, dtype=torch.bfloat16)
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
    """One stretch of text between two refreshes, as one policy would have proposed it."""

    overlap: Tensor  # (n,) probability that the proposal stands, by tokens since the refresh
    stands: Tensor  # (n,) min(1, q(x) / p(x)) of the text's own tokens

    @property
    def tokens(self) -> float:
        """The expected tokens of one verification of all n proposals."""
        before = torch.cat((torch.ones(1), self.stands[:-1])).cumprod(0)
        return 1 + float((before * self.overlap).sum())


class PolicyTrace:
    """A prompt, and behind it a cache for every variant that follows the target along a text."""

    def __init__(
        self,
        runtime: Runtime,
        prompt: Sequence[int],
        new: int,
        variants: Sequence[Variant],
        rows: int,
    ):
        """Read the prompt; there is room for `new` tokens and passes of `rows` more."""
        self.session = SequenceState(runtime, list(prompt), new + rows + 1)
        self.model, self.target = runtime.target, self.session.target
        self.session.retrieval = None
        del self.session.levels[1:]
        self.target.observers.clear()  # the session's own
        self.caches = {variant: self._cache(variant, new, rows) for variant in variants}
        self.target.observers += self.caches.values()
        self.first = self.session.prefill()  # (1, V)
        self._start = [cache.snapshot() for cache in (self.target, *self.caches.values())]

    def _cache(self, variant: Variant, new: int, rows: int) -> RetrievalCache:
        target, prompt = self.target, self.session.prompt
        capacity = len(prompt) + new + rows + 1
        shape = RetrievalCacheSpec.of(
            variant.tokens(target.layout), variant.chunk, capacity, rows, new + rows
        )
        shape = replace(
            shape,
            quantised=variant.bits == 8,
            window=target.shape.recent,
            block=target.shape.block,
        )
        policy = MEASURED[variant.policy]()
        return RetrievalCache(target.layout, shape, policy, target.rotary, prompt.device)

    def rewind(self) -> None:
        """Put all caches back to the prompt's end."""
        caches = (self.target, *self.caches.values())
        for cache, state in zip(caches, self._start, strict=True):
            cache.restore(state)

    def text(self, new: int, sampling: Sampling) -> Tensor:
        """Draw the next `new` tokens (new,) from the target's law alone."""
        generator = Generator(self.first.device).manual_seed(sampling.seed)
        followers, self.target.observers = self.target.observers, []
        tokens, logits = [], self.first
        for _ in range(new):
            tokens.append(draw(sampling.probs(logits)[0], generator))
            logits = self.model(tokens[-1], self.target, 1)
            self.target.advance(1)
        self.target.observers = followers
        self.rewind()
        return torch.cat(tokens)

    def chains(self, text: Tensor, interval: int, sampling: Sampling) -> dict[Variant, list[Chain]]:
        """Verify `interval` tokens of the text at a time, each time behind a draft per variant."""
        chains: dict[Variant, list[Chain]] = {variant: [] for variant in self.caches}
        for start in range(0, len(text) - interval, interval):
            rows = text[start : start + interval]
            following = text[start + 1 : start + interval + 1, None]
            laws = {
                variant: sampling.probs(self.model(rows, cache, interval))
                for variant, cache in self.caches.items()
            }
            # (n, V); what follows the text gets refreshed here
            truth = sampling.probs(self.model(rows, self.target, interval))
            self.target.advance(interval)
            for variant, law in laws.items():
                # a token of the text may be at the nucleus' edge, and out of it in a pass that
                # rounds differently: 0 / 0
                share = law.gather(1, following) / truth.gather(1, following)
                stands = share.clamp(max=1).nan_to_num(nan=1.0).squeeze(1)
                chains[variant].append(Chain(torch.minimum(truth, law).sum(1), stands))
        self.rewind()
        return chains
