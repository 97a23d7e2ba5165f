"""Cancellation during prefill, keeping workers alive, and the callback for logits."""

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


def cancelled_after(layers: int, prompt: list[int]) -> tuple[Request, list[float]]:
    """Return a request cancelled after the prefill of some layers, and its progress reports."""
    polls = 0
    fractions = list[float]()

    def is_cancelled() -> bool:
        nonlocal polls
        polls += 1
        return polls > layers

    request = Request(
        prompt,
        NEW,
        GREEDY,
        progress=lambda done, total: fractions.append(done / total),
        is_cancelled=is_cancelled,
    )
    return request, fractions


def check_cancelled(engine: Engine, layers: int, prompt: list[int]) -> None:
    request, fractions = cancelled_after(layers, prompt)
    with pytest.raises(RequestCancelled):
        list(engine.submit(request))
    assert max(fractions, default=0) <= layers / LAYERS
    assert not engine.scheduler.is_busy


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize("layers", slow_except([1, 0, LAYERS - 1]))
def test_prefill_is_cancelled_before_the_next_layer(mode: str, layers: int, models: Pair) -> None:
    """For a prompt and for a later turn; the next request is not affected."""
    with models.engine(mode, **CHUNKED) as engine:
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
        check_cancelled(engine, layers, LONG)
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        with engine.conversation(room=1000):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
            check_cancelled(engine, layers, [*PROMPT, *expected, *LONG])
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected


@pytest.mark.slow
def test_cancellation_on_two_ranks(folders: Folders) -> None:
    expected, results = run_ranks(2, run_cancellations_on_rank, folders)[0]
    assert all(result == expected for result in results)


def run_cancellations_on_rank(folders: Folders) -> tuple[list[int], list[list[int]]]:
    group = TensorParallelGroup.from_environment("cpu")
    with Pair(*folders, group).engine("hierarchical", **CHUNKED) as engine:
        if group.rank:
            engine.run_worker()
            return [], []
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
        results = []
        with patch.object(decoding.engine.engine, "KEEP_ALIVE_S", 0.001):
            with engine.conversation(room=1000):
                for layers in (0, 3):
                    with engine.keep_workers_alive():  # without an open sequence, then with one
                        sleep(0.05)
                    check_cancelled(engine, layers, LONG)
                    results.append(list(engine.generate(PROMPT, NEW, GREEDY)))
                    with engine.keep_workers_alive():
                        sleep(0.05)
                    check_cancelled(engine, layers, [*PROMPT, *results[-1], *LONG])
                    results.append(list(engine.generate(PROMPT, NEW, GREEDY)))
            with engine.keep_workers_alive():
                sleep(0.05)
        results.append(list(engine.generate(PROMPT, NEW, GREEDY)))
        engine.close()
    return expected, results


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize("sampling", slow_except([GREEDY, Sampling(1.0, top_p=1, seed=4)], 1))
def test_on_logits_receives_the_logits_of_each_token(
    mode: str, sampling: Sampling, models: Pair
) -> None:
    """Before the token is yielded, and they are the target's after all preceding tokens."""
    rows: list[Tensor] = []
    tokens: list[int] = []
    with models.engine(mode, **CHUNKED) as engine:
        request = Request(
            PROMPT, NEW, sampling, on_logits=lambda logits, _: rows.extend(logits.clone())
        )
        for token in engine.submit(request):
            tokens.append(token)
            assert len(rows) >= len(tokens)
        assert len(rows) == NEW
        for count, row in enumerate(rows):
            expected: list[Tensor] = []

            def collect(logits: Tensor, _: Tensor, expected: list[Tensor] = expected) -> None:
                expected.extend(logits)

            prefix = [*PROMPT, *tokens[:count]]
            list(engine.submit(Request(prefix, 1, sampling, on_logits=collect)))
            torch.testing.assert_close(row, expected[0], atol=1e-4, rtol=1e-4)
