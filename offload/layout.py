"""The shape of a KV cache: everything that the memory tiers need to know about a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


def shares(count: int, parts: int) -> list[int]:
    """Split `count` into `parts` nearly equal integers, spread evenly."""
    ends = [part * count // parts for part in range(parts + 1)]
    return [end - start for start, end in pairwise(ends)]


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


# Up to this number of scores per head, attention to windows is one masked call: that is faster than
# two without a mask, and a merge.
MASKED_SCORES = 1 << 16
# Tokens by which a sequence can be shortened from where its windows are kept: more than those at a
# prompt's end that are computed again for what observes them.
REWIND = 64
CHECKPOINT_STEP = 16_384  # tokens
# Last query tokens of a prompt, which observers see: every layer's attention is computed for these.
OBSERVED_ROWS = 32
# Tokens of which heads hold keys and values of their own at once, beside those of a chunk.
EXPANDED_TOKENS = 8192
WRITEBACK_BYTES = 512 << 10  # shorter copies to the host are slow
STATE_CHUNK = 64  # tokens between which a recurrent layer computes all scores
STATE_TOKENS = 512  # tokens of a prompt that it processes at once
_STATE_DIM = 64  # head dimension of a state where it is copied as KV


@dataclass(frozen=True)
class SlidingWindow:
    """Some layers in which a token attends to itself and the `tokens` - 1 before it, not to all.

    Source: Beltagy et al. 2020, Longformer, arXiv 2004.05150, section 3.1.
    """

    tokens: int
    layers: frozenset[int]
    step: int = CHECKPOINT_STEP  # a layer's last tokens are kept in host memory at its multiples

    @property
    def kept(self) -> int:
        """Return the tokens that a layer keeps at a position, if there are as many.

        They are more than its window, so that a sequence can be shortened a little.
        """
        return self.tokens + REWIND

    def segment(self, end: int) -> Segment:
        """Return the tokens that a layer keeps at a position."""
        return Segment(max(0, end - self.kept), end)

    def is_checkpoint(self, segment: Segment) -> bool:
        """Return whether a segment is what a layer keeps at a multiple of the step."""
        return segment.end % self.step == 0 and segment == self.segment(segment.end)

    def segments(self, tokens: int) -> list[Segment]:
        """Return what a layer keeps of so many tokens: at each multiple of the step, and at last.

        The last one is left out if it is a multiple.
        """
        ends = [*range(self.step, tokens + 1, self.step), *([tokens] if tokens % self.step else [])]
        return [self.segment(end) for end in ends]

    def resumable(self, length: int, segments: Iterable[Segment]) -> int:
        """Return the largest number of tokens, up to `length`, after which a sequence can go on.

        A layer that holds these segments has the whole window before it. 0 if there is none.
        """
        return max(
            (
                min(length, each.end)
                for each in segments
                if not each.start or min(length, each.end) >= each.start + self.tokens
            ),
            default=0,
        )


@dataclass(frozen=True)
class RecurrentShape:
    """Layers with a state of fixed size instead of keys and values: gated delta nets, or Mamba-2.

    The heads are those of one rank, or of the whole model. In Mamba-2 the values are x, and the key
    heads are its groups, with B as keys and C as queries. Source: Yang et al. 2025, Gated Delta
    Networks, arXiv 2412.06464, section 3; Dao and Gu 2024, Transformers are SSMs, arXiv 2405.21060,
    section 7.
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int  # a multiple of the key heads
    key_dim: int
    value_dim: int
    kernel_size: int  # weights of a channel in the causal convolution of queries, keys and values
    # whether value head i has key head i % key_heads; else consecutive ones share a key head
    is_tiled: bool = False
    is_mamba: bool = False  # else the layers are gated delta nets
    step: int = CHECKPOINT_STEP  # states are kept in host memory at its multiples

    @property
    def shared(self) -> int:
        """Return the value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Return the numbers of a token that are convolved: its queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a layer's state: float32, and the inputs of the convolution."""
        state = 4 * self.value_heads * self.key_dim * self.value_dim
        return state + (self.kernel_size - 1) * self.channels * itemsize

    def row_bytes(self, itemsize: int) -> int:
        """Return the bytes of what a layer keeps of a token that may still be rejected."""
        values = self.value_heads * (self.value_dim + 1)
        return self.channels * itemsize + 4 * (self.key_heads * self.key_dim + values)

    def cache_bytes(self, rows: int, itemsize: int) -> int:
        """Return the bytes of all layers' states in a cache, for forwards of up to `rows` rows."""
        rows += 1  # one is padding
        return len(self.layers) * (self.state_bytes(itemsize) + rows * self.row_bytes(itemsize))

    def rewindable_bytes(self, rows: int, rewind: int, itemsize: int) -> int:
        """Return the bytes of all layers' states that can go back by `rewind` tokens."""
        older = self.cache_bytes(2 * rewind + rows, itemsize)
        return self.cache_bytes(rows, itemsize) + older

    def kept_tokens(self, itemsize: int) -> int:
        """Return the tokens of KV, in the layout of `KVLayout.of`, whose bytes a state takes."""
        return ceil_div(self.state_bytes(itemsize), 2 * _STATE_DIM * itemsize)

    def segment(self, end: int, itemsize: int) -> Segment:
        """Return the tokens whose place the state at a position takes, where KV is copied."""
        return Segment(end - self.kept_tokens(itemsize), end)

    @staticmethod
    def last_position(tokens: int) -> int:
        """Return the position near the end of a prompt at which its state is kept.

        The tokens after it are computed again for what observes them.
        """
        return max(0, tokens - OBSERVED_ROWS) // STATE_CHUNK * STATE_CHUNK

    def positions(self, tokens: int) -> list[int]:
        """Return the positions at which the state of a prompt is kept, in order."""
        last = self.last_position(tokens)
        multiples = range(self.step, tokens + 1, self.step)
        return sorted({*multiples, last} - {0})

    def checkpoints(self, tokens: int) -> int:
        """Return how many states are kept of a sequence of up to so many tokens.

        They are those at multiples of the step, at the `last_position`, and at an extra one.
        """
        return tokens // self.step + 2


class Segment(NamedTuple):
    """Consecutive tokens of a sequence."""

    start: int
    end: int


class HeadShape(NamedTuple):
    """The KV heads of a layer: those of one rank, or of the whole model."""

    heads: int
    dim: int
    groups: int  # query heads per KV head


@dataclass(frozen=True)
class KVLayout:
    """The KV geometry of one rank. `heads` are the *local* KV heads.

    Numbers are those of layers with full attention, unless `of` or `windowed` gives others.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    groups: int = 1  # query heads per KV head
    window: SlidingWindow | None = None
    windowed_heads: HeadShape | None = None  # heads of layers with a window, if they are others
    recurrent: RecurrentShape | None = None
    planes: int = 2  # keys, and values; 1 if the values are the keys, which are stored once

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} must be at least 1, found {getattr(self, name)}")

    def window_of(self, layer: int) -> int | None:
        """Return the tokens of a layer's window; None for full attention."""
        window = self.window
        return window.tokens if window is not None and layer in window.layers else None

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer has a state instead of keys and values."""
        return self.recurrent is not None and layer in self.recurrent.layers

    @property
    def attention_layers(self) -> list[int]:
        """Return the layers with keys and values, in order."""
        return [layer for layer in range(self.layers) if not self.is_recurrent(layer)]

    @cached_property  # plans ask for it very often
    def full_layers(self) -> int:
        """The number of layers with full attention, whose KV grows with the sequence."""
        windowed = len(self.window.layers) if self.window is not None else 0
        return len(self.attention_layers) - windowed

    def with_full_attention(self, layers: int) -> KVLayout:
        """Return the geometry of so many layers with full attention."""
        return replace(self, layers=layers, window=None, windowed_heads=None, recurrent=None)

    @property
    def windowed(self) -> KVLayout:
        """The geometry of layers with a window."""
        if (own := self.windowed_heads) is None:
            return self
        return replace(
            self, heads=own.heads, head_dim=own.dim, groups=own.groups, windowed_heads=None
        )

    @property
    def kinds(self) -> list[KVLayout]:
        """The geometries of its layers, one or two."""
        if self.window is None or self.windowed_heads is None:
            return [self]
        if not self.full_layers:
            return [self.windowed]
        return [self, self.windowed]

    def of(self, layer: int) -> KVLayout:
        """Return the geometry of a layer; of a recurrent one, that in which its state is copied."""
        if self.is_recurrent(layer):
            return replace(self.with_full_attention(1), heads=1, head_dim=_STATE_DIM)
        return self if self.window_of(layer) is None else self.windowed

    def segments(self, layer: int, tokens: int) -> list[Segment]:
        """Return what is stored of a layer of a prompt: of one with a window, or a state, parts."""
        if self.is_recurrent(layer):
            assert self.recurrent is not None
            itemsize = self.dtype.itemsize
            positions = self.recurrent.positions(tokens)
            return [self.recurrent.segment(end, itemsize) for end in positions]
        if self.window_of(layer) is not None:
            assert self.window is not None
            return self.window.segments(tokens)
        return [Segment(0, tokens)]

    def resumable(self, length: int, tokens: int) -> int:
        """Return the largest number of tokens, up to `length`, after which a sequence can go on.

        It begins like a prompt of `tokens` tokens that is stored.
        """
        if self.recurrent is not None:
            positions = self.recurrent.positions(tokens)
            length = max((each for each in positions if each <= length), default=0)
        if self.window is not None:
            length = self.window.resumable(length, self.window.segments(tokens))
        return length

    @property
    def in_pairs(self) -> KVLayout:
        """The geometry of buffers with keys and values, even if these are the same."""
        return self if self.planes == 2 else replace(self, planes=2)

    def bytes(self, tokens: int, layers: int | None = None) -> int:
        """Return the bytes of `tokens` tokens in `layers` layers.

        By default in all layers, of which those with a window keep no more than its tokens.
        """
        if layers is None:
            rest = 0
            if (window := self.window) is not None:
                rest = self.windowed.bytes(min(tokens, window.tokens), len(window.layers))
            return rest + self.bytes(tokens, self.full_layers)
        token = self.planes * self.heads * self.head_dim * self.dtype.itemsize
        return tokens * layers * token

    def stored_bytes(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens in all layers, as they are stored for later use."""
        stored = self.bytes(tokens, self.full_layers)
        for layer in range(self.layers):
            if self.is_recurrent(layer) or self.window_of(layer) is not None:
                kept = sum(end - start for start, end in self.segments(layer, tokens))
                stored += self.of(layer).bytes(kept, 1)
        return stored

    def shape(self, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of head-major storage: (layers, planes, Hkv, tokens, D).

        A head's prefix is one contiguous copy.
        """
        return layers, self.planes, self.heads, tokens, self.head_dim
