"""A layer of the target's cache with a sliding window: it keeps its last tokens, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import token_slice, write_tokens
from offload.kernels.group_attention import FAST
from offload.layout import REWIND, Segment, SlidingWindow
from offload.memory.link import Copy, Link, copies_by_head
from offload.tiered.kv_file import HostReader, KVBlock, copies_to, read_segments
from offload.tiered.layer import KVGroup, TieredLayer, attend_groups
from offload.tiered.shape import LayerSpec
from offload.traffic import ByteCounters


class Checkpoints:
    """A layer's last tokens at multiples of the window's step, and at an extra position, in host
    memory (n, 2, Hkv, kept, D).

    One is missing if fewer tokens were held there: the sequence went on close before it.
    """

    def __init__(
        self, window: SlidingWindow, host: Tensor | None, link: Link, traffic: ByteCounters
    ):
        """Start without any; `host` None: there is no memory for them."""
        self._window, self._host, self._link, self._traffic = window, host, link, traffic
        self._ends: list[int] = []
        self.passed = 0  # the position up to which they have been made
        self.extra = 0  # the extra position; 0 if there is none

    @property
    def segments(self) -> list[Segment]:
        """Return the tokens of each."""
        return [self._window.segment(end) for end in self._ends]

    def at(self, end: int) -> Tensor:
        """Return the memory (2, Hkv, kept, D) of the one at a position."""
        assert self._host is not None
        multiple, rest = divmod(end, self._window.step)
        return self._host[-1 if rest else multiple - 1]

    def add(self, segment: Segment) -> Tensor | None:
        """Add one, and return its memory, which the caller fills; None if there is none."""
        self.passed = segment.end
        if self._host is None:
            return None
        self._ends.append(segment.end)
        return self.at(segment.end)

    def save(self, end: int, kv: Tensor, first: int) -> None:
        """Make those up to the position `end`, from kv (2, Hkv, N, D).

        It has the tokens from `first` on.
        """
        step, passed = self._window.step, self.passed
        self.passed = max(passed, end)
        positions = {*range((passed // step + 1) * step, end + 1, step), self.extra}
        for position in sorted(each for each in positions if passed < each <= end):
            start, stop = self._window.segment(position)
            if start < first or (host := self.add(Segment(start, stop))) is None:
                continue
            stored = token_slice(host, 0, stop - start)
            last = token_slice(kv, start - first, stop - first)
            self._traffic.link_out += stored.nbytes
            # waited for: kv is overwritten, or freed
            self._link.wait(self._link.copy_out(copies_by_head(stored, last)))

    def start_before(self, length: int) -> int | None:
        """Return the first token of one that has the window before a position; None without any."""
        segment = self._around(length)
        return None if segment is None else segment.start

    def restore(self, length: int, kv: Tensor) -> int:
        """Copy the tokens that end at `length`, or soon after, to the first slots of kv.

        kv is (2, Hkv, capacity, D). Returns the position of the first one.
        """
        segment = self._around(length)
        assert segment is not None
        start, end = segment
        stored = token_slice(self.at(end), 0, end - start)
        self._traffic.link_in += stored.nbytes
        copies = copies_by_head(token_slice(kv, 0, end - start), stored)
        self._link.wait(self._link.copy(copies))
        return start

    def truncate(self, length: int) -> None:
        """Forget those after a position."""
        self._ends = [end for end in self._ends if end <= length]
        self.passed = min(self.passed, length)

    def _around(self, length: int) -> Segment | None:
        """Return the tokens of one that has the window before a position; None without any."""
        holding = (
            each for each in self.segments if self._window.resumable(length, [each]) == length
        )
        return next(holding, None)


class WindowedLayer(TieredLayer):
    """A layer whose queries see a window of tokens, in a device buffer (2, Hkv, capacity, D).

    It keeps a little more than the window before the cache's boundary, where there is one, and all
    tokens after it: a rejected draft is overwritten. At some positions (`SlidingWindow.step`,
    `Checkpoints.extra`) it also keeps its last tokens in host memory: from there the sequence, or
    another one, may go on.
    """

    is_on_device = True

    def __init__(
        self,
        spec: LayerSpec,
        link: Link,
        host: Tensor | None,
        traffic: ByteCounters,
        is_whole: bool = False,
    ):
        """Allocate the buffer.

        Args:
            spec: its own.
            link: of the cache.
            host: memory for checkpoints (n, 2, Hkv, kept, D).
            traffic: the cache's counters.
            is_whole: whether the buffer has room for all tokens, so that none is dropped.
        """
        assert spec.layout.window is not None
        self._window = spec.layout.window
        self.window = self._window.tokens  # a query sees so many
        self._kept = spec.capacity if is_whole else self._window.kept
        self.checkpoints = Checkpoints(self._window, host, link, traffic)
        with torch.inference_mode(False):  # a link's copies write to it
            self._kv = torch.empty(spec.shape, dtype=spec.layout.dtype, device=link.device)
        self.first = 0  # position of the token in the first slot
        # destinations of a segment's blocks, each with its first token
        self._loaded: list[tuple[Tensor, int]] = []

    @property
    def device_bytes(self) -> int:
        return self._kv.nbytes

    def resumable(self, length: int, end: int) -> int:
        """Return the largest length, up to `length`, to which its `end` tokens can be cut."""
        return self._window.resumable(
            length, [*self.checkpoints.segments, Segment(self.first, end)]
        )

    def holds_window(self, length: int) -> bool:
        """Return whether the device has the window before a position."""
        return not self.first or length >= self.first + self.window

    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        write_tokens(self._kv, k, v, start - self.first)

    def groups(self, end: int, boundary: int) -> Iterator[KVGroup]:
        kv = token_slice(self._kv, 0, end - self.first)
        yield KVGroup(0, kv.shape[1], [kv], start=self.first, window=self.window)

    def attend_on_device(
        self, q: Tensor, end: int, boundary: int, traffic: ByteCounters
    ) -> Partial:
        return attend_groups(q, self.groups(end, boundary), FAST, traffic)

    def shift_tail(self, boundary: int, count: int, rest: int) -> None:
        self.checkpoints.save(boundary, self._kv, self.first)
        self.first = _slide(self._kv, self.first, boundary - self._kept, boundary + rest)

    def extend(self, k: Tensor, v: Tensor, start: int, boundary: int) -> Tensor:
        """Add k and v (T, Hkv, D) of a prompt's tokens, from `start` on, in order.

        `boundary` is that of the whole prompt. Returns the KV (2, Hkv, N, D) of these tokens and of
        those before them that they see.
        """
        first, end = max(self.first, start - self._window.kept), start + len(k)
        held = token_slice(self._kv, first - self.first, start - self.first)
        kv = held.new_empty((*held.shape[:2], end - first, held.shape[3]))
        token_slice(kv, 0, start - first).copy_(held)
        write_tokens(kv, k, v, start - first)
        self.checkpoints.save(end, kv, first)
        self.first = _slide(self._kv, self.first, min(boundary, end) - self._kept, start)
        kept = max(self.first, start)  # those before it are dropped already
        token_slice(self._kv, kept - self.first, end - self.first).copy_(
            token_slice(kv, kept - first, end - first)
        )
        return kv

    def truncate(self, length: int) -> None:
        if not length:
            self.first = 0
        elif (start := self.checkpoints.start_before(length)) is not None and start < self.first:
            # more tokens before it than the device has: the next checkpoint may need them
            self.first = self.checkpoints.restore(length, self._kv)
        self.checkpoints.truncate(length)

    def snapshot(self) -> Any:
        """Return the state that `restore` returns to."""
        return self._kv.clone(), self.first, self.checkpoints.passed

    def restore(self, snapshot: Any) -> None:
        """Return to the state of a snapshot."""
        saved, self.first, passed = snapshot
        self._kv.copy_(saved)
        self.checkpoints.truncate(passed)

    def begin_load(self, segment: Segment, tokens: int) -> None:
        """Expect the blocks of a segment of the first `tokens` of a prompt (`load_block`)."""
        self._loaded = []
        if (
            self._window.is_checkpoint(segment)
            and (host := self.checkpoints.add(segment)) is not None
        ):
            self._loaded.append((host, segment.start))
        if self._window.resumable(tokens, [segment]) == tokens:
            self.first = segment.start
            if 0 < self.checkpoints.extra <= tokens <= self.checkpoints.extra + REWIND:
                # the stored tokens end there, and can be shortened
                self.checkpoints.extra = tokens
            self._loaded.append((self._kv, segment.start))

    def load_block(self, block: KVBlock, boundary: int) -> list[Copy]:
        copies = []
        for kv, first in self._loaded:
            to = copies_to(kv, KVBlock(block.head, block.start - first, block.kv))
            if kv is self._kv:
                copies += to
                continue
            for destination, source in to:
                destination.copy_(source)
        return copies

    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        held = link.read_to_host(token_slice(self._kv, 0, length - self.first))
        held = held if link.copies else held.clone()
        parts = [(Segment(self.first, length), held)]
        parts += [(each, self.checkpoints.at(each.end)) for each in self.checkpoints.segments]
        return HostReader(partial(read_segments, parts), [each for each, _ in parts])


def _slide(kv: Tensor, first: int, new_first: int, end: int) -> int:
    """Drop the tokens before `new_first` of kv (2, Hkv, capacity, D), which holds `first` to `end`.

    Returns the first token that is held, or is to be added next.
    """
    if new_first <= first:
        return first
    rest = token_slice(kv, new_first - first, max(new_first, end) - first).clone()
    token_slice(kv, 0, rest.shape[2]).copy_(rest)
    return new_first
