"""One text in the making: its memory plan, its caches and the decoders nested over them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from decoding.planning.defaults import (
    DRAFT_SLACK,
    FIRST_DRAFT_ON_DEVICE,
    FIRST_DRAFT_OVER_LINK,
    FIRST_INNER_DRAFT,
    MAX_DRAFT,
    MAX_INNER_DRAFT,
)
from decoding.runtime import Runtime
from decoding.settings import Settings
from decoding.speculation.decoders import Autoregressive, Decoder, Forward, Proposer, Speculative
from decoding.speculation.draft_length import Adaptive, DraftLength, Fixed
from decoding.speculation.lookup import Lookup
from decoding.speculation.sampling import Sampling
from decoding.speculation.text import Text
from decoding.speculation.vocabulary import readable, reading
from offload.cache import Cache
from offload.retrieval import RetrievalCache
from offload.selection import POLICIES
from offload.streaming import StreamingCache
from offload.streaming_shape import StreamingShape
from offload.tiered import TieredCache
from parallel.graphs import GraphRunner
from parallel.lockstep import Announced, PassLeader
from parallel.model import Llama

# of what is put before the target, and before the retrieval level
Lengths = tuple[DraftLength, DraftLength]


class Session:
    """The caches of one text on this rank; on rank 0 also its decoders. `announced`: the models on
    all ranks, each with a cache.
    """

    def __init__(self, runtime: Runtime, prompt: list[int], new: int):
        """Allocates everything the text needs. Raises FitError."""
        self.runtime, self.new = runtime, new
        runtime.link.peak()
        self.peaks: dict[str, int | None] = {}  # memory in use at most, by phase (`Link.peak`)
        self.plan = runtime.plan(len(prompt), new)
        settings, group = runtime.settings, runtime.target.group
        device, config = group.device, runtime.target.config
        self.prompt = torch.tensor(prompt, device=device)
        needs = runtime.needs
        self.max_tokens = needs.max_pass_tokens
        self.uses_link = needs.uses_link(self.plan)
        layout = config.kv_layout(group.size, runtime.dtype)
        rotary = config.rotary(len(prompt), len(prompt) + new, runtime.dtype, device)
        tiers = needs.tiers(len(prompt), new)
        tiers = tiers.placed(self.plan.resident_layers, self.plan.late_layers)
        self.target = TieredCache(tiers, runtime.link, rotary, runtime.arena)
        self.announced: list[Announced] = [(runtime.target, self.target)]
        self.forward = GraphRunner(bool(settings.graphs), group.recorder)
        self.retrieval = None
        if needs.has_retrieval:
            shape, policy = needs.shape(len(prompt), new), POLICIES[settings.policy]()
            interval, shares = needs.selection(self.plan)
            self.retrieval = RetrievalCache(layout, shape, policy, rotary, device, interval, shares)
            self.target.followers.append(self.retrieval)
            self.announced.append((runtime.target, self.retrieval))
        self.draft = None
        if needs.has_draft and runtime.draft is not None:
            self.draft = _draft_cache(runtime.draft, needs.draft_shape)
            if runtime.draft.group.size > 1:
                self.announced.append((runtime.draft, self.draft))

    @property
    def caches(self) -> list[Cache]:
        """Those of the target, outermost first."""
        return [cache for model, cache in self.announced if model is self.runtime.target]

    def prefill(self, progress=None) -> Tensor:
        """Read the prompt on all ranks; logits (1, V) of the first new token. Raises FitError, on
        all ranks.
        """
        with self.target.prefill(len(self.prompt)) as reading:
            logits = self.runtime.target.prefill(
                self.prompt, reading, self.runtime.needs.prefill_chunk, progress
            )
        with self.runtime.target.group.together():
            self.target.bring_in()
        if self.runtime.draft is not None and self.draft is not None:
            draft, vocab = self.runtime.draft, self.runtime.target.config.vocab
            _read(draft, self.draft, readable(self.prompt, draft.config.vocab, vocab))
        self.peaks["prefill"] = self.runtime.link.peak()
        return logits

    def decoder(
        self,
        text: Text,
        leader: PassLeader,
        sampling: Sampling,
        generator: Generator,
        lengths: Lengths | None = None,
    ) -> Decoder:
        """Return the nested decoders of this text's mode, to go on behind `text`.

        For rank 0, after prefill: `text` is the prompt and the first token. `lengths` None: the
        settings'.
        """
        runtime = self.runtime
        inner: Proposer | None = None
        if runtime.draft is not None and self.draft is not None:
            forward: Forward = (
                leader if runtime.draft.group.size > 1 else partial(self.forward, runtime.draft)
            )
            rows, vocab = runtime.draft.config.vocab, runtime.target.config.vocab
            law = sampling if rows == vocab else sampling.over(vocab)
            forward = reading(forward, rows, vocab)
            inner = Autoregressive("draft", forward, self.draft, text, law, generator)
        if ngram := runtime.needs.ngram:
            inner = Lookup(text, ngram, runtime.target.config.vocab, self.prompt.device, inner)
        lengths = lengths or draft_lengths(runtime.settings)
        first = FIRST_DRAFT_ON_DEVICE
        if self.uses_link:
            first = FIRST_DRAFT_OVER_LINK
        for length, start in zip(lengths, (first, FIRST_INNER_DRAFT), strict=True):
            length.begin(start)
        for name, cache, length in reversed(
            list(zip(("target", "retrieval"), self.caches, lengths, strict=False))
        ):
            if inner is None:
                inner = Autoregressive(name, leader, cache, text, sampling, generator)
            else:
                inner = Speculative(name, leader, cache, inner, length, sampling, generator)
        assert isinstance(inner, Decoder)
        inner.sync([])
        return inner

    def close(self) -> None:
        """The text is over: what decoding took is noted, recordings go, and no copy is left that
        works on its caches.
        """
        self.runtime.link.drain()
        self.peaks["decoding"] = self.runtime.link.peak()
        self.forward.forget()

    def snapshot(self) -> list[Any]:
        """Where all caches stand, for `rewind`: right behind the prompt, say, to continue it more
        than once.
        """
        return [cache.snapshot() for cache in self._own()]

    def rewind(self, snapshot: list[Any]) -> None:
        """Back to where the caches stood; on all ranks."""
        for cache, state in zip(self._own(), snapshot, strict=True):
            cache.restore(state)

    def _own(self) -> list[Cache]:
        return [cache for cache in (self.target, self.retrieval, self.draft) if cache is not None]


def draft_lengths(settings: Settings) -> Lengths:
    """Fixed where they are set, else adaptive, to be used for text after text."""
    outer, inner = settings.draft_length, settings.inner_length
    return Adaptive(MAX_DRAFT) if outer is None else Fixed(outer), (
        Adaptive(MAX_INNER_DRAFT) if inner is None else Fixed(inner)
    )


def _draft_cache(model: Llama, shape: StreamingShape) -> StreamingCache:
    dtype = model.embed.weight.dtype
    rotary = model.config.rotary(shape.slots, shape.slots, dtype, model.group.device)
    layout = model.config.kv_layout(model.group.size, dtype)
    return StreamingCache(layout, shape, rotary, model.group.device)


def _read(model: Llama, cache: StreamingCache, prompt: Tensor) -> None:
    """What the draft's cache can keep of the prompt: the sinks and the last window, read
    directly.
    """
    rest = prompt
    if (skipped := len(rest) - cache.shape.sinks - cache.shape.window) > 0:
        _advance(model, cache, rest[: cache.shape.sinks])
        cache.skip(skipped)
        rest = rest[cache.shape.sinks + skipped :]
    _advance(model, cache, rest)


def _advance(model: Llama, cache: Cache, tokens: Tensor) -> None:
    for part in tokens.split(DRAFT_SLACK):
        model(part, cache, 1)
        cache.advance(len(part))
