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

    reads_tokens = True  # whether it depends on the tokens before

    @abstractmethod
    def process(
        self, logits: Tensor, tokens: Sequence[int], committed: int, after: int = 0
    ) -> Tensor:
        """Return the changed logits (T, V) float32; the given ones stay as they are.

        Args:
            logits: (T, V). The last row follows all tokens but the last `after` ones, and each row
                before it one less.
            tokens: new ones, which follow the prompt.
            committed: how many of them are part of the sequence, at most those before the first
                row; the others are drafts. It never decreases.
            after: number of tokens after the last row: rows of one forward may come in blocks.
        """

    def count_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow new tokens, by rules that forbid some."""
        return len(draft)


class LogitsProcessors:
    """All rules of a request, one after another; by default none.

    The new tokens begin at index `start` of the sequence.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = (), start: int = 0):
        self._processors, self.start = list(processors), start
        self.reads_tokens = any(each.reads_tokens for each in processors)

    def __bool__(self) -> bool:
        return bool(self._processors)

    def process(
        self, logits: Tensor, tokens: Sequence[int], committed: int, after: int = 0
    ) -> Tensor:
        """Return the changed logits (T, V), as `LogitsProcessor.process`."""
        for each in self._processors:
            logits = each.process(logits, tokens, committed, after)
        return logits

    def count_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow new tokens."""
        return min(
            (each.count_possible(tokens, draft) for each in self._processors), default=len(draft)
        )


class LogitBias(LogitsProcessor):
    """Adds to the logits of some tokens."""

    reads_tokens = False

    def __init__(self, bias: Mapping[int, float], device: torch.device):
        """`bias`: what is added, by token id."""
        self._ids = torch.tensor(list(bias), device=device)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def process(
        self, logits: Tensor, tokens: Sequence[int], committed: int, after: int = 0
    ) -> Tensor:
        return logits.index_add(1, self._ids, self._values.expand(len(logits), -1))


class Penalties(LogitsProcessor):
    """Penalties for tokens that occurred before.

    The repetition penalty is for those of the prompt, too (Keskar et al. 2019, arXiv 1909.05858,
    section 4.1); presence and frequency penalties then count new tokens only, as OpenAI's API does.
    """

    def __init__(self, sampling: Sampling, prompt: Tensor):
        """Take the penalties of `sampling`; `prompt` are the tokens (P,) of the prompt."""
        self._sampling, self._prompt = sampling, prompt
        self._in_prompt: Tensor | None = None  # (V,) bool
        self._counts: Tensor | None = None  # (V,) float32: how often new tokens occur
        self._counted = 0  # new tokens that are counted

    def process(
        self, logits: Tensor, tokens: Sequence[int], committed: int, after: int = 0
    ) -> Tensor:
        first = len(tokens) - after - len(logits) + 1  # tokens before the first row
        counts, sampling = self._row_counts(logits, tokens, committed, first), self._sampling
        if (penalty := sampling.repetition_penalty) != 1:
            if self._in_prompt is None:
                unknown = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
                self._in_prompt = unknown.index_fill_(0, self._prompt, value=True)
            weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where((counts > 0) | self._in_prompt, weaker, logits)
        if sampling.frequency_penalty:
            logits = logits - sampling.frequency_penalty * counts
        if sampling.presence_penalty:
            logits = logits - sampling.presence_penalty * (counts > 0)
        return logits

    def _row_counts(
        self, logits: Tensor, tokens: Sequence[int], committed: int, first: int
    ) -> Tensor:
        """Return how often each new token occurs before each row, (T, V) float32.

        `first`: number of tokens before the first row.
        """
        if self._counts is None:
            self._counts = logits.new_zeros(logits.shape[1])
        # those of the sequence stay, and are counted once
        assert committed >= self._counted
        ids = ints_to_device_async(tokens[self._counted : committed], logits.device)
        self._counts.index_add_(0, ids, logits.new_ones(len(ids)))
        self._counted = committed
        rows, columns = list[int](), list[int]()
        for index, token in enumerate(tokens[committed:], committed):
            later = range(max(0, index + 1 - first), len(logits))  # rows that follow it
            rows += later
            columns += [token] * len(later)
        cells = [ints_to_device_async(each, logits.device) for each in (rows, columns)]
        counts = self._counts.repeat(len(logits), 1)
        return counts.index_put_(tuple(cells), logits.new_ones(len(rows)), accumulate=True)


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
        rules.append(LogitBias(sampling.logit_bias, prompt.device))
    if sampling.has_penalties:
        rules.append(Penalties(sampling, prompt))
    if grammar is not None:
        rules.append(grammar)
    return LogitsProcessors(rules, len(prompt))
