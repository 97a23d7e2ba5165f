"""One text in the making: its memory plan, its caches and the decoders nested over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from decoding.decoders import Autoregressive, Decoder, Speculative
from decoding.sampling import Sampling
from decoding.settings import COMPUTE_LENGTH, LINK_LENGTH, Settings
from offload import (
    POLICIES,
    Cache,
    HostArena,
    Link,
    MemoryPlan,
    Needs,
    RetrievalCache,
    StreamingCache,
    TieredCache,
    host_available,
    make_link,
    plan_memory,
)
from parallel import Llama, PassLeader, parameter_bytes

SLACK = 64  # slots of the draft's cache that fill before its window slides


@dataclass(frozen=True)
class Models:
    """What a text is decoded with. `draft` is on rank 0 alone, and whole: drafting needs no collective."""

    target: Llama
    draft: Llama | None
    mode: str
    settings: Settings
    link: Link
    arena: HostArena

    @classmethod
    def make(cls, target: Llama, draft: Llama | None, mode: str, settings: Settings) -> Models:
        """Put models to work in this mode, on a link and an arena of their own. Raises TierForceError for an unknown link."""
        link = make_link(settings.link, target.group.device)
        return cls(target, draft, mode, settings, link, HostArena(link, target.embed.weight.dtype))

    def over(self, settings: Settings) -> Models:
        """The same models under other settings, on rank 0."""
        return Models.make(self.target, self.draft, settings.resolved_mode(self.draft is not None), settings)

    @property
    def has_retrieval(self) -> bool:
        return self.mode in ("hierarchical", "retrieval")

    @property
    def has_draft(self) -> bool:
        return self.mode in ("hierarchical", "speculative")

    @property
    def most(self) -> int:
        """Tokens of the largest pass: the same on all ranks, whatever their plans."""
        return max(self.settings.draft_length or LINK_LENGTH, self.settings.inner_length) + 2

    @property
    def tail(self) -> int:
        """Tokens of a host layer that gather on the device before they are written back in one block."""
        return max(256, self.most)

    @property
    def window(self) -> int:
        """Recent tokens the draft's cache keeps when it slides: no fewer than a verification may still take back."""
        return max(self.settings.window, self.settings.draft_length or LINK_LENGTH)

    @property
    def dtype(self) -> torch.dtype:
        return self.target.embed.weight.dtype


def plan(models: Models, prompt: int, new: int) -> MemoryPlan:
    """Where the KV of a text of `prompt` + `new` tokens goes on this rank. Raises FitError."""
    settings, target, group = models.settings, models.target, models.target.group
    layout = target.config.kv_layout(group.size, models.dtype)
    item, device = models.dtype.itemsize, group.device
    retrieval = min(settings.budget, prompt) + settings.chunk_size + new
    draft = 0
    if models.has_draft and models.draft is not None:
        draft_layout = models.draft.config.kv_layout(1, models.dtype)
        draft = draft_layout.bytes(settings.sinks + models.window + SLACK) * 3 // 2  # keys twice: raw and rotated
    chunk = min(prompt, settings.prefill_chunk)
    work = chunk * (4 * target.config.hidden + 4 * target.config.intermediate // group.size)  # a layer's activations
    needs = Needs(
        layout=layout,
        context=prompt + new,
        tail=models.tail,
        retrieval=layout.bytes(retrieval) if models.has_retrieval else 0,
        draft=draft,
        tables=2 * (prompt + new) * target.config.head_dim * item,
        hidden=(prompt * target.config.hidden + work) * item,
        copies=models.link.copies,
    )
    on_cpu = device.type == "cpu"
    host = host_available() // group.size + models.arena.nbytes
    weights = parameter_bytes(target) + (parameter_bytes(models.draft) if models.draft is not None else 0)
    there = models.link.device_available() // (group.size if on_cpu else 1)
    if settings.device_memory is not None:
        free = min(settings.device_memory - weights, there)
        host = max(0, host - max(0, free)) if on_cpu else host  # two readings of one memory differ by what came and went
    else:
        free = int(there * 0.9)
    return plan_memory(needs, free, host, settings.resident_layers)


class Session:
    """The caches of one text on this rank; on rank 0 also its decoders. `caches` are those of the sharded model, in one order."""

    def __init__(self, models: Models, prompt: list[int], new: int):
        """Allocates everything the text needs. Raises FitError."""
        self.models, self.new = models, new
        self.plan = plan(models, len(prompt), new)
        settings, group = models.settings, models.target.group
        device, config = group.device, models.target.config
        self.prompt = torch.tensor(prompt, device=device)
        streams = self.plan.resident_layers < config.layers and models.link.copies
        self.draft_length = settings.draft_length or (LINK_LENGTH if streams else COMPUTE_LENGTH)
        self.most = models.most
        layout = config.kv_layout(group.size, models.dtype)
        rotary = config.rotary(len(prompt), len(prompt) + new, models.dtype, device)
        self.target = TieredCache(
            layout,
            len(prompt) + new,
            self.plan.resident_layers,
            models.link,
            rotary,
            models.arena,
            tail=models.tail,
            slot_heads=self.plan.slot_heads,
            slots=self.plan.slots,
        )
        self.caches: list[Cache] = [self.target]
        if models.has_retrieval:
            budget = max(settings.chunk_size, min(settings.budget, len(prompt)))
            retrieval = RetrievalCache(
                layout, budget, settings.chunk_size, settings.chunk_size + new, POLICIES[settings.policy](), rotary, device
            )
            self.target.followers.append(retrieval)
            self.caches.append(retrieval)

    def prefill(self, progress=None) -> Tensor:
        """Read the prompt on all ranks; logits (1, V) of the first new token."""
        with self.target.prefill(len(self.prompt)):
            return self.models.target.prefill(self.prompt, self.target, self.models.settings.prefill_chunk, progress)

    def decoder(self, leader: PassLeader, sampling: Sampling, generator: Generator) -> Decoder:
        """The nested decoders of this text's mode, outermost first; for rank 0, after prefill."""
        settings, prompt = self.models.settings, self.prompt.tolist()
        inner = self._draft(prompt, sampling, generator) if self.models.has_draft else None
        for name, cache in reversed(list(zip(("target", "retrieval"), self.caches, strict=False))):
            if inner is None:
                inner = Autoregressive(name, leader, cache, prompt, sampling, generator)
            else:
                length = self.draft_length if cache is self.target else settings.inner_length
                inner = Speculative(name, leader, cache, prompt, inner, length, sampling, generator)
        assert inner is not None
        return inner

    def _draft(self, prompt: list[int], sampling: Sampling, generator: Generator) -> Decoder:
        """The draft model on its StreamingLLM cache, having read what it can keep of the prompt."""
        model, sinks, window = self.models.draft, self.models.settings.sinks, self.models.window
        assert model is not None
        slots = sinks + window + SLACK
        dtype = model.embed.weight.dtype
        rotary = model.config.rotary(slots, slots, dtype, model.group.device)
        cache = StreamingCache(model.config.kv_layout(1, dtype), sinks, window, SLACK, rotary, model.group.device)
        rest = self.prompt
        if (skipped := len(rest) - sinks - window) > 0:
            _read(model, cache, rest[:sinks])
            cache.skip(skipped)
            rest = rest[sinks + skipped :]
        _read(model, cache, rest)
        return Autoregressive("draft", model, cache, prompt, sampling, generator)


def _read(model: Llama, cache: Cache, tokens: Tensor) -> None:
    for part in tokens.split(SLACK):
        model(part, cache, 1)
        cache.advance(len(part))
