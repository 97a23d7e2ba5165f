"""Resident layers that come to the device behind prefill: the same outputs, each byte moved once
each way, none of it per token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding import Sampling
from decoding.planning.memory_plan import device_breakdown
from offload.memory.link import Link
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.prefill import Prefill
from parallel.model.loading import parameter_bytes
from support.driving import CAPACITY, LAYOUT, TAIL, forward, pair, plain, prefill, text, tiered
from support.engines import SMALL, Pair
from support.links import make_test_link

LAYERS = LAYOUT.layers
COPYING = pytest.mark.parametrize("link", ["emulated", "delaying"], indirect=True)
SPLITS = pytest.mark.parametrize(("resident", "deferred"), [(1, 1), (3, 1), (3, 2), (2, 2)])


@COPYING
@SPLITS
@pytest.mark.parametrize(("prompt", "chunk"), [(50, 16), (3, 2), (90, 90)])
def test_outputs_do_not_depend_on_when_a_layer_comes(
    link: Link, resident: int, deferred: int, prompt: int, chunk: int
) -> None:
    cache, want, tokens = tiered(link, resident, deferred=deferred), plain(), text(prompt)
    torch.testing.assert_close(
        prefill(cache, tokens, chunk), forward(want, tokens), atol=1e-5, rtol=1e-5
    )
    want.advance(prompt)
    for rows in (1, 20, 3, 17, 1):
        more = text(rows)
        torch.testing.assert_close(forward(cache, more), forward(want, more), atol=1e-5, rtol=1e-5)
        cache.advance(rows)
        want.advance(rows)


@COPYING
@SPLITS
def test_a_late_layer_goes_out_and_comes_back_once(
    link: Link, resident: int, deferred: int
) -> None:
    cache, early = tiered(link, resident, deferred=deferred), resident - deferred
    ring = 3 * 2 * 2 * CAPACITY * LAYOUT.head_dim * 4
    there = LAYOUT.bytes(TAIL, LAYERS - resident) + ring
    with Prefill(cache, 50) as reading:
        assert cache.device_bytes == LAYOUT.bytes(CAPACITY, early) + there
        for layer, qkv in enumerate(text(50)):
            reading.attend(layer, *qkv, 0)
    cache.onload_deferred()
    assert cache.device_bytes == LAYOUT.bytes(CAPACITY, resident) + there
    assert cache.traffic.link_in == LAYOUT.bytes(50, deferred)
    assert cache.traffic.link_out == LAYOUT.bytes(50, deferred) + LAYOUT.bytes(
        cache.boundary, LAYERS - resident
    )
    before = cache.traffic.link_in
    forward(cache, text(2))
    assert cache.traffic.link_in - before == LAYOUT.bytes(cache.boundary, LAYERS - resident)


@COPYING
def test_a_cache_with_late_layers_need_not_be_prefilled(link: Link) -> None:
    cache, want = tiered(link, 2, deferred=1), plain()
    for rows in [24, 1, 20, 3]:
        tokens = text(rows)
        torch.testing.assert_close(
            forward(cache, tokens), forward(want, tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(rows)
        want.advance(rows)


@pytest.mark.parametrize(("resident", "deferred"), [(LAYERS, 1), (1, 2)])
def test_late_layers_take_far_ones_to_come_by(resident: int, deferred: int) -> None:
    link = make_test_link("emulated")
    with pytest.raises(ValueError, match="that needs offloaded layers and a host link"):
        tiered(link, resident, deferred=deferred)
    with pytest.raises(ValueError, match="that needs offloaded layers and a host link"):
        tiered(make_test_link("view"), 2, deferred=1)
    link.close()


@COPYING
def test_a_cache_that_starts_over_has_all_its_layers(link: Link) -> None:
    cache = tiered(link, 2, deferred=1)
    for length in (50, 30):
        want, prompt, tokens = plain(), text(length), text(3)
        torch.testing.assert_close(
            prefill(cache, prompt, 16), forward(want, prompt), atol=1e-5, rtol=1e-5
        )
        want.advance(length)
        torch.testing.assert_close(
            forward(cache, tokens), forward(want, tokens), atol=1e-5, rtol=1e-5
        )
        cache.crop(0)


@pytest.mark.parametrize("policy", ["attention", "static"])
def test_followers_see_what_they_would_have_seen(policy: str) -> None:
    """A late layer's prefix and recent tokens are shown from the memory that prefill works in."""
    shape, story = RetrievalCacheSpec.of(48, 4, 150, 24, 24), text(100)
    found = []
    for deferred in (0, 2):
        link = make_test_link("delaying")
        target, middle = pair(link, 2, shape, policy, deferred=deferred)
        prefill(target, story, 40)
        torch.manual_seed(5)
        found.append(forward(middle, text(3)))
        link.close()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_the_engine_spends_on_layers_what_hidden_states_took(
    mode: str, checkpoint: Callable[..., Path]
) -> None:
    models = Pair(
        checkpoint(max_position_embeddings=4096, num_hidden_layers=5),
        checkpoint(seed=1, num_hidden_layers=1),
    )
    assert models.draft is not None
    prompt, new, sampling = [5, 9, 3, 7] * 500, 30, Sampling(1.0, top_p=1)
    more = {**SMALL, "retrieval_budget": 64, "prefill_chunk": 64, "link": "emulated:50"}
    wanted = models.generate(mode, prompt, new, sampling, gpu_kv_layers=2, **more)
    with models.engine(mode, **more) as engine:
        needs = engine.runtime.requirements
        needed = max(
            sum(tiers.values()) for tiers in device_breakdown(needs.memory(len(prompt), new), 2, 1)
        )
    room = needed + parameter_bytes(models.target) + parameter_bytes(models.draft)
    with models.engine(mode, device_memory=room, gpu_kv_layers=2, **more) as engine:
        assert list(engine.generate(prompt, new, sampling)) == wanted
        stats, plan = engine.stats, engine.stats.plan
        assert plan is not None
        assert (plan.resident_layers, plan.deferred_layers) == (2, 1)
        assert plan.host_bytes == engine.runtime.arena.nbytes
        layout = engine.runtime.target.config.kv_layout(1, torch.float32)
        assert stats.prefill_link_in == layout.bytes(len(prompt), 1)
        streamed = stats.traffic["target"].link_in - stats.prefill_link_in
        assert stats.link_bytes_per_token == streamed / (new - 1)
