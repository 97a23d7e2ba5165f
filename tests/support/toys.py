"""Toy models whose distribution of whole sequences is known, on caches that hold tokens, not KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from decoding import Sampling
from decoding.speculation.coroutines import run
from decoding.speculation.decoders import Autoregressive, Decoder, Proposer, Speculative
from decoding.speculation.draft_length import DraftLength, Fixed, RoundStats
from decoding.speculation.logits_processors import LogitsProcessors
from decoding.speculation.prompt_lookup import PromptLookup
from decoding.speculation.randomness import IndependentNoise, Randomness
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sequence import TokenSequence
from offload.attention.folding import Partial
from offload.cache.base import Cache
from offload.layout import KVLayout
from parallel.execution.batched_forward import ForwardFn, ForwardRequest

VOCAB = 4
PROMPT = [1, 3, 0]


Rule = Callable[[Tensor, list[int]], Tensor]


class HistoryCache(Cache):
    """Tokens instead of their KV; as with KV, entries past `length` are stale and overwritten."""

    device_bytes = 0

    def __init__(self) -> None:
        super().__init__(KVLayout(1, 1, 1, torch.float32))
        self.history: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        raise NotImplementedError("a toy model has no attention")

    def write(self, tokens: list[int]) -> list[int]:
        """Append the tokens of a forward; return the sequence up to and including them."""
        self.history[self.length :] = tokens
        return self.history


class Toy:
    """Logits from a random table, by the last two tokens and the parity of the sequence length.

    The parity makes a position that is off by one show. `scale` is the distance of the
    distributions from uniform: 0 is uniform, 20 nearly one-hot.
    """

    def __init__(self, seed: int, scale: float):
        self.table = (
            torch.randn(2, VOCAB, VOCAB, VOCAB, generator=Generator().manual_seed(seed)) * scale
        )
        # one tensor per history, made once: indexing would dominate the seconds of a forward
        self._rows = self.table.flatten(0, -2).unbind()

    def __call__(self, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        assert isinstance(cache, HistoryCache)
        sequence = cache.write(tokens.tolist())
        ends = range(len(sequence) - rows + 1, len(sequence) + 1)
        return torch.stack([self.logits(sequence, end) for end in ends]) if ends else torch.empty(0)

    def logits(self, sequence: list[int], end: int | None = None) -> Tensor:
        """Return the logits (V,) after a sequence, or after its first `end` tokens."""
        end = len(sequence) if end is None else end
        return self._rows[(end % 2 * VOCAB + sequence[end - 2]) * VOCAB + sequence[end - 1]]

    def continuation_probs(
        self, sampling: Sampling, tokens: int, rule: Rule = lambda logits, _: logits
    ) -> Tensor:
        """Return the probability of each continuation of PROMPT by `tokens` tokens.

        Its shape is (V ** tokens,), in order of `continuation_index`. `rule` changes the logits
        (V,) that follow a sequence.
        """
        probs, sequences = torch.ones(1, dtype=torch.float64), [PROMPT]
        for _ in range(tokens):
            logits = torch.stack([rule(self.logits(each), each) for each in sequences])
            probs = (probs[:, None] * sampling.probs(logits)).flatten()
            sequences = [[*sequence, token] for sequence in sequences for token in range(VOCAB)]
        return probs


class WideToy:
    """The same logits of a large vocabulary after every sequence, so that any draft is accepted."""

    def __init__(self, vocab: int, scale: float = 1.0):
        self.row = torch.randn(vocab, generator=Generator().manual_seed(0)) * scale

    def __call__(self, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        assert isinstance(cache, HistoryCache)
        cache.write(tokens.tolist())
        return self.row.repeat(rows, 1)


def continuation_index(tokens: list[int]) -> int:
    """Return the number whose digits in base V are the tokens."""
    value = 0
    for token in tokens:
        value = value * VOCAB + token
    return value


class ErraticLength(DraftLength):
    """A draft length that varies with past acceptance as wildly as allowed.

    It is long after a fully accepted draft, short after a rejection.
    """

    def __init__(self, max_length: int):
        self.max_length, self._next = max_length, 1

    def reset(self, start: int) -> None:
        pass

    def next(self) -> int:
        return self._next

    def record(self, stats: RoundStats) -> None:
        is_accepted = stats.accepted == stats.drafted
        self._next = self.max_length if is_accepted else 1 + stats.accepted % self.max_length


def nest(
    models: Sequence[ForwardFn],
    lengths: Sequence[int | DraftLength],
    sampling: Sampling,
    source: Generator | Randomness,
    ngram: int = 0,
) -> Decoder:
    """Return nested decoders of models, outermost first, at the end of PROMPT.

    `lengths` are the draft lengths of all models but the last. With an n-gram, prompt lookup drafts
    before the last model, or below it if that has a draft length too.
    """
    randomness = IndependentNoise(source) if isinstance(source, Generator) else source
    sequence, cached = TokenSequence(PROMPT), PROMPT[:-1]
    below: Proposer | None = (
        PromptLookup(sequence, ngram, VOCAB, randomness.device)
        if ngram and len(lengths) == len(models)
        else None
    )
    for model, length in reversed(list(zip(models, [*lengths, 0][: len(models)], strict=True))):
        cache = HistoryCache()
        cache.write(cached)
        cache.advance(len(cached))
        if below is None:
            below = Autoregressive("leaf", model, cache, sequence, sampling, randomness)
            if ngram:
                below = PromptLookup(sequence, ngram, VOCAB, randomness.device, below)
        else:
            draft_length = Fixed(length) if isinstance(length, int) else length
            name = f"over {below.name}"
            below = Speculative(name, model, cache, below, draft_length, sampling, randomness)
    assert isinstance(below, Decoder)
    below.sync([])
    return below


def apply_processors(decoder: Decoder, processors: LogitsProcessors) -> None:
    """Let all levels of a decoder share processors of logits."""
    for level in decoder.levels():
        level.processors = processors


def restart(decoder: Decoder) -> None:
    """Drop the sequence so far and return all levels to the end of PROMPT."""
    sequence = TokenSequence(PROMPT)
    for level in decoder.levels():
        level.sequence, level.unverified = sequence, []
        level.position = len(sequence)
        if isinstance(level, Decoder):
            level.cache.crop(len(PROMPT) - 1)
            level.position = level.cache.length
    decoder.sync([])


def tokens_of(level: Proposer) -> list[int]:
    """Return the sequence as a level has read it, followed by its unverified tokens."""
    return [*level.sequence.tokens_from(0)[: level.position], *level.unverified]


def forward(request: ForwardRequest) -> Tensor:
    """Run a forward of a toy model."""
    return request.model(request.tokens, request.cache, request.rows)


def forward_meanwhile(rng: random.Random) -> Callable[[ForwardRequest], Tensor]:
    """Return `forward`, with up to 7 forwards of what may run meanwhile before it."""

    def run_both(request: ForwardRequest) -> Tensor:
        logits: Tensor | None = None
        for _ in range(rng.randrange(8) if request.meanwhile is not None else 0):
            try:
                inner = request.meanwhile.send(logits)  # type: ignore[arg-type, union-attr]
            except StopIteration:
                break
            logits = forward(inner)
        return forward(request)

    return run_both


def propose(level: Proposer, n: int) -> Draft:
    return run(level.propose(n), forward)


def generate(
    decoder: Decoder, tokens: int, forward: Callable[[ForwardRequest], Tensor] = forward
) -> list[int]:
    """Return the next `tokens` tokens, decoded round by round as in the engine."""
    generated: list[int] = []
    while len(generated) < tokens:
        generated += run(decoder.round(tokens - len(generated)), forward)
    return generated


def trace_calls(decoder: Decoder) -> list[Proposer]:
    """Return a list to which a level is appended at every call of its model."""
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
