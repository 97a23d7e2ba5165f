"""Short forwards in static shapes, on caches with a slot per token.

A forward whose shapes, addresses and launches are the same at any length can be captured once and
replayed: as a CUDA graph it costs one launch instead of hundreds. So positions are read from device
memory here, as in gpt-fast's static cache. Plain operations attend to all slots of a cache, of
which some are masked; fused kernels to those that are visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from offload.attention import masked_attention
from offload.attention.folding import Partial, concatenated
from offload.attention.head_major import attend_by_heads, token_slice
from offload.cache.static_shape import StaticCache
from offload.kernels.selection import slot_kernels
from offload.recurrent.recurrence import RecurrentInputs
from offload.rotary import Angles


@dataclass(frozen=True)
class Place:
    """The place of a forward's `tokens` tokens in a cache; 0 tokens leave the cache as it is."""

    tokens: int
    start: int = 0  # the first token's position in the sequence
    slot: int = 0  # the first token's
    position: int = 0  # the first token's, in RoPE
    first_valid_slot: int = 0
    # the same in layers with a window
    windowed_slot: int = 0
    first_valid_windowed_slot: int = 0

    @classmethod
    def after(cls, cache: StaticCache, tokens: int) -> Place:
        """Place the next forward's tokens after the cached ones; count the bytes it attends to.

        Raises ValueError if they do not fit.
        """
        cache.begin_forward(tokens)
        slot, position = cache.slot_and_position(cache.length)
        if not cache.has_room(tokens):  # a sliding cache raises in `begin_forward`
            raise ValueError(f"{tokens} tokens at slot {slot} do not fit a buffer of {cache.slots}")
        cache.traffic.attended += cache.slot_bytes(0, cache.slots)
        windowed = cache.windowed_slot(cache.length)
        first = cache.first_valid_slot()
        return cls(tokens, cache.length, slot, position, first, *windowed[:2])


class StaticForward:
    """Forwards of up to `rows` tokens on each cache; after `place`, all else can be captured.

    The tokens of all sequences follow each other. Those that a forward lacks are padding, whose
    results are of no use.
    """

    length = 0  # unused: the start is in device memory
    is_batch_invariant = False

    def __init__(self, caches: Sequence[StaticCache], rows: int):
        layout = caches[0].layout
        self.caches, self._rows = list(caches), rows
        # number of tokens, slot of the first one, and the first valid slot (B, 3): in layers of
        # full attention, and in those with a window
        device = caches[0].buffers(layout.attention_layers[0]).kv.device
        self._places = [
            torch.zeros(len(caches), 3, dtype=torch.int64, device=device) for _ in range(2)
        ]
        self._starts = torch.zeros(len(caches), dtype=torch.int64, device=device)
        # copied from the sequences' tables: the next sequence on a cache has others
        count = len(caches) * rows
        self._angles = caches[0].rotary.angles(0, 1).map(lambda table: table.repeat(count, 1, 1))
        kernels = [
            slot_kernels(device.type, layout.dtype, each.head_dim, each.groups)[0]
            for each in layout.kinds
        ]
        self._attention = (
            _PlainAttention(self.caches, rows)
            if kernels[0] is None or None in kernels
            else _FusedAttention(self.caches, kernels[0])
        )

    def place(self, index: int, place: Place) -> None:
        """Set where the next forward's tokens on a cache are."""
        slots = (
            (place.slot, place.first_valid_slot),
            (place.windowed_slot, place.first_valid_windowed_slot),
        )
        for places, numbers in zip(self._places, slots, strict=True):
            for tensor, number in zip(places[index], (place.tokens, *numbers), strict=True):
                tensor.fill_(number)
        self._starts[index].fill_(place.start)
        rotary, first = self.caches[index].rotary, index * self._rows
        own = rotary.angles(place.position, place.position + place.tokens)
        for table, rows in zip(self._angles, own, strict=True):
            assert (table is None) == (rows is None)
            if table is not None and rows is not None:
                table[first : first + place.tokens].copy_(rows)

    def written(self, index: int, place: Place) -> Tensor:
        """Return the KV (2, Hkv, T, D) of tokens placed there, in a cache's first layer with any.

        It is a view, which a forward should write.
        """
        cache = self.caches[index]
        layer = cache.layout.attention_layers[0]
        first = place.slot - cache.window_offset
        if cache.layout.window_of(layer) is not None:
            first = place.windowed_slot
        return token_slice(cache.buffers(layer).kv, first, first + place.tokens)

    def begin_forward(self, rows: int) -> None:
        """Read the places from device memory."""
        self._attention.begin(self._places)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        """Write the tokens' KV and return their attention, as `Cache.attend`; `start` is unused."""
        return self._attention.attend(layer, self._angles.scaled(q), k, v, self._angles)

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor:
        """Return a recurrent layer's outputs (B * T, Hv, Dv), as `Cache.recur`."""
        firsts = [index * self._rows for index in range(len(self.caches))]
        parts = [inputs.rows(slice(first, first + self._rows)) for first in firsts]
        outs = []
        for cache, own, place in zip(self.caches, parts, self._places[0], strict=True):
            assert cache.recurrent is not None
            outs.append(cache.recurrent.outputs(layer, own, place[0]))
        return torch.cat(outs)

    def previous_hidden_states(self, rows: int) -> Tensor:
        """Return the hidden states (B * T, hidden), as `PredictionCache` does."""
        parts = []
        for cache, start in zip(self.caches, self._starts, strict=True):
            assert cache.hidden_states is not None
            parts.append(cache.hidden_states.read(start - 1, self._rows))
        return torch.cat(parts)

    def keep_hidden_states(self, states: Tensor, rows: int) -> None:
        """Keep each sequence's part of states (B * T, hidden), as `Cache.keep_hidden_states`."""
        parts = states.split(self._rows)
        places = zip(self.caches, parts, self._starts, self._places[0], strict=True)
        for cache, own, start, place in places:
            cache.keep_first_hidden_states(own, start, place[0])


class _FusedAttention:
    """The tokens of all sequences are written and attended to by kernels."""

    def __init__(self, caches: Sequence[StaticCache], kernels: ModuleType):
        self._kernels, self._layout, self._rotary = kernels, caches[0].layout, caches[0].rotary
        kinds: list[list[int]] = [[], []]  # layers with full attention, and with a window
        for layer in self._layout.attention_layers:
            kinds[int(self._layout.window_of(layer) is not None)].append(layer)
        # table of each layer's kind, with its index there
        self._tables: dict[int, tuple[Any, int]] = {}
        for layers in filter(None, kinds):
            table = kernels.SlotTable.of(
                [each.buffers(layer) for each in caches] for layer in layers
            )
            self._tables |= {layer: (table, index) for index, layer in enumerate(layers)}

    def begin(self, places: Sequence[Tensor]) -> None:
        """Begin a forward with the places of a StaticForward, (B, 3) for each kind of layer."""
        self._places = places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Partial:
        """Return the attention of q (B * T, Hq, D), as `StaticForward.attend`."""
        turns, window = self._rotary.of_layer(angles, layer), self._layout.window_of(layer)
        places = self._places[int(window is not None)]
        table, index = self._tables[layer]
        q = self._kernels.write(q, k, v, turns, table, index, places)
        q = self._rotary.weighted(q, layer)
        out: Partial = self._kernels.attend(q, table, index, places, window)
        return out


class _PlainAttention:
    """Plain operations, sequence by sequence, with masks for slots that are not visible."""

    def __init__(self, caches: Sequence[StaticCache], rows: int):
        self._caches, self._layout, self._rotary = caches, caches[0].layout, caches[0].rotary
        device = caches[0].buffers(self._layout.attention_layers[0]).kv.device
        self._steps = torch.arange(rows, device=device)
        self._windowed_slots = [cache.windowed_slot(cache.length).slots for cache in caches]
        slots = max(max(cache.slots for cache in caches), *self._windowed_slots)
        self._columns = torch.arange(slots, device=device)

    def begin(self, places: Sequence[Tensor]) -> None:
        """Compute slots and masks from the places of a StaticForward, (B, 3) each."""
        window = self._layout.window
        windows = [None] if window is None else [None, window.tokens]
        # each cache's, in a layer's own buffer; with full attention, and with a window
        self._slots = [list[Tensor]() for _ in windows]
        self._masks = [list[Tensor]() for _ in windows]
        for kind, window_tokens in enumerate(windows):
            for index, place in enumerate(places[kind]):
                slots, mask = self._slots_and_mask(index, place, window_tokens)
                self._slots[kind].append(slots)
                self._masks[kind].append(mask)

    def _slots_and_mask(
        self, index: int, place: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens' slots (T,) in a layer's own buffer, and their mask (T, slots)."""
        tokens, slot, first = place
        cache = self._caches[index]
        count, offset = cache.slots, cache.window_offset
        if window is not None:
            count, offset = self._windowed_slots[index], 0
        slots = torch.where(self._steps < tokens, slot + self._steps, count)  # (T,)
        columns = self._columns[:count]
        hidden = (columns > slots[:, None]) | (columns < first)  # (T, slots)
        if window is not None:
            hidden |= columns <= slots[:, None] - window
        mask = torch.zeros_like(hidden, dtype=torch.float32)
        return slots - offset, mask.masked_fill(hidden, -torch.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Partial:
        """Return the attention of q (B * T, Hq, D), as `StaticForward.attend`."""
        kind = int(self._layout.window_of(layer) is not None)
        q, rotated_k = (self._rotary.apply(x, angles, layer) for x in (q, k))
        q = self._rotary.weighted(q, layer)
        parts = [x.split(len(self._steps)) for x in (q, rotated_k, k, v)]
        outs = []
        for index, (own_q, own_k, own_raw, own_v) in enumerate(zip(*parts, strict=True)):
            cache, slots = self._caches[index], self._slots[kind][index]
            kv, raw, *_ = cache.buffers(layer)
            _write(kv[0], slots, own_k)
            _write(kv[1], slots, own_v)
            if raw is not None:
                _write(raw, slots, own_raw)
            attend = partial(_masked, self._masks[kind][index])
            outs.append(attend_by_heads(own_q, k.shape[1], cache.head_groups(layer), attend))
        return concatenated(outs, dim=0)


def _masked(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    return masked_attention(q, k, v, mask)


def _write(buffer: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write x (T, Hkv, D) to slots of a buffer (Hkv, n, D)."""
    buffer.index_copy_(1, slots, x.transpose(0, 1))
