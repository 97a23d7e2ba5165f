"""The caches and the memory of a request of one size; bytes are per rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from decoding.config.defaults import (
    ALLOCATOR_FACTOR,
    BOUNDARY_BLOCK,
    DRAFT_SLACK,
    MASKED_VALUES_PER_SCORE,
    SELECTION_INTERVAL_ON_DEVICE,
    SPLIT_BLOCK,
    SPLIT_RECENT,
    WHOLE_CONTEXT_STEP,
)
from decoding.planning.activations import (
    activation_elements,
    expanded_bytes,
    has_own_kv,
    moe_scratch_bytes,
    prefill_chunk,
    recurrence_bytes,
    sampling_bytes,
    unpacked_expert_bytes,
)
from decoding.planning.memory_plan import MemoryRequirements
from decoding.planning.requirements import Requirements
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.codec.format import compression_saves
from offload.errors import InvalidRequestError
from offload.kernels.batch_invariant_shape import ROW_BLOCK, working_bytes
from offload.layout import MASKED_SCORES, ceil_div
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.retrieval.shape import RetrievalCacheSpec, SplitSelectionSpec
from offload.tiered.shape import TieredCacheSpec
from parallel.config.parameter_count import MAX_GRAPH_TOKENS, MAX_STATIC_TOKENS


@dataclass(frozen=True)
class RequestSpec:
    """A request's size, and the specs of its caches in one mode and retrieval budget.

    Specs and memory raise ConfigError if there are fewer heads than ranks.
    """

    requirements: Requirements
    prompt: int  # tokens
    max_new_tokens: int

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for an empty prompt."""
        if self.prompt < 1:
            raise InvalidRequestError(f"a prompt needs at least 1 token, found {self.prompt}.")

    @property
    def tokens(self) -> int:
        """Return the tokens of prompt and output together."""
        return self.prompt + self.max_new_tokens

    @cached_property
    def retrieval(self) -> RetrievalCacheSpec:
        """Return the layout of the retrieval cache."""
        needs, settings = self.requirements, self.requirements.settings
        # tokens generated between two selections: all of them without reselection
        interval_tokens = self.max_new_tokens
        if POLICY_SPECS[settings.policy].reselects:
            interval = settings.selection_interval or SELECTION_INTERVAL_ON_DEVICE
            interval_tokens = interval + 2 * needs.max_forward_tokens + max_ahead(self)
            if not settings.graphs:
                interval_tokens = min(self.max_new_tokens, interval_tokens)
        budget = max(settings.chunk_size, min(needs.strategy.budget, self.tokens))
        rows = needs.max_forward_tokens
        shape = RetrievalCacheSpec.of(
            budget, settings.chunk_size, self.tokens, rows, interval_tokens
        )
        # Requests that differ little in size have equal buffers: they replay the same CUDA graphs.
        step = WHOLE_CONTEXT_STEP if settings.graphs else 1
        shape = replace(shape, quantised=needs.int8_retrieval, whole_step=step)
        if not needs.has_split:
            return shape
        block = ceil_div(SPLIT_BLOCK, shape.chunk) * shape.chunk
        return replace(shape, window=SPLIT_RECENT, block=block)

    @cached_property
    def split_selection(self) -> SplitSelectionSpec | None:
        """Return the numbers of selected keys of split layers; None if there are none."""
        needs = self.requirements
        if not needs.strategy.split_budget:
            return None
        return SplitSelectionSpec(
            needs.strategy.split_budget, needs.settings.chunk_size, self.tokens
        )

    @cached_property
    def target(self) -> TieredCacheSpec:
        """Return the layout of the target cache without a placement of layers."""
        needs, rows = self.requirements, self.requirements.max_forward_tokens
        forward_rows = rows
        recent, block = 0, BOUNDARY_BLOCK
        if needs.may_retrieve:
            recent, block = self.retrieval.window, self.retrieval.block
        if needs.has_split:  # accepted tokens and, after them, tokens drafted meanwhile
            rows *= 2
        shape = TieredCacheSpec.with_ring(
            needs.layout, self.tokens, recent, block, rows, needs.copies
        )
        compressed = needs.settings.compress_offload
        if compressed is None:
            compressed = needs.has_split and needs.copies
        compressed = compressed and compression_saves(needs.dtype)
        return replace(
            shape,
            compressed=compressed,
            batch_invariant=needs.settings.deterministic,
            forward_rows=forward_rows,
        )

    @property
    def draft(self) -> StreamingCacheSpec:
        """Return the layout of the draft cache.

        When its window slides, it keeps at least as many tokens as a verification can reject. A
        prediction block has no sinks: the target's hidden states of the first tokens are not kept,
        and its gated attention needs none (Qiu et al. 2025, arXiv 2505.06708, section 4).
        """
        needs, settings = self.requirements, self.requirements.settings
        window = max(settings.window, settings.draft_length_range(needs.mode)[-1])
        sizes = window, DRAFT_SLACK, needs.max_forward_tokens
        if needs.draft is not None and needs.draft.is_predictor:
            return StreamingCacheSpec(0, *sizes, hidden=needs.draft.hidden)
        return StreamingCacheSpec(settings.sinks, *sizes)

    @cached_property
    def memory(self) -> MemoryRequirements:
        """Return the memory requirements beside the weights, by purpose."""
        needs, target = self.requirements, self.requirements.target
        layer, shared, scratch = _retrieval_bytes(self)
        whole_retrieval = target.full_layers * layer + shared + scratch
        whole_retrieval += self.retrieval.windowed_bytes(needs.layout)
        has_own_rope = target.windowed_rope is not None and target.sliding_window is not None
        rotated = target.rotary_dim  # dimensions of a position's cosines, and of its sines
        if has_own_rope:
            own = target.windowed_heads
            rotated += target.rotary_dim if own is None else own.dim
        return MemoryRequirements(
            target=self.target,
            retrieval=whole_retrieval if needs.has_retrieval else 0,
            draft=self._draft_bytes,
            states=_state_bytes(needs),
            tables=2 * self.tokens * rotated * needs.dtype.itemsize,
            hidden=self.hidden_bytes(self.prompt),
            forwards=self._forward_bytes,
            captured=self._captured_bytes(1),
            splitting=needs.has_split,
            streamed_retrieval=(0, 0, 0) if needs.has_retrieval else (layer, shared, scratch),
            split_selection=_split_selection_bytes(self),
        )

    def shared_memory(self, concurrency: int) -> MemoryRequirements:
        """Return the memory requirements of one of `concurrency` requests: graphs share memory."""
        return replace(self.memory, captured=self._captured_bytes(concurrency))

    def hidden_bytes(self, tokens: int) -> int:
        """Return the bytes of hidden states and activations of a layer-major prefill."""
        needs = self.requirements
        chunk = min(tokens, prefill_chunk(needs, self.prompt))
        activations = (
            ALLOCATOR_FACTOR * chunk * activation_elements(needs, has_own_kv(needs, chunk))
        )
        nbytes = (tokens * needs.target.hidden + activations) * needs.dtype.itemsize
        window, layout = needs.layout.window, needs.layout
        if window is not None:  # a chunk's keys with those before it that it sees, and reversed
            nbytes += 3 * layout.windowed.bytes(min(tokens, chunk + window.tokens), 1)
        nbytes += unpacked_expert_bytes(needs) + recurrence_bytes(needs, tokens)
        return nbytes + expanded_bytes(needs, tokens, chunk)

    def _captured_bytes(self, concurrency: int) -> int:
        """Return a request's share of the scratch bytes of captured forwards.

        Graphs keep them, in one memory pool for all requests.
        """
        needs = self.requirements
        if not (needs.settings.graphs and (needs.has_retrieval or needs.has_draft)):
            return 0
        rows = min(concurrency * self._captured_tokens, MAX_STATIC_TOKENS)
        logits = 4 * needs.target.vocab  # bytes of a token's
        forward = rows * (self._row_elements * needs.dtype.itemsize + logits)
        # each model's graphs of one request, and of several, leave their logits in a buffer
        outputs = MAX_GRAPH_TOKENS + (MAX_STATIC_TOKENS if concurrency > 1 else 0)
        outputs *= (needs.has_retrieval + needs.has_draft) * logits
        return (forward + outputs + self._masked_bytes + moe_scratch_bytes(needs)) // concurrency

    @property
    def _captured_tokens(self) -> int:
        """Return the query tokens of a request's longest captured forward."""
        return min(self.requirements.max_forward_tokens, MAX_GRAPH_TOKENS)

    @property
    def _row_elements(self) -> int:
        """Return the elements of a query token's activations in a decoding forward."""
        return ALLOCATOR_FACTOR * activation_elements(self.requirements)

    @property
    def _forward_bytes(self) -> int:
        """Return the scratch bytes of a decoding forward, beside the caches."""
        needs = self.requirements
        rows = needs.max_forward_tokens
        batch_invariant = 0
        if needs.settings.deterministic:
            rows += 2 * ROW_BLOCK
            layout = needs.layout
            batch_invariant = working_bytes(layout, self.tokens, rows, layout.groups)
        scratch = self._masked_bytes + _windowed_bytes(needs) + recurrence_bytes(needs, rows)
        scratch += moe_scratch_bytes(needs) + sampling_bytes(needs, rows) + batch_invariant
        return rows * self._row_elements * needs.dtype.itemsize + scratch

    @property
    def _masked_bytes(self) -> int:
        """Return the bytes of masked attention over the retrieval cache in a captured forward."""
        needs = self.requirements
        if not needs.has_retrieval:
            return 0
        slots = self.retrieval.slots
        if (window := needs.layout.window) is not None:
            slots += self.retrieval.windowed_slots(window.tokens)  # has a mask of its own
        scores = self._captured_tokens * _query_heads(needs) * slots
        return 4 * MASKED_VALUES_PER_SCORE * scores

    @property
    def _draft_bytes(self) -> int:
        """Return the bytes of the draft cache."""
        needs = self.requirements
        if needs.draft is None or not needs.has_draft:
            return 0
        rank = needs.rank if needs.draft_ranks > 1 else None
        return self.draft.device_bytes(needs.draft.kv_layout(needs.draft_ranks, needs.dtype, rank))


def _retrieval_bytes(spec: RequestSpec) -> tuple[int, int, int]:
    """Return the bytes of a layer's retrieval cache, shared ones, and those of a selection."""
    needs, shape = spec.requirements, spec.retrieval
    if not needs.may_retrieve:
        return 0, 0, 0
    layout = needs.layout.with_full_attention(1)
    rows, policy = _policy_sizes(needs, shape)
    scratch = shape.scratch_bytes(layout, rows)
    return shape.layer_bytes(layout) + policy, shape.shared_bytes(layout), scratch


def _split_selection_bytes(spec: RequestSpec) -> tuple[int, int]:
    """Return the bytes of a split layer's selected keys, and of a selection.

    The scratch memory of a retrieval level's selection serves both.
    """
    needs, selection = spec.requirements, spec.split_selection
    if selection is None:
        return 0, 0
    layout = needs.layout.with_full_attention(1)
    rows, policy = _policy_sizes(needs, spec.retrieval)
    scratch = replace(spec.retrieval, quantised=False).scratch_bytes(layout, rows)
    scratch += selection.packing_bytes(layout)
    if needs.has_retrieval:
        scratch = max(0, scratch - spec.retrieval.scratch_bytes(layout, rows))
    return selection.layer_bytes(layout) + policy, scratch


def _policy_sizes(requirements: Requirements, shape: RetrievalCacheSpec) -> tuple[int, int]:
    """Return the query rows of a KV head that a policy samples, and its own bytes in a layer."""
    policy = POLICY_SPECS[requirements.settings.policy]
    layout = requirements.layout.with_full_attention(1)
    rows = policy.query_rows * layout.groups
    return rows, policy.state_bytes(layout, shape.context, shape.chunk)


def _state_bytes(requirements: Requirements) -> int:
    """Return the bytes of the recurrent states of drafting levels with the target's weights."""
    if (states := requirements.layout.recurrent) is None:
        return 0
    levels = requirements.has_retrieval + requirements.has_split
    rows, itemsize = requirements.max_forward_tokens, requirements.dtype.itemsize
    return levels * states.cache_bytes(rows, itemsize)


def _windowed_bytes(requirements: Requirements) -> int:
    """Return the scratch bytes of attention to windows in a forward that is not captured."""
    window, layout = requirements.layout.window, requirements.layout
    if window is None:
        return 0
    masked = 4 * MASKED_VALUES_PER_SCORE * MASKED_SCORES * _query_heads(requirements)
    if requirements.settings.deterministic:  # one block of rows, always masked
        scores = ROW_BLOCK * (window.tokens + ROW_BLOCK) * _query_heads(requirements)
        masked = max(masked, 4 * MASKED_VALUES_PER_SCORE * scores)
    return masked + 2 * layout.windowed.bytes(window.tokens, 1)


def _query_heads(requirements: Requirements) -> int:
    """Return the largest number of query heads of a layer on a rank."""
    return max(each.heads * each.groups for each in requirements.layout.kinds)


def max_ahead(spec: RequestSpec) -> int:
    """Return how many tokens are drafted during a verification, at most; 0: none are.

    The next draft, of all but the first of them, is no longer than any other. With the one that is
    verified, they may be rejected: a draft model's window must not have slid past them.
    """
    needs = spec.requirements
    if not needs.drafts_ahead:
        return 0
    longest = needs.settings.draft_length_range(needs.mode)[-1]
    return min(longest, spec.draft.window - longest) if needs.has_draft else longest
