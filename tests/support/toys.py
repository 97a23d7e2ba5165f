"""Models whose law of whole texts can be written down, on caches that hold the text itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from decoding import Sampling
from decoding.speculation.coroutines import run
from decoding.speculation.decoders import Autoregressive, Decoder, Proposer, Speculative
from decoding.speculation.draft_length import DraftLength, Fixed, RoundStats
from decoding.speculation.prompt_lookup import PromptLookup
from decoding.speculation.randomness import IndependentNoise, Randomness
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sequence import TokenSequence
from offload.cache.base import Cache
from offload.layout import KVLayout
from parallel.execution.batched_forward import ForwardFn, ForwardRequest

VOCAB = 4
PROMPT = [1, 3, 0]


class HistoryCache(Cache):
    """Tokens in place of their KV. As with KV, what stands behind `length` is stale, and written
    over.
    """

    device_bytes = 0

    def __init__(self) -> None:
        super().__init__(KVLayout(1, 1, 1, torch.float32))
        self.history: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        raise NotImplementedError("a toy model has no attention")

    def write(self, tokens: list[int]) -> list[int]:
        """Keep the tokens of a pass behind the others; returns the text up to and with them."""
        self.history[self.length :] = tokens
        return self.history


class Toy:
    """Logits from a random table, by the last two tokens and whether the text is of odd length: a
    slip of one position shows.

    `scale` is how far the laws are from uniform: 0 is uniform, 20 nearly one-hot.
    """

    def __init__(self, seed: int, scale: float):
        self.table = (
            torch.randn(2, VOCAB, VOCAB, VOCAB, generator=Generator().manual_seed(seed)) * scale
        )
        # a tensor for each history, made once: indexing would be most of a pass
        self._rows = self.table.flatten(0, -2).unbind()

    def __call__(self, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        assert isinstance(cache, HistoryCache)
        text = cache.write(tokens.tolist())
        return torch.stack(
            [self.logits(text, end) for end in range(len(text) - rows + 1, len(text) + 1)]
        )

    def logits(self, text: list[int], end: int | None = None) -> Tensor:
        """Return the logits (V,) behind a text, or behind its first `end` tokens."""
        end = len(text) if end is None else end
        return self._rows[(end % 2 * VOCAB + text[end - 2]) * VOCAB + text[end - 1]]

    def text_law(self, sampling: Sampling, tokens: int) -> Tensor:
        """The probability of each continuation of PROMPT by `tokens` tokens, (V ** tokens,), in
        order of `number`.
        """
        law, texts = torch.ones(1, dtype=torch.float64), [PROMPT]
        for _ in range(tokens):
            rows = sampling.probs(torch.stack([self.logits(text) for text in texts]))
            law = (law[:, None] * rows).flatten()
            texts = [[*text, token] for text in texts for token in range(VOCAB)]
        return law


def number(continuation: list[int]) -> int:
    """Its digits are the tokens, in base V."""
    value = 0
    for token in continuation:
        value = value * VOCAB + token
    return value


class Moody(DraftLength):
    """A length that follows past acceptance as wildly as the rules allow: long after a success,
    short after a failure.
    """

    def __init__(self, most: int):
        self.most, self._next = most, 1

    def reset(self, start: int) -> None:
        pass

    def next(self) -> int:
        return self._next

    def record(self, past: RoundStats) -> None:
        self._next = self.most if past.accepted == past.drafted else 1 + past.accepted % self.most


def nest(
    models: Sequence[Toy],
    lengths: Sequence[int | DraftLength],
    sampling: Sampling,
    source: Generator | Randomness,
    ngram: int = 0,
) -> Decoder:
    """Decoders outermost first; `lengths` are the draft lengths of all but the last. Ready to go on
    behind PROMPT.

    With an n-gram, prompt lookup stands in front of the last model, or below it when it has a
    length too.
    """
    chance = IndependentNoise(source) if isinstance(source, Generator) else source
    text, read = TokenSequence(PROMPT), PROMPT[:-1]
    below: Proposer | None = (
        PromptLookup(text, ngram, VOCAB, chance.device)
        if ngram and len(lengths) == len(models)
        else None
    )
    for model, length in reversed(list(zip(models, [*lengths, 0][: len(models)], strict=True))):
        cache = HistoryCache()
        cache.write(read)
        cache.advance(len(read))
        if below is None:
            below = Autoregressive("leaf", model, cache, text, sampling, chance)
            if ngram:
                below = PromptLookup(text, ngram, VOCAB, chance.device, below)
        else:
            many = Fixed(length) if isinstance(length, int) else length
            name = f"over {below.name}"
            below = Speculative(name, model, cache, below, many, sampling, chance)
    assert isinstance(below, Decoder)
    below.sync([])
    return below


def restart(decoder: Decoder) -> None:
    """Give up the text so far and stand behind PROMPT again."""
    text = TokenSequence(PROMPT)
    for level in decoder.levels():
        level.text, level.unverified = text, []
        level.position = len(text)
        if isinstance(level, Decoder):
            level.cache.crop(len(PROMPT) - 1)
            level.position = level.cache.length
    decoder.sync([])


def known(level: Proposer) -> list[int]:
    """The text as a level knows it, with what is proposed behind it."""
    return [*level.text.tokens_from(0)[: level.position], *level.unverified]


def answer(asked: ForwardRequest) -> Tensor:
    """Make a pass of a toy."""
    return asked.model(asked.tokens, asked.cache, asked.rows)


def propose(level: Proposer, n: int) -> Draft:
    return run(level.propose(n), answer)


def go_on(decoder: Decoder, tokens: int) -> list[int]:
    """The next `tokens` tokens, round by round as the engine asks for them."""
    new: list[int] = []
    while len(new) < tokens:
        new += run(decoder.round(tokens - len(new)), answer)
    return new


def trace(decoder: Decoder) -> list[Proposer]:
    """A list that gets a level every time its model is called."""
    calls: list[Proposer] = []

    def traced(level: Decoder) -> ForwardFn:
        model = level.model

        def call(tokens: Tensor, cache: Cache, rows: int) -> Tensor:
            calls.append(level)
            return model(tokens, cache, rows)

        return call

    for level in decoder.levels():
        if isinstance(level, Decoder):
            level.model = traced(level)
    return calls
