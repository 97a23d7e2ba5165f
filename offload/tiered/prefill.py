"""Layer-major prefill of the target's cache: all that is read in one layer before the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor

from offload.attention.head_major import attend_prefix, token_slice, write_tokens
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVBlock, copies_to
from offload.tiered.layer import TieredLayer

OBSERVED_ROWS = (
    32  # rows of the prompt that followers see: a prefill attends with these in every layer
)


class Prefill:
    """A context in which a cache is given tokens after those it holds: a prompt, or another turn.

    When it is left, the cache holds them too; after a prompt `TieredCache.onload_deferred` is to follow.
    After an error the cache is good for nothing.

    `attend` or `store` is called for all chunks of a layer before any of the next layer, in order;
    `attend` for the last one. Positions count from the first of these tokens. The KV of a layer
    that is not on the device is built in the stage, a buffer that all such layers share, and leaves
    for the host block by block as it is computed. What the layer held before comes to the stage
    once, and first; of a prompt nothing is read back.
    """

    def __init__(self, cache: TieredCache, tokens: int):
        self.tokens = tokens
        self._cache = cache
        self._cached = cache.length
        self._boundary = cache.boundary  # among the tokens that the cache holds
        # (2, Hkv, N, D) for all N tokens; None where every layer has a buffer of its own
        self._staging: Tensor | None = None
        # the stage's blocks on their way to the host, of this layer and of the one before: the
        # first token of each, and its ticket
        self._leaving: deque[tuple[int, Any]] = deque()
        self._left: deque[tuple[int, Any]] = deque()

    def __enter__(self) -> Prefill:
        """Raise ValueError where the cache has no room for the tokens."""
        cache, end = self._cache, self._cached + self.tokens
        cache.check_room(self.tokens)
        cache.boundary = cache.shape.boundary(end)
        for follower in cache.observers:
            follower.on_forward(cache.boundary, end, end)
        self._staging = cache.staging_buffer(end)
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
            layer.finish_prefill()
        self._cache.link.drain()
        self._cache.advance(self.tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Keep the KV of the tokens at `start` and return their attention output.

        q (T, Hq, D), k and v (T, Hkv, D), none of them rotated; out (T, Hq, D).
        """
        cache = self._cache
        at = self._cached + start
        end = at + len(q)
        q = cache.rotary(q, at, layer)
        k = cache.rotary(k, at, layer)
        kv = self._build(layer, k, v, at)
        out, _ = attend_prefix(kv, q, end, cache.traffic)
        if end == self._cached + self.tokens:
            prefix = token_slice(kv, 0, cache.boundary)
            recent = token_slice(kv, cache.boundary, end)
            cache.notify(layer, 0, q[-OBSERVED_ROWS:], prefix, recent)
        return out

    def store(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Keep the KV of tokens whose own attention nobody asks for."""
        at = self._cached + start
        self._build(layer, self._cache.rotary(k, at, layer), v, at)

    def load_blocks(self, layer: int, pieces: Iterable[KVBlock]) -> None:
        """Let a layer hold the KV of all these tokens, which comes in pieces.

        In place of `attend` and `store`, for an empty cache. Followers see nothing of it.
        """
        cache, link = self._cache, self._cache.link
        place = cache.layers[layer]
        kv = None
        if place.is_split:
            kv = self._acquire_staging()
            self._wait_for_staging(self.tokens)
        for piece in pieces:
            copies = (
                place.load_blocks(piece, cache.boundary) if kv is None else copies_to(kv, piece)
            )
            ticket = link.copy(copies)
            link.wait(ticket)
            for _, source in copies:
                cache.traffic.link_in += source.nbytes if link.copies else 0
        if kv is not None:
            self._store(place, kv, 0, self.tokens)

    def _build(self, layer: int, k: Tensor, v: Tensor, at: int) -> Tensor:
        """Add rotated k and v, of the tokens from `at` on, to this layer's KV; return all of it.

        It is (2, Hkv, N, D).
        """
        place = self._cache.layers[layer]
        end = at + len(k)
        kv = place.buffer
        if kv is None:
            assert self._staging is not None
            kv = self._acquire_staging() if at == self._cached else self._staging
            self._wait_for_staging(end)
        if at == self._cached and at:
            self._load_cached(place, kv)
        write_tokens(kv, k, v, at)
        self._store(place, kv, at, end)
        return kv

    def _acquire_staging(self) -> Tensor:
        """Return the stage, for another layer than the one whose blocks are leaving it."""
        assert self._staging is not None
        self._left.extend(self._leaving)
        self._leaving.clear()
        return self._staging

    def _load_cached(self, place: TieredLayer, kv: Tensor) -> None:
        """Bring what the layer holds to where its KV is built."""
        ticket = place.load(kv, self._cached, self._boundary)
        if ticket is not None:
            self._cache.link.wait(ticket)
        if self._cache.boundary < self._boundary:
            place.truncate(self._cache.boundary)  # the rest is recent, and may yet be replaced
        # what was recent may be part of the prefix now, or the other way round
        first = min(self._boundary, self._cache.boundary)
        self._store(place, kv, first, self._cached)

    def _store(self, place: TieredLayer, kv: Tensor, start: int, end: int) -> None:
        """Keep what stands in kv from `start` to `end` where its layer keeps it."""
        ticket = place.store(token_slice(kv, start, end), start, self._cache.boundary)
        if ticket is not None:
            self._leaving.append((start, ticket))

    def _wait_for_staging(self, end: int) -> None:
        """Wait until what the layer before has in the stage up to `end` has left."""
        while self._left and self._left[0][0] < end:
            _, ticket = self._left.popleft()
            self._cache.link.wait(ticket)
