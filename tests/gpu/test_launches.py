"""Launches of forwards on a GPU, with fused kernels, and waits of the host: counted, not timed.

A layer's launches do not depend on its dimensions, except for the number of its KV heads: they
arrive a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from decoding import GREEDY, Engine
from offload.codec import outliers
from offload.tiered import shape, split
from parallel.model.pipeline import LayerSteps
from parallel.model.transformer import KVCacheLike, Transformer
from parallel.ranks.process_group import TensorParallelGroup
from standin import Machine
from standin.fused import fused_kernels
from support.engines import Pair
from support.interpreter import require_interpreter
from support.models import random_tokens

pytestmark = pytest.mark.cuda
LAYERS = 2
PROMPT = random_tokens(300).tolist()
# a 7B's numbers of heads, small dimensions
SEVEN_B = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "dtype": torch.float16,
}
GROUPED = {**SEVEN_B, "num_attention_heads": 8, "num_key_value_heads": 2}
OPTIONS: dict[str, Any] = {
    "graphs": False,
    "num_draft_tokens": 4,
    "num_inner_draft_tokens": 2,
    "retrieval_budget": 64,
    "gpu_kv_layers": 0,
}


class Forward(NamedTuple):
    """A forward, and what it launched."""

    cache: str
    rows: int
    kernels: int  # and copies within the device
    transfers: int


@pytest.fixture
def machine(gpu: Machine | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A stand-in with fused kernels, for which as few heads arrive at a time as for a book."""
    if gpu is None:
        pytest.skip("only a stand-in counts launches")
    require_interpreter()
    monkeypatch.setattr(shape, "_MIN_COPY_BYTES", 1)
    with fused_kernels(gpu):
        yield gpu


@pytest.fixture
def forwards(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """The forwards of the test, without prefill."""
    counted, run = list[Forward](), Transformer.forward_steps

    def forward_steps(
        model: Transformer, tokens: Tensor, cache: KVCacheLike, rows: int
    ) -> LayerSteps[Tensor]:
        first = len(machine.launches)
        logits = yield from run(model, tokens, cache, rows)
        own = [each for each in machine.launches[first:] if "empty" not in each]
        transfers = sum("cpu" in each for each in own)
        name = type(cache).__name__
        counted.append(Forward(name, len(tokens), len(own) - transfers, transfers))
        return logits

    monkeypatch.setattr(Transformer, "forward_steps", forward_steps)
    return counted


@contextmanager
def engine(path: Path, draft: Path, mode: str, **options: Any) -> Iterator[Engine]:
    """Yield an engine in float16, with drafts of 4 tokens, and 2 of the draft model."""
    pair = Pair(path, draft, TensorParallelGroup(device=torch.device("cuda", 0)), "float16")
    with pair.engine(mode, **{**OPTIONS, **options}) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options", "cache"),
    [
        ("hierarchical", {}, "RetrievalCache"),
        ("split-hierarchical", {"split_budget": 64}, "OnDeviceCache"),
    ],
)
def test_drafting_takes_few_launches(
    mode: str,
    options: dict[str, Any],
    cache: str,
    forwards: list[Forward],
    checkpoint: Callable[..., Path],
) -> None:
    """Any number of query tokens takes 24 kernels a layer, with selected keys or without."""
    with engine(checkpoint(**GROUPED), checkpoint(dtype=torch.float16), mode, **options) as opened:
        list(opened.generate(PROMPT, 8, GREEDY))
    drafts = [each for each in forwards if each.cache == cache]
    assert 3 in {each.rows for each in drafts}
    assert max(each.kernels for each in drafts) <= 24 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resident", "kernels", "transfers"),
    # all heads of a resident layer are selected from at once
    [(0, 2_700, 2_048), (1, 1_800, 1_024)],
)
def test_a_verification_with_selection_takes_few_launches(
    resident: int,
    kernels: int,
    transfers: int,
    forwards: list[Forward],
    checkpoint: Callable[..., Path],
) -> None:
    """All 32 layers of a 7B, of which each has 32 KV heads, take 5,000 launches at most."""
    verifications = list[Forward]()
    small = checkpoint(dtype=torch.float16)
    with engine(checkpoint(**SEVEN_B), small, "retrieval", gpu_kv_layers=resident) as opened:
        stream = opened.generate(PROMPT[:160], 40, GREEDY)
        while len(verifications) < 2:  # the first one also moves tokens to the host
            next(stream)
            verifications = [each for each in forwards if each.cache == "TieredCache"]
        stream.close()
    last = verifications[-1]
    assert last.rows > 1
    assert last.kernels * 32 / LAYERS <= kernels
    assert last.transfers * 32 / LAYERS <= transfers


def test_the_host_does_not_wait_for_each_block_that_is_split(
    machine: Machine, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, pieces, append = [], list[int](), outliers.Outliers.append

    def count(layer: outliers.Outliers, kv: Tensor, mask: Tensor, start: int) -> None:
        pieces.append(start)
        append(layer, kv, mask, start)

    monkeypatch.setattr(outliers.Outliers, "append", count)
    for tokens in (256, 16):
        monkeypatch.setattr(split, "SPLIT_TOKENS", tokens)
        machine.waits.clear()
        pieces.clear()
        with engine(checkpoint(**GROUPED), checkpoint(dtype=torch.float16), "split") as opened:
            list(opened.generate(PROMPT, 1, GREEDY))
        # links are drained when they are closed, too
        waits = [each for each in machine.waits if each != "Stream.synchronize"]
        counts.append((len(pieces), len(waits)))
    (few_pieces, waits_for_few), (many_pieces, waits_for_many) = counts
    assert many_pieces >= 8 * few_pieces
    assert waits_for_many == waits_for_few
