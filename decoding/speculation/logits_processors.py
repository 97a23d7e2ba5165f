"""Rules that change logits by the tokens before them, the same at every level.

A level's distribution is that of the changed logits, and so is the target's: speculation stays
exact, and drafts follow the rules, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decoding.speculation.sampling import Sampling
from parallel.ranks.process_group import ints_to_device_async


class LogitsProcessor(ABC):
    """A rule on the logits of one request."""

    @abstractmethod
    def process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the changed logits (T, V) float32; the given ones stay as they are.

        `tokens` are new ones, which follow the prompt. The last row of the logits follows all of
        them, and each row before it one token less.
        """

    def count_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow new tokens, by rules that forbid some."""
        return len(draft)


class LogitsProcessors(LogitsProcessor):
    """All rules of a request, one after another; by default none.

    The new tokens begin at index `start` of the sequence.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = (), start: int = 0):
        self._processors, self.start = list(processors), start

    def __bool__(self) -> bool:
        return bool(self._processors)

    def process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        for each in self._processors:
            logits = each.process(logits, tokens)
        return logits

    def count_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        return min(
            (each.count_possible(tokens, draft) for each in self._processors), default=len(draft)
        )


class LogitBias(LogitsProcessor):
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]):
        """`bias`: what is added, by token id."""
        self._tokens, self._values = list(bias), list(bias.values())

    def process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        ids = ints_to_device_async(self._tokens, logits.device)
        return logits.index_add(1, ids, logits.new_tensor(self._values).expand(len(logits), -1))


class Penalties(LogitsProcessor):
    """Penalties for tokens that occurred before.

    The repetition penalty is for those of the prompt, too (Keskar et al. 2019, arXiv 1909.05858,
    section 4.1); presence and frequency penalties then count new tokens only, as OpenAI's API does.
    """

    def __init__(self, sampling: Sampling, prompt: Tensor):
        """Take the penalties of `sampling`; `prompt` are the tokens (P,) of the prompt."""
        self._sampling, self._prompt = sampling, prompt

    def process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        counts, sampling = self._counts(logits, tokens), self._sampling
        if (penalty := sampling.repetition_penalty) != 1:
            is_known = counts > 0
            is_known[:, self._prompt] = True
            weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(is_known, weaker, logits)
        if sampling.frequency_penalty:
            logits = logits - sampling.frequency_penalty * counts
        if sampling.presence_penalty:
            logits = logits - sampling.presence_penalty * (counts > 0)
        return logits

    @staticmethod
    def _counts(logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return how often each token occurs before each row, (T, V) float32."""
        rows, columns = list[int](), list[int]()
        first = len(tokens) - len(logits) + 1  # tokens before the first row
        for index, token in enumerate(tokens):
            after = range(max(0, index + 1 - first), len(logits))  # rows that follow it
            rows += after
            columns += [token] * len(after)
        cells = [ints_to_device_async(each, logits.device) for each in (rows, columns)]
        ones = logits.new_ones(len(rows))
        return torch.zeros_like(logits).index_put_((cells[0], cells[1]), ones, accumulate=True)


def make_processors(
    sampling: Sampling, prompt: Tensor, grammar: LogitsProcessor | None = None
) -> LogitsProcessors:
    """Return the rules of a request, in order: bias, penalties, grammar.

    Args:
        sampling: its options.
        prompt: the tokens (P,) of its prompt.
        grammar: the rule that leaves only tokens that its grammar allows.
    """
    rules = list[LogitsProcessor]()
    if sampling.logit_bias:
        rules.append(LogitBias(sampling.logit_bias))
    if sampling.has_penalties:
        rules.append(Penalties(sampling, prompt))
    if grammar is not None:
        rules.append(grammar)
    return LogitsProcessors(rules, len(prompt))
