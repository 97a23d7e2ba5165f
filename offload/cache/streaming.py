"""The draft's cache: attention sinks and a recent window, at positions the draft was trained on.

Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), section 3.2: keys are cached before
rotation and rotated by their slot.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import token_slice, write_tokens
from offload.attention.window import attend_slots
from offload.cache.static_shape import SlotBuffers, StaticCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.layout import KVLayout
from offload.recurrent.rewindable import RewindableStates
from offload.rotary import Rotary


class StreamingCache(StaticCache):
    """The first tokens of a sequence, and its recent tokens in a sliding window.

    Sliding moves the last `window` tokens down and rotates them again, once every `slack` tokens.
    In between, slots and so positions stay fixed, and `crop` can remove any draft. Tokens that left
    the window are lost: `crop` raises if it would need them. A layer with a window of its own sees
    no more slots than that. The rotary table needs as many
    positions as there are slots, however long the sequence.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "_dropped", "_memory")
    recurrent: RewindableStates | None

    def __init__(
        self, layout: KVLayout, shape: StreamingCacheSpec, rotary: Rotary, device: torch.device
    ):
        super().__init__(layout)
        self.shape = shape
        self.rotary = rotary
        self.slots = shape.slots
        self._dropped = 0  # tokens dropped between the sinks and the window
        shapes = shape.layer_shapes(layout)
        sizes = [prod(each) for each in shapes]
        self._memory = torch.zeros(sum(sizes), dtype=layout.dtype, device=device)
        parts = zip(self._memory.split(sizes), shapes, strict=True)
        buffers = (part.view(each) for part, each in parts)
        self._layers = dict(zip(layout.attention_layers, buffers, strict=True))
        if layout.recurrent is not None:
            self.recurrent = RewindableStates(
                layout.recurrent, shape.slack, shape.rewind, layout.dtype, device
            )

    @property
    def device_bytes(self) -> int:
        states = self.recurrent.nbytes if self.recurrent is not None else 0
        return self._memory.nbytes + states

    def begin_forward(self, rows: int) -> None:
        end = self.length + rows
        if end - self._dropped > self.slots:
            self._slide()
        if end - self._dropped > self.slots:
            raise ValueError(f"{rows} tokens do not fit the {self.shape.slack} slots of slack")
        super().begin_forward(rows)

    def slot_and_position(self, start: int) -> tuple[int, int]:
        slot = start - self._dropped
        return slot, slot

    def has_room(self, rows: int) -> bool:
        if rows <= self.shape.slack:  # the window slides
            return True
        return super().has_room(rows)

    def buffers(self, layer: int) -> SlotBuffers:
        buffer = self._layers[layer]
        return SlotBuffers(buffer[:2], buffer[2])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        slot, _ = self.slot_and_position(start)
        end = slot + len(k)
        kv, raw, *_ = self.buffers(layer)
        assert raw is not None
        token_slice(raw, slot, end).copy_(k.transpose(0, 1))
        q, k = self.rotary.queries_and_keys(q, k, slot, layer)
        write_tokens(kv, k, v, slot)
        window = self.layout.window_of(layer)
        return attend_slots(kv, q, end, self.traffic, window)

    def skip_tokens(self, tokens: int) -> None:
        """Count `tokens` tokens that are never computed: those between the sinks and the window."""
        sinks = self.shape.sinks
        if self.length != sinks:
            raise ValueError(
                f"tokens can only be skipped right after the {sinks} sinks, not at {self.length}"
            )
        self.length += tokens
        self._dropped += tokens
        if self.recurrent is not None:
            self.recurrent.skip(tokens)

    @torch.inference_mode()
    def reset(self) -> None:
        """Empty the cache.

        Slots that are not visible are read by static forwards: what was not finite may not stay.
        """
        self.length = self._dropped = 0
        self._memory.zero_()
        if self.recurrent is not None:
            self.recurrent.reset()

    @property
    def oldest(self) -> int:
        """The first token of the window, once others have left it."""
        return self.shape.sinks + self._dropped if self._dropped else 0

    @property
    def shortest(self) -> int:
        """Minimum length that `crop` can return to."""
        return max(self.oldest, self.recurrent.oldest if self.recurrent is not None else 0)

    def crop(self, length: int) -> None:
        if length < self.shortest:
            raise ValueError(
                f"cannot crop to {length} tokens: those up to {self.shortest} have left the window"
            )
        super().crop(length)

    def _slide(self) -> None:
        """Drop the tokens between the sinks and the last `window` tokens."""
        start = self.shape.sinks
        end = start + self.shape.window
        drop = self.length - self._dropped - end
        if drop <= 0:
            return
        for layer, buffer in self._layers.items():
            kept = buffer[1:]  # values, and keys before rotation
            window = token_slice(kept, start + drop, end + drop).clone()
            token_slice(kept, start, end).copy_(window)
            rotated = self.rotary.keys(window[1].transpose(0, 1), start, layer)
            token_slice(buffer[0], start, end).copy_(rotated.transpose(0, 1))
        self._dropped += drop
