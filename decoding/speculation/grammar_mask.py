"""Logits restricted to the tokens that a grammar allows."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
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
_KEPT = 64  # positions whose masks are kept, more than all levels together are ahead


class GrammarMask(LogitsProcessor):
    """Sets the logits of tokens after which no answer could match the grammar to -inf.

    The distribution is the model's, restricted to the others and renormalised, at every position
    up to a stop token. What follows that is not restricted, and not part of the answer; neither is
    what follows a draft token that the grammar forbids. All levels share the mask of a position.
    """

    def __init__(
        self, matcher: LLMatcher, stop_tokens: Set[int], matcher_vocab: int, model_vocab: int
    ):
        """Restrict an answer from its beginning.

        Args:
            matcher: at the beginning of the grammar; nothing else uses it.
            stop_tokens: ids of tokens that end an answer.
            matcher_vocab: number of tokens in the matcher's masks.
            model_vocab: number of tokens that the model has, at most as many.
        """
        self._matcher, self._stop_tokens = matcher, stop_tokens
        known = np.zeros(ceil_div(matcher_vocab, _WORD) * _WORD, dtype=np.uint8)
        known[:model_vocab] = 1
        packed = np.packbits(known, bitorder="little").view(np.int32)
        self._known = torch.from_numpy(packed)  # (W,), the mask of the model's tokens
        self._tokens: list[int] = []  # those that the state is for
        self._masks: dict[int, Tensor | None] = {}  # (W,) int32 by number of tokens before it
        self._consumed = 0  # tokens that the matcher is after
        self._end: int | None = None  # the number of tokens from which on all are allowed

    def process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Raises InvalidRequestError if the grammar is too complex, or allows none of the tokens.

        Otherwise as `LogitsProcessor.process`.
        """
        masks = self._masks_of(tokens, len(logits))
        if all(mask is None for mask in masks):
            return logits
        words = torch.stack([self._known if mask is None else mask for mask in masks])  # (T, W)
        words = copy_to_device_async(words, logits.device)
        bits = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
        is_allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        return logits.masked_fill(is_allowed == 0, -math.inf)

    def count_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        self._move_to([*tokens, *draft])
        self._consume(len(self._tokens))
        return len(draft) if self._end is None else max(0, self._end - 1 - len(tokens))

    def _masks_of(self, tokens: Sequence[int], count: int) -> list[Tensor | None]:
        """Return the masks (W,) of the last positions, the last of which follows all tokens.

        None: all tokens are allowed.
        """
        self._move_to(tokens)
        positions = range(len(tokens) - count + 1, len(tokens) + 1)
        for position in positions:
            if position not in self._masks:
                self._masks[position] = self._compute(position)
        masks = [self._masks[position] for position in positions]
        while len(self._masks) > max(_KEPT, count):
            del self._masks[next(iter(self._masks))]
        return masks

    def _move_to(self, tokens: Sequence[int]) -> None:
        """Keep what holds for the common beginning of these tokens and those before."""
        old, tokens = self._tokens, list(tokens)
        is_longer = tokens[: len(old)] == old  # mostly, and fast
        common = len(old) if is_longer else common_prefix(old, tokens)
        if common < len(old):
            self._masks = {at: mask for at, mask in self._masks.items() if at <= common}
            self._back_to(common)
            if self._end is not None and self._end > common:
                self._end = None
        self._tokens = tokens

    def _compute(self, position: int) -> Tensor | None:
        """Return the mask after the first `position` tokens. Raises InvalidRequestError."""
        self._back_to(position)
        self._consume(position)
        if self._end is not None and self._end <= position:
            return None
        mask = torch.empty_like(self._known)
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        mask &= self._known
        if self._matcher.is_error() or not mask.any():
            reason = self._matcher.get_error().partition("\n")[0] or "none of the model's tokens"
            raise InvalidRequestError(
                f"the answer cannot follow the grammar after {position} tokens: {reason}."
            )
        return mask

    def _back_to(self, position: int) -> None:
        if self._consumed > position:
            self._matcher.rollback(self._consumed - position)
            self._consumed = position

    def _consume(self, position: int) -> None:
        """Let the matcher take the first `position` tokens, or those before one that ends it."""
        while self._consumed < (position if self._end is None else min(position, self._end - 1)):
            token = self._tokens[self._consumed]
            if token in self._stop_tokens or not self._matcher.try_consume_tokens([token]):
                self._end = self._consumed + 1
            else:
                self._consumed += 1
