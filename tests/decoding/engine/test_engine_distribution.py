"""Sampled text of the whole engine, on models with attention and caches, follows the law
transformers computes for it.
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
# few: what leans towards the draft is a slope, and more cells would see it later
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
    """A target of a layer on the device and one on the host, and a draft that knows nothing of
    it.
    """
    return tuple(
        checkpoint(seed=seed, num_hidden_layers=layers, max_position_embeddings=4096)
        for seed, layers in ((0, 2), (1, 1))
    )


def places(text: list[int], sampling: Sampling, folders: Folders) -> Tensor:
    """Where each new token stands in its law, (N,): uniform in [0, 1] and independent if that is
    the target's.

    The probability integral transform, with the vocabulary in order of how far the target prefers a
    token to the draft, so that a leaning towards the draft shows; a token of no probability gives
    NaN.
    """
    tokens = torch.tensor([*PROMPT, *text])
    p, q = (reference_laws(folder, tokens, sampling) for folder in folders)
    order = (p - q).argsort(1)
    # (N, V), (N, 1)
    ordered, place = p.gather(1, order), order.argsort(1).gather(1, tokens[len(PROMPT) :, None])
    share = ordered.gather(1, place)
    noise = torch.rand(share.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = (ordered.cumsum(1).gather(1, place) - noise * share)[:, 0]
    return found.masked_fill(share[:, 0] == 0, torch.nan)


def reference_laws(folder: Path, tokens: Tensor, sampling: Sampling) -> Tensor:
    """What transformers says of each new token, (N, V), also of a model of more or fewer tokens."""
    rows = ModelConfig.from_pretrained(folder).vocab
    logits = reference_logits(folder, tokens.masked_fill(tokens >= rows, 0))[len(PROMPT) - 1 : -1]
    laws = sampling.probs(logits[:, :VOCAB]).double()
    return torch.nn.functional.pad(laws, (0, VOCAB - laws.shape[1]))


def dtype_for(mode: str) -> str:
    return "bfloat16" if "split" in mode else "float32"


def likelihood(mode: str, sampling: Sampling, folders: Folders, new: int, **choices: Any) -> float:
    pair = Pair(*folders, dtype=dtype_for(mode))
    text = pair.text(mode, PROMPT, new, sampling, **{**SMALL, **choices})
    found = places(text, sampling, folders)
    if found.isnan().any():
        return 0.0
    return p_value(found.histc(CELLS, 0, 1), torch.ones(CELLS))


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
        3,  # and hierarchical, whatever is selected
    ),
)
def test_a_long_text_follows_the_target_law(mode: str, sampling: str, folders: Folders) -> None:
    assert likelihood(mode, SAMPLINGS[sampling], folders, 500) > LIKELY


@pytest.mark.parametrize("mode", slow_except(["retrieval", "hierarchical"]))
def test_a_retrieval_cache_in_8_bits_leaves_the_law_alone(mode: str, folders: Folders) -> None:
    assert likelihood(mode, SAMPLINGS["full"], folders, 500, int8_retrieval=True) > LIKELY


@pytest.mark.parametrize(
    ("mode", "sampling"),
    slow_except([("plain", "full"), ("hierarchical", "nucleus")]),
)
def test_three_texts_at_once_follow_the_target_law(
    mode: str, sampling: str, folders: Folders
) -> None:
    """Each has noise of its own: their places are independent, and uniform together."""
    law = SAMPLINGS[sampling]
    requests = [Request(PROMPT, 250, replace(law, seed=seed)) for seed in (1, 2, 3)]
    with Pair(*folders).engine(mode, **SMALL) as engine:
        texts = [text.tokens for text in engine.generate_batch(requests, 3)]
    found = torch.cat([places(text, law, folders) for text in texts])
    assert len(found) == 750
    assert not found.isnan().any()
    assert p_value(found.histc(CELLS, 0, 1), torch.ones(CELLS)) > LIKELY


@pytest.mark.parametrize(
    ("mode", "sampling"),
    slow_except([("plain", "full"), ("hierarchical", "nucleus"), ("split-hierarchical", "full")]),
)
def test_a_turn_of_a_conversation_follows_the_target_law(
    mode: str, sampling: str, folders: Folders
) -> None:
    law, pair = SAMPLINGS[sampling], Pair(*folders, dtype=dtype_for(mode))
    with (
        pair.engine(mode, link="emulated:50", **SMALL) as engine,
        engine.conversation(room=600),
    ):
        list(engine.generate(PROMPT[:40], 9, law))
        text = list(engine.generate(PROMPT, 500, law))
        assert engine.stats.reused_tokens == 40
    found = places(text, law, folders)
    assert not found.isnan().any()
    assert p_value(found.histc(CELLS, 0, 1), torch.ones(CELLS)) > LIKELY


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
def test_a_long_text_follows_the_target_law_with_slices(
    mode: str, sampling: str, split: int, folders: Folders
) -> None:
    """In 16 bits: what rounding changes of a law, so few tokens do not tell."""
    chosen = {"split_kv_layers": split, "link": "emulated:50", "prompt_lookup_ngram": 1}
    assert likelihood(mode, SAMPLINGS[sampling], folders, 500, **chosen) > LIKELY


@pytest.mark.parametrize(
    ("mode", "rows"), slow_except([("speculative", VOCAB - 30), ("hierarchical", VOCAB + 30)])
)
def test_a_long_text_follows_the_target_law_with_a_draft_of_other_rows(
    mode: str, rows: int, folders: Folders, checkpoint: Callable[..., Path]
) -> None:
    draft = checkpoint(seed=1, num_hidden_layers=1, vocab_size=rows, max_position_embeddings=4096)
    sampling = SAMPLINGS["nucleus" if mode == "hierarchical" else "full"]
    assert likelihood(mode, sampling, (folders[0], draft), 500) > LIKELY


@pytest.mark.parametrize("policy", slow_except(POLICIES))
def test_a_long_text_follows_the_target_law_whatever_is_selected(
    policy: str, folders: Folders
) -> None:
    choices = {"policy": policy, "retrieval_budget": 64, "selection_interval": 1}
    assert likelihood("hierarchical", SAMPLINGS["full"], folders, 500, **choices) > LIKELY


@pytest.mark.parametrize("mode", slow_except(["retrieval", "hierarchical"]))
def test_a_long_text_follows_the_target_law_with_lengths_that_adapt_and_lookup(
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
    ("mode", "tokens"),  # in 16 bits what the draft proposes is nearly right, and it takes longer
    slow_except([("speculative", 700), ("hierarchical", 900), ("split-speculative", 1_500)]),
)
def test_a_plain_redraw_is_found_out(
    mode: str, tokens: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.speculation.rejection_sampler, "residual_probs", lambda p, q: p)
    # the latest chunks, for a good selection drafts too well for it to matter much
    monkeypatch.setattr(AttentionScorePolicy, "scores", latest)
    assert likelihood(mode, SAMPLINGS["full"], folders, tokens) < BROKEN


def latest(
    policy: AttentionScorePolicy, rows: QuerySample, layer: int, head: int, chunk: int
) -> Tensor:
    """Rank chunks by where they stand, as `SelectionPolicy.scores` says."""
    heads, tokens, _ = rows.keys.shape
    return torch.arange(tokens // chunk).float().repeat(heads, 1)
