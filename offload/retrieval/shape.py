"""The spec of the retrieval cache: how its budget is spent, and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass

from offload.codec.format import split_format
from offload.layout import KVLayout, ceil_div

# keys, over all heads, that a selection processes at once: bounds its scratch memory
OBSERVED_KEYS = 1 << 18
# bytes of the buffer that int8 KV is dequantised to without a fused kernel, unless one head takes
# more: under half of a 4090's L2 cache, since attention reads it right away
SHARED_BYTES = 34 << 20
# elements quantised at once, in float32: also bounds scratch memory
QUANTISED_ELEMENTS = 1 << 22
_FLOAT32, _INT64, _INT32 = 4, 8, 4  # bytes
# bytes per element of keys whose low bits are packed: the key, its low bits in 16 bits, and in 8
_PACKING_BYTES = 6


@dataclass(frozen=True)
class RetrievalCacheSpec:
    """How a budget of tokens per head is spent: selected + window = budget.

    That holds right after a selection. The window is every token after the target's boundary:
    `window` to `window + block` tokens, and the query tokens of the forward. A context within the
    budget is kept whole. At least one chunk is always selected, even if the rest exceeds the
    budget. All numbers are tokens.
    """

    budget: int
    chunk: int  # tokens that are selected together
    window: int  # minimum number of recent tokens, which are kept exactly
    block: int  # step of the boundary; a multiple of chunk
    context: int  # tokens of the whole sequence
    rows: int  # query tokens of the largest forward
    append_room: int  # maximum tokens between two selections, or after the only one
    quantised: bool = False  # whether selected tokens are stored in int8
    # slots of a context within the budget are rounded up to a multiple of this
    whole_step: int = 1

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
        """Return how many tokens to select, of `prefix` tokens before the boundary.

        `recent` tokens follow it.
        """
        if prefix + recent <= self.budget:
            return prefix
        chunks = max(1, (self.budget - recent) // self.chunk)
        return min(chunks * self.chunk, prefix)

    @property
    def selected_slots(self) -> int:
        """Slots per head for selected tokens; if quantised, these are apart from the window's.

        A context within the budget is selected whole, except for its window.
        """
        if self.budget < self.context:
            return self.budget
        return ceil_div(self.budget, self.whole_step) * self.whole_step

    @property
    def slots(self) -> int:
        """Tokens per head that a forward may attend to.

        Buffers have room for one more, for padding (`StaticCache`).
        """
        window = self.window + self.block + self.rows
        if self.quantised:
            return self.selected_slots + window + self.append_room
        return max(self.selected_slots, self.chunk + window) + self.append_room

    def windowed_slots(self, window: int) -> int:
        """Return the slots of a layer with a window: those before the boundary, and all after it.

        `window` is the layer's own, in tokens.
        """
        recent = self.window + self.block + self.rows + self.append_room
        return min(window, self.context) + recent

    def kv_buffer(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the shape of keys and values (layers, 2, Hkv, slots + 1, D)."""
        return layout.in_pairs.shape(layout.layers, self.slots + 1)

    def has_buffers_of(self, other: RetrievalCacheSpec, window: int | None = None) -> bool:
        """Return whether caches of both specs have the same buffers.

        `window`: that of some of the target's layers, in tokens.
        """
        own, others = (
            (
                each.slots,
                each.quantised,
                each.quantised and each.selected_slots,
                window and each.windowed_slots(window),
                each.rows,  # recurrent states have room for them
            )
            for each in (self, other)
        )
        return own == others

    def layer_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory of one layer."""
        if not self.quantised:
            return layout.in_pairs.bytes(self.slots + 1, 1)
        window = self.slots + 1 - self.selected_slots
        return self.quantised_bytes(layout, self.selected_slots, window)

    @staticmethod
    def quantised_bytes(layout: KVLayout, selected: int, window: int) -> int:
        """Return a layer's bytes for `selected` int8 tokens, and `window` in full precision."""
        elements = 2 * layout.heads * layout.head_dim
        scales = 2 * layout.heads * layout.dtype.itemsize
        return selected * (elements + scales) + layout.in_pairs.bytes(window, 1)

    def shared_heads(self, layout: KVLayout) -> int:
        """Return how many heads are dequantised at once, in parts of about equal size."""
        head_bytes = layout.in_pairs.bytes(self.slots, 1) // layout.heads
        max_heads = max(1, SHARED_BYTES // head_bytes)
        return ceil_div(layout.heads, ceil_div(layout.heads, max_heads))

    def shared_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory that all layers share."""
        if not self.quantised:
            return 0
        head_bytes = layout.in_pairs.bytes(self.slots, 1) // layout.heads
        return head_bytes * self.shared_heads(layout)

    def windowed_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory of all layers with a window."""
        if (window := layout.window) is None:
            return 0
        return layout.windowed.bytes(self.windowed_slots(window.tokens) + 1, len(window.layers))

    def device_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory of the cache."""
        full = layout.full_layers * self.layer_bytes(layout) + self.shared_bytes(layout)
        return full + self.windowed_bytes(layout)

    def scratch_bytes(self, layout: KVLayout, rows: int) -> int:
        """Return the bytes of scratch memory of a selection by `rows` query tokens.

        It is a few float32 arrays with a value per key and query token, the mean keys, a contiguous
        copy of keys, and the elements being quantised.
        """
        batched_keys = min(OBSERVED_KEYS, self.context * layout.heads)
        keys = max(batched_keys, self.context)
        means = layout.head_dim // self.chunk
        values = keys * (4 * rows + means + layout.head_dim)
        if self.quantised:
            elements = 2 * layout.heads * self.selected_slots * layout.head_dim
            values += 2 * min(QUANTISED_ELEMENTS, elements)
        return _FLOAT32 * values


@dataclass(frozen=True)
class SplitSelectionSpec:
    """The numbers of tokens of a selection in split layers."""

    budget: int  # selected tokens per head
    chunk: int  # tokens that are selected together
    context: int  # tokens of the whole sequence

    @property
    def chunks(self) -> tuple[int, int]:
        """Return how many chunks per head are selected at most, and how many the sequence has."""
        selected = max(1, min(self.budget, self.context) // self.chunk)
        return selected, ceil_div(self.context, self.chunk)

    @property
    def selector(self) -> RetrievalCacheSpec:
        """Return what a `Selector` needs to know: recent tokens are no part of this budget."""
        budget = max(self.chunk, self.budget)
        return RetrievalCacheSpec(budget, self.chunk, 0, self.chunk, self.context, 0, 0)

    def layer_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of device memory of one layer."""
        fmt = split_format(layout.dtype)
        assert fmt is not None
        selected, chunks = self.chunks
        tokens = selected * self.chunk * fmt.low_key_bytes(layout.head_dim)
        return layout.heads * (tokens + _INT64 * selected + _INT32 * chunks)

    def packing_bytes(self, layout: KVLayout) -> int:
        """Return the bytes of scratch memory of packing the heads that are selected at a time."""
        selected, _ = self.chunks
        tokens = selected * self.chunk
        packed = max(tokens, min(OBSERVED_KEYS, layout.heads * tokens))
        return _PACKING_BYTES * packed * layout.head_dim
