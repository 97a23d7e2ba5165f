"""The shape of the retrieval cache: how a budget is spent, and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout import KVLayout, ceil_div

# keys, over all heads, that a selection looks at in one go: bounds its scratch memory
OBSERVED_KEYS = 1 << 18
# bytes of what is written out of 8 bits to be attended to, unless one head takes more: less than
# half of what the second-level cache of a 4090 holds, for it is read again at once
SHARED_BYTES = 34 << 20
# of second-level cache: with less, what is written out of 8 bits is gone before it is read again
MIN_L2_BYTES = SHARED_BYTES * 3 // 2
# elements that are quantised at a time, in float32: bounds the same
QUANTISED_ELEMENTS = 1 << 22
_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class RetrievalCacheSpec:
    """How a budget of tokens a head is spent: selected + window = budget.

    It is spent so right after a selection. The window is every token behind the target's boundary:
    `window` to `window + block` tokens, and the rows of the pass. A context within the budget is
    kept whole. At least one chunk is always selected, even where the rest has used the budget up.
    All numbers are tokens.
    """

    budget: int
    chunk: int  # selection goes by chunks of this many tokens
    window: int  # recent tokens that are kept exactly, at least
    block: int  # the boundary moves in steps of this; a multiple of chunk
    context: int  # tokens of the whole text
    rows: int  # tokens of the largest pass
    append_room: int  # tokens that may come between two selections, or behind the only one
    quantised: bool = False  # whether selected tokens are kept in 8 bits

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
        cls, budget: int, chunk: int, context: int, rows: int, append_room: int
    ) -> RetrievalCacheSpec:
        """Return sizes that suit a budget."""
        quarter = max(1, budget // 4)
        block = ceil_div(min(64, quarter), chunk) * chunk
        window = max(1, min(32, budget // 8))
        return cls(budget, chunk, window, block, context, rows, append_room)

    def selected(self, prefix: int, recent: int) -> int:
        """Return how many tokens to select.

        `prefix` tokens stand before the boundary, `recent` ones behind it.
        """
        if prefix + recent <= self.budget:
            return prefix
        chunks = max(1, (self.budget - recent) // self.chunk)
        return min(chunks * self.chunk, prefix)

    @property
    def selected_slots(self) -> int:
        """Tokens a head that selected ones have slots of their own for, where they are quantised.

        A text within the budget is selected whole, but for its window.
        """
        return self.budget

    @property
    def slots(self) -> int:
        """Tokens a head that a pass may attend to."""
        window = self.window + self.block + self.rows
        if self.quantised:
            return self.selected_slots + window + self.append_room
        return max(self.budget, self.chunk + window) + self.append_room

    def kv_buffer(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the shape of keys and values (layers, 2, Hkv, slots, D)."""
        return layout.shape(layout.layers, self.slots)

    def layer_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory that each layer takes."""
        if not self.quantised:
            return layout.bytes(self.slots, 1)
        window = self.slots - self.selected_slots
        return self.quantised_bytes(layout, self.selected_slots, window)

    @staticmethod
    def quantised_bytes(layout: KVLayout, selected: int, window: int) -> int:
        """Return what a layer takes for so many quantised tokens, and for so many whole ones."""
        elements = 2 * layout.heads * layout.head_dim
        scales = 2 * layout.heads * layout.dtype.itemsize
        return selected * (elements + scales) + layout.bytes(window, 1)

    def shared_heads(self, layout: KVLayout) -> int:
        """Return how many heads are written out of 8 bits at a time: about as many each time."""
        head = layout.bytes(self.slots, 1) // layout.heads
        at_most = max(1, SHARED_BYTES // head)
        return ceil_div(layout.heads, ceil_div(layout.heads, at_most))

    def shared_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory that all layers share."""
        if not self.quantised:
            return 0
        head = layout.bytes(self.slots, 1) // layout.heads
        return head * self.shared_heads(layout)

    def device_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory the cache takes."""
        return layout.layers * self.layer_bytes(layout) + self.shared_bytes(layout)

    def scratch_bytes(self, layout: KVLayout, rows: int) -> int:
        """Return the bytes that selecting takes while it is done, `rows` rows having a say.

        They are a few float32 arrays of a value for each key and row, mean keys, and a copy of keys
        that lie apart; and what is quantised at a time.
        """
        concurrency = min(OBSERVED_KEYS, self.context * layout.heads)
        keys = max(concurrency, self.context)
        means = layout.head_dim // self.chunk
        values = keys * (4 * rows + means + layout.head_dim)
        if self.quantised:
            elements = 2 * layout.heads * self.selected_slots * layout.head_dim
            values += 2 * min(QUANTISED_ELEMENTS, elements)
        return _FLOAT32 * values
