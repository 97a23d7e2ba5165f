"""The caches of one sequence and the decoding levels on them, from the table of modes."""

from __future__ import annotations

from collections.abc import Callable

from decoding.config.settings import LEVELS
from decoding.models.runtime import Runtime
from decoding.planning.memory_plan import MemoryPlan
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

    def __init__(self, runtime: Runtime, plan: MemoryPlan, prompt_tokens: int, max_new_tokens: int):
        """Allocate the caches. Raises InsufficientMemoryError.

        Args:
            runtime: models and settings.
            plan: where the sequence's KV is placed on this rank.
            prompt_tokens: number of tokens to prefill.
            max_new_tokens: maximum number of tokens to generate.
        """
        self._runtime, self._plan = runtime, plan
        self._prompt_tokens, self._max_new_tokens = prompt_tokens, max_new_tokens
        self.target = self._target_cache()
        self.levels = [Level("target", runtime.target, self.target)]
        self.retrieval = self._retrieval_cache()
        self.draft: StreamingCache | None = None
        make: dict[str, Callable[[], Level | None]] = {
            "split": self._split_level,
            "retrieval": self._retrieval_level,
            "draft": self._draft_level,
        }
        for name in LEVELS[runtime.mode]:
            if (level := make[name]()) is not None:
                self.levels.append(level)

    def _target_cache(self) -> TieredCache:
        runtime, prompt, new = self._runtime, self._prompt_tokens, self._max_new_tokens
        spec = runtime.requirements.planned_spec(self._plan, prompt, new)
        config, device = runtime.target.config, runtime.target.group.device
        rotary = config.rotary(prompt, prompt + new, runtime.dtype, device)
        return TieredCache(spec, runtime.link, rotary, runtime.arena)

    def _retrieval_cache(self) -> RetrievalCache | None:
        """Return a cache that observes the target's in some layers; None if there are none."""
        runtime, needs = self._runtime, self._runtime.requirements
        layers = needs.retrieval_layers(self.target.shape)
        if not layers:
            return None
        spec = needs.retrieval_spec(self._prompt_tokens, self._max_new_tokens)
        policy = POLICIES[runtime.settings.policy]()
        interval = needs.selection_interval(self._plan)
        rotary, layout = self.target.rotary, self.target.layout
        device = runtime.target.group.device
        retrieval = RetrievalCache(layout, spec, policy, rotary, device, interval, layers)
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
        spec = self._runtime.requirements.draft_spec
        dtype, device = model.embed.weight.dtype, model.group.device
        rotary = model.config.rotary(spec.slots, spec.slots, dtype, device)
        layout = model.config.kv_layout(model.group.size, dtype, model.group.rank)
        self.draft = StreamingCache(layout, spec, rotary, device)
        return Level("draft", model, self.draft, is_sharded=model.group.size > 1)
