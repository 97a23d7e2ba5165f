"""How often a retrieval cache's proposals would stand, without the noise of drawing them: texts are
decoded once from the target, and every policy is led along them.

The law p of the target and the law q of the same model on a retrieval cache are both known at every
token. A proposal stands with probability sum_x min(p(x), q(x)), the overlap, exactly (Leviathan et
al. 2023, arXiv 2211.17192, theorem 3.5). Along a text drawn from p, the first k - 1 proposals of a
chain stand with the mean of prod min(1, q(x_i) / p(x_i)), so a chain of n proposals yields

    1 + sum_k prod_(i<k) min(1, q(x_i) / p(x_i)) . overlap_k

tokens on average: an unbiased estimate, for a refresh after every n tokens of text, that needs no
luck of the draw. (In the engine a refresh comes after as many tokens as stood, and sees rows that
were rejected; that is for the counted runs to show.) Middle pass, verification and refresh are the
engine's own. Memory is equal right after a choice; the static policy's window then goes on growing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from decoding import Sampling
from decoding.planning.defaults import SUMMARY_SHARES
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.speculation.decoders import Autoregressive, Speculative
from decoding.speculation.draft_length import Fixed
from decoding.speculation.sampling import draw
from decoding.speculation.text import Text
from offload.errors import TierForceError
from offload.retrieval import RetrievalCache
from offload.retrieval_shape import RetrievalShape
from offload.selection import POLICIES


@dataclass(frozen=True)
class Variant:
    """A way to spend the device memory of `budget` tokens a head."""

    policy: str
    budget: int
    chunk: int = 8
    summary: int | None = None  # None: as the engine would; 0: no summaries
    turns: int = 1  # one in so many of the summaries is made anew at each choice

    @property
    def name(self) -> str:
        kind = (
            ""
            if self.summary == 0
            else " + summaries" + (f" of {self.summary}" if self.summary else "")
        )
        return f"{self.policy}, chunk {self.chunk}{kind}" + (
            f", 1/{self.turns} anew" if self.turns > 1 else ""
        )


STATIC = Variant("static", 768, 8, 0)  # the published policy
OURS = Variant("mass", 768)  # the engine's default over a link
COMPUTE = replace(OURS, turns=SUMMARY_SHARES)  # and its default without one
ALL = [
    STATIC,
    Variant("window", 768, 8, 0),
    Variant("accumulated", 768, 8, 0),
    Variant("mean-key", 768, 8, 0),
    Variant("mass", 768, 8, 0),
    Variant("mean-key", 768),
    Variant("mass", 768, 8, 64),
    OURS,
    COMPUTE,
    Variant("mass", 768, 1),
]


@dataclass(frozen=True)
class Chain:
    """One stretch of text between two refreshes, as one policy would have proposed it."""

    overlap: Tensor  # (n,) probability that the proposal stands, by tokens since the refresh
    stands: Tensor  # (n,) min(1, q(x) / p(x)) of the text's own tokens

    @property
    def tokens(self) -> float:
        """Expected tokens of one verification of all n proposals."""
        before = torch.cat((torch.ones(1), self.stands[:-1])).cumprod(0)
        return 1 + float((before * self.overlap).sum())


class Led:
    """A prompt, a text of the target's behind it, and a cache for every variant that follows the
    target along it.
    """

    def __init__(
        self,
        models: Runtime,
        prompt: Sequence[int],
        new: int,
        variants: Sequence[Variant],
        rows: int,
    ):
        self.session = Session(models, list(prompt), new + rows + 1)
        target, config = self.session.target, models.target.config
        layout = config.kv_layout(models.target.group.size, models.dtype)
        target.followers.clear()  # the session's own, whose place these take
        self.session.retrieval = None
        del self.session.levels[1:]
        self.caches: dict[Variant, RetrievalCache] = {}
        for each in variants:
            context = len(prompt) + new + rows + 1
            shape = RetrievalShape.of(
                each.budget, each.chunk, each.summary, context, rows, new + rows
            )
            shape = replace(shape, window=target.shape.recent, block=target.shape.block)
            cache = RetrievalCache(
                layout,
                shape,
                POLICIES[each.policy](),
                target.rotary,
                self.session.prompt.device,
                1,
                each.turns,
            )
            self.caches[each] = cache
            target.followers.append(cache)
        self.first = self.session.prefill()  # (1, V)
        self._start = [cache.snapshot() for cache in (target, *self.caches.values())]

    def rewind(self) -> None:
        for cache, state in zip(
            (self.session.target, *self.caches.values()), self._start, strict=True
        ):
            cache.restore(state)

    def text(self, new: int, sampling: Sampling) -> Tensor:
        """The next `new` tokens (new,) from the target's law alone."""
        target, model = self.session.target, self.session.runtime.target
        generator = Generator(self.first.device).manual_seed(sampling.seed)
        followers, target.followers = target.followers, []
        tokens, logits = [], self.first
        for _ in range(new):
            tokens.append(draw(sampling.law(logits)[0], generator))
            logits = model(tokens[-1], target, 1)
            target.advance(1)
        target.followers = followers
        self.rewind()
        return torch.cat(tokens)

    def along(self, text: Tensor, interval: int, sampling: Sampling) -> dict[Variant, list[Chain]]:
        """Verify `interval` tokens of the text at a time, each time after every variant has been
        led along them.
        """
        model, target = self.session.runtime.target, self.session.target
        chains: dict[Variant, list[Chain]] = {variant: [] for variant in self.caches}
        for start in range(0, len(text) - interval, interval):
            rows, following = (
                text[start : start + interval],
                text[start + 1 : start + interval + 1, None],
            )
            laws = {
                variant: sampling.law(model(rows, cache, interval))
                for variant, cache in self.caches.items()
            }
            # (n, V); what follows the text gets refreshed here
            truth = sampling.law(model(rows, target, interval))
            target.advance(interval)
            for variant, law in laws.items():
                # a token of the text may be at the nucleus' edge, and out of it in a pass that
                # rounds differently: 0 / 0
                stands = (
                    (law.gather(1, following) / truth.gather(1, following))
                    .clamp(max=1)
                    .nan_to_num(nan=1.0)
                    .squeeze(1)
                )
                chains[variant].append(Chain(torch.minimum(truth, law).sum(1), stands))
        self.rewind()
        return chains

    def counted(
        self, variant: Variant, new: int, draft: int, sampling: Sampling
    ) -> tuple[int, int]:
        """Decode `new` tokens with drafts of `draft` tokens on the variant's cache: tokens made,
        and verifications.
        """
        model, target, cache = (
            self.session.runtime.target,
            self.session.target,
            self.caches[variant],
        )
        generator = Generator(self.first.device).manual_seed(sampling.seed)
        first = int(draw(sampling.law(self.first)[0], generator))
        text = Text([*self.session.prompt.tolist(), first])
        inner = Autoregressive("retrieval", model, cache, text, sampling, generator)
        decoder = Speculative("target", model, target, inner, Fixed(draft), sampling, generator)
        while (missing := new - decoder.stats.produced) > 0:
            decoder.round(missing)
        self.rewind()
        return decoder.stats.produced, decoder.stats.passes


def prompts(tokens: Sequence[int], context: int, count: int, new: int) -> list[list[int]]:
    """`count` stretches of `context` tokens, spread evenly over the text. Raises TierForceError
    when it is too short for that.
    """
    spare = len(tokens) - context - new
    if spare < count - 1:
        raise TierForceError(
            f"the text has {len(tokens)} tokens, too few for {count} prompts of {context}: use a "
            "longer --text."
        )
    step = spare // max(1, count - 1)
    return [list(tokens[index * step : index * step + context]) for index in range(count)]
