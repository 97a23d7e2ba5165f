"""Levels that draft against codes: the very logits of the target, for the fewest bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.decode_loop import PrefilledPrompt
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.engine.session import SequenceState
from decoding.planning.memory_plan import device_breakdown
from offload.errors import TierForceError
from offload.memory.host_arena import HostArena
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

MODES = ["split", "split-retrieval", "split-speculative", "split-hierarchical"]
TEXT = prompt("argparse")[:700]
NEW = 40


def opened(mode: str, group: TensorParallelGroup | None = None, **choices: Any) -> Engine:
    """An engine of the demo pair with all levels at work behind a few hundred tokens."""
    settings = Settings(
        mode=mode,
        **{
            "dtype": "bfloat16",
            "retrieval_budget": 200,
            "num_draft_tokens": 8,
            "num_inner_draft_tokens": 3,
            "link": "emulated:50",
            "gpu_kv_layers": 1,
            **choices,
        },
    )
    draft = DEMO / "draft" if "speculative" in mode or "hierarchical" in mode else None
    engine = Engine.from_pretrained(DEMO / "target", draft, settings, group=group)
    engine.stop_tokens = frozenset()
    return engine


@pytest.mark.parametrize("length", slow_except([900, 2700]))
def test_logits_are_bit_for_bit_those_without_slices(length: int) -> None:
    """Forwards of several widths up to this length; any number of their tokens is accepted."""
    rng = random.Random(0)
    engine = opened("split", link="view")
    runtime, tokens = engine.runtime, torch.tensor((3 * prompt("argparse"))[:length])
    session = SequenceState(runtime, tokens[:300].tolist(), length - 300)
    shape = replace(
        runtime.requirements.target_spec(300, length - 300), compressed=False
    ).with_placement(1)
    shapes = [
        shape,
        shape.with_placement(1, 0, 5),
        replace(shape, compressed=True).with_placement(1, 0, 2),
    ]
    caches = [
        TieredCache(
            each, runtime.link, session.target.rotary, HostArena(runtime.link, runtime.dtype)
        )
        for each in shapes
    ]
    with torch.inference_mode():
        for cache in caches:
            with Prefill(cache, 300) as reading:
                runtime.target.prefill(tokens[:300], reading, 256)
        while caches[0].length + 65 < length:
            rows, start = rng.choice((1, 7, 33, 65, 65)), caches[0].length
            part = tokens[start : start + rows]
            without, *found = (runtime.target(part, cache, rows) for cache in caches)
            assert all(torch.equal(without, each) for each in found)
            stand = rng.randint(1, rows)
            for cache in caches:
                cache.advance(stand)
    sizes = [cache.host.nbytes for cache in caches]
    assert sizes[1] < sizes[2] < sizes[0]
    engine.close()


@pytest.mark.parametrize("mode", slow_except(MODES, 1, -1))
@pytest.mark.parametrize("split", slow_except([None, 2]))
def test_what_codes_say_stands_nearly_always(mode: str, split: int | None) -> None:
    engine = opened(mode, split_kv_layers=split)
    assert len(list(engine.generate(TEXT, NEW, GREEDY))) == NEW
    stats = engine.stats
    names = [level.name for level in stats.levels]
    assert names[:2] == ["target", "split"]
    assert ("retrieval" in names) == ("retrieval" in mode or "hierarchical" in mode)
    assert ("draft" in names) == ("speculative" in mode or "hierarchical" in mode)
    accepted = stats.acceptance["target"]
    assert accepted is not None
    assert accepted > (0.8 if split is None else 0.5)
    assert stats.plan is not None
    assert stats.plan.split_layers == (5 if split is None else 2)
    # four of 16 bits of a layer with codes, twelve of the others
    passes = stats.levels[0].stats.forwards
    layout = engine.runtime.requirements.layout
    streamed = stats.traffic["target"].link_in - stats.prefill_link_in
    bits = 5 * 4 if split is None else 2 * 4 + 3 * 12
    assert streamed <= passes * layout.bytes(len(TEXT) + NEW, 1) * bits / 16
    assert streamed >= passes * layout.bytes(len(TEXT) - 128, 1) * bits / 16
    engine.close()


def test_a_text_is_the_same_where_codes_come_late() -> None:
    """In memory with room for all of them, but not beside the prompt's hidden states."""
    texts, plans = [], []
    room: int | None = None
    for _ in range(2):
        engine = opened("split", prefill_chunk=2000, device_memory=room)
        texts.append(list(engine.generate(TEXT, NEW, Sampling(0.8, top_p=1, seed=3))))
        stats, needs = engine.stats, engine.runtime.requirements
        assert stats.plan is not None
        plans.append(stats.plan)
        came = needs.planned_spec(stats.plan, len(TEXT)).deferred_bytes(len(TEXT))
        # of resident layers all tokens come, of codes those before the boundary
        assert 0.8 * came <= stats.prefill_link_in <= came
        wanted = needs.memory(len(TEXT), NEW)
        phases = device_breakdown(wanted, 1, 3, 5)
        room = needs.weight_bytes + max(sum(tiers.values()) for tiers in phases)
        engine.close()
    early, deferred = plans
    assert (early.deferred_layers, early.split_layers) == (0, 5)
    assert deferred.deferred_layers > deferred.resident_layers == 1
    assert deferred.split_layers == 5
    assert texts[0] == texts[1]


def on_two_ranks(mode: str, folder: Path) -> None:
    group = TensorParallelGroup.from_environment("cpu")
    engine = opened(mode, group, split_kv_layers=3)
    if group.rank:
        engine.run_worker()
        return
    tokens = list(engine.generate(TEXT, NEW, GREEDY))
    stats = engine.stats
    assert len(tokens) == NEW
    accepted = stats.acceptance["target"]
    assert accepted is not None
    assert accepted > 0.6
    engine.close()
    (folder / mode).touch()


@pytest.mark.slow
def test_two_ranks_draft_against_codes_of_their_heads(tmp_path: Path) -> None:
    run_ranks(2, on_two_ranks, "split-hierarchical", tmp_path)
    assert (tmp_path / "split-hierarchical").exists()


def test_slices_of_32_bits_are_refused() -> None:
    with pytest.raises(TierForceError, match="needs elements of 16 bits, found float32"):
        opened("split", dtype="float32")
    with pytest.raises(TierForceError, match="`compress_offload` saves nothing with float32"):
        opened("plain", dtype="float32", compress_offload=True)


def test_layers_that_are_not_there_get_no_codes() -> None:
    with pytest.raises(TierForceError, match="`split_kv_layers` 9: the model has 6 layers"):
        opened("split", split_kv_layers=9)
    with pytest.raises(TierForceError, match="`gpu_kv_layers` 4 and `split_kv_layers` 3: the"):
        opened("split", gpu_kv_layers=4, split_kv_layers=3)
    with pytest.raises(TierForceError, match="needs a split mode"):
        Settings(mode="hierarchical", split_kv_layers=3)


@pytest.mark.parametrize("split", slow_except([5, 2], 1))
@pytest.mark.slow
def test_a_text_is_gone_through_twice_alike(split: int) -> None:
    """Codes, outliers and the retrieval cache of layers without codes come back with the rest."""
    engine = opened("split", split_kv_layers=split, num_draft_tokens=5)
    session = SequenceState(engine.runtime, TEXT, 70)
    text = PrefilledPrompt(session)
    first, again = (text.run(Sampling(1.0, top_p=1, seed=1)) for _ in range(2))
    assert first.tokens == again.tokens > 60
    assert first.tokens_per_verification == again.tokens_per_verification
    engine.close()
