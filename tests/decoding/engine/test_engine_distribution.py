"""Samples of the whole engine, on models with attention and caches, follow the distribution that
transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.speculation.rejection_sampler
from decoding import Sampling
from decoding.engine.request import Request
from offload.retrieval.selection import POLICIES, AttentionScorePolicy, QuerySample
from parallel.config.model_config import ModelConfig
from support import engines
from support.distributions import BROKEN, LIKELY, p_value
from support.engines import Folders, Pair
from support.models import TINY, random_tokens, reference_logits
from support.slow import slow_except

PROMPT = random_tokens(70, seed=2).tolist()
# few: a bias towards the draft is a slope, which more cells would detect later
CELLS = 5
VOCAB = TINY["vocab_size"]
SAMPLINGS = {
    "full": Sampling(1.0, top_p=1, seed=1),
    "nucleus": Sampling(0.6, top_p=0.9, seed=1),
    "top-k": Sampling(0.9, 12, 1, seed=1),
}
SMALL = {**engines.SMALL, "retrieval_budget": 16, "num_draft_tokens": 4, "gpu_kv_layers": 1}


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> Folders:
    """A target with an on-device and an offloaded layer, and an unrelated draft."""
    return tuple(
        checkpoint(seed=seed, num_hidden_layers=layers, max_position_embeddings=4096)
        for seed, layers in ((0, 2), (1, 1))
    )


def quantiles(output: list[int], sampling: Sampling, folders: Folders) -> Tensor:
    """Return each new token's quantile in the target's distribution, (N,).

    They are uniform in [0, 1] and independent if the tokens follow it: the probability integral
    transform. The vocabulary is ordered by how much the target prefers a token over the draft, so
    that a bias towards the draft shows. A token of zero probability gives NaN.
    """
    tokens = torch.tensor([*PROMPT, *output])
    p, q = (reference_probs(folder, tokens, sampling) for folder in folders)
    order = (p - q).argsort(1)
    ordered = p.gather(1, order)  # (N, V)
    index = order.argsort(1).gather(1, tokens[len(PROMPT) :, None])  # (N, 1)
    share = ordered.gather(1, index)
    noise = torch.rand(share.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = (ordered.cumsum(1).gather(1, index) - noise * share)[:, 0]
    return values.masked_fill(share[:, 0] == 0, torch.nan)


def reference_probs(folder: Path, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return transformers' distribution of each new token, (N, VOCAB), for any vocabulary size."""
    rows = ModelConfig.from_pretrained(folder).vocab
    logits = reference_logits(folder, tokens.masked_fill(tokens >= rows, 0))[len(PROMPT) - 1 : -1]
    probs = sampling.probs(logits[:, :VOCAB]).double()
    return torch.nn.functional.pad(probs, (0, VOCAB - probs.shape[1]))


def dtype_for(mode: str) -> str:
    return "bfloat16" if "split" in mode else "float32"


def likelihood(mode: str, sampling: Sampling, folders: Folders, new: int, **options: Any) -> float:
    """Return the p-value of `new` tokens of an engine under the target's distribution."""
    pair = Pair(*folders, dtype=dtype_for(mode))
    output = pair.generate(mode, PROMPT, new, sampling, **{**SMALL, **options})
    values = quantiles(output, sampling, folders)
    if pair.dtype == "bfloat16" and sampling.top_p < 1:
        # rounding moves the end of a nucleus: tokens right after it are left out
        wider = quantiles(output, replace(sampling, top_p=sampling.top_p + 0.01), folders)
        values = values[~values.isnan() | wider.isnan()]
    if values.isnan().any():
        return 0.0
    return p_value(values.histc(CELLS, 0, 1), torch.ones(CELLS))


@pytest.mark.parametrize(
    ("mode", "sampling"),
    slow_except(
        [
            ("plain", "full"),
            ("retrieval", "full"),
            ("hierarchical", "full"),
            ("speculative", "nucleus"),
            ("hierarchical", "nucleus"),
            ("hierarchical", "top-k"),
        ],
        3,  # hierarchical runs for every policy below
    ),
)
def test_output_follows_the_target_distribution(mode: str, sampling: str, folders: Folders) -> None:
    assert likelihood(mode, SAMPLINGS[sampling], folders, 500) > LIKELY


@pytest.mark.parametrize("mode", slow_except(["retrieval", "hierarchical"]))
def test_an_8_bit_retrieval_cache_does_not_change_the_distribution(
    mode: str, folders: Folders
) -> None:
    assert likelihood(mode, SAMPLINGS["full"], folders, 500, int8_retrieval=True) > LIKELY


@pytest.mark.parametrize(
    ("mode", "sampling"),
    slow_except([("plain", "full"), ("hierarchical", "nucleus")]),
)
def test_concurrent_requests_follow_the_target_distribution(
    mode: str, sampling: str, folders: Folders
) -> None:
    """Each has randomness of its own: quantiles of all three are independent and uniform."""
    base = SAMPLINGS[sampling]
    requests = [Request(PROMPT, 250, replace(base, seed=seed)) for seed in (1, 2, 3)]
    with Pair(*folders).engine(mode, **SMALL) as engine:
        outputs = [completion.tokens for completion in engine.generate_batch(requests, 3)]
    values = torch.cat([quantiles(output, base, folders) for output in outputs])
    assert len(values) == 750
    assert not values.isnan().any()
    assert p_value(values.histc(CELLS, 0, 1), torch.ones(CELLS)) > LIKELY


@pytest.mark.parametrize(
    ("mode", "sampling"),
    slow_except([("plain", "full"), ("hierarchical", "nucleus"), ("split-hierarchical", "full")]),
)
def test_a_turn_follows_the_target_distribution(mode: str, sampling: str, folders: Folders) -> None:
    params, pair = SAMPLINGS[sampling], Pair(*folders, dtype=dtype_for(mode))
    with (
        pair.engine(mode, link="emulated:50", **SMALL) as engine,
        engine.conversation(room=600),
    ):
        list(engine.generate(PROMPT[:40], 9, params))
        output = list(engine.generate(PROMPT, 500, params))
        assert engine.stats.reused_tokens == 40
    values = quantiles(output, params, folders)
    assert not values.isnan().any()
    assert p_value(values.histc(CELLS, 0, 1), torch.ones(CELLS)) > LIKELY


@pytest.mark.parametrize(
    ("mode", "sampling", "split"),
    slow_except(
        [
            ("split", "full", 1),
            ("split-hierarchical", "full", 1),
            ("split-hierarchical", "nucleus", 0),
        ]
    ),
)
def test_output_follows_the_target_distribution_with_split_layers(
    mode: str, sampling: str, split: int, folders: Folders
) -> None:
    """In 16 bits: so few tokens cannot detect what rounding changes of a distribution."""
    options = {"split_kv_layers": split, "split_budget": 16, "link": "emulated:50"}
    options["prompt_lookup_ngram"] = 1
    assert likelihood(mode, SAMPLINGS[sampling], folders, 500, **options) > LIKELY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rows"), [("speculative", VOCAB - 30), ("hierarchical", VOCAB + 30)]
)
def test_output_follows_the_target_distribution_with_another_draft_vocabulary(
    mode: str, rows: int, folders: Folders, checkpoint: Callable[..., Path]
) -> None:
    draft = checkpoint(seed=1, num_hidden_layers=1, vocab_size=rows, max_position_embeddings=4096)
    sampling = SAMPLINGS["nucleus" if mode == "hierarchical" else "full"]
    assert likelihood(mode, sampling, (folders[0], draft), 500) > LIKELY


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_output_follows_the_target_distribution_with_every_policy(
    policy: str, folders: Folders
) -> None:
    options = {"policy": policy, "retrieval_budget": 64, "selection_interval": 1}
    assert likelihood("hierarchical", SAMPLINGS["full"], folders, 500, **options) > LIKELY


@pytest.mark.parametrize("mode", slow_except(["retrieval", "hierarchical"]))
def test_output_follows_the_target_distribution_with_adaptive_lengths_and_lookup(
    mode: str, folders: Folders
) -> None:
    assert (
        likelihood(
            mode,
            SAMPLINGS["nucleus"],
            folders,
            500,
            num_draft_tokens=None,
            num_inner_draft_tokens=None,
            prompt_lookup_ngram=1,
        )
        > LIKELY
    )


@pytest.mark.parametrize(
    ("mode", "tokens"),  # in 16 bits drafts are nearly right, so that more tokens are needed
    slow_except([("speculative", 700), ("hierarchical", 900), ("split-speculative", 2_500)]),
)
def test_resampling_from_the_target_distribution_is_detected(
    mode: str, tokens: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.speculation.rejection_sampler, "residual_probs", lambda p, q: p)
    # selects the latest chunks: with a good selection few drafts are rejected
    monkeypatch.setattr(AttentionScorePolicy, "scores", score_by_position)
    assert likelihood(mode, SAMPLINGS["full"], folders, tokens) < BROKEN


def score_by_position(
    policy: AttentionScorePolicy, rows: QuerySample, layer: int, head: int, chunk: int
) -> Tensor:
    """Score chunks by position, in place of `SelectionPolicy.scores`."""
    heads, tokens, _ = rows.keys.shape
    scores = torch.arange(tokens // chunk).float()
    scores[0] = torch.inf
    return scores.repeat(heads, 1)
