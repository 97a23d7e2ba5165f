"""Penalties are those of transformers and of OpenAI's API, for each row by the tokens before it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from decoding import Sampling
from decoding.speculation.logits_processors import make_processors

VOCAB = 40
PROMPT = [3, 7, 7, 39]
ALL = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.6,
    frequency_penalty=-0.3,
    logit_bias={5: 4.0, 7: -100},
)


def by_definition(logits: Tensor, tokens: list[int], sampling: Sampling) -> Tensor:
    """Return the logits (V,) that follow the prompt and new tokens."""
    row = logits.clone()
    for token, bias in (sampling.logit_bias or {}).items():
        row[token] += bias
    ids = torch.tensor([[*PROMPT, *tokens]])
    row = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, row[None])[0]
    for token in range(VOCAB):
        count = tokens.count(token)
        row[token] -= sampling.frequency_penalty * count
        row[token] -= sampling.presence_penalty * (count > 0)
    return row


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=0.7),
        Sampling(presence_penalty=0.8),
        Sampling(frequency_penalty=0.4),
        Sampling(logit_bias={0: 3, 39: -2.5}),
        ALL,
    ],
)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_each_row_is_changed_by_the_tokens_before_it(sampling: Sampling, rows: int) -> None:
    source = random.Random(rows)
    processors = make_processors(sampling, torch.tensor(PROMPT))
    assert processors
    tokens = list[int]()
    for length, committed in ((rows - 1, 0), (rows + 12, 5), (rows + 12, 5), (rows + 20, 21)):
        drafted = length - committed
        kept = [*tokens, *(source.randrange(VOCAB) for _ in range(committed))][:committed]
        tokens = [*kept, *(source.randrange(VOCAB) for _ in range(drafted))]
        logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(length))
        before = logits.clone()
        found = processors.process(logits, tokens, committed)
        assert torch.equal(logits, before)
        ends = range(length - rows + 1, length + 1)
        expected = [
            by_definition(row, tokens[:end], sampling)
            for row, end in zip(logits, ends, strict=True)
        ]
        torch.testing.assert_close(found, torch.stack(expected))


def test_rows_do_not_depend_on_how_many_are_processed_together() -> None:
    processors, single = (make_processors(ALL, torch.tensor(PROMPT)) for _ in range(2))
    tokens = [1, 5, 5, 3, 20, 1]
    logits = torch.randn(7, VOCAB)
    together = processors.process(logits, tokens, 0)
    blocks = [
        processors.process(logits[at : at + 3], tokens, 0, max(0, 4 - at)) for at in (0, 3, 6)
    ]
    assert torch.equal(together, torch.cat(blocks))
    alone = [single.process(logits[end : end + 1], tokens[:end], end) for end in range(7)]
    assert torch.equal(together, torch.cat(alone))


def test_there_are_none_by_default() -> None:
    processors = make_processors(Sampling(), torch.tensor(PROMPT))
    assert not processors
    assert processors.count_possible([], [1, 2]) == 2
