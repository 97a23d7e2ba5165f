"""The recurrent states of the target's sequence, some of which are kept in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.layout import RecurrentShape, Segment
from offload.memory.link import Copy, Link
from offload.recurrent.recurrence import RecurrentInputs
from offload.recurrent.states import RecurrentStates
from offload.tiered.kv_file import HostReader, KVBlock, copies_to, read_segments
from offload.tiered.layer import KVGroup, TieredLayer
from offload.traffic import ByteCounters

_LOST = -1  # position of states that are to be replaced by kept ones


class TieredStates(RecurrentStates):
    """States on the device, and in host memory those after some positions of the prompt.

    From such a position the sequence, or another one, may go on: a state cannot be shortened.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        rows: int,
        hosts: dict[int, Tensor],
        link: Link,
        traffic: ByteCounters,
        is_batch_invariant: bool = False,
    ):
        """Allocate states after no tokens.

        Args:
            shape: the layers, with the heads of this rank.
            rows: tokens of the largest forward.
            hosts: memory of each layer's kept states (n, 2, 1, T, D).
            link: of the cache.
            traffic: the cache's counters.
            is_batch_invariant: as in `RecurrentStates`.
        """
        any_host = next(iter(hosts.values()))
        super().__init__(shape, rows, any_host.dtype, link.device, is_batch_invariant)
        self._hosts, self._link, self._traffic = hosts, link, traffic
        self._free = list(range(len(any_host)))  # slots of that memory
        self._slots: dict[int, int] = {}  # positions, and the slots of the states after them
        self._last = 0  # the last one that is no multiple of the shape's step
        self.extra = 0  # one that is kept when others follow; 0 if there is none

    @property
    def positions(self) -> list[int]:
        """Return the positions whose states are kept."""
        return sorted(self._slots)

    def resumable(self, length: int) -> int:
        """Return the largest length, up to `length`, to which the sequence can be cut."""
        return length if self.holds(length) else self.copyable(length)

    def copyable(self, length: int) -> int:
        """Return the last position, up to `length`, whose states are kept; 0 without any."""
        return max((each for each in self._slots if each <= length), default=0)

    def begin_prompt(self, start: int, end: int) -> None:
        """Begin to extend the layers, from position `start` to `end`."""
        self._advance_to(start)
        self._written = 0
        for position in sorted({*self.shape.positions(end), self.extra}):
            if start < position <= end:
                self.add(position)

    def add(self, position: int, is_loaded: bool = False) -> None:
        """Expect the states after a position; `truncate` to one of them if they are loaded.

        There is memory for all multiples of the shape's step, for the extra position, and for one
        other: the last one that was added.
        """
        if is_loaded:
            self.position, self._written = _LOST, 0
        if position in self._slots:
            return
        if position % self.shape.step and position != self.extra:
            if (slot := self._slots.pop(self._last, None)) is not None:
                self._free.append(slot)
            self._last = position
        self._slots[position] = self._free.pop()

    def extend_from(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor:
        """Return the outputs of a prompt's tokens from `start` on, as `extend`.

        On the way the states of some positions are kept.
        """
        end, outs = start + len(inputs.channels), []
        kept = [each for each in self.positions if start < each <= end]
        done = start
        for position in [*kept, *([end] if end not in kept else [])]:
            outs.append(self.extend(layer, inputs.rows(slice(done - start, position - start))))
            done = position
            if position in kept:
                self._save(layer, position)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def memory_of(self, layer: int, position: int) -> Tensor:
        """Return the memory (2, 1, T, D) of a layer's state after a position."""
        return self._hosts[layer][self._slots[position]]

    def end_prompt(self, position: int) -> None:
        super().end_prompt(_LOST if self.position == _LOST else position)

    def truncate(self, length: int) -> None:
        """Go back to a position that is `resumable`, and forget those after it."""
        for position in [each for each in self._slots if each > length]:
            self._free.append(self._slots.pop(position))
        if self.holds(length):
            self._written = length - self.position
            return
        if not length:
            self._clear()
            return
        for layer in self._hosts:
            self._restore(layer, length)
        super().end_prompt(length)

    def snapshot(self) -> Any:
        return super().snapshot(), dict(self._slots), list(self._free), self._last

    def restore(self, snapshot: Any) -> None:
        states, slots, free, self._last = snapshot
        self._slots, self._free = dict(slots), list(free)
        super().restore(states)

    def _advance_to(self, start: int) -> None:
        """Advance to `start`, and keep the states after multiples of the step on the way."""
        step = self.shape.step
        for position in range((self.position // step + 1) * step, start + 1, step):
            count = position - self.position
            super()._advance_to(position)
            self._tensors.drop(count, self._written)
            self._written -= count
            self.add(position)
            for layer in self._hosts:
                self._save(layer, position)
        super()._advance_to(start)

    def _save(self, layer: int, position: int) -> None:
        """Copy a layer's state, which is after this position, to host memory."""
        memory = self.memory_of(layer, position)
        numbers = [each.contiguous().view(memory.dtype).flatten() for each in self.state_of(layer)]
        packed = torch.zeros(memory.numel(), dtype=memory.dtype, device=self._link.device)
        torch.cat(numbers, out=packed[: sum(map(len, numbers))])
        self._traffic.link_out += memory.nbytes
        self._link.wait(self._link.copy_out([(memory.view(-1), packed)]))

    def _restore(self, layer: int, position: int) -> None:
        memory = self.memory_of(layer, position)
        packed = torch.empty(memory.numel(), dtype=memory.dtype, device=self._link.device)
        self._traffic.link_in += memory.nbytes
        self._link.wait(self._link.copy([(packed, memory.view(-1))]))
        for own in self.state_of(layer):
            size = own.nbytes // packed.itemsize
            own.copy_(packed[:size].view(own.dtype).view(own.shape))
            packed = packed[size:]


class RecurrentLayer(TieredLayer):
    """A recurrent layer where others have keys and values: its kept states are copied as KV."""

    is_on_device = True

    def __init__(self, layer: int, states: TieredStates):
        self.layer, self.states = layer, states

    @property
    def device_bytes(self) -> int:
        return 0  # the states count all layers'

    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        raise NotImplementedError

    def groups(self, end: int, boundary: int) -> Iterator[KVGroup]:
        return iter(())

    def begin_load(self, segment: Segment) -> None:
        """Expect the blocks of the state that takes a segment's place (`load_block`)."""
        self.states.add(segment.end, is_loaded=True)
        self._loaded = segment

    def load_block(self, block: KVBlock, boundary: int) -> list[Copy]:
        memory = self.states.memory_of(self.layer, self._loaded.end)
        shifted = KVBlock(block.head, block.start - self._loaded.start, block.kv)
        for destination, source in copies_to(memory, shifted):
            destination.copy_(source)
        return []

    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        parts = []
        for end in self.states.positions:
            kv = self.states.memory_of(self.layer, end)
            if end % self.states.shape.step:  # the next prompt's will replace it
                kv = kv.clone()
            parts.append((Segment(end - kv.shape[2], end), kv))
        return HostReader(partial(read_segments, parts), [each for each, _ in parts])
