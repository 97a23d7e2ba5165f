"""Warnings about probable mistakes are printed before work begins, and counts after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.app.options import Common
from decoding.app.terminal.messages import counts_line, sanity_warnings, stats_line
from decoding.config.settings import Settings
from decoding.speculation.sampling import Sampling
from support.commands import DRAFT, MODELS, forked
from support.engines import Pair
from support.models import rope

COMMON = Common(model="a", draft="b", settings=Settings(), sampling=Sampling())


class TokenizerOfLength:
    """A tokenizer with `tokens` entries."""

    def __init__(self, tokens: int):
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Pair:
    return Pair(checkpoint(), checkpoint(seed=1, num_hidden_layers=1))


def test_matching_models_give_no_warning(pair: Pair) -> None:
    with pair.engine("hierarchical", stop=[3]) as engine:
        engine.tokenizer = TokenizerOfLength(pair.target.config.vocab)
        assert sanity_warnings(engine, COMMON) == []


def test_suspicious_models_and_options_give_warnings(pair: Pair) -> None:
    vocab = pair.target.config.vocab
    with pair.engine("plain") as engine:
        engine.tokenizer = TokenizerOfLength(vocab // 3)
        settings = Settings(mode="plain", retrieval_budget=64, num_draft_tokens=5)
        common = replace(COMMON, settings=settings)
        other, endless, *unused = sanity_warnings(engine, common)
        assert f"a has {vocab:,} tokens, its tokenizer {vocab // 3:,}" in other
        assert "no end-of-sequence token" in endless
        assert unused == [
            f"{option} is not used in --mode plain."
            for option in ("--draft b", "--retrieval-budget 64", "--num-draft-tokens 5")
        ]
    with pair.engine("speculative", stop=[3]) as engine:
        engine.tokenizer = TokenizerOfLength(vocab)
        unused = sanity_warnings(engine, common)
        assert unused == ["--retrieval-budget 64 is not used in --mode speculative."]


@pytest.mark.parametrize(("context", "has_warning"), [(None, True), (4096, False)])
def test_guessed_context_gives_warning(
    checkpoint: Callable[..., Path], context: int | None, has_warning: bool
) -> None:
    linear = rope("linear", factor=4.0)
    folder = checkpoint(max_position_embeddings=16_384, rope_parameters=linear)
    pair = Pair(folder, folder)
    with pair.engine("plain", stop=[3], context=context) as engine:
        engine.tokenizer = TokenizerOfLength(pair.target.config.vocab)
        warnings = sanity_warnings(engine, replace(COMMON, draft=None))
        assert engine.context == (context or 16_384)
    assert [line.startswith("a: RoPE type 'linear' scales") for line in warnings] == [
        True
    ] * has_warning


def test_command_prints_warnings(tmp_path: Path) -> None:
    prompt = ("--prompt", "It was", "--max-new-tokens", "1")
    result = forked(tmp_path, "generate", *MODELS, *prompt, "--mode", "plain")
    assert result.code == 0, result.err
    assert f"warning: --draft {DRAFT} is not used in --mode plain." in result.err


COUNTS = {
    "prompt_tokens": 7_616,
    "reused_tokens": 0,
    "loaded_tokens": 0,
    "new_tokens": 64,
    "concurrency": 1,
    "time_to_first_token_s": 18.9,
    "decode_s": 4.2,
    "ms_per_token": 66.7,
}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "7,616 tokens read in 19 s, 64 written in 4.2 s (15.0 per second)"),
        (
            {"reused_tokens": 7_500, "new_tokens": 1, "ms_per_token": None},
            "7,500 tokens in the cache, 116 read in 19 s, 1 written",
        ),
        (
            {"loaded_tokens": 7_000, "reused_tokens": 500, "ms_per_token": 0.0},
            "500 tokens in the cache, 7,000 loaded from disk, 116 read in 19 s, 64 written",
        ),
        (
            {"parts": [], "concurrency": 2},
            "7,616 tokens read, 64 written",
        ),
        ({"prompt_tokens": 1}, "1 token read in 19 s, 64 written in 4.2 s (15.0 per second)"),
        (
            {"answers": []},
            "7,616 tokens read in 19 s, 64 written in 4.2 s (15.0 per second)",
        ),
    ],
)
def test_counts_are_in_words(more: dict[str, Any], line: str) -> None:
    assert counts_line({**COUNTS, **more}) == line


def test_stats_explain_the_speed_too() -> None:
    stats = {"mode": "retrieval", "tokens_per_verification": 15.8, "link_bytes_per_token": 2.1e6}
    line = counts_line(COUNTS)
    assert stats_line({**COUNTS, **stats}) == (
        f"{line}, 15.80 tokens per verification, 2.1 MB/token over the host link"
    )
    assert stats_line({**COUNTS, **stats, "mode": "plain", "link_bytes_per_token": None}) == line
