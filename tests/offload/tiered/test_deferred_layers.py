"""Resident layers that are copied to the device after prefill.

Outputs are the same; each byte crosses the link once each way, and none of it per token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding import Sampling
from decoding.planning.memory_plan import device_breakdown
from decoding.planning.request_spec import RequestSpec
from offload.memory.link import Link
from offload.prefill.layer_major import Prefill
from offload.retrieval.shape import RetrievalCacheSpec
from parallel.model.loading import parameter_bytes
from support.driving import (
    CAPACITY,
    LAYOUT,
    TAIL,
    cache_pair,
    forward,
    plain_cache,
    prefill,
    random_qkv,
    tiered_cache,
)
from support.engines import SMALL, Pair
from support.links import make_test_link

LAYERS = LAYOUT.layers
copying_links = pytest.mark.parametrize("link", ["emulated", "delaying"], indirect=True)
every_placement = pytest.mark.parametrize(
    ("resident", "deferred"), [(1, 1), (3, 1), (3, 2), (2, 2)]
)


@copying_links
@every_placement
@pytest.mark.parametrize(("prompt", "chunk"), [(50, 16), (3, 2), (90, 90)])
def test_deferral_does_not_change_outputs(
    link: Link, resident: int, deferred: int, prompt: int, chunk: int
) -> None:
    cache, reference = tiered_cache(link, resident, deferred=deferred), plain_cache()
    prompt_qkv = random_qkv(prompt)
    torch.testing.assert_close(
        prefill(cache, prompt_qkv, chunk), forward(reference, prompt_qkv), atol=1e-5, rtol=1e-5
    )
    reference.advance(prompt)
    for rows in (1, 20, 3, 17, 1):
        tokens = random_qkv(rows)
        torch.testing.assert_close(
            forward(cache, tokens), forward(reference, tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(rows)
        reference.advance(rows)


@copying_links
@every_placement
def test_a_deferred_layer_is_copied_once_in_each_direction(
    link: Link, resident: int, deferred: int
) -> None:
    cache = tiered_cache(link, resident, deferred=deferred)
    not_deferred = resident - deferred
    ring = 3 * 2 * 2 * CAPACITY * LAYOUT.head_dim * 4
    base_bytes = LAYOUT.bytes(TAIL, LAYERS - resident) + ring
    with Prefill(cache, 50) as context:
        assert cache.device_bytes == LAYOUT.bytes(CAPACITY, not_deferred) + base_bytes
        for layer, qkv in enumerate(random_qkv(50)):
            context.attend(layer, *qkv, 0)
    cache.onload_deferred()
    assert cache.device_bytes == LAYOUT.bytes(CAPACITY, resident) + base_bytes
    assert cache.traffic.link_in == LAYOUT.bytes(50, deferred)
    assert cache.traffic.link_out == LAYOUT.bytes(50, deferred) + LAYOUT.bytes(
        cache.boundary, LAYERS - resident
    )
    before = cache.traffic.link_in
    forward(cache, random_qkv(2))
    assert cache.traffic.link_in - before == LAYOUT.bytes(cache.boundary, LAYERS - resident)


@copying_links
def test_a_cache_with_deferred_layers_needs_no_prefill(link: Link) -> None:
    cache, reference = tiered_cache(link, 2, deferred=1), plain_cache()
    for rows in [24, 1, 20, 3]:
        tokens = random_qkv(rows)
        torch.testing.assert_close(
            forward(cache, tokens), forward(reference, tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(rows)
        reference.advance(rows)


@pytest.mark.parametrize(("resident", "deferred"), [(LAYERS, 1), (1, 2)])
def test_deferred_layers_require_offloaded_layers_and_a_link(resident: int, deferred: int) -> None:
    link = make_test_link("emulated")
    with pytest.raises(ValueError, match="that needs offloaded layers and a host link"):
        tiered_cache(link, resident, deferred=deferred)
    with pytest.raises(ValueError, match="that needs offloaded layers and a host link"):
        tiered_cache(make_test_link("view"), 2, deferred=1)
    link.close()


@copying_links
def test_a_cache_with_deferred_layers_can_be_reused(link: Link) -> None:
    cache = tiered_cache(link, 2, deferred=1)
    for length in (50, 30):
        reference, prompt, tokens = plain_cache(), random_qkv(length), random_qkv(3)
        torch.testing.assert_close(
            prefill(cache, prompt, 16), forward(reference, prompt), atol=1e-5, rtol=1e-5
        )
        reference.advance(length)
        torch.testing.assert_close(
            forward(cache, tokens), forward(reference, tokens), atol=1e-5, rtol=1e-5
        )
        cache.crop(0)


@pytest.mark.parametrize("policy", ["attention", "static"])
def test_observers_are_notified_of_deferred_layers(policy: str) -> None:
    """Their prefix and tail are passed from the memory that prefill builds them in."""
    shape = RetrievalCacheSpec.of(48, 4, 150, 24, 24)
    sequence = random_qkv(100)
    outs = []
    for deferred in (0, 2):
        link = make_test_link("delaying")
        target, middle = cache_pair(link, 2, shape, policy, deferred=deferred)
        prefill(target, sequence, 40)
        torch.manual_seed(5)
        outs.append(forward(middle, random_qkv(3)))
        link.close()
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_deferred_layers_use_the_memory_of_hidden_states(
    mode: str, checkpoint: Callable[..., Path]
) -> None:
    models = Pair(
        checkpoint(max_position_embeddings=4096, num_hidden_layers=5),
        checkpoint(seed=1, num_hidden_layers=1),
    )
    assert models.draft is not None
    prompt, max_new_tokens, sampling = [5, 9, 3, 7] * 500, 30, Sampling(1.0, top_p=1)
    options = {**SMALL, "retrieval_budget": 64, "prefill_chunk": 64, "link": "emulated:50"}
    expected = models.generate(mode, prompt, max_new_tokens, sampling, gpu_kv_layers=2, **options)
    with models.engine(mode, **options) as engine:
        spec = RequestSpec(engine.runtime.requirements, len(prompt), max_new_tokens)
        phases = device_breakdown(spec.memory, 2, 1)
        required = max(sum(tiers.values()) for tiers in phases)
    device_memory = required + parameter_bytes(models.target) + parameter_bytes(models.draft)
    with models.engine(mode, device_memory=device_memory, gpu_kv_layers=2, **options) as engine:
        assert list(engine.generate(prompt, max_new_tokens, sampling)) == expected
        stats = engine.stats
        assert stats.plan is not None
        plan = stats.plan.memory
        assert (plan.resident_layers, plan.deferred_layers) == (2, 1)
        assert plan.host_bytes == engine.runtime.arena.nbytes
        layout = engine.runtime.target.config.kv_layout(1, torch.float32)
        assert stats.prefill_link_in == layout.bytes(len(prompt), 1)
        streamed = stats.traffic["target"].link_in - stats.prefill_link_in
        assert stats.link_bytes_per_token == streamed / (max_new_tokens - 1)
