"""The middle level's cache: what matters of the target's KV, on the device, chosen anew whenever
the target verifies.

The paper chooses chunks once, behind the prompt (TriForce, arXiv 2404.11912, section 4.1). But a
verification brings all keys to the device anyway, so here the choice follows the text, and what is
not chosen is summarised (docs/algorithm.md, "The retrieval cache").
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from offload.buffers import attend_to, put
from offload.fixed_shape import SlotCache
from offload.layout import KVLayout
from offload.retrieval_shape import SEEN_TOKENS, RetrievalShape
from offload.rotary import Rotary
from offload.selection import Seen, SelectionPolicy
from offload.summaries import biases, tangents


class RetrievalCache(SlotCache):
    """Follows a TieredCache. One buffer per layer, (2, Hkv, slots, D): summaries, then selected
    tokens, then the window and whatever is drafted, so that a pass attends to one segment. Keys are
    rotated at their absolute positions.
    """

    _state = (
        "length",
        "refreshes",
        "policy",
        "_base",
        "_selected",
        "_summaries",
        "_whole",
        "_chosen_at",
        "_kv",
        "_bias",
    )

    def __init__(
        self,
        layout: KVLayout,
        shape: RetrievalShape,
        policy: SelectionPolicy,
        rotary: Rotary,
        device: torch.device,
        every: int = 1,
        turns: int = 1,
    ):
        """A choice serves at least `every` tokens before the next, if the policy refreshes; 1 is a
        choice at every verification.

        Each choice makes one in `turns` of the summaries anew, in turn, and the biases of all: a
        summary that is not weighs what it should, only its key and value are of an older choice. It
        saves most of the second reading of the prefix.
        """
        super().__init__(layout)
        self.shape, self.policy, self.rotary, self.every, self.turns = (
            shape,
            policy,
            rotary,
            every,
            turns,
        )
        self.slots = shape.slots
        self.refreshes = 0
        self._base = 0  # position of the window's first token, which was the boundary
        self._selected = self._summaries = 0  # slots in front of the window
        self._whole = 0  # summaries of whole stretches that an earlier choice has made
        self._parts: list[slice] = []  # of the summaries: what the choice under way makes anew
        self._chosen_at: int | None = None  # tokens of text at the last choice
        self._choosing = False  # whether the target's pass under way is one that chooses
        self._kv = torch.zeros(
            layout.shape(layout.layers, shape.slots), dtype=layout.dtype, device=device
        )
        summarised = (layout.layers, layout.heads, shape.slots if shape.summary else 0)
        self._bias = torch.zeros(summarised, dtype=torch.float32, device=device)

    @property
    def device_bytes(self) -> int:
        return self._kv.nbytes + self._bias.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        slot = self._slot(start)
        put(self._kv[layer], self.rotary(k, start), v, slot)
        bias = self._bias[layer] if self._summaries else None
        q = self.rotary(q, start)
        return attend_to(self._kv[layer], q, slot + len(q), self.traffic, bias=bias)[0]

    def place(self, start: int) -> tuple[int, int]:
        return self._slot(start), start

    def buffers(self, layer: int) -> tuple[Tensor, None, Tensor | None]:
        return self._kv[layer], None, self._bias[layer] if self.shape.summary else None

    def crop(self, length: int) -> None:
        self._refuse_inside_selection(length)
        super().crop(length)

    # -- following the target ----------------------------------------------------------------------

    def follow(self, boundary: int, length: int, end: int) -> None:
        """A pass of the target starts: `boundary` tokens of prefix, `length` that stand, and new
        ones up to `end`.
        """
        # when decoding, the pass's first token was pending: it stands already
        text = length + (end > length)
        due = (
            self.policy.traits.reselects
            and self._chosen_at is not None
            and text - self._chosen_at >= self.every
        )
        self._choosing = due or self._chosen_at is None
        if self._choosing:
            self._base, self._chosen_at = boundary, text
            self._selected, self._summaries = self.shape.split(boundary, end - boundary)
            self._parts, self._whole = (
                self._due(self._whole),
                (boundary // self.shape.summary if self._summaries else 0),
            )
            self.refreshes += 1

    def observe(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        heads = slice(head, head + prefix.shape[1])
        kv, end = self._kv[layer, :, heads], prefix.shape[2] + recent.shape[2]
        if not self._choosing:
            # the target's own KV takes the place of what this level computed from a partial context
            new = recent[:, :, -len(q) :]
            put(kv, new[0].transpose(0, 1), new[1].transpose(0, 1), self._slot(end - len(q)))
            return
        put(kv, recent[0].transpose(0, 1), recent[1].transpose(0, 1), self._slot(self._base))
        group = q.shape[1] // prefix.shape[1]
        step = max(1, SEEN_TOKENS // max(1, prefix.shape[2]))
        for first in range(0, prefix.shape[1], step):
            part = slice(first, first + step)
            self._choose(
                layer, head + first, q[:, first * group : (first + step) * group], prefix[:, part]
            )

    def _choose(self, layer: int, head: int, q: Tensor, prefix: Tensor) -> None:
        """Fill the selected and summary slots of these heads: q (T, Hq, D), prefix (2, Hkv, N,
        D).
        """
        kv, chunk = self._kv[layer, :, head : head + prefix.shape[1]], self.shape.chunk
        if self._selected == prefix.shape[2]:
            kv[:, :, : self._selected] = prefix
            self._bias[layer, head : head + prefix.shape[1]] = 0
            return
        seen = Seen(q, prefix[0], self.policy.traits.rows)
        # (Hkv, n / chunk)
        chunks = self.policy.select(seen, layer, head, chunk, self._selected // chunk)
        summaries, selected = kv[:, :, : self._summaries + self._selected].tensor_split(
            [self._summaries], dim=2
        )
        # a chunk of one head is one row to copy
        for part, index in product(range(2), range(len(chunks))):
            rows, slots = (x[part, index].view(-1, chunk * x.shape[-1]) for x in (prefix, selected))
            torch.index_select(rows, 0, chunks[index], out=slots)
        if self._summaries:
            seen.leave_out(chunks, chunk)
            for due in self._parts:
                summaries[:, :, due] = tangents(seen, prefix, self.shape.summary, due)
            bias = self._bias[layer, head : head + prefix.shape[1]].zero_()
            bias[:, : self._summaries] = biases(seen, summaries[0], self.shape.summary)

    def _due(self, whole: int) -> list[slice]:
        """Which summaries a choice is to make, the first `whole` of which are there: a share of
        these, and all others.
        """
        turn = self.refreshes % self.turns
        share = slice(whole * turn // self.turns, whole * (turn + 1) // self.turns)
        return [part for part in (share, slice(whole, self._summaries)) if part.start < part.stop]

    def advanced(self, length: int) -> None:
        self._refuse_inside_selection(length)
        self.length = length

    def _refuse_inside_selection(self, length: int) -> None:
        if length < self._base:
            raise ValueError(
                f"cannot crop to {length} tokens: the selection covers the first {self._base}"
            )

    def _slot(self, position: int) -> int:
        return self._selected + self._summaries + position - self._base
