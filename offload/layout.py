"""The shape of a KV cache: everything that the memory tiers need to know about a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} must be at least 1, found {getattr(self, name)}")

    def window_of(self, layer: int) -> int | None:
        """Return the tokens of a layer's window; None for full attention."""
        window = self.window
        return window.tokens if window is not None and layer in window.layers else None

    @property
    def full_layers(self) -> int:
        """Return the number of layers with full attention, whose KV grows with the sequence."""
        return self.layers - (len(self.window.layers) if self.window is not None else 0)

    def without_windows(self, layers: int) -> KVLayout:
        """Return the geometry of so many layers with full attention."""
        return replace(self, layers=layers, window=None, windowed_heads=None)

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
        """Return the geometry of a layer."""
        return self if self.window_of(layer) is None else self.windowed

    @property
    def layer_token_bytes(self) -> int:
        """Return the bytes of one token's keys and values in one layer on this rank."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    def bytes(self, tokens: int, layers: int | None = None) -> int:
        """Return the bytes of `tokens` tokens in `layers` layers.

        By default in all layers, of which those with a window keep no more than its tokens.
        """
        if layers is None:
            rest = 0
            if (window := self.window) is not None:
                rest = self.windowed.bytes(min(tokens, window.tokens), len(window.layers))
            return rest + self.bytes(tokens, self.full_layers)
        return tokens * self.layer_token_bytes * layers

    def stored_bytes(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens in all layers, as they are stored for later use."""
        if (window := self.window) is None:
            return self.bytes(tokens)
        kept = sum(end - start for start, end in window.segments(tokens))
        return self.bytes(tokens, self.full_layers) + self.windowed.bytes(kept, len(window.layers))

    def shape(self, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of head-major storage: (layers, keys and values, Hkv, tokens, D).

        A head's prefix is one contiguous copy.
        """
        return layers, 2, self.heads, tokens, self.head_dim
