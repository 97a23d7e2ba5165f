"""The planned memory of logits and distributions is what a round takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import GREEDY, Sampling, Settings
from decoding.config.settings import LEVELS
from decoding.planning.activations import sampling_bytes
from decoding.planning.requirements import Requirements, noise_positions
from decoding.speculation import decoders
from decoding.speculation.coroutines import run
from decoding.speculation.decoders import Speculative
from decoding.speculation.logits_processors import make_processors
from decoding.speculation.randomness import make_randomness
from parallel.execution.batched_forward import ForwardRequest
from support.live_bytes import LiveBytes
from support.planning import case_of
from support.slow import slow_except
from support.toys import PROMPT, WideToy, apply_processors, forward, nest

VOCAB = 2000
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": Sampling(1.0, top_p=1),
    "top-p": Sampling(1.0, top_p=0.9),
    "everything": Sampling(
        temperature=1.0,
        top_k=VOCAB - 10,
        top_p=0.9,
        min_p=0.001,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={3: 1.0},
    ),
}
Case = tuple[str, dict[str, Any]]  # mode and options
LONG: list[Case] = [
    ("split", {}),
    ("retrieval", {}),
    ("split-hierarchical", {"num_draft_tokens": 256}),
    ("split-hierarchical", {"deterministic": True}),
]
SHORT: list[Case] = [
    ("speculative", {"num_draft_tokens": 3}),
    ("split-hierarchical", {"num_draft_tokens": 60, "num_inner_draft_tokens": 59}),
]


def requirements_of(mode: str, **options: Any) -> Requirements:
    case = case_of(0)
    target = replace(case.target, vocab=VOCAB)
    settings = Settings(mode=mode, **options)
    return Requirements(target, case.draft, mode, settings, torch.bfloat16, 1, 1, True)


def forward_after_drafts(request: ForwardRequest) -> Tensor:
    """Run a forward of a toy model, after all that may be drafted meanwhile."""
    if request.meanwhile is not None:
        run(request.meanwhile, forward)
    return forward(request)


def round_bytes(needs: Requirements, sampling: Sampling) -> int:
    """Return the most bytes that are live in a round of a longest draft, all of it accepted.

    The client gets log-probabilities.
    """
    settings, levels = needs.settings, len(LEVELS[needs.mode])
    inner = settings.inner_draft_length_range[-1]
    lengths = [settings.draft_length_range(needs.mode)[-1], inner, inner][:levels]
    randomness = make_randomness(sampling, torch.device("cpu"), noise_positions(needs))
    model = WideToy(VOCAB, scale=0.1)  # flat: on a CPU, too, all of a row is sorted
    decoder = nest([model] * (levels + 1), lengths, sampling, randomness)
    apply_processors(decoder, make_processors(sampling, torch.tensor(PROMPT)))
    assert isinstance(decoder, Speculative)
    decoder.max_ahead = lengths[0] if needs.drafts_ahead else 0
    logprobs = list[Tensor]()
    decoder.on_logits = lambda logits, _: logprobs.append(logits.log_softmax(-1))
    with LiveBytes() as live:
        tokens = run(decoder.round(1000), forward_after_drafts)
    assert len(tokens) == lengths[0] + 1
    return live.peak


@pytest.mark.parametrize("name", slow_except(SAMPLINGS, 3))
@pytest.mark.parametrize(("mode", "options"), [*LONG, *SHORT])
def test_a_round_fits_its_planned_memory(mode: str, options: dict[str, Any], name: str) -> None:
    needs = requirements_of(mode, **options)
    assert round_bytes(needs, SAMPLINGS[name]) <= sampling_bytes(needs, needs.max_forward_tokens)


@pytest.mark.parametrize(("mode", "options"), slow_except(LONG))
def test_little_more_is_planned_than_a_round_takes(mode: str, options: dict[str, Any]) -> None:
    """What sorting takes on a GPU is not counted here."""
    needs = requirements_of(mode, **options)
    planned = sampling_bytes(needs, needs.max_forward_tokens)
    assert planned < 1.25 * round_bytes(needs, SAMPLINGS["everything"])


def test_all_rows_at_once_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "PROBS_ROWS", 1000)
    needs = requirements_of("split")
    planned = sampling_bytes(needs, needs.max_forward_tokens)
    assert round_bytes(needs, SAMPLINGS["top-p"]) > 1.5 * planned
