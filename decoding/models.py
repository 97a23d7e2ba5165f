"""What a text is decoded with: models, link and arena; and where the KV of a text goes, before it is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoding.decoders import CATCH_UP
from decoding.settings import Settings
from offload import (
    POLICIES,
    FitError,
    HostArena,
    Link,
    MemoryPlan,
    Needs,
    RetrievalShape,
    host_available,
    make_link,
    plan_memory,
    tail_tokens,
)
from parallel import Llama, parameter_bytes

MOST, INNER_MOST = 64, 16  # the longest draft put before the target, and before the level below, where they adapt
LINK_REFRESH, COMPUTE_REFRESH = 1, 16  # tokens one selection serves: where keys come over a link anyway, and where it costs compute
NGRAM = 3  # tokens that prompt lookup matches
BLOCK = 256  # tokens of host layers that gather on the device before they are written back, where nobody selects
SLACK = 64  # slots of the draft's cache that fill before its window slides


@dataclass(frozen=True)
class Models:
    """What a text is decoded with. `draft` is on rank 0 alone and whole, so that drafting needs no collective, or on all, split."""

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
    def ngram(self) -> int:
        """Tokens that prompt lookup matches; 0 where there is none."""
        if self.mode == "plain":
            return 0
        if self.settings.lookup is not None:
            return self.settings.lookup
        return 0 if self.has_draft else NGRAM

    @property
    def most(self) -> int:
        """Tokens of the largest pass: the same on all ranks, whatever their plans."""
        return max(self.settings.draft_length or MOST, self.settings.inner_length or INNER_MOST, CATCH_UP) + 2

    def shape(self, prompt: int, new: int) -> RetrievalShape:
        """How the retrieval cache of such a text is laid out. Raises FitError for summaries that leave room for nothing else."""
        settings, context = self.settings, prompt + new
        summaries = -(-context // settings.summary_size) if settings.summary_size and context > settings.budget else 0
        if summaries + settings.chunk_size > settings.budget:
            raise FitError(
                f"--summary-size {settings.summary_size}: {context} tokens need {summaries} summaries, which leave no room for a "
                f"chunk in --budget {settings.budget}. Use larger summaries, or leave --summary-size out."
            )
        since = (settings.refresh or COMPUTE_REFRESH) + 2 * self.most if POLICIES[settings.policy].refreshes else new
        budget = max(settings.chunk_size, min(settings.budget, context))
        return RetrievalShape.of(budget, settings.chunk_size, settings.summary_size, context, self.most, min(since, new))

    def recent(self, prompt: int, new: int) -> tuple[int, int]:
        """Tokens that stay behind the target's boundary, and in what blocks it moves."""
        if not self.has_retrieval:
            return 0, BLOCK
        shape = self.shape(prompt, new)
        return shape.window, shape.block

    @property
    def window(self) -> int:
        """Recent tokens the draft's cache keeps when it slides: no fewer than a verification may still take back."""
        return max(self.settings.window, self.settings.draft_length or MOST)

    @property
    def dtype(self) -> torch.dtype:
        return self.target.embed.weight.dtype


def plan(models: Models, prompt: int, new: int) -> MemoryPlan:
    """Where the KV of a text of `prompt` + `new` tokens goes on this rank. Raises FitError."""
    settings, target, group = models.settings, models.target, models.target.group
    layout = target.config.kv_layout(group.size, models.dtype)
    item, device = models.dtype.itemsize, group.device
    retrieval = draft = 0
    if models.has_retrieval:
        shape, policy = models.shape(prompt, new), POLICIES[settings.policy]()
        seen = policy.rows * target.config.heads // target.config.kv_heads
        retrieval = shape.device_bytes(layout) + shape.scratch_bytes(layout, seen)
        retrieval += policy.state_bytes(layout, shape.context, shape.chunk)
    if models.has_draft and models.draft is not None:
        draft_layout = models.draft.config.kv_layout(models.draft.group.size, models.dtype)
        draft = draft_layout.bytes(settings.sinks + models.window + SLACK) * 3 // 2  # keys twice: raw and rotated
    chunk = min(prompt, settings.prefill_chunk)
    work = chunk * (4 * target.config.hidden + 4 * target.config.intermediate // group.size)  # a layer's activations
    needs = Needs(
        layout=layout,
        context=prompt + new,
        tail=tail_tokens(*models.recent(prompt, new), models.most),
        retrieval=retrieval,
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
