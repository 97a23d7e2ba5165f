"""Warnings about probable mistakes are printed before work begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decoding.app.options import Common
from decoding.app.terminal.messages import sanity_warnings
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
        other, endless, unused = sanity_warnings(engine, COMMON)
        assert f"a has {vocab:,} tokens, its tokenizer {vocab // 3:,}" in other
        assert "no end-of-sequence token" in endless
        assert unused == "--draft b is not used in --mode plain."


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
