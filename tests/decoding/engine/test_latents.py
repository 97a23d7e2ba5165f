"""Latent attention: what is kept of a token is stored, copied and read once, in every use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding import GREEDY
from support.engines import Pair
from support.models import random_tokens
from support.shared_documents import (
    check_batches,
    check_prompt_cache,
    check_swapped_out,
    check_turns,
)
from support.slow import slow_except

MODES = ["plain", "hierarchical"]
OPTIONS = {"family": "deepseek_v2", "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Pair:
    return Pair(checkpoint(**OPTIONS), checkpoint(**OPTIONS, seed=1))


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_turns_that_extend_or_replace_a_conversation(models: Pair, mode: str) -> None:
    check_turns(models, mode)


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_the_prompt_cache(models: Pair, mode: str, cache_folder: str) -> None:
    check_prompt_cache(models, mode, cache_folder)


def test_swapped_out_conversations(models: Pair) -> None:
    check_swapped_out(models)


def test_batches(models: Pair) -> None:
    check_batches(models)


def test_a_prompt_is_stored_for_split_modes_and_for_others(
    checkpoint: Callable[..., Path], cache_folder: str
) -> None:
    """Split layers have keys and values, others have the latents once: neither reads the other."""
    pair = Pair(*2 * [checkpoint(**OPTIONS)], dtype="bfloat16")
    prompt = random_tokens(600).tolist()
    loaded = []
    for mode in ("plain", "split", "plain", "split"):
        options = {"link": "emulated:50", "gpu_kv_layers": 1, "prompt_cache": cache_folder}
        with pair.engine(mode, **options) as engine:
            list(engine.generate(prompt, 2, GREEDY))
            loaded.append(engine.stats.loaded_tokens)
    assert loaded[:2] == [0, 0]
    assert min(loaded[2:]) > 500


def test_the_link_carries_latents_once(models: Pair) -> None:
    """A forward copies the prefix of two layers: as many bytes as their keys have."""
    layout = models.target.config.kv_layout(1, torch.float32)
    assert layout.bytes(1, 1) == 32 * 4  # a rotated key of 8 dimensions, a latent of 24
    prompt = random_tokens(700).tolist()
    options = {"link": "emulated:50", "gpu_kv_layers": 1}
    with models.engine("plain", **options) as engine:
        list(engine.generate(prompt, 3, GREEDY))
        assert engine.stats.link_bytes_per_token == 2 * 512 * layout.bytes(1, 1)
