"""What a user may not have meant by models is told before work begins."""

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


class OtherTokenizer:
    """A tokenizer of so many tokens."""

    def __init__(self, tokens: int):
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Pair:
    return Pair(checkpoint(), checkpoint(seed=1, num_hidden_layers=1))


def test_models_that_go_together_raise_no_doubt(pair: Pair) -> None:
    with pair.engine("hierarchical", stop=[3]) as engine:
        engine.tokenizer = OtherTokenizer(pair.target.config.vocab)
        assert sanity_warnings(engine, COMMON) == []


def test_what_cannot_be_meant_is_told(pair: Pair) -> None:
    vocab = pair.target.config.vocab
    with pair.engine("plain") as engine:
        engine.tokenizer = OtherTokenizer(vocab // 3)
        other, endless, unused = sanity_warnings(engine, COMMON)
        assert f"a has {vocab:,} tokens, its tokenizer {vocab // 3:,}" in other
        assert "no token that ends a text" in endless
        assert unused == "--draft b has no part in --mode plain."


@pytest.mark.parametrize(("context", "is_told"), [(None, True), (4096, False)])
def test_a_context_that_was_guessed_is_told(
    checkpoint: Callable[..., Path], context: int | None, is_told: bool
) -> None:
    linear = rope("linear", factor=4.0)
    folder = checkpoint(max_position_embeddings=16_384, rope_parameters=linear)
    pair = Pair(folder, folder)
    with pair.engine("plain", stop=[3], context=context) as engine:
        engine.tokenizer = OtherTokenizer(pair.target.config.vocab)
        told = sanity_warnings(engine, replace(COMMON, draft=None))
        assert engine.context == (context or 16_384)
    assert [line.startswith("a: RoPE type 'linear' stretches") for line in told] == [True] * is_told


def test_a_command_tells_its_doubts(tmp_path: Path) -> None:
    prompt = ("--prompt", "It was", "--max-new-tokens", "1")
    done = forked(tmp_path, "generate", *MODELS, *prompt, "--mode", "plain")
    assert done.code == 0, done.err
    assert f"warning: --draft {DRAFT} has no part in --mode plain." in done.err
