"""The caches of one sequence and the decoding levels on them, from the table of modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decoding.config.defaults import MAX_GRAPH_SHARE
from decoding.config.settings import LEVELS
from decoding.models.runtime import Runtime
from decoding.planning.plan import Plan
from offload.cache.prediction import PredictionCache
from offload.cache.static_shape import StaticCache
from offload.cache.streaming import StreamingCache
from offload.memory.host_arena import HostArena
from offload.recurrent.states import RecurrentStates
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.split_selection import SplitSelection
from offload.tiered.cache import TieredCache
from offload.tiered.device_view import OnDeviceCache
from offload.traffic import ByteCounters
from parallel.config.parameter_count import MAX_GRAPH_TOKENS
from parallel.execution.cuda_graphs import GraphRunner
from parallel.execution.executor import Level
from parallel.model.transformer import Transformer

# Tokens that a level has not read when it drafts next: the last one it drafted and, of each level
# above, the one that follows an accepted draft.
MAX_PENDING = 4


class SequenceSlot:
    """The place of one sequence at a time, and what that leaves to the next one.

    It is host memory and, if short forwards are captured as CUDA graphs, the caches that they were
    captured on.
    """

    def __init__(self, arena: HostArena, graphs: GraphRunner, index: int = 0):
        """Start without caches; `index` is the slot's in the engine."""
        self.arena, self.graphs, self.index = arena, graphs, index
        self.retrieval: RetrievalCache | None = None
        self.draft: StreamingCache | None = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes of device memory of the caches."""
        caches = (self.retrieval, self.draft)
        return sum(cache.device_bytes for cache in caches if cache is not None)

    def fit(self, plan: Plan) -> None:
        """Free the caches that the next sequence cannot reuse."""
        needs, window = plan.requirements, plan.requirements.layout.window
        if self.retrieval is not None and not (
            needs.has_retrieval
            and self.retrieval.selector.shape.has_buffers_of(
                plan.spec.retrieval, None if window is None else window.tokens
            )
        ):
            self.graphs.release(self.retrieval)
            self.retrieval = None
        if self.draft is not None and not (needs.has_draft and self.draft.shape == plan.spec.draft):
            self.graphs.release(self.draft)
            self.draft = None

    def vacate(self) -> None:
        """Free what belongs to a finished sequence alone: rotary tables, scores of selections."""
        if (cache := self.retrieval) is not None:
            policy = type(cache.selector.policy)()
            cache.reset(
                cache.selector.shape, policy, cache.rotary.first(1), cache.selector.min_interval
            )

    def free(self) -> None:
        """Free the caches and all graphs on them."""
        for cache in (self.retrieval, self.draft):
            if cache is not None:
                self.graphs.release(cache)
        self.retrieval = self.draft = None

    def capture(self, levels: Sequence[Level]) -> None:
        """Capture the short forwards of a sequence's levels, unless an earlier one did.

        All ranks call it when the caches are empty.
        """
        for level in levels:
            if isinstance(level.cache, StaticCache):
                self.graphs.capture(level.model, level.cache, level.graph_sizes, self.index)


def graph_runner(runtime: Runtime) -> GraphRunner:
    """Return a runner of CUDA graphs, if settings ask for them, in a part of what plans leave."""
    enabled, capturer = bool(runtime.settings.graphs), runtime.target.group.graph_capturer
    return GraphRunner(enabled, capturer, max(0.0, MAX_GRAPH_SHARE * runtime.memory().device))


class DecodingLevels:
    """The levels that a sequence of a mode is decoded on, on this rank.

    `levels` are outermost first: the target, the on-device view of its cache, the retrieval cache
    that observes it, and the draft model if this rank runs one. An inner level may be missing.
    """

    def __init__(self, runtime: Runtime, plan: Plan, slot: SequenceSlot):
        """Allocate the caches as planned, except those that the slot has.

        Raises InsufficientMemoryError.
        """
        self._runtime, self._plan, self._slot = runtime, plan, slot
        slot.fit(plan)
        self.target = self._target_cache()
        self.levels = [Level("target", runtime.target, self.target)]
        self.retrieval = self._retrieval_cache()
        make: dict[str, Callable[[], Level | None]] = {
            "split": self._split_level,
            "retrieval": self._retrieval_level,
            "draft": self._draft_level,
        }
        for name in LEVELS[plan.requirements.mode]:
            if (level := make[name]()) is not None:
                self.levels.append(level)
        last = self.levels[-1].cache
        states = last.hidden_states if isinstance(last, PredictionCache) else None
        for level in self.levels:
            level.cache.hidden_states = states

    def _target_cache(self) -> TieredCache:
        runtime, spec = self._runtime, self._plan.spec
        rotary = runtime.target.rotary(spec.prompt, spec.tokens)
        return TieredCache(self._plan.target_spec, runtime.link, rotary, self._slot.arena)

    def _retrieval_cache(self) -> RetrievalCache | None:
        """Return a cache that observes the target's in some layers; None if there are none."""
        plan = self._plan
        if not plan.retrieval_layers:
            return None
        spec, rotary = plan.spec.retrieval, self.target.rotary
        policy = POLICIES[plan.requirements.settings.policy]()
        retrieval, interval = self._slot.retrieval, plan.selection_interval
        if retrieval is not None:
            retrieval.reset(spec, policy, rotary, interval)
        else:
            device, layers = self._runtime.target.group.device, plan.retrieval_layers
            layout = self.target.layout.in_pairs
            retrieval = RetrievalCache(layout, spec, policy, rotary, device, interval, layers)
        self.target.observers.append(retrieval)
        return retrieval

    def _split_level(self) -> Level:
        """Return the target's weights on the on-device view of its cache."""
        cache = OnDeviceCache(self.target, self.retrieval, self._split_selection())
        cache.recurrent = self._draft_states()
        return Level("split", self._runtime.target, cache)

    def _split_selection(self) -> SplitSelection | None:
        """Return an observer that selects keys of split layers, if they have a budget."""
        plan = self._plan
        layers, spec = plan.split_selection_layers, plan.spec.split_selection
        if spec is None or not layers:
            return None
        policy = POLICIES[plan.requirements.settings.policy]()
        device = self._runtime.target.group.device
        layout, interval = self.target.layout, plan.selection_interval
        selection = SplitSelection(layout, spec, policy, layers, device, interval)
        self.target.observers.append(selection)
        return selection

    def _retrieval_level(self) -> Level:
        """Return the target's weights on the retrieval cache."""
        retrieval = self.retrieval
        assert retrieval is not None
        retrieval.recurrent = self._draft_states(retrieval.recurrent)
        if self._slot.graphs.enabled:
            self._slot.retrieval = retrieval
        longest = self._plan.requirements.settings.inner_draft_length_range[-1] + 2
        # a verification has two tokens or more
        sizes = _graph_sizes(2, min(longest, MAX_GRAPH_TOKENS))
        return Level("retrieval", self._runtime.target, retrieval, graph_sizes=sizes)

    def _draft_states(self, own: RecurrentStates | None = None) -> RecurrentStates | None:
        """Return recurrent states that follow those of the level above; None if it has none.

        `own`: those that the level's cache has already, which keep their addresses.
        """
        parent, needs = self.levels[-1].cache.recurrent, self._plan.requirements
        if parent is None:
            return None
        rows, device = needs.max_forward_tokens, self._runtime.target.group.device
        states = own or RecurrentStates(parent.shape, rows, self._runtime.dtype, device)
        states.parent = parent
        return states

    def _draft_level(self) -> Level | None:
        """Return the draft model on a cache of its own; None if this rank does not run it."""
        model, slot = self._runtime.draft, self._slot
        if model is None:
            return None
        draft = slot.draft or self._draft_cache(model)
        draft.reset()
        draft.traffic = ByteCounters()
        if slot.graphs.enabled:
            slot.draft = draft
        pending = MAX_PENDING
        if model.config.is_predictor:  # it reads accepted tokens again
            needs = self._plan.requirements
            lengths = needs.settings.draft_length_range(needs.mode)
            if len(self.levels) > 1:
                lengths = needs.settings.inner_draft_length_range
            pending += lengths[-1]
        sizes = _graph_sizes(1, min(pending, MAX_GRAPH_TOKENS))
        return Level("draft", model, draft, model.group.size > 1, sizes)

    def _draft_cache(self, model: Transformer) -> StreamingCache:
        spec = self._plan.spec.draft
        dtype, device = model.embed.weight.dtype, model.group.device
        rotary = model.rotary(spec.slots, spec.slots)
        layout = model.config.kv_layout(model.group.size, dtype, model.group.rank).in_pairs
        kind = PredictionCache if model.config.is_predictor else StreamingCache
        return kind(layout, spec, rotary, device)


def _graph_sizes(shortest: int, longest: int) -> list[int]:
    """Return the numbers of tokens of which forwards are captured; others are padded to the next.

    They are powers of two, from `shortest` to at most half of `longest`, and `longest`.
    """
    sizes = []
    while 2 * shortest <= longest:
        sizes.append(shortest)
        shortest *= 2
    return [*sizes, longest]
