"""What texts take of one rank, by configs and settings alone: no weights, no device.

All sizes are in tokens or bytes, as named. Bytes are those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decoding.config.defaults import (
    ALLOCATOR_FACTOR,
    BOUNDARY_BLOCK,
    DEFAULT_RETRIEVAL_BUDGET,
    DRAFT_SLACK,
    LOOKUP_NGRAM,
    MASKED_VALUES_PER_SCORE,
    MAX_DRAFT,
    MAX_INNER_DRAFT,
    MAX_PREFILL_CHUNK,
    PREFILL_ACTIVATION_BYTES,
    PREFILL_CHUNK_STEP,
    PROBS_BYTES_PER_LOGIT,
    RETRIEVAL_BUDGETS,
    SELECTION_INTERVAL_ON_DEVICE,
    SELECTION_INTERVAL_OVER_LINK,
    SPLIT_BLOCK,
    SPLIT_DRAFT_BYTES,
    SPLIT_RECENT,
)
from decoding.config.settings import LEVELS, Settings
from decoding.planning.memory_plan import MemoryPlan, MemoryRequirements
from decoding.speculation.draft_length import MAX_CATCH_UP, NOISE_POSITIONS
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.codec.format import split_format
from offload.dtypes import dtype_name
from offload.kernels.batch_invariant_shape import ROW_BLOCK, working_bytes
from offload.layout import KVLayout, ceil_div
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.shape import OFFLOADED, TieredCacheSpec
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import (
    MAX_GRAPH_TOKENS,
    MAX_STATIC_TOKENS,
    parameter_count,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Strategy:
    """A mode, and the retrieval budget in it."""

    mode: str  # one of LEVELS
    budget: int  # tokens a head; it means nothing where a mode has no retrieval


@dataclass(frozen=True)
class Requirements:
    """What texts need that these models decode with these settings."""

    target: ModelConfig
    draft: ModelConfig | None  # where this rank runs one
    mode: str  # never `auto`
    settings: Settings
    dtype: torch.dtype
    ranks: int
    draft_ranks: int  # over which the draft is split
    copies: bool  # whether the link copies
    rank: int | None = None  # which one; None: the last, which holds no less than any other

    def __post_init__(self) -> None:
        """Raise TierForceError for slices of what is not cut into any."""
        self.settings.check_split_dtype(self.mode, dtype_name(self.dtype))

    @property
    def layout(self) -> KVLayout:
        """Return the geometry of the target's KV on this rank.

        Raises ConfigError where there are fewer heads than ranks.
        """
        return self.target.kv_layout(self.ranks, self.dtype, self.rank)

    # -- which levels there are --------------------------------------------------------------------

    @property
    def has_retrieval(self) -> bool:
        """Return whether there is a level that drafts on a retrieval cache."""
        return "retrieval" in LEVELS[self.mode]

    @property
    def has_split(self) -> bool:
        """Return whether there is a level that drafts against codes."""
        return "split" in LEVELS[self.mode]

    @property
    def may_retrieve(self) -> bool:
        """Return whether layers may have a retrieval cache: all, or those without codes."""
        return self.has_retrieval or self.has_split

    def retrieval_layers(self, shape: TieredCacheSpec) -> list[int]:
        """Return the layers that have a retrieval cache where these are placed so."""
        kinds = enumerate(shape.placement())
        if self.has_retrieval:
            return [layer for layer, _ in kinds]
        return [layer for layer, kind in kinds if self.has_split and kind == OFFLOADED]

    @property
    def has_draft(self) -> bool:
        """Return whether this mode uses a draft model."""
        return "draft" in LEVELS[self.mode]

    @property
    def ngram(self) -> int:
        """Return how many tokens prompt lookup matches; 0 where there is none."""
        if self.mode == "plain":
            return 0
        if self.settings.prompt_lookup_ngram is not None:
            return self.settings.prompt_lookup_ngram
        return 0 if self.has_draft else LOOKUP_NGRAM

    # -- mode and retrieval budget -----------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Return how texts are drafted for."""
        return Strategy(self.mode, self.budget)

    @property
    def has_choice(self) -> bool:
        """Return whether mode or budget are chosen text by text."""
        return self.selects_budget or len(self.candidate_modes) > 1

    @property
    def candidate_modes(self) -> list[str]:
        """Return the modes worth a thought: where none is set, this one with slices, too."""
        split = f"split-{self.mode}"
        cut = self.copies and split_format(self.dtype) is not None
        return [self.mode, split] if cut and self.settings.mode == "auto" else [self.mode]

    @property
    def budget(self) -> int:
        """Return the retrieval budget, tokens a head."""
        return self.settings.retrieval_budget or DEFAULT_RETRIEVAL_BUDGET

    @property
    def int8_retrieval(self) -> bool:
        """Return whether what the retrieval cache selects is kept in 8 bits an element.

        By default it is where elements have 16 and KV may have to leave the device.
        """
        chosen = self.settings.int8_retrieval
        return self.copies and self.dtype.itemsize == 2 if chosen is None else chosen

    @property
    def selects_budget(self) -> bool:
        """Return whether there is a budget, and none is set."""
        return self.may_retrieve and self.settings.retrieval_budget is None

    def candidate_budgets(self, context: int) -> list[int]:
        """Return the budgets worth a thought for a text of `context` tokens.

        The first that holds the text whole is the last.
        """
        end = 2 * max(RETRIEVAL_BUDGETS[0], self.settings.chunk_size, context)
        return [budget for budget in RETRIEVAL_BUDGETS if self.settings.chunk_size <= budget < end]

    def with_strategy(self, way: Strategy) -> Requirements:
        """Return these needs with this mode and budget, and nothing left to choose."""
        settings = replace(self.settings, mode=way.mode, retrieval_budget=way.budget)
        return replace(self, mode=way.mode, settings=settings)

    # -- passes ------------------------------------------------------------------------------------

    @property
    def draft_lengths(self) -> range:
        """Return the lengths of a draft that may be put before the target."""
        length = self.settings.num_draft_tokens
        return range(1, MAX_DRAFT + 1) if length is None else range(length, length + 1)

    @property
    def inner_lengths(self) -> range:
        """Return the lengths of a draft that may be put before a level below the target."""
        length = self.settings.num_inner_draft_tokens
        return range(1, MAX_INNER_DRAFT + 1) if length is None else range(length, length + 1)

    @property
    def max_forward_tokens(self) -> int:
        """Return the tokens of the largest pass: the same on all ranks, whatever their plans."""
        outer = self.settings.num_draft_tokens or MAX_DRAFT
        inner = self.settings.num_inner_draft_tokens or MAX_INNER_DRAFT
        return max(outer, inner, MAX_CATCH_UP) + 2

    @property
    def window(self) -> int:
        """Return how many recent tokens the draft's cache keeps when it slides.

        They are no fewer than a verification may still take back.
        """
        return max(self.settings.window, self.settings.num_draft_tokens or MAX_DRAFT)

    @property
    def activation_elements(self) -> int:
        """Return the elements a token that a layer's prefill holds at most.

        They are those of a chunk that computes, and of two whose sums are under way.
        """
        target = self.target
        # products, what is rotated of them or normed, and the output
        attention = target.head_dim * (5 * target.heads + 4 * target.kv_heads)
        widest = max(4 * target.intermediate, attention) // self.ranks
        if target.experts is not None:  # their sum, and the tokens of one of them, before and after
            widest = max(widest, 3 * target.hidden + 4 * target.experts.intermediate // self.ranks)
        return 8 * target.hidden + widest

    @property
    def moe_scratch_bytes(self) -> int:
        """Return what mixing experts in fixed shapes holds in the largest pass.

        It is every expert's output for every token, or the weights that a few tokens gather.
        """
        experts = self.target.experts
        if experts is None:
            return 0
        hidden, columns = self.target.hidden, ceil_div(experts.intermediate, self.ranks)
        tokens = min(self.max_forward_tokens, MAX_STATIC_TOKENS)
        outputs = experts.count * tokens * (3 * columns * self.dtype.itemsize + 8 * hidden)
        gathered = experts.count // 3 * 3 * columns * hidden * self.dtype.itemsize
        return max(outputs, gathered)

    @property
    def prefill_chunk(self) -> int:
        """Return how many tokens prefill computes at once.

        They are as many as keep large products large, within a bounded memory.
        """
        if self.settings.prefill_chunk:
            return self.settings.prefill_chunk
        step = PREFILL_CHUNK_STEP
        fits = PREFILL_ACTIVATION_BYTES // (self.activation_elements * self.dtype.itemsize)
        return max(step, min(MAX_PREFILL_CHUNK, fits // step * step))

    # -- shapes of caches --------------------------------------------------------------------------

    def retrieval_spec(self, prompt: int, new: int) -> RetrievalCacheSpec:
        """Return how the retrieval cache of such a text is laid out."""
        settings, context = self.settings, prompt + new
        # tokens that may come behind one selection: without a further one, all new ones
        since = new
        if POLICY_SPECS[settings.policy].reselects:
            interval = settings.selection_interval or SELECTION_INTERVAL_ON_DEVICE
            since = min(new, interval + 2 * self.max_forward_tokens)
        budget = max(settings.chunk_size, min(self.budget, context))
        rows = self.max_forward_tokens
        shape = RetrievalCacheSpec.of(budget, settings.chunk_size, context, rows, since)
        shape = replace(shape, quantised=self.int8_retrieval)
        if not self.has_split:
            return shape
        block = ceil_div(SPLIT_BLOCK, shape.chunk) * shape.chunk
        return replace(shape, window=SPLIT_RECENT, block=block)

    def recent(self, prompt: int, new: int) -> tuple[int, int]:
        """Return how many tokens stay behind the target's boundary, and by what blocks it moves."""
        if not self.may_retrieve:
            return 0, BOUNDARY_BLOCK
        shape = self.retrieval_spec(prompt, new)
        return shape.window, shape.block

    def target_spec(self, prompt: int, new: int) -> TieredCacheSpec:
        """Return how the target's cache is laid out, before a plan says which layers are resident.

        Raises ConfigError where there are fewer heads than ranks.
        """
        recent, block = self.recent(prompt, new)
        rows = self.max_forward_tokens
        if self.has_split:  # those that stand, and behind them what is drafted meanwhile
            rows *= 2
        shape = TieredCacheSpec.with_ring(
            self.layout, prompt + new, recent, block, rows, self.copies
        )
        packed = self.settings.compress_offload
        if packed is None:
            packed = self.has_split and self.copies
        packed = packed and shape.compression_saves
        return replace(shape, compressed=packed, batch_invariant=self.settings.deterministic)

    @property
    def draft_spec(self) -> StreamingCacheSpec:
        """Return how the draft's cache is laid out."""
        return StreamingCacheSpec(self.settings.sinks, self.window, DRAFT_SLACK)

    def planned_spec(self, plan: MemoryPlan, prompt: int, new: int = 0) -> TieredCacheSpec:
        """Return how the target's cache is laid out by a plan."""
        shape = self.target_spec(prompt, new)
        return shape.with_placement(plan.resident_layers, plan.deferred_layers, plan.split_layers)

    def effective_device_tokens(self, plan: MemoryPlan, tokens: int, code: float) -> float:
        """Return as how many tokens in 16 bits the device attends to what it has of so many.

        A code takes so much of an element's time.
        """
        layers = self.target.layers
        split = plan.split_layers
        streamed = layers - plan.resident_layers - split
        whole = plan.resident_layers + split * code
        return (whole * tokens + streamed * min(self.budget, tokens)) / layers

    # -- what a plan decides -----------------------------------------------------------------------

    def uses_link(self, plan: MemoryPlan) -> bool:
        """Return whether a verification waits for KV that comes over the link."""
        return self.copies and plan.resident_layers < self.target.layers

    def selection_interval(self, plan: MemoryPlan) -> int:
        """Return the tokens that a selection serves at least."""
        over_link = self.uses_link(plan)
        usual = SELECTION_INTERVAL_OVER_LINK if over_link else SELECTION_INTERVAL_ON_DEVICE
        return self.settings.selection_interval or usual

    # -- memory ------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights on one rank."""
        weights = weight_bytes(self.target, self.ranks, self.dtype)
        if self.draft is not None and self.has_draft:
            weights += weight_bytes(self.draft, self.draft_ranks, self.dtype)
        return weights

    def memory(self, prompt: int, new: int) -> MemoryRequirements:
        """Return the device memory beside the weights, by what it is for.

        Raises InsufficientMemoryError, and ConfigError where there are fewer heads than ranks.
        """
        target, item = self.target, self.dtype.itemsize
        layer, shared = self._retrieval_bytes(prompt, new)
        return MemoryRequirements(
            target=self.target_spec(prompt, new),
            retrieval=self.target.layers * layer + shared if self.has_retrieval else 0,
            draft=self._draft_bytes(),
            tables=2 * (prompt + new) * target.rotary_dim * item,
            hidden=self.hidden_bytes(prompt),
            forwards=self._forward_bytes(prompt, new),
            splitting=self.has_split,
            streamed_retrieval=0 if self.has_retrieval else layer,
            selection=0 if self.has_retrieval else shared,
        )

    def _forward_bytes(self, prompt: int, new: int) -> int:
        """Return what a pass takes when decoding, beside caches."""
        item = self.dtype.itemsize
        row = (
            ALLOCATOR_FACTOR * self.activation_elements * item
            + PROBS_BYTES_PER_LOGIT * self.target.vocab
        )
        rows, steady = self.max_forward_tokens, 0
        if self.settings.deterministic:
            rows += 2 * ROW_BLOCK
            groups = self.target.heads // self.target.kv_heads
            steady = working_bytes(self.layout, prompt + new, rows, groups)
            steady += 8 * NOISE_POSITIONS * self.target.vocab  # float64
        return rows * row + self._masked_bytes(prompt, new) + self.moe_scratch_bytes + steady

    def hidden_bytes(self, tokens: int) -> int:
        """Return what reading so many tokens layer by layer holds of them."""
        chunk = min(tokens, self.prefill_chunk)
        elements = tokens * self.target.hidden + ALLOCATOR_FACTOR * chunk * self.activation_elements
        return elements * self.dtype.itemsize

    def _retrieval_bytes(self, prompt: int, new: int) -> tuple[int, int]:
        """Return what a layer's retrieval cache takes, and what is shared or taken to choose."""
        if not self.may_retrieve:
            return 0, 0
        layout = replace(self.layout, layers=1)
        shape, policy = self.retrieval_spec(prompt, new), POLICY_SPECS[self.settings.policy]
        rows = policy.query_rows * self.target.heads // self.target.kv_heads
        remembered = policy.state_bytes(layout, shape.context, shape.chunk)
        shared = shape.shared_bytes(layout) + shape.scratch_bytes(layout, rows)
        return shape.layer_bytes(layout) + remembered, shared

    def _masked_bytes(self, prompt: int, new: int) -> int:
        """Return what masked attention over the retrieval cache holds in a recorded pass."""
        if not self.has_retrieval:
            return 0
        rows = min(self.max_forward_tokens, MAX_GRAPH_TOKENS)
        heads = self.layout.heads * self.target.heads // self.target.kv_heads
        values = MASKED_VALUES_PER_SCORE * rows * heads
        return 4 * values * self.retrieval_spec(prompt, new).slots

    def _draft_bytes(self) -> int:
        """Return what the draft's cache takes."""
        if self.draft is None or not self.has_draft:
            return 0
        rank = self.rank if self.draft_ranks > 1 else None
        layout = self.draft.kv_layout(self.draft_ranks, self.dtype, rank)
        return self.draft_spec.device_bytes(layout)


def weight_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return the bytes of the last rank's weights: no other rank has more."""
    return parameter_count(config, ranks) * dtype.itemsize


def draft_ranks(draft: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return over how many ranks a draft is split by default."""
    large = weight_bytes(draft, 1, dtype) >= SPLIT_DRAFT_BYTES
    return ranks if large and draft.kv_heads >= ranks else 1
