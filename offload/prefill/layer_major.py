"""Layer-major prefill of the target's cache: all tokens pass one layer before the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from offload.attention.expanded_latents import LatentHeads, attend_expanded
from offload.attention.folding import Partial
from offload.attention.head_major import attend_prefix, in_pairs, token_slice, write_tokens
from offload.attention.window import attend_slots
from offload.layout import OBSERVED_ROWS, WRITEBACK_BYTES, KVLayout, Segment
from offload.prefill.host_copy import KVSource
from offload.recurrent.recurrence import RecurrentInputs
from offload.tiered.cache import TieredCache, notify
from offload.tiered.kv_file import HostReader, KVBlock, copies_to
from offload.tiered.layer import TieredLayer
from offload.tiered.recurrent import RecurrentLayer
from offload.tiered.windowed import WindowedLayer


class Prefill:
    """A context that adds tokens to a cache: a prompt, or another turn.

    On exit the cache has advanced past them; after a prompt, call `TieredCache.onload_deferred`.
    After an error the cache is unusable.

    `attend` or `store` is called for all chunks of a layer before any of the next layer, in order;
    `attend` for the last one. Positions count from the first of these tokens. The KV of a layer
    that is not on the device is built in the staging buffer, shared by all such layers, and copied
    to the host as it is computed, in blocks of at least 512 KiB of a head. KV that the layer
    already held is loaded into the staging buffer once, at the start; none of the prompt's own is
    read back. A layer with a window keeps its last tokens, and its chunks see those.
    """

    def __init__(self, cache: TieredCache, tokens: int):
        self.tokens = tokens
        self._cache = cache
        self._cached = cache.length
        self._boundary = cache.boundary  # within the cached tokens
        # (2, Hkv, N, D) for all N tokens; None where every layer has a buffer of its own
        self._staging: Tensor | None = None
        # staged blocks in flight to the host (first token, ticket), of this layer and the previous
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._previous_in_flight: deque[tuple[int, Any]] = deque()
        self._stored = 0  # the first tokens, which this layer has been passed
        self._staged: TieredLayer | None = None  # the layer whose KV is in the staging buffer

    def __enter__(self) -> Prefill:
        """Raise ValueError if the cache has no room for the tokens."""
        cache, end = self._cache, self._cached + self.tokens
        cache.check_room(self.tokens)
        cache.boundary = cache.shape.boundary(end)
        for observer in cache.observers:
            observer.on_forward(cache.boundary, end, end)
        self._staging = cache.buffers.staging(cache.shape, end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        for layer in self._cache.layers:
            layer.finish_store()
        self._cache.link.drain()
        self._cache.advance(self.tokens)
        if self._cache.recurrent is not None:
            self._cache.recurrent.end_prompt(self._cache.length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        """Store the KV of the tokens at `start` and return their attention.

        q (T, Hq, D), k and v (T, Hkv, D), none of them rotated.
        """
        cache = self._cache
        at = self._cached + start
        end = at + len(q)
        q, k = cache.rotary.queries_and_keys(q, k, at, layer)
        layer_kv = cache.layers[layer]
        if isinstance(layer_kv, WindowedLayer):
            seen = layer_kv.extend(k, v, at, cache.boundary)
            out = attend_slots(seen, q, seen.shape[2], cache.traffic, layer_kv.window)
            (group,) = layer_kv.groups(end, cache.boundary)
            prefix, recent = group.split_at(cache.boundary)
        else:
            kv = self._build(layer_kv, k, v, at)
            out = attend_prefix(kv, q, end, cache.traffic)
            prefix, recent = _parted(kv, cache.boundary, end)
        if end == self._cached + self.tokens:
            notify(cache.observers, layer, 0, q[-OBSERVED_ROWS:], prefix, recent)
        return out

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads, start: int
    ) -> Partial:
        """Store the latents of the tokens at `start`, return the attention to heads' own KV.

        q (T, Hq, D) and latents (T, 1, Dl), none of them rotated.
        """
        cache = self._cache
        at = self._cached + start
        end = at + len(q)
        q = cache.rotary.queries(q, at, layer)
        latents = cache.rotary.keys(latents, at, layer)
        kv = self._build(cache.layers[layer], latents, latents, at)
        out = attend_expanded(kv[0, 0, :end], q, heads, cache.traffic)
        if cache.observers and end == self._cached + self.tokens:
            observed = heads.latent_queries(q[-OBSERVED_ROWS:])
            notify(cache.observers, layer, 0, observed, *_parted(kv, cache.boundary, end))
        return out

    def store(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store the KV of tokens whose attention output is not needed."""
        at = self._cached + start
        k = self._cache.rotary.keys(k, at, layer)
        layer_kv = self._cache.layers[layer]
        if isinstance(layer_kv, WindowedLayer):
            layer_kv.extend(k, v, at, self._cache.boundary)
        else:
            self._build(layer_kv, k, v, at)

    @property
    def output_rows(self) -> int:
        """The last tokens of which the last layer's output is needed.

        In deterministic runs they do not depend on what drafts: how many rows are computed at once
        may affect the last one.
        """
        kept = self._cache.hidden_states
        if kept is None or self._cache.is_batch_invariant:
            return OBSERVED_ROWS
        return max(OBSERVED_ROWS, kept.kept)

    def keep_hidden_states(self, states: Tensor) -> None:
        """Keep the hidden states (T, hidden) of the last tokens, after the final norm."""
        if (kept := self._cache.hidden_states) is not None:
            kept.record(states, self._cached + self.tokens - len(states))

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor:
        """Return a recurrent layer's outputs (T, Hv, Dv) of the tokens at `start`.

        It is called for all tokens, in order.
        """
        states = self._cache.recurrent
        assert states is not None
        if not start:  # not where states are loaded: these are kept, and no others
            states.begin_prompt(self._cached, self._cached + self.tokens)
        return states.extend_from(layer, inputs, self._cached + start)

    def load_blocks(
        self, layer: int, blocks: Iterable[KVBlock], segment: Segment | None = None
    ) -> None:
        """Load a layer's KV of all these tokens from blocks; with a window or state, of a segment.

        Replaces `attend` and `store`, for an empty cache. Observers are not notified.
        """
        cache, link = self._cache, self._cache.link
        layer_kv = cache.layers[layer]
        kv = None
        if isinstance(layer_kv, WindowedLayer):
            layer_kv.begin_load(segment or Segment(0, self.tokens), self.tokens)
        if isinstance(layer_kv, RecurrentLayer):
            assert segment is not None
            layer_kv.begin_load(segment)
        if layer_kv.is_split:
            kv = self._acquire_staging(layer_kv)
            self._wait_for_staging(self.tokens)
        for block in blocks:
            copies = (
                layer_kv.load_block(block, cache.boundary) if kv is None else copies_to(kv, block)
            )
            ticket = link.copy(copies)
            link.wait(ticket)
            for _, source in copies:
                cache.traffic.link_in += source.nbytes if link.copies else 0
        if kv is not None:
            self._store(layer_kv, kv, 0, self.tokens)

    def _build(self, layer_kv: TieredLayer, k: Tensor, v: Tensor, at: int) -> Tensor:
        """Write rotated k and v, of the tokens from `at` on, to this layer's KV; return all of it.

        It is (2, Hkv, N, D).
        """
        end = at + len(k)
        kv = layer_kv.buffer
        if kv is None:
            assert self._staging is not None
            kv = self._acquire_staging(layer_kv) if at == self._cached else self._staging
            self._wait_for_staging(end)
        if at == self._cached:
            self._stored = at
            if at:
                self._load_cached(layer_kv, kv)
        write_tokens(kv, k, v, at)
        head_bytes = (end - self._stored) * k.shape[2] * k.element_size()
        if head_bytes >= WRITEBACK_BYTES or end == self._cached + self.tokens:
            self._store(layer_kv, kv, self._stored, end)
            self._stored = end
        return kv

    def _acquire_staging(self, layer_kv: TieredLayer) -> Tensor:
        """Return the staging buffer, from which the previous layer's blocks are still in flight."""
        assert self._staging is not None
        if self._staged is not None:
            self._staged.finish_store()
        self._staged = layer_kv
        self._previous_in_flight.extend(self._in_flight)
        self._in_flight.clear()
        return self._staging

    def _load_cached(self, layer_kv: TieredLayer, kv: Tensor) -> None:
        """Load the KV that the layer already holds to where its KV is built."""
        ticket = layer_kv.load(kv, self._cached, self._boundary)
        if ticket is not None:
            self._cache.link.wait(ticket)
        if self._cache.boundary < self._boundary:
            layer_kv.truncate(self._cache.boundary)  # tokens past it go to the tail
        # tokens between both boundaries move from the tail to the prefix, or back
        first = min(self._boundary, self._cache.boundary)
        self._store(layer_kv, kv, first, self._cached)

    def _store(self, layer_kv: TieredLayer, kv: Tensor, start: int, end: int) -> None:
        """Store the tokens from `start` to `end` of kv in the layer."""
        ticket = layer_kv.store(token_slice(kv, start, end), start, self._cache.boundary)
        if ticket is not None:
            self._in_flight.append((start, ticket))

    def _wait_for_staging(self, end: int) -> None:
        """Wait until the previous layer's blocks before `end` have been copied out of staging."""
        while self._previous_in_flight and self._previous_in_flight[0][0] < end:
            _, ticket = self._previous_in_flight.popleft()
            self._cache.link.wait(ticket)


def _parted(kv: Tensor, boundary: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a layer's KV up to the boundary, and those from it to `end`."""
    return in_pairs(token_slice(kv, 0, boundary)), in_pairs(token_slice(kv, boundary, end))


def copy_prefix(source: KVSource, cache: TieredCache, tokens: int) -> Iterator[int]:
    """Copy the KV of a source's first tokens to an empty cache, of the same layout.

    Yields each layer's index once it is copied; the cache has these tokens after the last step.
    From now on a source that is a cache may be decoded on, but not truncated below these tokens.
    There are fewer tokens than in the prompt, so that its observers see the last ones, and the
    source is `resumable` after them. Raises InsufficientMemoryError.
    """
    return _copy_layers(source, source.host_readers(), cache, tokens)


@torch.inference_mode()
def _copy_layers(
    source: KVSource, readers: Sequence[HostReader], cache: TieredCache, tokens: int
) -> Iterator[int]:
    with Prefill(cache, tokens) as prefill:
        for index, (layer, read) in enumerate(zip(cache.layers, readers, strict=True)):
            on_device = _on_device(source, index)
            if on_device is not None and layer.buffer is not None and layer.is_on_device:
                token_slice(layer.buffer, 0, tokens).copy_(token_slice(on_device, 0, tokens))
            else:
                heads = range(cache.layout.of(index).heads)
                held, window = read.segments or [Segment(0, tokens)], cache.layout.window
                for _, part in loaded_segments(cache.layout, index, held, tokens):
                    if window is not None and index in window.layers:
                        part = Segment(max(part.start, part.end - window.kept), part.end)
                    blocks = (KVBlock(head, part.start, read(head, *part)) for head in heads)
                    prefill.load_blocks(index, blocks, part)
            yield index
    cache.truncate(tokens)


def loaded_segments(
    layout: KVLayout, layer: int, held: Sequence[Segment], tokens: int
) -> list[tuple[Segment, Segment]]:
    """Return what to load of a layer, for the first `tokens` of a sequence.

    In a layer with a window, that is what `held` has at multiples of the step, and at last. Each is
    a part of one of `held`, which precedes it in the result. In a recurrent layer it is all states.
    """
    if layout.is_recurrent(layer):
        return [(each, each) for each in held if each.end <= tokens]
    window = layout.window
    if window is None or layer not in window.layers:
        return [(each, Segment(0, tokens)) for each in held[:1]]
    saved = sorted(each for each in held if each.end <= tokens and window.is_checkpoint(each))
    parts = [(each, each) for each in saved]
    if saved and saved[-1].end == tokens:
        return parts
    last = next(each for each in held if window.resumable(tokens, [each]) == tokens)
    return [*parts, (last, Segment(last.start, tokens))]


def _on_device(source: KVSource, layer: int) -> Tensor | None:
    """Return a layer's KV (2, Hkv, N, D) if all of it is on the device."""
    if not isinstance(source, TieredCache) or not source.layers[layer].is_on_device:
        return None
    return source.layers[layer].buffer
