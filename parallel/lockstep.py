"""Passes of a sharded model on all ranks: rank 0 decides and announces, the others follow.

All that depends on randomness, drafts included, happens on rank 0 alone. Before each pass it sends
one small message: which model and cache, at what length the cache stands (the verdict of the round
before), and the tokens of the pass. So ranks cannot drift apart, and rank 0 may give up a text
between any two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from offload.cache import Cache
from parallel.group import Group, on_device
from parallel.model import Llama

Announced = tuple[Llama, Cache]  # a model split over the ranks, and one of the caches it runs on
# makes logits (rows, V) of model, tokens, cache and rows: the model itself, or a GraphRunner
PassRunner = Callable[[Llama, Tensor, Cache, int], Tensor]
_END = -1  # in place of the index of a model and cache
_HEADER = 4  # numbers before the tokens: index, length of the cache, rows, tokens


class PassLeader:
    """Rank 0's side: it tells the other ranks of each pass, and then makes it as they do."""

    def __init__(
        self,
        announced: Sequence[Announced],
        max_tokens: int,
        run_pass: PassRunner = Llama.__call__,
    ):
        """Lead the other ranks, which are in `follow_passes` with the same arguments.

        Args:
            announced: the models and caches, in one order on all ranks.
            max_tokens: tokens of the longest pass.
            run_pass: how a pass is made.
        """
        self.announced = list(announced)
        self.max_tokens = max_tokens
        self.run_pass = run_pass
        self.group: Group = announced[0][0].group

    def __call__(self, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Return logits (rows, V) of the last `rows` of tokens (T,), behind the cache's content.

        T is at most `max_tokens`.
        """
        index = self._index_of(cache)
        model, _ = self.announced[index]
        if self.group.size > 1:
            self._announce([index, cache.length, rows, len(tokens), *tokens.tolist()])
        return self.run_pass(model, tokens, cache, rows)

    def close(self) -> None:
        """End the text: the other ranks leave `follow_passes`."""
        self._announce([_END])

    def _index_of(self, cache: Cache) -> int:
        return next(index for index, (_, each) in enumerate(self.announced) if each is cache)

    def _announce(self, numbers: list[int]) -> None:
        size = _HEADER + self.max_tokens
        padding = [0] * (size - len(numbers))
        self.group.broadcast_numbers(numbers + padding, size)


def follow_passes(
    announced: Sequence[Announced],
    max_tokens: int,
    run_pass: PassRunner = Llama.__call__,
) -> None:
    """Make every pass that rank 0 announces, on the other ranks, until the text is done.

    The arguments are those of `PassLeader`.
    """
    group: Group = announced[0][0].group
    size = _HEADER + max_tokens
    while True:
        index, length, rows, count, *tokens = group.broadcast_numbers([], size)
        if index == _END:
            return
        model, cache = announced[index]
        cache.settle(length)
        run_pass(model, on_device(tokens[:count], group.device), cache, rows)
