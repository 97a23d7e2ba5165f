"""Logits restricted to the tokens that a grammar allows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from decoding.speculation.logits_processors import LogitsProcessor
from decoding.speculation.sequence import common_prefix
from offload.errors import InvalidRequestError
from offload.layout import ceil_div
from parallel.ranks.process_group import copy_to_device_async

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WORD = 32  # tokens per word of a mask
_FIRST_S, _MASK_S = 5.0, 0.01  # limit of the seconds for all masks, and more for each of them


class GrammarMask(LogitsProcessor):
    """Sets the logits of tokens after which no answer could match the grammar to -inf.

    The distribution is the model's, restricted to the others and renormalised, at every position
    up to a stop token. What follows that is not part of the answer, and not restricted; neither is
    what follows a draft token that the grammar forbids, which is rejected, or a draft that nothing
    can follow: should it be accepted, the request ends with an error in the next round. All levels
    share the mask of a position.
    """

    def __init__(
        self, start: LLMatcher, stop_tokens: Set[int], matcher_vocab: int, model_vocab: int
    ):
        """Restrict an answer from its beginning.

        Args:
            start: a matcher at the beginning of the grammar, which is copied.
            stop_tokens: ids of tokens that end an answer.
            matcher_vocab: number of tokens in the matcher's masks.
            model_vocab: number of tokens that the model has, at most as many.
        """
        self._matcher = _Matcher(start)
        self._stop_tokens = stop_tokens
        self._known = _packed(range(model_vocab), matcher_vocab)
        self._stops = _packed(stop_tokens, matcher_vocab) & self._known
        self._tokens: list[int] = []  # those that the state is for
        self._masks: dict[int, Tensor] = {}  # (W,) int32 by number of tokens before it
        self._committed = 0  # tokens that are no drafts
        # the number of tokens from which on nothing is restricted, and why, if that is an error
        self._end: tuple[int, str] | None = None

    def process(
        self, logits: Tensor, tokens: Sequence[int], committed: int, after: int = 0
    ) -> Tensor:
        """Return the changed logits (T, V), as `LogitsProcessor.process`.

        Raises InvalidRequestError if the sequence cannot be continued. A draft that cannot be
        continued is no error: the target may reject it.
        """
        end = len(tokens) - after + 1
        masks = self._masks_of(tokens, range(end - len(logits), end), committed)
        words = copy_to_device_async(torch.stack(masks), logits.device)  # (T, W)
        bits = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
        is_allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        return logits.masked_fill(is_allowed == 0, -math.inf)

    def count_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        self._move_to([*tokens, *draft])
        self._consume(len(self._tokens))
        self._prune()
        return len(draft) if self._end is None else max(0, self._end[0] - 1 - len(tokens))

    def _masks_of(self, tokens: Sequence[int], positions: range, committed: int) -> list[Tensor]:
        """Return the masks (W,) of positions, each the number of tokens before it."""
        self._committed = committed
        self._move_to(tokens)
        masks = list[Tensor]()
        for position in positions:
            self._consume(position)
            if self._end is None or self._end[0] > position:
                mask = self._mask(position)  # may be the end
            is_free = self._end is not None and self._end[0] <= position
            masks.append(self._free() if is_free else mask)
        self._prune()
        return masks

    def _prune(self) -> None:
        """Drop the masks of positions that no level needs any more."""
        self._masks = {at: mask for at, mask in self._masks.items() if at >= self._committed}

    def _free(self) -> Tensor:
        """Return the mask (W,) of a position that is not restricted.

        Raises InvalidRequestError if the sequence, and not a draft, cannot be continued.
        """
        assert self._end is not None
        end, reason = self._end
        if not reason:
            return self._known
        if end <= self._committed:
            raise InvalidRequestError(
                f"the answer cannot follow the grammar after {end} tokens: {reason}."
            )
        # Should the draft be accepted, the answer does not end here: the error comes next.
        return self._known & ~self._stops

    def _move_to(self, tokens: Sequence[int]) -> None:
        """Keep what holds for the common beginning of these tokens and those before."""
        old, tokens = self._tokens, list(tokens)
        is_longer = tokens[: len(old)] == old  # mostly, and fast
        common = len(old) if is_longer else common_prefix(old, tokens)
        self._tokens = tokens
        if common == len(old):
            return
        self._masks = {at: mask for at, mask in self._masks.items() if at <= common}
        if self._end is not None and self._end[0] > common:
            self._end = None
        if self._matcher.taken > common:
            if not self._matcher.back_to(common):
                self._restart()
                return
            # without a new mask here, llguidance 1.9 may allow what an abandoned draft allowed
            self._masks.pop(common, None)
            self._mask(common)

    def _consume(self, position: int) -> None:
        """Let the matcher take the first `position` tokens, or those before one that ends it."""
        while (taken := self._matcher.taken) < position and self._end is None:
            token, mask = self._tokens[taken], self._mask(taken)
            if self._end is not None:  # there is none
                return
            is_allowed = bool(mask[token // _WORD] >> (token % _WORD) & 1)
            if token in self._stop_tokens:
                self._end = taken + 1, "" if is_allowed else "it ends too early"
            elif not is_allowed:
                self._end = taken + 1, "it does not allow the last one"
            elif not self._matcher.take([token]):
                self._fail(taken + 1)

    def _mask(self, position: int) -> Tensor:
        """Return the mask (W,) of the matcher's position, or of one that has been computed.

        A position without allowed tokens ends what is restricted.
        """
        if (known := self._masks.get(position)) is not None:
            return known
        assert position == self._matcher.taken
        mask = torch.empty_like(self._known)
        is_complete = self._matcher.fill(mask)
        mask &= self._known & ~self._stops
        if is_complete:
            mask |= self._stops
        if self._matcher.error or not mask.any():
            self._fail(position)
        else:
            self._masks[position] = mask
        return mask

    def _fail(self, position: int) -> None:
        """Note that the tokens up to a position cannot be continued."""
        reason = self._matcher.error
        if not reason or "NoExtension" in reason:
            reason = "none of the model's tokens continues it"
        self._end = position, reason
        self._restart()

    def _restart(self) -> None:
        """Begin again: a matcher stays in error once it is."""
        # the tokens that are no drafts have been taken before, one by one
        self._matcher.restart(self._tokens[: self._committed])


class _Matcher:
    """A matcher, how many tokens it has taken, and how much time it may still take."""

    def __init__(self, start: LLMatcher):
        """Begin with a copy of `start`."""
        self._start, self._current = start, start.deep_copy()
        self.taken = 0
        self._left_s, self._timed = _FIRST_S, -1  # seconds, and the last position they are for

    @property
    def error(self) -> str:
        """Return why it cannot go on, in one line; empty if it can."""
        return self._current.get_error().partition("\n")[0]

    def take(self, tokens: list[int]) -> bool:
        """Take tokens; return whether all of them could be."""
        count = self._current.try_consume_tokens(tokens)
        self.taken += count
        return count == len(tokens)

    def back_to(self, taken: int) -> bool:
        """Return whether it could be taken back to where it had taken fewer tokens."""
        is_back = self._current.rollback(self.taken - taken)
        self.taken = taken
        return is_back

    def restart(self, tokens: list[int]) -> None:
        """Begin again, and take tokens."""
        self._current, self.taken = self._start.deep_copy(), 0
        self.take(tokens)

    def fill(self, mask: Tensor) -> bool:
        """Fill a mask (W,) for the next token; return whether what it has taken is complete.

        Raises InvalidRequestError if masks have taken too much time.
        """
        started = time.perf_counter()
        self._current.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        self._left_s -= time.perf_counter() - started
        if self.taken > self._timed:
            self._left_s, self._timed = self._left_s + _MASK_S, self.taken
        if self._left_s < 0:
            raise InvalidRequestError("the grammar takes too long to follow: use a simpler one.")
        return self._current.is_accepting()


def _packed(tokens: Iterable[int], vocab: int) -> Tensor:
    """Return the mask (W,) int32 of these tokens, one bit for each of the vocabulary."""
    bits = np.zeros(ceil_div(vocab, _WORD) * _WORD, dtype=np.uint8)
    bits[[token for token in tokens if token < vocab]] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
