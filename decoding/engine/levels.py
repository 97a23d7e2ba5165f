"""The caches of one sequence and the decoding levels on them, from the table of modes."""

from __future__ import annotations

from collections.abc import Callable

from decoding.config.settings import LEVELS
from decoding.models.runtime import Runtime
from decoding.planning.plan import Plan
from offload.cache.streaming import StreamingCache
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.tiered.cache import TieredCache
from offload.tiered.device_view import OnDeviceCache
from parallel.execution.executor import Level


class DecodingLevels:
    """The levels that a sequence of a mode is decoded on, on this rank.

    `levels` are outermost first: the target, the on-device view of its cache, the retrieval cache
    that observes it, and the draft model if this rank runs one. An inner level may be missing.
    """

    def __init__(self, runtime: Runtime, plan: Plan):
        """Allocate the caches as planned. Raises InsufficientMemoryError."""
        self._runtime, self._plan = runtime, plan
        self.target = self._target_cache()
        self.levels = [Level("target", runtime.target, self.target)]
        self.retrieval = self._retrieval_cache()
        self.draft: StreamingCache | None = None
        make: dict[str, Callable[[], Level | None]] = {
            "split": self._split_level,
            "retrieval": self._retrieval_level,
            "draft": self._draft_level,
        }
        for name in LEVELS[plan.requirements.mode]:
            if (level := make[name]()) is not None:
                self.levels.append(level)

    def _target_cache(self) -> TieredCache:
        runtime, spec = self._runtime, self._plan.spec
        config, device = runtime.target.config, runtime.target.group.device
        rotary = config.rotary(spec.prompt, spec.tokens, runtime.dtype, device)
        return TieredCache(self._plan.target_spec, runtime.link, rotary, runtime.arena)

    def _retrieval_cache(self) -> RetrievalCache | None:
        """Return a cache that observes the target's in some layers; None if there are none."""
        plan = self._plan
        if not plan.retrieval_layers:
            return None
        retrieval = RetrievalCache(
            self.target.layout,
            plan.spec.retrieval,
            POLICIES[plan.requirements.settings.policy](),
            self.target.rotary,
            self._runtime.target.group.device,
            plan.selection_interval,
            plan.retrieval_layers,
        )
        self.target.observers.append(retrieval)
        return retrieval

    def _split_level(self) -> Level:
        """Return the target's weights on the on-device view of its cache."""
        return Level("split", self._runtime.target, OnDeviceCache(self.target, self.retrieval))

    def _retrieval_level(self) -> Level:
        """Return the target's weights on the retrieval cache."""
        assert self.retrieval is not None
        return Level("retrieval", self._runtime.target, self.retrieval)

    def _draft_level(self) -> Level | None:
        """Return the draft model on a cache of its own; None if this rank does not run it."""
        model = self._runtime.draft
        if model is None:
            return None
        spec = self._plan.spec.draft
        dtype, device = model.embed.weight.dtype, model.group.device
        rotary = model.config.rotary(spec.slots, spec.slots, dtype, device)
        layout = model.config.kv_layout(model.group.size, dtype, model.group.rank)
        self.draft = StreamingCache(layout, spec, rotary, device)
        return Level("draft", model, self.draft, is_sharded=model.group.size > 1)
