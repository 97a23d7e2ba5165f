"""What a text takes of one rank, by the models' configs and the settings alone: no weights, no
device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decoding.settings import BUDGET, Settings
from decoding.speculation.decoders import CATCH_UP
from offload.errors import FitError
from offload.layout import ceil_div
from offload.memory_plan import Needs, tail_tokens
from offload.policies import POLICY_TRAITS
from offload.retrieval_shape import RetrievalShape
from parallel.config import ModelConfig
from parallel.sizes import MAX_GRAPH_TOKENS, parameter_count

# the longest draft put before the target, and before the level below, where they adapt
MOST, INNER_MOST = 64, 16
COMPUTE_REFRESH = 16  # tokens one selection serves where it costs compute
# selections that share the work of making all summaries anew, where it costs compute
COMPUTE_TURNS = 8
BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)  # of which one is chosen where none is set
NGRAM = 3  # tokens that prompt lookup matches
# tokens of host layers that gather on the device before they are written back, where nobody selects
BLOCK = 256
# times the activations that live at once: what an allocator holds for them (python -m bench memory)
HELD = 2
# float32 values that a masked pass holds for each row of a head and slot, with one recorded beside
# it
SCORES = 6
# of an entry of a row of logits: itself, its place in their order (int64), and what laws are made
# of and compared
LAW_BYTES = 48
PREFILL_BYTES, PREFILL_MOST = 256 << 20, 4096  # activations of one chunk, and its tokens, at most
# bytes of weights from which reading them takes longer than the collectives of a split model
LARGE_DRAFT = 3 << 30
USED = 0.9  # of the device memory that is free, where nothing else is said
SLACK = 64  # slots of the draft's cache that fill before its window slides


@dataclass(frozen=True)
class Sizes:
    """Of a target and, where this rank runs one, a draft."""

    target: ModelConfig
    draft: ModelConfig | None
    mode: str
    settings: Settings
    dtype: torch.dtype
    ranks: int
    draft_ranks: int  # over which the draft is split
    copies: bool  # whether the link copies

    @property
    def budget(self) -> int:
        """Of retrieval."""
        return self.settings.budget or BUDGET

    def budgets(self, context: int) -> list[int]:
        """Those of BUDGETS worth a thought for a text of `context` tokens: the first that holds it
        whole is the last.
        """
        return [
            each
            for each in BUDGETS
            if self.settings.chunk_size
            <= each
            < 2 * max(BUDGETS[0], self.settings.chunk_size, context)
        ]

    def spending(self, budget: int) -> Sizes:
        """With another retrieval budget."""
        return replace(self, settings=replace(self.settings, budget=budget))

    @property
    def has_retrieval(self) -> bool:
        return self.mode in ("hierarchical", "retrieval")

    @property
    def has_draft(self) -> bool:
        return self.mode in ("hierarchical", "speculative")

    @property
    def ngram(self) -> int:
        """Tokens that prompt lookup matches; 0 where there is none."""
        if self.mode == "plain":
            return 0
        if self.settings.lookup is not None:
            return self.settings.lookup
        return 0 if self.has_draft else NGRAM

    @property
    def most(self) -> int:
        """Tokens of the largest pass: the same on all ranks, whatever their plans."""
        return (
            max(
                self.settings.draft_length or MOST,
                self.settings.inner_length or INNER_MOST,
                CATCH_UP,
            )
            + 2
        )

    @property
    def window(self) -> int:
        """Recent tokens the draft's cache keeps when it slides: no fewer than a verification may
        still take back.
        """
        return max(self.settings.window, self.settings.draft_length or MOST)

    @property
    def activations(self) -> int:
        """Elements a token that a layer's prefill holds at most: a chunk that computes, and two
        whose sums are under way.
        """
        return 8 * self.target.hidden + 4 * self.target.intermediate // self.ranks

    @property
    def prefill_chunk(self) -> int:
        """Tokens that prefill computes at once: as many as keep large products large, within a
        bounded memory.
        """
        fits = PREFILL_BYTES // (self.activations * self.dtype.itemsize)
        return self.settings.prefill_chunk or max(256, min(PREFILL_MOST, fits // 256 * 256))

    def shape(self, prompt: int, new: int) -> RetrievalShape:
        """How the retrieval cache of such a text is laid out. Raises FitError for summaries that
        leave room for nothing else.
        """
        settings, context = self.settings, prompt + new
        summaries = (
            ceil_div(context, settings.summary_size)
            if settings.summary_size and context > self.budget
            else 0
        )
        if summaries + settings.chunk_size > self.budget:
            raise FitError(
                f"--summary-size {settings.summary_size}: {context} tokens need {summaries} "
                f"summaries, which leave no room for a chunk in --budget {self.budget}. Use larger "
                "summaries, or leave --summary-size out."
            )
        since = (
            (settings.refresh or COMPUTE_REFRESH) + 2 * self.most
            if POLICY_TRAITS[settings.policy].reselects
            else new
        )
        budget = max(settings.chunk_size, min(self.budget, context))
        return RetrievalShape.of(
            budget, settings.chunk_size, settings.summary_size, context, self.most, min(since, new)
        )

    def recent(self, prompt: int, new: int) -> tuple[int, int]:
        """Tokens that stay behind the target's boundary, and in what blocks it moves."""
        if not self.has_retrieval:
            return 0, BLOCK
        shape = self.shape(prompt, new)
        return shape.window, shape.block

    def needs(self, prompt: int, new: int) -> Needs:
        """Device memory beside the weights, by what it is for. Raises FitError, ConfigError."""
        settings, target, item = self.settings, self.target, self.dtype.itemsize
        layout = target.kv_layout(self.ranks, self.dtype)
        retrieval = draft = masked = 0
        if self.has_retrieval:
            shape, policy = self.shape(prompt, new), POLICY_TRAITS[settings.policy]
            retrieval = shape.device_bytes(layout) + shape.scratch_bytes(
                layout, policy.rows * target.heads // target.kv_heads
            )
            retrieval += policy.state_bytes(layout, shape.context, shape.chunk)
            recorded = min(self.most, MAX_GRAPH_TOKENS)
            masked = SCORES * 4 * recorded * target.heads // self.ranks * shape.slots
        if self.has_draft and self.draft is not None:
            slots = settings.sinks + self.window + SLACK
            # keys twice: raw and rotated
            draft = self.draft.kv_layout(self.draft_ranks, self.dtype).bytes(slots) * 3 // 2
        return Needs(
            layout=layout,
            context=prompt + new,
            tail=tail_tokens(*self.recent(prompt, new), self.most),
            retrieval=retrieval,
            draft=draft,
            tables=2 * (prompt + new) * target.head_dim * item,
            hidden=(
                prompt * target.hidden + HELD * min(prompt, self.prefill_chunk) * self.activations
            )
            * item,
            passes=self.most * (HELD * self.activations * item + LAW_BYTES * target.vocab) + masked,
            copies=self.copies,
        )


def weight_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Return the bytes of weights on the last rank, which has no fewer than any other."""
    return parameter_count(config, ranks) * dtype.itemsize


def draft_ranks(draft: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Over how many ranks a draft is split by default."""
    large = weight_bytes(draft, 1, dtype) >= LARGE_DRAFT
    return ranks if large and draft.kv_heads % ranks == 0 else 1
