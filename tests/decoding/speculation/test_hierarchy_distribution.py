"""The law of what a hierarchy writes is the target's own, however bad the levels below and however
deep they nest.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import decoding.speculation.rejection_sampler
from decoding import Sampling
from decoding.speculation.coroutines import Steps
from decoding.speculation.decoders import Decoder, Speculative
from decoding.speculation.draft_length import DraftLength
from decoding.speculation.rejection_sampler import Draft
from support.laws import BROKEN, LIKELY, frequencies, p_value
from support.slow import slow_except
from support.toys import PROMPT, VOCAB, Moody, Toy, go_on, nest, number, restart, trace

NUCLEUS, FULL, TOP_K = Sampling(0.6, top_p=0.9), Sampling(1.0, top_p=1), Sampling(1.0, 3, 1)
TOKENS = 4
TEXTS = 1_000  # planted errors are found from 800 on


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def family(below: str) -> list[Toy]:
    """Target, middle, draft. The two lower ones have nothing to do with the target, or with each
    other.
    """
    sharp, flat = Toy(1, 20.0), Toy(2, 0.0)
    lower = {
        "sharp draft": [flat, sharp],
        "sharp middle": [sharp, flat],
        "skewed": [Toy(3, 1.0), Toy(4, 1.5)],
    }
    return [Toy(0, 1.5), *lower[below]]


@torch.inference_mode()  # as engines do
def text_counts(decoder: Decoder, tokens: int = TOKENS) -> Tensor:
    """How often each continuation of the prompt comes out, (V ** tokens,)."""
    numbers = []
    for _ in range(TEXTS):
        restart(decoder)
        numbers.append(number(go_on(decoder, tokens)))
    return frequencies(numbers, VOCAB**tokens)


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
def test_texts_of_three_levels_follow_the_target_law(
    outer: int, inner: int, below: str, sampling: Sampling
) -> None:
    models = family(below)
    decoder = nest(models, [outer, inner], sampling, generator(outer + 10 * inner))
    assert p_value(text_counts(decoder), models[0].text_law(sampling, TOKENS)) > LIKELY


@pytest.mark.parametrize(
    ("level", "below", "sampling"),
    slow_except(
        [
            # not a sharp draft: the flat middle level is seldom wrong enough for its redraws to
            # show
            (0, "sharp middle", NUCLEUS),
            (0, "skewed", FULL),
            # not a sharp middle: with one likely token, a plain redraw draws the same
            (1, "sharp draft", NUCLEUS),
            (1, "sharp draft", FULL),
            (1, "skewed", FULL),
        ],
        *(1, 3),
    ),
)
def test_a_plain_redraw_at_one_level_is_found_out(
    level: int, below: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # level 1 is the published middle level: it redraws from p on rejection, and reports p as the
    # law it drew from
    models = family(below)
    decoder = nest(models, [3, 2], sampling, generator(7))
    right, asking = decoding.speculation.rejection_sampler.residual_probs, trace(decoder)

    def plain_redraw(p: Tensor, q: Tensor) -> Tensor:
        return p if asking[-1] is decoder.levels()[level] else right(p, q)

    monkeypatch.setattr(decoding.speculation.rejection_sampler, "residual_probs", plain_redraw)
    assert p_value(text_counts(decoder), models[0].text_law(sampling, TOKENS)) < BROKEN


@pytest.mark.parametrize("below", slow_except(["sharp draft", "sharp middle", "skewed"], 2))
def test_a_long_text_follows_the_target_law_after_every_history(below: str) -> None:
    models = family(below)
    text = [*PROMPT, *go_on(nest(models, [4, 2], FULL, generator(5)), 2_500)]
    counts = torch.zeros(2, VOCAB, VOCAB, VOCAB)
    for end in range(len(PROMPT), len(text)):
        counts[end % 2, text[end - 2], text[end - 1], text[end]] += 1
    law = FULL.probs(models[0].table.flatten(0, -2))
    p_values = [p_value(*each) for each in zip(counts.flatten(0, -2), law, strict=True)]
    assert min(p_values) > LIKELY / len(p_values)


@pytest.mark.parametrize("lengths", slow_except([[3, 2, 1], [4, 3, 2, 1]]))
def test_any_depth_of_nesting_follows_the_target_law(lengths: list[int]) -> None:
    # each level leaves one token to the level above: with fewer the lowest would never be asked
    tokens = len(lengths) + 1
    models = [Toy(seed, 1.5) for seed in range(len(lengths) + 1)]
    decoder = nest(models, lengths, FULL, generator(6))
    counts = text_counts(decoder, tokens)
    assert all(level.stats.forwards for level in decoder.levels())
    assert p_value(counts, models[0].text_law(FULL, tokens)) > LIKELY


@pytest.mark.parametrize(
    ("models", "lengths", "ngram", "sampling"),
    slow_except(
        [
            (2, [Moody(4)], 0, FULL),
            (3, [Moody(4), Moody(3)], 0, NUCLEUS),
            (1, [3], 1, NUCLEUS),  # the target, and prompt lookup below it
            (3, [4, 2], 1, NUCLEUS),  # prompt lookup in front of the draft model
            (3, [Moody(4), Moody(3)], 2, FULL),
        ],
        *(0, 2, 4),
    ),
)
def test_lengths_that_follow_the_past_and_prompt_lookup_keep_the_law(
    models: int, lengths: list[int | DraftLength], ngram: int, sampling: Sampling
) -> None:
    toys = [Toy(seed, 1.5) for seed in range(models)]
    counts = text_counts(nest(toys, lengths, sampling, generator(8), ngram))
    assert p_value(counts, toys[0].text_law(sampling, TOKENS)) > LIKELY


def test_a_length_that_follows_the_token_under_test_is_found_out() -> None:
    # why lengths may know past rounds only: here a draft that starts with token 0 is put off as
    # long as the dice allow
    toys = [Toy(seed, 1.5) for seed in range(2)]
    decoder = nest(toys, [3], FULL, generator(9))
    assert isinstance(decoder, Speculative)
    propose = decoder.inner.propose

    def choosy(n: int) -> Steps[Draft]:
        draft = yield from propose(n)
        if int(draft.tokens[0]) == 0:
            decoder.inner.sync(decoder.unverified)
            draft = yield from propose(n)
        return draft

    decoder.inner.propose = choosy  # type: ignore[method-assign]
    assert p_value(text_counts(decoder), toys[0].text_law(FULL, TOKENS)) < BROKEN
