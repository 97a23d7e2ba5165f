"""Passes of a sharded model on all ranks: rank 0 decides and announces, the others follow.

All that depends on randomness, drafts included, happens on rank 0 alone. One small message a pass
carries it out: which model and cache, where that cache stands (the verdict of the round before),
and the tokens of the pass. So ranks cannot drift apart, and rank 0 may give up a text at any point
between two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from offload.cache import Cache
from parallel.group import Group, on_device
from parallel.model import Llama

Sharded = tuple[Llama, Cache]  # a model split over the ranks, and one of the caches it runs on
# how a pass is made of model, tokens, cache and rows: a Replay, say
Run = Callable[[Llama, Tensor, Cache, int], Tensor]
_END = -1  # in place of a cache
_HEAD = 4  # numbers in front of the tokens: which cache, its length, rows, tokens


class PassLeader:
    """Rank 0's side: calls a model, after telling the other ranks to do the same."""

    def __init__(self, sharded: Sequence[Sharded], most: int, run: Run = Llama.__call__):
        """`sharded` in one order on all ranks; `most` is the most tokens of one pass."""
        self.sharded, self.most, self.run = list(sharded), most, run
        self.group: Group = sharded[0][0].group

    def __call__(self, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Logits (rows, V) after the last `rows` of tokens (T,), T <= most, behind the content of
        `cache`.
        """
        which = next(index for index, (_, known) in enumerate(self.sharded) if known is cache)
        if self.group.size > 1:
            self._announce([which, cache.length, rows, len(tokens), *tokens.tolist()])
        return self.run(self.sharded[which][0], tokens, cache, rows)

    def close(self) -> None:
        """The text is done: the other ranks leave `follow_passes`."""
        self._announce([_END])

    def _announce(self, numbers: list[int]) -> None:
        size = _HEAD + self.most
        self.group.broadcast_numbers(numbers + [0] * (size - len(numbers)), size)


def follow_passes(sharded: Sequence[Sharded], most: int, run: Run = Llama.__call__) -> None:
    """The other ranks' side: run what rank 0 announces until the text is done."""
    group: Group = sharded[0][0].group
    while True:
        which, length, rows, count, *tokens = group.broadcast_numbers([], _HEAD + most)
        if which == _END:
            return
        model, cache = sharded[which]
        cache.settle(length)
        run(model, on_device(tokens[:count], group.device), cache, rows)
