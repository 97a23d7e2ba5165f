"""What texts are decoded with: models, settings, link, arena, and the memory there is."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import torch

from decoding.config.defaults import LINK_PROBE_BYTES, LINK_PROBE_SECONDS, USABLE_SHARE
from decoding.config.settings import Settings
from decoding.planning.fit import Memory, fit
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Requirements, Strategy
from decoding.planning.prior import HardwarePrior, find_prior
from decoding.prefix_cache.manager import ModelFingerprint, PrefixCacheManager
from offload.errors import TierForceError
from offload.kernels.selection import Kernels, batch_invariant_kernels, split_kernels
from offload.memory.bandwidth import BandwidthProbe
from offload.memory.host import host_available
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.link_spec import make_link
from offload.retrieval.shape import MIN_L2_BYTES
from parallel.model.loading import parameter_bytes
from parallel.model.transformer import Transformer


@dataclass(frozen=True)
class Runtime:
    """The models on this rank, with the settings, the link and the arena that texts share.

    `draft` is whole and on rank 0 alone, so that drafting needs no collective, or split over all
    ranks.
    """

    target: Transformer
    draft: Transformer | None
    mode: str
    settings: Settings
    link: Link
    arena: HostArena
    identity: ModelFingerprint | None = None  # of the target's KV, where prompts are kept on disk

    @classmethod
    def create(
        cls,
        target: Transformer,
        draft: Transformer | None,
        mode: str,
        settings: Settings,
        identity: ModelFingerprint | None = None,
    ) -> Runtime:
        """Put models to work in this mode, on a link and an arena of their own.

        Raises TierForceError for a link that the device cannot have.
        """
        link = make_link(settings.link, target.group.device)
        if settings.int8_retrieval is None and (link.l2_bytes or MIN_L2_BYTES) < MIN_L2_BYTES:
            settings = replace(settings, int8_retrieval=False)
        arena = HostArena(link, target.embed.weight.dtype)
        return cls(target, draft, mode, settings, link, arena, identity)

    def with_settings(self, settings: Settings) -> Runtime:
        """Return the same models under other settings; for rank 0."""
        if settings.graphs is None:
            settings = replace(settings, graphs=self.settings.graphs)
        mode = settings.resolved_mode(self.draft is not None)
        return Runtime.create(self.target, self.draft, mode, settings, self.identity)

    def with_strategy(self, way: Strategy) -> Runtime:
        """Return this runtime with another mode or budget, on the same link and arena."""
        needs = self.requirements
        if not needs.has_choice:
            return self
        chosen = needs.with_strategy(way)
        return replace(self, mode=chosen.mode, settings=chosen.settings)

    def prior(self, link_rate: float | None) -> HardwarePrior | None:
        """Return what is known of this machine, whose link has this rate. Raises TierForceError."""
        prior = find_prior(self.settings.hardware, self.link.device_name, self.target.group.size)
        return None if prior is None else prior.with_link(link_rate)

    def prefix_cache(self) -> PrefixCacheManager | None:
        """Return what keeps prompts on disk, where the settings say so; all ranks call it.

        Raises TierForceError, on all ranks, for a folder that cannot be used.
        """
        settings = self.settings
        if settings.prompt_cache is None:
            return None
        if self.identity is None:
            raise TierForceError("`prompt_cache` is for models that were loaded with it.")
        return PrefixCacheManager(
            settings.prompt_cache, settings.prompt_cache_limit, self.identity, self.target.group
        )

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and KV."""
        return self.target.embed.weight.dtype

    @property
    def split_kernels(self) -> Kernels:
        """The kernels that layers in slices are joined with, or None, and why it is so."""
        layout, device = self.requirements.layout, self.target.group.device
        return split_kernels(device.type, self.dtype, layout.head_dim, layout.groups)

    @property
    def batch_invariant_kernels(self) -> Kernels:
        """The kernels that identical texts attend with, or None, and why it is so."""
        layout, device = self.requirements.layout, self.target.group.device
        return batch_invariant_kernels(device.type, self.dtype, layout.head_dim, layout.groups)

    @property
    def requirements(self) -> Requirements:
        """Return what texts need of this rank."""
        return Requirements(
            target=self.target.config,
            draft=self.draft.config if self.draft is not None else None,
            mode=self.mode,
            settings=self.settings,
            dtype=self.dtype,
            ranks=self.target.group.size,
            draft_ranks=self.draft.group.size if self.draft is not None else 1,
            copies=self.link.copies,
            rank=self.target.group.rank,
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights on this rank."""
        return parameter_bytes(*(model for model in (self.target, self.draft) if model is not None))

    def memory(self) -> Memory:
        """Return the memory that the next text may use on this rank, as it is now.

        On a CPU device memory is host memory, which all ranks share.
        """
        limit, group = self.settings.device_memory, self.target.group
        on_cpu = group.device.type == "cpu"
        host = host_available() // group.size + self.arena.nbytes
        there = self.link.device_available() // (group.size if on_cpu else 1)
        if limit is None:
            return Memory(int(there * USABLE_SHARE), host)
        usable = there if on_cpu else int(there * USABLE_SHARE)
        device = min(limit - self.weight_bytes, usable)
        if on_cpu:
            # two readings of one memory differ by what came and went
            host = max(0, host - max(0, device))
        return Memory(device, host)

    def plan(self, prompt: int, new: int, memory: Memory | None = None) -> MemoryPlan:
        """Plan where the KV of a text of `prompt` + `new` tokens goes on this rank.

        `memory` None: all there is. Raises InsufficientMemoryError.
        """
        return fit(self.requirements, memory or self.memory(), prompt, new)

    def link_rate(self) -> float | None:
        """Measure the link: bytes a second of the slowest rank while all copy at once.

        None where nothing is copied. GPUs may share lanes. All ranks call it. Raises InsufficientMemoryError.
        """
        if not self.link.copies:
            return None
        group = self.target.group
        with group.sync_errors():
            copies = BandwidthProbe(self.link, LINK_PROBE_BYTES)
        with closing(copies):
            return min(group.gather(copies.rate(out=False, seconds=LINK_PROBE_SECONDS)))
