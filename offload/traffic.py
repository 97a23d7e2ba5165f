"""Byte counters: what moved, counted where it moves, so that no figure is estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class ByteCounters:
    """The bytes since the counter was made, of one level of the hierarchy."""

    link_in: int = 0  # host to device: KV streamed for verification, and late layers behind prefill
    link_out: int = 0  # device to host: KV written back
    attended: int = 0  # KV bytes that attention read, from whichever tier

    def reset(self) -> None:
        """Count from 0 again."""
        self.link_in = self.link_out = self.attended = 0

    def add(self, other: ByteCounters) -> None:
        """Count what another counter has counted, too."""
        self.link_in += other.link_in
        self.link_out += other.link_out
        self.attended += other.attended

    def snapshot(self) -> dict[str, int]:
        return asdict(self)
