"""Memory requirements per rank, from configs and settings alone: no weights, no device.

Bytes are per rank.
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
    budget: int  # tokens per head; unused in modes without retrieval


@dataclass(frozen=True)
class Requirements:
    """The requirements of requests decoded by these models with these settings."""

    target: ModelConfig
    draft: ModelConfig | None  # None if this rank runs no draft model
    mode: str  # never `auto`
    settings: Settings
    dtype: torch.dtype
    ranks: int
    draft_ranks: int  # tensor-parallel ranks of the draft model
    copies: bool  # whether offloaded KV is copied over the link
    rank: int | None = None  # None: the last rank, which holds no less than any other

    def __post_init__(self) -> None:
        """Raise TierForceError for a split mode with a dtype that cannot be split."""
        self.settings.check_split_dtype(self.mode, dtype_name(self.dtype))

    @property
    def layout(self) -> KVLayout:
        """Return the geometry of the target's KV on this rank.

        Raises ConfigError if there are fewer heads than ranks.
        """
        return self.target.kv_layout(self.ranks, self.dtype, self.rank)

    # -- levels ------------------------------------------------------------------------------------

    @property
    def has_retrieval(self) -> bool:
        """Return whether a level drafts on a retrieval cache."""
        return "retrieval" in LEVELS[self.mode]

    @property
    def has_split(self) -> bool:
        """Return whether a level drafts on the high bytes of split layers."""
        return "split" in LEVELS[self.mode]

    @property
    def may_retrieve(self) -> bool:
        """Return whether layers may have a retrieval cache: all, or those that are not split."""
        return self.has_retrieval or self.has_split

    def retrieval_layers(self, shape: TieredCacheSpec) -> list[int]:
        """Return the layers that have a retrieval cache with this placement."""
        placement = enumerate(shape.placement())
        if self.has_retrieval:
            return [layer for layer, _ in placement]
        return [layer for layer, kind in placement if self.has_split and kind == OFFLOADED]

    @property
    def has_draft(self) -> bool:
        """Return whether this mode uses a draft model."""
        return "draft" in LEVELS[self.mode]

    @property
    def ngram(self) -> int:
        """Return the n-gram length of prompt lookup; 0 without prompt lookup."""
        if self.mode == "plain":
            return 0
        if self.settings.prompt_lookup_ngram is not None:
            return self.settings.prompt_lookup_ngram
        return 0 if self.has_draft else LOOKUP_NGRAM

    # -- strategy: mode and retrieval budget -------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Return the mode and budget of these requirements."""
        return Strategy(self.mode, self.budget)

    @property
    def has_choice(self) -> bool:
        """Return whether mode or budget are selected per request."""
        return self.selects_budget or len(self.candidate_modes) > 1

    @property
    def candidate_modes(self) -> list[str]:
        """Return the modes to consider: this one and, with mode `auto`, its split variant."""
        split = f"split-{self.mode}"
        can_split = self.copies and split_format(self.dtype) is not None
        return [self.mode, split] if can_split and self.settings.mode == "auto" else [self.mode]

    @property
    def budget(self) -> int:
        """Return the retrieval budget in tokens per head."""
        return self.settings.retrieval_budget or DEFAULT_RETRIEVAL_BUDGET

    @property
    def int8_retrieval(self) -> bool:
        """Return whether the retrieval cache stores 8-bit elements.

        The default is yes if elements have 16 bits and KV can be offloaded.
        """
        setting = self.settings.int8_retrieval
        return self.copies and self.dtype.itemsize == 2 if setting is None else setting

    @property
    def selects_budget(self) -> bool:
        """Return whether the mode has a retrieval budget and the settings leave it open."""
        return self.may_retrieve and self.settings.retrieval_budget is None

    def candidate_budgets(self, context: int) -> list[int]:
        """Return the budgets to consider for `context` tokens, up to the first that covers them."""
        end = 2 * max(RETRIEVAL_BUDGETS[0], self.settings.chunk_size, context)
        return [budget for budget in RETRIEVAL_BUDGETS if self.settings.chunk_size <= budget < end]

    def with_strategy(self, strategy: Strategy) -> Requirements:
        """Return these requirements with a fixed mode and budget."""
        settings = replace(self.settings, mode=strategy.mode, retrieval_budget=strategy.budget)
        return replace(self, mode=strategy.mode, settings=settings)

    # -- forwards ----------------------------------------------------------------------------------

    @property
    def draft_lengths(self) -> range:
        """Return the allowed draft lengths for the target."""
        length = self.settings.num_draft_tokens
        return range(1, MAX_DRAFT + 1) if length is None else range(length, length + 1)

    @property
    def inner_lengths(self) -> range:
        """Return the allowed draft lengths for a level below the target."""
        length = self.settings.num_inner_draft_tokens
        return range(1, MAX_INNER_DRAFT + 1) if length is None else range(length, length + 1)

    @property
    def max_forward_tokens(self) -> int:
        """Return the query tokens of the largest forward, the same on all ranks with any plans."""
        outer = self.settings.num_draft_tokens or MAX_DRAFT
        inner = self.settings.num_inner_draft_tokens or MAX_INNER_DRAFT
        return max(outer, inner, MAX_CATCH_UP) + 2

    @property
    def window(self) -> int:
        """Return the recent tokens that the draft cache keeps when its window slides.

        They are at least as many as a verification can reject.
        """
        return max(self.settings.window, self.settings.num_draft_tokens or MAX_DRAFT)

    @property
    def activation_elements(self) -> int:
        """Return the peak activation elements per token of a layer's prefill.

        They cover one chunk being computed and two with all-reduces in flight.
        """
        target = self.target
        # projections, their normed and rotated copies, and the output
        attention = target.head_dim * (5 * target.heads + 4 * target.kv_heads)
        widest = max(4 * target.intermediate, attention) // self.ranks
        if target.experts is not None:  # the sum, and one expert's inputs and outputs
            widest = max(widest, 3 * target.hidden + 4 * target.experts.intermediate // self.ranks)
        return 8 * target.hidden + widest

    @property
    def moe_scratch_bytes(self) -> int:
        """Return the scratch bytes of a static-shape MoE in the largest forward.

        They hold every expert's output for every token, or the weights gathered for a few tokens.
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
        """Return the tokens per prefill chunk: enough for efficient matmuls in bounded memory."""
        if self.settings.prefill_chunk:
            return self.settings.prefill_chunk
        step = PREFILL_CHUNK_STEP
        max_tokens = PREFILL_ACTIVATION_BYTES // (self.activation_elements * self.dtype.itemsize)
        return max(step, min(MAX_PREFILL_CHUNK, max_tokens // step * step))

    # -- cache specs -------------------------------------------------------------------------------

    def retrieval_spec(self, prompt: int, max_new_tokens: int) -> RetrievalCacheSpec:
        """Return the layout of the retrieval cache."""
        settings, context = self.settings, prompt + max_new_tokens
        # tokens generated between two selections: all of them without reselection
        interval_tokens = max_new_tokens
        if POLICY_SPECS[settings.policy].reselects:
            interval = settings.selection_interval or SELECTION_INTERVAL_ON_DEVICE
            interval_tokens = min(max_new_tokens, interval + 2 * self.max_forward_tokens)
        budget = max(settings.chunk_size, min(self.budget, context))
        rows = self.max_forward_tokens
        shape = RetrievalCacheSpec.of(budget, settings.chunk_size, context, rows, interval_tokens)
        shape = replace(shape, quantised=self.int8_retrieval)
        if not self.has_split:
            return shape
        block = ceil_div(SPLIT_BLOCK, shape.chunk) * shape.chunk
        return replace(shape, window=SPLIT_RECENT, block=block)

    def recent(self, prompt: int, max_new_tokens: int) -> tuple[int, int]:
        """Return the tokens of the target's device tail and of an offload block."""
        if not self.may_retrieve:
            return 0, BOUNDARY_BLOCK
        shape = self.retrieval_spec(prompt, max_new_tokens)
        return shape.window, shape.block

    def target_spec(self, prompt: int, max_new_tokens: int) -> TieredCacheSpec:
        """Return the layout of the target cache without a placement of layers.

        Raises ConfigError if there are fewer heads than ranks.
        """
        recent, block = self.recent(prompt, max_new_tokens)
        rows = self.max_forward_tokens
        if self.has_split:  # accepted tokens and, after them, tokens drafted meanwhile
            rows *= 2
        shape = TieredCacheSpec.with_ring(
            self.layout, prompt + max_new_tokens, recent, block, rows, self.copies
        )
        compressed = self.settings.compress_offload
        if compressed is None:
            compressed = self.has_split and self.copies
        compressed = compressed and shape.compression_saves
        return replace(shape, compressed=compressed, batch_invariant=self.settings.deterministic)

    @property
    def draft_spec(self) -> StreamingCacheSpec:
        """Return the layout of the draft cache."""
        return StreamingCacheSpec(self.settings.sinks, self.window, DRAFT_SLACK)

    def planned_spec(
        self, plan: MemoryPlan, prompt: int, max_new_tokens: int = 0
    ) -> TieredCacheSpec:
        """Return the layout of the target cache with the placement of a plan."""
        shape = self.target_spec(prompt, max_new_tokens)
        return shape.with_placement(plan.resident_layers, plan.deferred_layers, plan.split_layers)

    def effective_device_tokens(self, plan: MemoryPlan, tokens: int, split_share: float) -> float:
        """Return the 16-bit equivalent number of tokens that attention reads on the device.

        `split_share` is the time to read a high byte, relative to a 16-bit element.
        """
        layers = self.target.layers
        split = plan.split_layers
        streamed = layers - plan.resident_layers - split
        whole = plan.resident_layers + split * split_share
        return (whole * tokens + streamed * min(self.budget, tokens)) / layers

    # -- consequences of a plan --------------------------------------------------------------------

    def uses_link(self, plan: MemoryPlan) -> bool:
        """Return whether a verification transfers KV over the link."""
        return self.copies and plan.resident_layers < self.target.layers

    def selection_interval(self, plan: MemoryPlan) -> int:
        """Return the minimum number of tokens between two selections."""
        over_link = self.uses_link(plan)
        default = SELECTION_INTERVAL_OVER_LINK if over_link else SELECTION_INTERVAL_ON_DEVICE
        return self.settings.selection_interval or default

    # -- memory ------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights on one rank, those of the draft included."""
        weights = weight_bytes(self.target, self.ranks, self.dtype)
        if self.draft is not None and self.has_draft:
            weights += weight_bytes(self.draft, self.draft_ranks, self.dtype)
        return weights

    def memory(self, prompt: int, max_new_tokens: int) -> MemoryRequirements:
        """Return the memory requirements beside the weights, by purpose.

        Raises InsufficientMemoryError, and ConfigError if there are fewer heads than ranks.
        """
        target, item = self.target, self.dtype.itemsize
        layer, shared = self._retrieval_bytes(prompt, max_new_tokens)
        return MemoryRequirements(
            target=self.target_spec(prompt, max_new_tokens),
            retrieval=self.target.layers * layer + shared if self.has_retrieval else 0,
            draft=self._draft_bytes(),
            tables=2 * (prompt + max_new_tokens) * target.rotary_dim * item,
            hidden=self.hidden_bytes(prompt),
            forwards=self._forward_bytes(prompt, max_new_tokens),
            splitting=self.has_split,
            streamed_retrieval=0 if self.has_retrieval else layer,
            selection=0 if self.has_retrieval else shared,
        )

    def _forward_bytes(self, prompt: int, max_new_tokens: int) -> int:
        """Return the scratch bytes of a decoding forward, beside the caches."""
        item = self.dtype.itemsize
        row = (
            ALLOCATOR_FACTOR * self.activation_elements * item
            + PROBS_BYTES_PER_LOGIT * self.target.vocab
        )
        rows = self.max_forward_tokens
        batch_invariant = 0
        if self.settings.deterministic:
            rows += 2 * ROW_BLOCK
            groups = self.target.heads // self.target.kv_heads
            batch_invariant = working_bytes(self.layout, prompt + max_new_tokens, rows, groups)
            batch_invariant += 8 * NOISE_POSITIONS * self.target.vocab  # float64
        return (
            rows * row
            + self._masked_bytes(prompt, max_new_tokens)
            + self.moe_scratch_bytes
            + batch_invariant
        )

    def hidden_bytes(self, tokens: int) -> int:
        """Return the bytes of hidden states and activations of a layer-major prefill."""
        chunk = min(tokens, self.prefill_chunk)
        elements = tokens * self.target.hidden + ALLOCATOR_FACTOR * chunk * self.activation_elements
        return elements * self.dtype.itemsize

    def _retrieval_bytes(self, prompt: int, max_new_tokens: int) -> tuple[int, int]:
        """Return the bytes of a layer's retrieval cache, and those shared or used by selection."""
        if not self.may_retrieve:
            return 0, 0
        layout = replace(self.layout, layers=1)
        shape = self.retrieval_spec(prompt, max_new_tokens)
        policy = POLICY_SPECS[self.settings.policy]
        rows = policy.query_rows * self.target.heads // self.target.kv_heads
        policy_state = policy.state_bytes(layout, shape.context, shape.chunk)
        shared = shape.shared_bytes(layout) + shape.scratch_bytes(layout, rows)
        return shape.layer_bytes(layout) + policy_state, shared

    def _masked_bytes(self, prompt: int, max_new_tokens: int) -> int:
        """Return the bytes of masked attention over the retrieval cache in a captured forward."""
        if not self.has_retrieval:
            return 0
        rows = min(self.max_forward_tokens, MAX_GRAPH_TOKENS)
        heads = self.layout.heads * self.target.heads // self.target.kv_heads
        values = MASKED_VALUES_PER_SCORE * rows * heads
        return 4 * values * self.retrieval_spec(prompt, max_new_tokens).slots

    def _draft_bytes(self) -> int:
        """Return the bytes of the draft cache."""
        if self.draft is None or not self.has_draft:
            return 0
        rank = self.rank if self.draft_ranks > 1 else None
        layout = self.draft.kv_layout(self.draft_ranks, self.dtype, rank)
        return self.draft_spec.device_bytes(layout)


def weight_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return the bytes of the last rank's weights, the maximum over ranks."""
    return parameter_count(config, ranks) * dtype.itemsize


def draft_ranks(draft: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return the default number of tensor-parallel ranks of a draft model."""
    large = weight_bytes(draft, 1, dtype) >= SPLIT_DRAFT_BYTES
    return ranks if large and draft.kv_heads >= ranks else 1
