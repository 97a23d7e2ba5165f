"""The draft's cache: attention sinks and a recent window, at positions the draft was trained for.

Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), section 3.2: keys are kept un-rotated and
rotated by their slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.buffers import attend_to, put
from offload.fixed_shape import SlotCache
from offload.layout import KVLayout
from offload.rotary import Rotary


class StreamingCache(SlotCache):
    """`sinks` first tokens, at least `window` recent ones, and `slack` slots that fill before the
    window slides.

    Sliding moves the last `window` tokens down and rotates them anew, once every `slack` tokens: in
    between, slots and with them positions stay put, and `crop` may take back anything drafted
    since. Tokens that slid out are gone: `crop` refuses to reach behind them. The rotary table
    needs sinks + window + slack positions only, however long the text.
    """

    _state = ("length", "_dropped", "_kv", "_raw")

    def __init__(
        self,
        layout: KVLayout,
        sinks: int,
        window: int,
        slack: int,
        rotary: Rotary,
        device: torch.device,
    ):
        super().__init__(layout)
        if min(sinks, window, slack) < 1:
            raise ValueError(
                f"sinks, window and slack must be at least 1, found {sinks}, {window} and {slack}"
            )
        self.sinks, self.window, self.rotary = sinks, window, rotary
        self.slots = sinks + window + slack
        self._dropped = 0  # tokens between the sinks and the window that are gone
        shape = layout.shape(layout.layers, self.slots)
        self._kv = torch.zeros(shape, dtype=layout.dtype, device=device)  # keys rotated by slot
        self._raw = torch.zeros_like(self._kv[:, 0])  # (L, Hkv, slots, D) keys as computed

    @property
    def device_bytes(self) -> int:
        return self._kv.nbytes + self._raw.nbytes

    def begin(self, rows: int) -> None:
        used = self.length - self._dropped
        if used + rows > self.slots:
            self._slide(used)
            if self.length - self._dropped + rows > self.slots:
                raise ValueError(
                    f"{rows} tokens do not fit the {self.slots - self.sinks - self.window} slots of"
                    " slack"
                )

    def place(self, start: int) -> tuple[int, int]:
        return start - self._dropped, start - self._dropped

    def buffers(self, layer: int) -> tuple[Tensor, Tensor, None]:
        return self._kv[layer], self._raw[layer], None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        slot, _ = self.place(start)
        self._raw[layer, :, slot : slot + len(k)] = k.transpose(0, 1)
        put(self._kv[layer], self.rotary(k, slot), v, slot)
        q = self.rotary(q, slot)
        return attend_to(self._kv[layer], q, slot + len(q), self.traffic)[0]

    def skip(self, tokens: int) -> None:
        """Count `tokens` tokens that were never read: the text between the sinks and where the
        draft starts reading.
        """
        if self.length != self.sinks:
            raise ValueError(
                f"tokens can be skipped right behind the {self.sinks} sinks only, not at "
                f"{self.length}"
            )
        self.length += tokens
        self._dropped += tokens

    def crop(self, length: int) -> None:
        if self._dropped and length < self.sinks + self._dropped:
            raise ValueError(
                f"cannot crop to {length} tokens: those up to {self.sinks + self._dropped} have "
                "left the window"
            )
        super().crop(length)

    def _slide(self, used: int) -> None:
        """Drop what lies between the sinks and the last `window` tokens."""
        drop = used - self.sinks - self.window
        if drop <= 0:
            return
        end = self.sinks + self.window
        self._raw[:, :, self.sinks : end] = self._raw[:, :, self.sinks + drop : end + drop].clone()
        self._kv[:, 1, :, self.sinks : end] = self._kv[
            :, 1, :, self.sinks + drop : end + drop
        ].clone()
        for kv, raw in zip(self._kv, self._raw, strict=True):
            keys = raw[:, self.sinks : end].transpose(0, 1)  # (window, Hkv, D)
            kv[0, :, self.sinks : end] = self.rotary(keys, self.sinks).transpose(0, 1)
        self._dropped += drop
