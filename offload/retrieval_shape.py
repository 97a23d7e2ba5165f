"""The shape of the retrieval cache: how a budget is spent, and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from offload.layout import KVLayout, ceil_div

# keys, over all heads, that a selection looks at in one go: bounds its scratch memory
OBSERVED_KEYS = 1 << 18
_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class RetrievalShape:
    """How a budget of tokens a head is spent: selected + summaries + window = budget.

    It is spent so right after a selection. The window is every token behind the target's boundary:
    `window` to `window + block` tokens, and the rows of the pass. A context within the budget is
    kept whole. At least one chunk is always selected, even where the rest has used the budget up.
    All numbers are tokens.
    """

    budget: int
    chunk: int  # selection goes by chunks of this many tokens
    summary: int  # tokens a summary stands for; 0 for no summaries
    window: int  # recent tokens that are kept exactly, at least
    block: int  # the boundary moves in steps of this; a multiple of chunk
    context: int  # tokens of the whole text
    rows: int  # tokens of the largest pass
    append_room: int  # tokens that may come between two selections, or behind the only one

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
        cls, budget: int, chunk: int, summary: int | None, context: int, rows: int, append_room: int
    ) -> RetrievalShape:
        """Return sizes that suit a budget.

        `summary` None: summaries of 64 tokens, or of more where they would take over a quarter of
        the budget.
        """
        quarter = max(1, budget // 4)
        block = ceil_div(min(64, quarter), chunk) * chunk
        if summary is None:
            summary = 64
            while context > summary * quarter:
                summary *= 2
        window = min(32, budget // 8)
        return cls(budget, chunk, summary, window, block, context, rows, append_room)

    def split(self, prefix: int, recent: int) -> tuple[int, int]:
        """Return how many tokens to select and how many summaries to make.

        `prefix` tokens stand before the boundary, `recent` ones behind it.
        """
        if prefix + recent <= self.budget:
            return prefix, 0
        summaries = self._summaries(prefix)
        chunks = max(1, (self.budget - summaries - recent) // self.chunk)
        selected = min(chunks * self.chunk, prefix)
        return selected, summaries if selected < prefix else 0

    @property
    def slots(self) -> int:
        """Tokens a head that must fit the buffer."""
        window = self.window + self.block + self.rows
        needed = self.chunk + self._summaries(self.context) + window
        return max(self.budget, needed) + self.append_room

    def _summaries(self, tokens: int) -> int:
        return ceil_div(tokens, self.summary) if self.summary else 0

    def kv_buffer(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the shape of keys and values (layers, 2, Hkv, slots, D)."""
        return layout.shape(layout.layers, self.slots)

    def bias_buffer(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the shape of the weights of keys (layers, Hkv, slots), float32."""
        return layout.layers, layout.heads, self.slots if self.summary else 0

    def device_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory the cache takes."""
        kv = prod(self.kv_buffer(layout)) * layout.dtype.itemsize
        return kv + prod(self.bias_buffer(layout)) * _FLOAT32

    def scratch_bytes(self, layout: KVLayout, rows: int) -> int:
        """Return the bytes that selecting takes while it is done, `rows` rows having a say.

        They are a few float32 arrays of a value for each key and row, mean keys, and a copy of keys
        that lie apart.
        """
        at_once = min(OBSERVED_KEYS, self.context * layout.heads)
        keys = max(at_once, self.context)
        means = layout.head_dim // self.chunk
        values = 4 * rows + means + layout.head_dim
        return _FLOAT32 * keys * values
