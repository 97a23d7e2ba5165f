"""How a retrieval budget is spent: plain arithmetic, which plans need as much as the cache
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout import KVLayout, ceil_div

# keys, over all heads, that a choice looks at in one go: bounds its scratch memory
SEEN_TOKENS = 1 << 18


@dataclass(frozen=True)
class RetrievalShape:
    """How a budget of tokens a head is spent: selected + summaries + window = budget, right after a
    choice. All in tokens.

    The window is every token behind the target's boundary, so it takes `window` to `window + block`
    tokens and the rows of the pass. A context within the budget is kept whole. At least one chunk
    is always selected, even where the rest has used the budget up.
    """

    budget: int
    chunk: int  # selection goes by chunks of this many tokens
    summary: int  # tokens a summary stands for; 0 for no summaries
    window: int  # recent tokens that are kept exactly, at least
    block: int  # the boundary moves in steps of this; a multiple of chunk
    context: int  # tokens of the whole text
    rows: int  # tokens of the largest pass
    fresh: int  # tokens that may come between two choices, or behind the only one

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.budget:
            raise ValueError(
                f"a retrieval chunk must have 1 to budget = {self.budget} tokens, found "
                f"{self.chunk}"
            )
        if self.block % self.chunk:
            raise ValueError(
                f"the boundary must move by whole chunks of {self.chunk}, found blocks of "
                f"{self.block}"
            )

    @classmethod
    def of(
        cls, budget: int, chunk: int, summary: int | None, context: int, rows: int, fresh: int
    ) -> RetrievalShape:
        """Sizes that suit a budget. `summary` None: summaries of 64 tokens, or more where they
        would take over a quarter of it.
        """
        block = ceil_div(min(64, max(1, budget // 4)), chunk) * chunk
        if summary is None:
            summary = 64
            while context > summary * max(1, budget // 4):
                summary *= 2
        return cls(budget, chunk, summary, min(32, budget // 8), block, context, rows, fresh)

    def split(self, prefix: int, recent: int) -> tuple[int, int]:
        """Tokens to select and summaries to make, with `prefix` tokens up to the boundary and
        `recent` ones behind it.
        """
        if prefix + recent <= self.budget:
            return prefix, 0
        summaries = ceil_div(prefix, self.summary) if self.summary else 0
        chunks = max(1, (self.budget - summaries - recent) // self.chunk)
        selected = min(chunks * self.chunk, prefix)
        return selected, summaries if selected < prefix else 0

    @property
    def slots(self) -> int:
        """Tokens a head that must fit the buffer."""
        summaries = ceil_div(self.context, self.summary) if self.summary else 0
        least = self.chunk + summaries + self.window + self.block + self.rows
        return max(self.budget, least) + self.fresh

    def device_bytes(self, layout: KVLayout) -> int:
        return layout.bytes(self.slots) + (
            layout.layers * layout.heads * self.slots * 4 if self.summary else 0
        )

    def scratch_bytes(self, layout: KVLayout, rows: int) -> int:
        """What choosing takes while it is done: a few arrays of `rows` float32 a key, mean keys, a
        copy of keys that lie apart.
        """
        keys = max(min(SEEN_TOKENS, self.context * layout.heads), self.context)
        return 4 * keys * (4 * rows + layout.head_dim // self.chunk + layout.head_dim)
