"""The output of a hierarchy follows the target's distribution, however bad the levels below are
and however deep they nest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import decoding.speculation.rejection_sampler
from decoding import Sampling
from decoding.speculation.coroutines import Steps
from decoding.speculation.decoders import Decoder, Speculative
from decoding.speculation.draft_length import DraftLength
from decoding.speculation.logits_processors import LogitsProcessors, make_processors
from decoding.speculation.randomness import Randomness, make_randomness
from decoding.speculation.rejection_sampler import Draft
from offload.errors import InvalidRequestError
from parallel.execution.batched_forward import ForwardRequest
from support.distributions import BROKEN, LIKELY, frequencies, p_value
from support.grammars import allowed, toy_mask
from support.slow import slow_except
from support.toys import (
    PROMPT,
    VOCAB,
    ErraticLength,
    Rule,
    Toy,
    apply_processors,
    continuation_index,
    forward,
    forward_meanwhile,
    generate,
    nest,
    restart,
    trace_calls,
)

NUCLEUS, FULL, TOP_K = Sampling(0.6, top_p=0.9), Sampling(1.0, top_p=1), Sampling(1.0, 3, 1)
TOKENS = 4
SAMPLES = 1_000  # injected errors are detected from 800 on


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hierarchy(below: str) -> list[Toy]:
    """Return a target, a middle and a draft model, unrelated to one another."""
    sharp, flat = Toy(1, 20.0), Toy(2, 0.0)
    lower = {
        "sharp draft": [flat, sharp],
        "sharp middle": [sharp, flat],
        "skewed": [Toy(3, 1.0), Toy(4, 1.5)],
    }
    return [Toy(0, 1.5), *lower[below]]


@torch.inference_mode()  # as engines do
def continuation_counts(
    decoder: Decoder,
    tokens: int = TOKENS,
    processors: Callable[[], LogitsProcessors] | None = None,
    forward: Callable[[ForwardRequest], Tensor] = forward,
) -> Tensor:
    """Return how often each continuation of the prompt is sampled, (V ** tokens,).

    Each is a request of its own, with its own processors.
    """
    indices = []
    for _ in range(SAMPLES):
        restart(decoder)
        if processors is not None:
            apply_processors(decoder, processors())
        indices.append(continuation_index(generate(decoder, tokens, forward)))
    return frequencies(indices, VOCAB**tokens)


@pytest.mark.parametrize(
    ("outer", "inner", "below", "sampling"),
    slow_except(
        [
            (1, 1, "sharp draft", NUCLEUS),  # a middle level that never drafts
            (2, 2, "sharp middle", NUCLEUS),
            (4, 1, "sharp middle", FULL),
            (4, 3, "sharp draft", FULL),
            (4, 3, "skewed", TOP_K),
        ],
        *(0, 3),
    ),
)
def test_output_of_three_levels_follows_the_target_distribution(
    outer: int, inner: int, below: str, sampling: Sampling
) -> None:
    models = hierarchy(below)
    decoder = nest(models, [outer, inner], sampling, generator(outer + 10 * inner))
    assert (
        p_value(continuation_counts(decoder), models[0].continuation_probs(sampling, TOKENS))
        > LIKELY
    )


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    ("outer", "inner", "below", "sampling"),
    slow_except(
        [
            (1, 1, "skewed", FULL),
            (1, 2, "skewed", NUCLEUS),
            (1, 3, "sharp draft", FULL),
            (2, 1, "skewed", FULL),
        ],
        1,
    ),
)
def test_output_with_drafts_ahead_follows_the_target_distribution(
    outer: int,
    inner: int,
    below: str,
    sampling: Sampling,
    is_exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A level drafts on during some verifications, up to any point, in rounds of its own too."""
    if not is_exact:  # the first token ahead is kept without a test
        monkeypatch.setattr(
            Randomness, "verify_token", lambda _, draft, *arguments: (True, int(draft.tokens))
        )
    models = hierarchy(below)
    decoder = nest(models, [outer, inner], sampling, generator(outer + 10 * inner))
    assert isinstance(decoder, Speculative)
    decoder.max_ahead = 3
    counts = continuation_counts(decoder, forward=forward_meanwhile(random.Random(0)))
    expected = models[0].continuation_probs(sampling, TOKENS)
    assert p_value(counts, expected) > LIKELY if is_exact else p_value(counts, expected) < BROKEN
    assert sum(stats.ahead for stats in decoder.rounds) > SAMPLES // 10


@pytest.mark.parametrize(
    ("level", "below", "sampling"),
    slow_except(
        [
            # not a sharp draft: few tokens of a flat middle level are rejected, so errors in its
            # recovered tokens hardly show
            (0, "sharp middle", NUCLEUS),
            (0, "skewed", FULL),
            # not a sharp middle: with one likely token, sampling from p gives the same token
            (1, "sharp draft", NUCLEUS),
            (1, "sharp draft", FULL),
            (1, "skewed", FULL),
        ],
        *(1, 3),
    ),
)
def test_resampling_from_p_at_one_level_is_detected(
    level: int, below: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # level 1 is the published middle level: after a rejection it samples from p, not from the
    # residual, and reports p as the draft probs
    models = hierarchy(below)
    decoder = nest(models, [3, 2], sampling, generator(7))
    correct, calls = decoding.speculation.rejection_sampler.residual_probs, trace_calls(decoder)

    def wrong_residual(p: Tensor, q: Tensor) -> Tensor:
        return p if calls[-1] is decoder.levels()[level] else correct(p, q)

    monkeypatch.setattr(decoding.speculation.rejection_sampler, "residual_probs", wrong_residual)
    assert (
        p_value(continuation_counts(decoder), models[0].continuation_probs(sampling, TOKENS))
        < BROKEN
    )


@pytest.mark.parametrize("below", slow_except(["sharp draft", "sharp middle", "skewed"], 2))
def test_a_long_sequence_follows_the_target_distribution_after_every_history(below: str) -> None:
    models = hierarchy(below)
    tokens = [*PROMPT, *generate(nest(models, [4, 2], FULL, generator(5)), 2_500)]
    counts = torch.zeros(2, VOCAB, VOCAB, VOCAB)
    for end in range(len(PROMPT), len(tokens)):
        counts[end % 2, tokens[end - 2], tokens[end - 1], tokens[end]] += 1
    probs = FULL.probs(models[0].table.flatten(0, -2))
    p_values = [p_value(*each) for each in zip(counts.flatten(0, -2), probs, strict=True)]
    assert min(p_values) > LIKELY / len(p_values)


@pytest.mark.parametrize("lengths", slow_except([[3, 2, 1], [4, 3, 2, 1]]))
def test_any_depth_of_nesting_follows_the_target_distribution(lengths: list[int]) -> None:
    # each level drafts one token less than its limit: with fewer tokens the lowest never drafts
    tokens = len(lengths) + 1
    models = [Toy(seed, 1.5) for seed in range(len(lengths) + 1)]
    decoder = nest(models, lengths, FULL, generator(6))
    counts = continuation_counts(decoder, tokens)
    assert all(level.stats.forwards for level in decoder.levels())
    assert p_value(counts, models[0].continuation_probs(FULL, tokens)) > LIKELY


@pytest.mark.parametrize(
    ("models", "lengths", "ngram", "sampling"),
    slow_except(
        [
            (2, [ErraticLength(4)], 0, FULL),
            (3, [ErraticLength(4), ErraticLength(3)], 0, NUCLEUS),
            (1, [3], 1, NUCLEUS),  # the target, and prompt lookup below it
            (3, [4, 2], 1, NUCLEUS),  # prompt lookup before the draft model
            (3, [ErraticLength(4), ErraticLength(3)], 2, FULL),
        ],
        *(2, 4),
    ),
)
def test_adaptive_lengths_and_prompt_lookup_keep_the_distribution(
    models: int, lengths: list[int | DraftLength], ngram: int, sampling: Sampling
) -> None:
    toys = [Toy(seed, 1.5) for seed in range(models)]
    counts = continuation_counts(nest(toys, lengths, sampling, generator(8), ngram))
    assert p_value(counts, toys[0].continuation_probs(sampling, TOKENS)) > LIKELY


def test_a_draft_that_depends_on_its_own_tokens_is_detected() -> None:
    # draft lengths may depend on past rounds only: here a draft that starts with token 0 is drawn
    # once more
    toys = [Toy(seed, 1.5) for seed in range(2)]
    decoder = nest(toys, [3], FULL, generator(9))
    assert isinstance(decoder, Speculative)
    propose = decoder.inner.propose

    def biased(n: int) -> Steps[Draft]:
        draft = yield from propose(n)
        if int(draft.tokens[0]) == 0:
            decoder.inner.sync(decoder.unverified)
            draft = yield from propose(n)
        return draft

    decoder.inner.propose = biased  # type: ignore[method-assign]
    assert p_value(continuation_counts(decoder), toys[0].continuation_probs(FULL, TOKENS)) < BROKEN


RULES: dict[str, tuple[Sampling, str | None]] = {
    "penalties": (
        Sampling(1.0, top_p=1, repetition_penalty=1.8, presence_penalty=0.7, frequency_penalty=0.9),
        None,
    ),
    "negative penalties, bias and min-p": (
        Sampling(0.8, top_p=0.95, min_p=0.1, frequency_penalty=-0.8, logit_bias={2: 1.5, 0: -1}),
        None,
    ),
    "grammar": (FULL, "(a|bb)*a{0,2}b?"),
    "grammar and nucleus": (NUCLEUS, "(ab|ba)*"),
    "grammar and penalties": (
        Sampling(1.0, top_p=1, repetition_penalty=1.5, frequency_penalty=1.2),
        "a?(ba)*(ab)*b{0,3}",
    ),
}


def rule_of(sampling: Sampling, pattern: str | None) -> Rule:
    """Return by definition what becomes of logits (V,) after a sequence."""

    def rule(logits: Tensor, sequence: list[int]) -> Tensor:
        row, new = logits.clone(), sequence[len(PROMPT) :]
        for token in range(VOCAB):
            row[token] += (sampling.logit_bias or {}).get(token, 0)
            if token in sequence:
                factor = sampling.repetition_penalty
                row[token] *= factor if row[token] < 0 else 1 / factor
            count = new.count(token)
            row[token] -= sampling.frequency_penalty * count
            row[token] -= sampling.presence_penalty * (count > 0)
            if pattern is not None and token not in allowed(pattern, new):
                row[token] = -torch.inf
        return row

    return rule


def processors_of(sampling: Sampling, pattern: str | None) -> LogitsProcessors:
    mask = None if pattern is None else toy_mask(pattern)
    return make_processors(sampling, torch.tensor(PROMPT), mask)


@pytest.mark.parametrize("rules", slow_except(RULES, 1, -1))
@pytest.mark.parametrize(
    ("lengths", "below", "ngram"),
    slow_except(
        [
            ([], "skewed", 0),
            ([3], "skewed", 0),
            ([4, 2], "sharp draft", 0),
            ([4, 2], "skewed", 1),
            ([ErraticLength(4), ErraticLength(3)], "sharp middle", 0),
        ],
        3,
    ),
)
def test_output_follows_the_distribution_under_rules(
    lengths: list[int | DraftLength], below: str, ngram: int, rules: str
) -> None:
    sampling, pattern = RULES[rules]
    models = hierarchy(below)[: len(lengths) + 1]
    decoder = nest(models, lengths, sampling, generator(11), ngram)
    expected = models[0].continuation_probs(sampling, TOKENS, rule_of(sampling, pattern))
    counts = continuation_counts(decoder, processors=partial(processors_of, sampling, pattern))
    assert p_value(counts, expected) > LIKELY


@pytest.mark.parametrize("rules", ["penalties", "grammar"])
def test_rules_that_overlook_the_tokens_of_a_draft_are_detected(
    rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that a grammar does not allow is an error of its own."""
    sampling, pattern = RULES[rules]
    models = hierarchy("skewed")
    decoder = nest(models, [4, 2], sampling, generator(12))
    process = LogitsProcessors.process

    def overlooking(
        own: LogitsProcessors, logits: Tensor, tokens: list[int], committed: int, after: int
    ) -> Tensor:
        assert after == 0
        before = tokens[: len(tokens) - len(logits) + 1]
        return torch.cat([process(own, row[None], before, committed) for row in logits])

    monkeypatch.setattr(LogitsProcessors, "process", overlooking)
    sample = partial(
        continuation_counts, decoder, processors=partial(processors_of, sampling, pattern)
    )
    if pattern is not None:
        with pytest.raises(InvalidRequestError, match="does not allow the last one"):
            sample()
        return
    expected = models[0].continuation_probs(sampling, TOKENS, rule_of(sampling, pattern))
    assert p_value(sample(), expected) < BROKEN


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("ngram", slow_except([0, 1], 1))
def test_coupled_output_under_rules_is_that_of_plain_decoding(rules: str, ngram: int) -> None:
    sampling, pattern = RULES[rules]
    models = hierarchy("skewed")

    def output(lengths: list[int | DraftLength], ngram: int, seed: int) -> list[int]:
        randomness = make_randomness(replace(sampling, seed=seed), torch.device("cpu"), 8)
        own = models[: len(lengths) + 1]
        decoder = nest(own, lengths, sampling, randomness, ngram)
        apply_processors(decoder, processors_of(sampling, pattern))
        return generate(decoder, 12)

    for seed in range(20):
        plain = output([], 0, seed)
        assert output([4, 2], ngram, seed)[:12] == plain[:12]
