"""A text that nobody wants any more, and what rank 0 sees and says between texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import decoding.engine.engine
from decoding import GREEDY, Engine, Sampling
from decoding.engine.request import Request
from offload.errors import RequestCancelled
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import SMALL
from support.engines import MODES, Folders, Pair
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

NEW = 8
LAYERS = 6
PROMPT, LONG = (random_tokens(count, seed=count).tolist() for count in (200, 400))
CHUNKED: dict[str, Any] = {
    **SMALL,
    "prefill_chunk": 64,
    "gpu_kv_layers": 1,
    "link": "emulated:50",
}


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> Folders:
    target = checkpoint(num_hidden_layers=LAYERS, max_position_embeddings=4096)
    return target, checkpoint(seed=1, num_hidden_layers=1)


def given_up_after(layers: int, prompt: list[int]) -> tuple[Request, list[float]]:
    """A request that is given up when it was read in so many layers; how much was read."""
    asked, shares = [0], list[float]()

    def is_cancelled() -> bool:
        asked[0] += 1
        return asked[0] > layers

    request = Request(
        prompt,
        NEW,
        GREEDY,
        progress=lambda done, total: shares.append(done / total),
        is_cancelled=is_cancelled,
    )
    return request, shares


def give_up(engine: Engine, layers: int, prompt: list[int]) -> None:
    request, shares = given_up_after(layers, prompt)
    with pytest.raises(RequestCancelled):
        list(engine.submit(request))
    assert max(shares, default=0) <= layers / LAYERS
    assert not engine.is_busy


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize("layers", slow_except([1, 0, LAYERS - 1]))
def test_no_layer_is_read_for_nobody(mode: str, layers: int, models: Pair) -> None:
    """Neither of a prompt nor of a later turn, and the next text is what it is alone."""
    with models.engine(mode, **CHUNKED) as engine:
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
        give_up(engine, layers, LONG)
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        with engine.conversation(room=1000):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
            give_up(engine, layers, [*PROMPT, *expected, *LONG])
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected


@pytest.mark.slow
def test_two_ranks_give_up_together(folders: Folders) -> None:
    expected, found = run_ranks(2, on_a_rank, folders)[0]
    assert all(each == expected for each in found)


def on_a_rank(folders: Folders) -> tuple[list[int], list[list[int]]]:
    group = TensorParallelGroup.from_environment("cpu")
    with Pair(*folders, group).engine("hierarchical", **CHUNKED) as engine:
        if group.rank:
            engine.run_worker()
            return [], []
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
        found = []
        with patch.object(decoding.engine.engine, "KEEP_ALIVE_S", 0.001):
            with engine.conversation(room=1000):
                for layers in (0, 3):
                    with engine.keep_workers_alive():  # before a text is open, and while one is
                        sleep(0.05)
                    give_up(engine, layers, LONG)
                    found.append(list(engine.generate(PROMPT, NEW, GREEDY)))
                    with engine.keep_workers_alive():
                        sleep(0.05)
                    give_up(engine, layers, [*PROMPT, *found[-1], *LONG])
                    found.append(list(engine.generate(PROMPT, NEW, GREEDY)))
            with engine.keep_workers_alive():
                sleep(0.05)
        found.append(list(engine.generate(PROMPT, NEW, GREEDY)))
        engine.close()
    return expected, found


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize("sampling", slow_except([GREEDY, Sampling(1.0, top_p=1, seed=4)], 1))
def test_each_token_is_seen_with_its_logits(mode: str, sampling: Sampling, models: Pair) -> None:
    """One row for each, before it is yielded, and the row is the target's behind all before it."""
    rows: list[Tensor] = []
    tokens: list[int] = []
    with models.engine(mode, **CHUNKED) as engine:
        asked = Request(PROMPT, NEW, sampling, on_logits=lambda logits: rows.extend(logits.clone()))
        for token in engine.submit(asked):
            tokens.append(token)
            assert len(rows) >= len(tokens)
        assert len(rows) == NEW
        for count, row in enumerate(rows):
            seen: list[Tensor] = []
            again = Request([*PROMPT, *tokens[:count]], 1, sampling, on_logits=seen.extend)
            list(engine.submit(again))
            torch.testing.assert_close(row, seen[0], atol=1e-4, rtol=1e-4)
