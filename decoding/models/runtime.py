"""The runtime of requests: models, settings, host link, host arena, and available memory."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from decoding.config.defaults import (
    LINK_PROBE_BYTES,
    LINK_PROBE_SECONDS,
    MAX_GRAPH_SHARE,
    USABLE_SHARE,
)
from decoding.config.settings import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.plan import Memory, Plan
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements
from decoding.planning.round_cost import Acceptance
from decoding.prefix_cache.manager import ModelFingerprint, PrefixCacheManager
from offload.errors import TierForceError
from offload.kernels.selection import (
    Kernels,
    batch_invariant_kernels,
    retrieval_kernels,
    slot_kernels,
    split_kernels,
)
from offload.memory.bandwidth import BandwidthProbe
from offload.memory.host import host_available
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.link_spec import make_link
from offload.recurrent.selection import prompt_kernels
from parallel.model.loading import parameter_bytes
from parallel.model.transformer import Transformer


@dataclass(frozen=True)
class Runtime:
    """The models on this rank, with the settings, the link and the arena that requests share.

    `draft` is either whole and on rank 0 only, in which case drafting needs no collectives, or
    sharded over all ranks.
    """

    target: Transformer
    draft: Transformer | None
    mode: str
    settings: Settings
    link: Link
    arena: HostArena
    identity: ModelFingerprint | None = None  # None without a prompt cache

    @classmethod
    def create(
        cls,
        target: Transformer,
        draft: Transformer | None,
        mode: str,
        settings: Settings,
        identity: ModelFingerprint | None = None,
    ) -> Runtime:
        """Return a runtime in this mode, with a link and an arena of its own.

        Raises TierForceError for a link that the device does not support.
        """
        link = make_link(settings.link, target.group.device)
        arena = HostArena(link, target.embed.weight.dtype)
        return cls(target, draft, mode, settings, link, arena, identity)

    def with_settings(self, settings: Settings) -> Runtime:
        """Return a runtime of the same models with other settings; for rank 0."""
        if settings.graphs is None:
            settings = replace(settings, graphs=self.settings.graphs)
        layers = self.target.config.full_layers
        mode = settings.resolved_mode(self.draft is not None, layers)
        return Runtime.create(self.target, self.draft, mode, settings, self.identity)

    def costs(self, link_rate: float | None) -> CostModel:
        """Return the cost model of this machine; `link_rate` in bytes/s replaces its profile's.

        Raises TierForceError for a hardware file that does not belong to this run.
        """
        profile, trust = HardwareProfile.find(
            self.settings.hardware, self.link.device_name, self.target.group.size
        )
        if link_rate is not None:
            profile = replace(profile, link_in=link_rate)
        return CostModel(profile, Acceptance(is_coupled=self.settings.deterministic), trust)

    def prefix_cache(self) -> PrefixCacheManager | None:
        """Return the manager of cached prompts; None without a prompt cache. All ranks call it.

        Raises TierForceError on all ranks for a folder that cannot be used.
        """
        settings = self.settings
        if settings.prompt_cache is None:
            return None
        if self.identity is None:
            raise TierForceError(
                "`prompt_cache` must be set when the models are loaded: load them with it."
            )
        return PrefixCacheManager(
            settings.prompt_cache,
            settings.prompt_cache_limit,
            self.identity,
            self.target.group,
            self.requirements.layout,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and KV."""
        return self.target.embed.weight.dtype

    @property
    def split_kernels(self) -> Kernels:
        """Return the kernels that reconstruct split layers, or None; and the reason."""
        layout, device = self.requirements.layout, self.target.group.device
        return split_kernels(device.type, self.dtype, layout.head_dim, layout.groups)

    @property
    def batch_invariant_kernels(self) -> Kernels:
        """Return the attention kernels of deterministic requests, or None; and the reason."""
        layout, device = self.requirements.layout, self.target.group.device
        return batch_invariant_kernels(device.type, self.dtype, layout.head_dim, layout.groups)

    @property
    def retrieval_kernels(self) -> Kernels:
        """Return the kernels that select what a retrieval cache keeps, or None; and the reason."""
        layout, device = self.requirements.layout, self.target.group.device
        return retrieval_kernels(device.type, self.dtype, layout.head_dim, layout.groups)

    @property
    def prompt_kernels(self) -> Kernels | None:
        """Return the kernels of recurrent layers in prompts, or None; and the reason.

        None if there are no such layers, or if they are of a kind that has no kernels.
        """
        shape, device = self.requirements.layout.recurrent, self.target.group.device
        if shape is None or shape.is_mamba:
            return None
        return prompt_kernels(device.type, self.dtype, shape)

    @property
    def slot_kernels(self) -> list[Kernels]:
        """Return the kernels of each model's captured forwards, or None; and the reason."""
        needs, device = self.requirements, self.target.group.device
        models = [self.target] if needs.has_retrieval else []
        if needs.has_draft and self.draft is not None:
            models.append(self.draft)
        layouts = [model.config.kv_layout(1, self.dtype) for model in models]
        return [
            slot_kernels(device.type, self.dtype, each.head_dim, each.groups)
            for layout in layouts
            if self.settings.graphs
            for each in layout.kinds
        ]

    @cached_property
    def requirements(self) -> Requirements:
        """Return the requirements of requests on this rank."""
        return Requirements(
            target=self.target.config,
            draft=self.draft.config if self.draft is not None else None,
            mode=self.mode,
            settings=self.settings,
            dtype=self.dtype,
            ranks=self.target.group.size,
            draft_ranks=self.draft.group.size if self.draft is not None else 1,
            copies=self.link.copies,
            multiprocessors=self.target.group.multiprocessors,
            rank=self.target.group.rank,
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights on this rank."""
        return parameter_bytes(*(model for model in (self.target, self.draft) if model is not None))

    def memory(self, reusable: int = 0, graphs: int = 0) -> Memory:
        """Return the memory that is now available to the next request on this rank.

        It includes `reusable` bytes of caches on the device. The bytes of CUDA graphs are a part of
        what plans leave: later ones are those of the first request, as long as that suffices. On a
        CPU, device memory is host memory, which all ranks share.
        """
        limit, group = self.settings.device_memory, self.target.group
        on_cpu = group.device.type == "cpu"
        host = host_available() // group.size + self.arena.nbytes
        available = self.link.device_available() // (group.size if on_cpu else 1) + reusable
        planned = min(USABLE_SHARE * (available + graphs), (1 - MAX_GRAPH_SHARE) * available)
        if limit is None:
            return Memory(int(planned), host)
        usable = available if on_cpu else int(planned)
        device = min(limit - self.weight_bytes, usable)
        if on_cpu:
            # may be negative: the two measurements of one memory are not simultaneous
            host = max(0, host - max(0, device))
        return Memory(device, host)

    def plan(self, prompt: int, max_new_tokens: int) -> Plan:
        """Return the plan of a request in this mode and budget, in all memory that is available.

        Raises InsufficientMemoryError.
        """
        return Plan.place(RequestSpec(self.requirements, prompt, max_new_tokens), self.memory())

    def link_rate(self) -> float | None:
        """Measure the link: bytes/s of the slowest rank while all ranks copy; GPUs may share lanes.

        None if the link does not copy. All ranks call it. Raises InsufficientMemoryError.
        """
        if not self.link.copies:
            return None
        group = self.target.group
        with group.sync_errors():
            probe = BandwidthProbe(self.link, LINK_PROBE_BYTES)
        with closing(probe):
            return min(group.gather(probe.rate(out=False, seconds=LINK_PROBE_SECONDS)))
