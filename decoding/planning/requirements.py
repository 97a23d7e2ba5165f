"""What all requests of an engine have in common: models, settings and ranks.

Everything follows from configs and settings alone: no weights, no device. Bytes are per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from decoding.config.defaults import (
    DEFAULT_RETRIEVAL_BUDGET,
    RETRIEVAL_BUDGETS,
    SPLIT_BUDGET_SHARES,
    SPLIT_DRAFT_BYTES,
)
from decoding.config.settings import LEVELS, Settings
from decoding.speculation.draft_length import MAX_CATCH_UP
from offload.codec.format import split_format
from offload.dtypes import dtype_name
from offload.layout import KVLayout
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import min_kv_heads
from parallel.config.weight_sizes import weight_sizes
from parallel.formats.plane_format import PlaneFormat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Strategy:
    """A mode, and the budgets in it."""

    mode: str  # one of LEVELS
    budget: int  # tokens per head; unused in modes without retrieval
    split_budget: int = 0  # tokens per head of split layers with exact keys


@dataclass(frozen=True)
class Requirements:
    """The models that decode requests, and how: what their caches and memory follow from."""

    target: ModelConfig
    draft: ModelConfig | None  # None if this rank runs no draft model
    mode: str  # never `auto`
    settings: Settings
    dtype: torch.dtype
    ranks: int
    draft_ranks: int  # tensor-parallel ranks of the draft model
    copies: bool  # whether offloaded KV is copied over the link
    multiprocessors: float | None = None  # those of a rank's GPU; None on a CPU
    rank: int | None = None  # None: the last rank, which holds no less than any other

    def __post_init__(self) -> None:
        """Raise TierForceError for a split mode with a dtype that cannot be split."""
        self.settings.check_split_dtype(self.mode, dtype_name(self.dtype))

    @cached_property  # plans ask for it very often
    def layout(self) -> KVLayout:
        """The geometry of the target's KV on this rank.

        Split floats have keys and values, even if these are the same. Raises ConfigError if there
        are fewer heads than ranks.
        """
        layout = self.target.kv_layout(self.ranks, self.dtype, self.rank)
        return layout.in_pairs if self.has_split or self.settings.compress_offload else layout

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights on one rank, those of the draft included."""
        weights = weight_bytes(self.target, self.ranks, self.dtype)
        if self.draft is not None and self.has_draft:
            weights += weight_bytes(self.draft, self.draft_ranks, self.dtype)
        return weights

    @property
    def max_forward_tokens(self) -> int:
        """Return the query tokens of the largest forward in this mode, the same on all ranks."""
        outer = self.settings.draft_length_range(self.mode)[-1]
        inner = self.settings.inner_draft_length_range[-1]
        return max(outer, inner, MAX_CATCH_UP) + 2

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

    @property
    def has_draft(self) -> bool:
        """Return whether this mode uses a draft model."""
        return "draft" in LEVELS[self.mode]

    @property
    def drafts_ahead(self) -> bool:
        """Return whether drafts continue while a verification waits for the link.

        Not with recurrent states, which go back by one draft only, or a prediction block, which
        reads the target's own states: those are of verified tokens only.
        """
        wanted = self.settings.draft_ahead
        if wanted is None:
            wanted = self.settings.num_draft_tokens is None
        layouts, is_predicted = [self.layout], False
        if self.draft is not None and self.has_draft:
            layouts.append(self.draft.kv_layout(self.draft_ranks, self.dtype))
            is_predicted = self.draft.is_predictor
        is_recurrent = any(layout.recurrent is not None for layout in layouts)
        has_levels = bool(LEVELS[self.mode])
        return wanted and has_levels and self.copies and not (is_predicted or is_recurrent)

    @property
    def int8_retrieval(self) -> bool:
        """Return whether the retrieval cache stores 8-bit elements.

        The default is yes if elements have 16 bits and KV can be offloaded.
        """
        setting = self.settings.int8_retrieval
        return self.copies and self.dtype.itemsize == 2 if setting is None else setting

    # -- strategy: mode and retrieval budget -------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Return the mode and the budgets: by default DEFAULT_RETRIEVAL_BUDGET, and none."""
        settings = self.settings
        split_budget = (settings.split_budget or 0) if self.has_split else 0
        return Strategy(
            self.mode, settings.retrieval_budget or DEFAULT_RETRIEVAL_BUDGET, split_budget
        )

    @property
    def has_choice(self) -> bool:
        """Return whether the mode or a budget is selected per request."""
        several = len(self.candidate_modes) > 1
        return several or self.selects_budget or _selects_split_budget(self)

    @property
    def candidate_modes(self) -> list[str]:
        """Return the modes to consider: this one and, with mode `auto`, its split variant."""
        split = f"split-{self.mode}"
        can_split = (
            self.copies and self.target.full_layers > 0 and split_format(self.dtype) is not None
        ) and self.target.latent is None  # split latents are stored twice
        return [self.mode, split] if can_split and self.settings.mode == "auto" else [self.mode]

    @property
    def selects_budget(self) -> bool:
        """Return whether the mode has a retrieval budget and the settings leave it open."""
        return self.may_retrieve and self.settings.retrieval_budget is None

    def with_strategy(self, strategy: Strategy) -> Requirements:
        """Return these requirements with a fixed mode and budgets."""
        settings = replace(self.settings, mode=strategy.mode, retrieval_budget=strategy.budget)
        fixed = replace(self, mode=strategy.mode, settings=settings)
        if not _selects_split_budget(fixed):
            return fixed
        settings = replace(settings, split_budget=strategy.split_budget)
        return replace(fixed, settings=settings)


def candidate_budgets(requirements: Requirements, context: int) -> list[int]:
    """Return the budgets to consider for `context` tokens, up to the first that covers them.

    The configured one alone, if there is one, or a chunk, if it is larger than any.
    """
    if not requirements.selects_budget:
        return [requirements.strategy.budget]
    chunk = requirements.settings.chunk_size
    end = 2 * max(RETRIEVAL_BUDGETS[0], chunk, context)
    return [budget for budget in RETRIEVAL_BUDGETS if chunk <= budget < end] or [chunk]


def candidate_split_budgets(requirements: Requirements, context: int) -> list[int]:
    """Return the budgets of split layers to consider for `context` tokens, in order.

    The configured one alone, if there is one; none in modes without a split level.
    """
    if not _selects_split_budget(requirements):
        return [requirements.strategy.split_budget]
    start, end = (share * context for share in SPLIT_BUDGET_SHARES)
    start, budget = max(start, requirements.settings.chunk_size), RETRIEVAL_BUDGETS[0]
    budgets = [0]
    while budget <= end:
        if budget >= start:
            budgets.append(budget)
        budget *= 2
    return budgets


def _selects_split_budget(requirements: Requirements) -> bool:
    """Return whether split layers have selected keys, of a number that the settings leave open."""
    return requirements.has_split and requirements.settings.split_budget is None


def largest_forward(requirements: Requirements) -> int:
    """Return the query tokens of the largest forward in any mode that a request may get."""
    modes = requirements.candidate_modes
    return max(replace(requirements, mode=mode).max_forward_tokens for mode in modes)


def noise_positions(requirements: Requirements) -> int:
    """Return the positions with cached noise: those of a longest draft; 0 without coupling."""
    if not requirements.settings.deterministic:
        return 0
    drafts = 2 if requirements.drafts_ahead else 1
    return drafts * requirements.max_forward_tokens


def weight_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return the bytes of a rank's weights, the maximum over ranks.

    Packed ones need memory in which a layer is unpacked.
    """
    sizes = weight_sizes(config, ranks, dtype.itemsize)
    return sizes.nbytes + sizes.scratch


def whole_weight_bytes(requirements: Requirements) -> int:
    """Return the bytes of all weights on one rank if none of them are packed."""
    draft = requirements.draft
    whole = replace(
        requirements,
        target=replace(requirements.target, kept_types=()),
        draft=None if draft is None else replace(draft, kept_types=()),
    )
    return whole.weight_bytes


def weight_notes(requirements: Requirements) -> list[str]:
    """Return notes for the user about matrices that are not packed, if there are any."""
    ranks, target = requirements.ranks, requirements.target
    sizes = weight_sizes(target, ranks, requirements.dtype.itemsize)
    cut, notes = sizes.cut, []
    if target.kept_types and sizes.whole_experts:
        share = sizes.whole_experts / (sizes.whole_experts + sizes.kept_experts)
        notes.append(
            f"{share:.0%} of the experts' weights are stored in 16 bits: only types of 4 bits and "
            "more stay packed, the same for all experts of a layer, with columns in order."
        )
    if not cut:
        return notes
    kinds = [kind for _, kind in requirements.target.kept_types]
    has_order = any(isinstance(kind, PlaneFormat) and kind.order for kind in kinds)
    why = "hold parts of all groups (act-order)" if has_order else "end inside of a block"
    return [
        *notes,
        f"{cut} matrices of the model are not packed: with {ranks} GPUs, each GPU's columns of "
        f"them {why}.",
    ]


def predictor_notes(requirements: Requirements) -> list[str]:
    """Return a note for the user about the target's multi-token-prediction block, if it has one."""
    draft, is_auto = requirements.draft, requirements.settings.mode == "auto"
    if draft is not None and draft.is_predictor and requirements.has_draft:
        return [
            "Drafts come from the model's own multi-token-prediction block; `mode` retrieval "
            "leaves it out."
        ]
    if draft is None and requirements.target.has_predictor and is_auto:
        return [
            "The model's multi-token-prediction block is left out: the context fits only without."
        ]
    return []


def draft_ranks(draft: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return the default number of tensor-parallel ranks of a draft model.

    A prediction block's are those of its target, whose head it shares.
    """
    if draft.is_predictor:
        return ranks
    large = weight_bytes(draft, 1, dtype) >= SPLIT_DRAFT_BYTES
    return ranks if large and min_kv_heads(draft) >= ranks else 1
