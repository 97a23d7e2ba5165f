"""Byte counters: transfers are counted where they happen, so no figure is estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class ByteCounters:
    """Bytes moved by one level of the hierarchy since the counter was created or reset."""

    # Host to device: KV streamed for verification, and deferred layers after prefill. What a ring
    # holds for a forward that does not follow is not counted.
    link_in: int = 0
    link_out: int = 0  # device to host: KV written back
    attended: int = 0  # KV bytes read by attention, in any tier

    def reset(self) -> None:
        """Reset all counters to 0."""
        self.link_in = self.link_out = self.attended = 0

    def add(self, other: ByteCounters) -> None:
        """Add the counts of another counter."""
        self.link_in += other.link_in
        self.link_out += other.link_out
        self.attended += other.attended

    def snapshot(self) -> dict[str, int]:
        return asdict(self)
