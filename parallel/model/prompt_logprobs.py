"""Log-probabilities of a prompt's own tokens, from the logits of its prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's N tokens but the first, on the host.

    Row i is of the distribution that follows the first i + 1 tokens, before all that changes it.
    """

    logprobs: Tensor  # (N - 1,) float32: those of the prompt's tokens
    top_logprobs: Tensor  # (N - 1, K) float32, in descending order
    top_tokens: Tensor  # (N - 1, K) int32


class PromptScorer:
    """Reduces logits of a prompt's positions to log-probabilities, as a prefill computes them."""

    def __init__(self, top: int, max_rows: int):
        """Keep the `top` largest of each position; logits are computed of `max_rows` at a time."""
        self._top, self._max_rows = top, max_rows
        self._parts: list[tuple[Tensor, ...]] = []

    def add(self, logits: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor) -> None:
        """Score the next tokens (T,) of the prompt.

        Args:
            logits: the model's head: (T, hidden) to (T, V) float32.
            states: hidden states (T, hidden) after the final norm, of the token before each.
            tokens: the tokens.
        """
        parts = zip(states.split(self._max_rows), tokens.split(self._max_rows), strict=True)
        for part, own in parts:
            logprobs = logits(part).log_softmax(-1)  # (P, V)
            top, indices = logprobs.topk(min(self._top, logprobs.shape[1]))
            scores = logprobs.gather(1, own[:, None]).squeeze(1), top, indices.to(torch.int32)
            self._parts.append(tuple(each.cpu() for each in scores))

    def result(self) -> PromptLogprobs:
        """Return the log-probabilities of all tokens so far, in the order they were added."""
        return PromptLogprobs(*map(torch.cat, zip(*self._parts, strict=True)))
