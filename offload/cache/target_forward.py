"""The target's forward, as levels see it that draft on views of its KV in the meantime."""

from __future__ import annotations


class TargetForward:
    """How far the target's last forward is.

    A layer that it has passed holds the exact KV of its tokens. All ranks count alike, since it
    ends with its last layer.
    """

    def __init__(self, layers: int):
        """`layers`: the number of layers with attention."""
        self._layers = layers
        self._passed: set[int] = set()
        self.end = 0  # position after its last token
        self.drafted_end = 0  # after the last token that was drafted meanwhile

    @property
    def drafted(self) -> int:
        """Return how many tokens were drafted after its own, in some layers or all."""
        return self.drafted_end - self.end

    @property
    def is_over(self) -> bool:
        """Return whether no layer is left."""
        return not self.end or len(self._passed) == self._layers

    def begin(self, end: int) -> None:
        """Begin another one, with query tokens up to `end`; 0: forget the last one."""
        self.end = self.drafted_end = end
        self._passed.clear()

    def complete_layer(self, layer: int) -> None:
        """Count a layer that it has passed."""
        self._passed.add(layer)

    def has_passed(self, layer: int) -> bool:
        """Return whether it has passed a layer."""
        return layer in self._passed

    def exact(self, layer: int, start: int) -> int:
        """Return how many tokens of a layer, from `start` on, it has written in passing.

        Drafts leave them as they are until it is over; then they are rejected, or not drafted.
        """
        if self.is_over or layer not in self._passed:
            return 0
        return max(0, self.end - start)
