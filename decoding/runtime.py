"""What a text is decoded with: models, link and arena; and where the KV of a text goes, before it
is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decoding.planning.needs import USED, Sizes
from decoding.settings import Settings
from offload.host_memory import host_available
from offload.link import Link, make_link
from offload.memory_plan import MemoryPlan, plan_memory
from offload.store import HostArena
from parallel.loading import parameter_bytes
from parallel.model import Llama


@dataclass(frozen=True)
class Runtime:
    """What a text is decoded with. `draft` is on rank 0 alone and whole, so that drafting needs no
    collective, or on all, split.
    """

    target: Llama
    draft: Llama | None
    mode: str
    settings: Settings
    link: Link
    arena: HostArena

    @classmethod
    def make(cls, target: Llama, draft: Llama | None, mode: str, settings: Settings) -> Runtime:
        """Put models to work in this mode, on a link and an arena of their own. Raises
        TierForceError for an unknown link.
        """
        link = make_link(settings.link, target.group.device)
        return cls(target, draft, mode, settings, link, HostArena(link, target.embed.weight.dtype))

    def with_settings(self, settings: Settings) -> Runtime:
        """The same models under other settings, on rank 0."""
        if settings.graphs is None:
            settings = replace(settings, graphs=self.settings.graphs)
        return Runtime.make(
            self.target, self.draft, settings.resolved_mode(self.draft is not None), settings
        )

    def with_budget(self, budget: int | None) -> Runtime:
        """These with another retrieval budget, on the same link and arena. None: as the settings
        have it.
        """
        if budget is None:
            return self
        return replace(self, settings=replace(self.settings, budget=budget))

    @property
    def sizes(self) -> Sizes:
        draft = self.draft.config if self.draft is not None else None
        split = self.draft.group.size if self.draft is not None else 1
        ranks, copies = self.target.group.size, self.link.copies
        return Sizes(
            self.target.config, draft, self.mode, self.settings, self.dtype, ranks, split, copies
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.target.embed.weight.dtype


def plan(runtime: Runtime, prompt: int, new: int) -> MemoryPlan:
    """Where the KV of a text of `prompt` + `new` tokens goes on this rank. Raises FitError."""
    settings, target, group = runtime.settings, runtime.target, runtime.target.group
    on_cpu = group.device.type == "cpu"
    host = host_available() // group.size + runtime.arena.nbytes
    weights = parameter_bytes(target) + (
        parameter_bytes(runtime.draft) if runtime.draft is not None else 0
    )
    there = runtime.link.device_available() // (group.size if on_cpu else 1)
    if settings.device_memory is not None:
        free = min(settings.device_memory - weights, there if on_cpu else int(there * USED))
        # two readings of one memory differ by what came and went
        host = max(0, host - max(0, free)) if on_cpu else host
    else:
        free = int(there * USED)
    return plan_memory(runtime.sizes.needs(prompt, new), free, host, settings.resident_layers)
