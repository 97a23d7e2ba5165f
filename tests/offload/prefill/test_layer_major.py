"""A cache extended after its last token, or from an earlier one, equals one prefilled at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from threading import Event

import pytest
import torch
from torch import Tensor

from offload.memory.cpu_link import EmulatedLink
from offload.memory.link import Copy, Link
from offload.prefill import layer_major
from offload.prefill.layer_major import Prefill
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered import shape as tiered_shape
from offload.tiered.cache import TieredCache
from support.driving import (
    BFLOAT16,
    LAYOUT,
    PLACEMENTS,
    QKV,
    ROWS,
    cache_pair,
    concat,
    first_tokens,
    forward,
    prefill,
    random_qkv,
    tiered_cache,
)
from support.links import CPU, every_link, make_test_link, worst_link
from support.slow import slow_except

every_seed = pytest.mark.parametrize("seed", slow_except([0, 1]))
# fields as in PLACEMENTS
SPLIT_PLACEMENTS = [
    (1, 0, 2, False),
    (0, 0, 4, False),
    (1, 0, 1, True),
    (2, 1, 0, True),
    (1, 2, 2, False),
    (0, 3, 4, False),
    (0, 1, 2, True),
]


def extend(cache: TieredCache, tokens: list[QKV], rng: random.Random) -> Tensor:
    """Add tokens to the cache, in a forward where possible; return outputs (L, T, Hq, D)."""
    rows = len(tokens[0][0])
    if rows <= ROWS and cache.is_block_aligned and rng.random() < 0.5:
        out = forward(cache, tokens)
        cache.advance(rows)
        return out
    out = prefill(cache, tokens, chunk=rng.choice([7, 16, 64]))
    cache.onload_deferred()
    return out


def check_turns(cache: TieredCache, reference: TieredCache, seed: int, close: bool) -> None:
    """Compare turns in `cache`, from random positions, with one prefill in `reference`."""
    rng = random.Random(seed)
    layout = cache.layout
    sequence = random_qkv(rng.randint(1, 60), layout)
    extend(cache, sequence, rng)
    for _ in range(9):
        max_cached = min(len(sequence[0][0]), 140)
        cached = rng.choice([max_cached, rng.randint(0, max_cached)])
        cache.truncate(cached)
        turn = random_qkv(rng.randint(1, 50), layout)
        sequence = concat(first_tokens(sequence, cached), turn)
        actual = extend(cache, turn, rng)
        reference.crop(0)
        expected = prefill(reference, sequence, chunk=32)[:, cached:]
        reference.onload_deferred()
        for _ in range(rng.randint(0, 3)):
            tokens = random_qkv(rng.randint(1, ROWS), layout)
            if cache.length + ROWS > cache.shape.capacity:
                break
            actual = torch.cat((actual, forward(cache, tokens)), dim=1)
            expected = torch.cat((expected, forward(reference, tokens)), dim=1)
            accepted = rng.randint(0, len(tokens[0][0]))
            cache.advance(accepted)
            reference.advance(accepted)
            sequence = concat(sequence, first_tokens(tokens, accepted))
        assert cache.length == reference.length == len(sequence[0][0])
        tolerance = 1e-5 if close else 3e-2
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


class RecordingLink(EmulatedLink):
    """Records the bytes of each copy to the host."""

    def __init__(self) -> None:
        super().__init__(CPU, rate=1e12)
        self.sizes = list[int]()

    def copy(self, pairs: Sequence[Copy]) -> Event:
        self.sizes += [source.nbytes for _, source in pairs]
        return super().copy(pairs)

    def copy_out(self, pairs: Sequence[Copy]) -> Event:
        self.sizes += [source.nbytes for _, source in pairs]
        return super().copy_out(pairs)


@pytest.mark.parametrize("split", [0, 2])
def test_prompts_leave_for_the_host_in_long_copies(
    split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of less than the size wanted is the last one of its layer."""
    wanted = 24 * BFLOAT16.head_dim  # 24 tokens of a byte, or 12 of two
    monkeypatch.setattr(layer_major, "WRITEBACK_BYTES", wanted)
    monkeypatch.setattr(tiered_shape, "WRITEBACK_BYTES", wanted)
    link = RecordingLink()
    cache = tiered_cache(link, 0, split=split, layout=BFLOAT16)
    tokens = random_qkv(150, BFLOAT16)
    prefill(cache, tokens, chunk=6)
    counts = Counter(size >= wanted for size in link.sizes)
    last = BFLOAT16.layers * BFLOAT16.heads * 2
    assert counts[True] >= 3 * counts[False]
    assert counts[False] <= last
    # and every element is there
    reference = tiered_cache(make_test_link("view"), BFLOAT16.layers, layout=BFLOAT16)
    reference.rotary = cache.rotary
    prefill(reference, tokens, chunk=6)
    turn = random_qkv(3, BFLOAT16)
    torch.testing.assert_close(forward(cache, turn), forward(reference, turn), atol=3e-2, rtol=3e-2)
    link.close()


@every_seed
@worst_link
@pytest.mark.parametrize(("resident", "deferred", "split", "compressed"), PLACEMENTS)
def test_turns_give_the_outputs_of_one_prefill(
    link: Link, resident: int, deferred: int, split: int, compressed: bool, seed: int
) -> None:
    deferred = deferred if link.copies else 0
    cache = tiered_cache(link, resident, deferred, split, compressed=compressed)
    check_turns(cache, tiered_cache(make_test_link("view"), LAYOUT.layers), seed, close=True)


@every_seed
@worst_link
@pytest.mark.parametrize(
    ("resident", "deferred", "split", "compressed"), slow_except(SPLIT_PLACEMENTS, 1, 4, 6)
)
def test_turns_on_split_layers_give_the_outputs_of_one_prefill(
    link: Link, resident: int, deferred: int, split: int, compressed: bool, seed: int
) -> None:
    deferred = deferred if link.copies else 0
    cache = tiered_cache(link, resident, deferred, split, compressed=compressed, layout=BFLOAT16)
    reference = tiered_cache(make_test_link("view"), LAYOUT.layers, layout=BFLOAT16)
    check_turns(cache, reference, seed, close=False)


@every_seed
@worst_link
@pytest.mark.parametrize(
    ("resident", "deferred", "split", "compressed"), slow_except(SPLIT_PLACEMENTS, 1, 4, 6)
)
def test_split_layers_reconstruct_exact_elements(
    link: Link, resident: int, deferred: int, split: int, compressed: bool, seed: int
) -> None:
    """The same forwards give bit-identical outputs, after truncating to any length."""
    deferred = deferred if link.copies else 0
    rng = random.Random(seed)
    cache = tiered_cache(link, resident, deferred, split, compressed=compressed, layout=BFLOAT16)
    reference = tiered_cache(link, resident, min(deferred, resident), layout=BFLOAT16)
    reference.rotary = cache.rotary
    turns = [(0, 70), (70, 30), (100, 1), (97, 2), (98, 5), (103, 1), (99, 3), (102, 40)]
    for cached, count in turns + [(None, rng.randint(1, 40)) for _ in range(8)]:
        length = cache.length
        if cached is None:
            cached = max(0, min(length - rng.choice([0, 1, 5, 14, 60]), 150))
        turn = with_outliers(random_qkv(count, BFLOAT16))
        in_forwards = rng.random() < 0.3 and count <= ROWS
        outs = []
        for kv_cache in (cache, reference):
            kv_cache.truncate(cached)
            if in_forwards and kv_cache.is_block_aligned:
                outs.append(forward(kv_cache, turn))
                kv_cache.advance(count)
            else:
                outs.append(prefill(kv_cache, turn, chunk=20))
            kv_cache.onload_deferred()
        assert torch.equal(*outs)


def with_outliers(tokens: list[QKV]) -> list[QKV]:
    """Make some keys tiny and some values huge, so that no high byte represents them."""
    for _, k, v in tokens:
        k[torch.rand(k.shape) < 0.02] *= 1e-6
        v[torch.rand(v.shape) < 0.02] *= 60
    return tokens


@pytest.mark.parametrize("link", ["emulated"], indirect=True)
@pytest.mark.parametrize("resident", range(LAYOUT.layers + 1))
def test_cached_tokens_cross_the_link_once(link: Link, resident: int) -> None:
    cache = tiered_cache(link, resident)
    offloaded = LAYOUT.layers - resident
    prefill(cache, random_qkv(100), chunk=16)
    before = cache.boundary
    link_out = cache.traffic.link_out
    prefill(cache, random_qkv(70), chunk=16)
    assert cache.traffic.link_in == LAYOUT.bytes(before, offloaded)
    # tokens that the boundary moved past leave once
    assert cache.traffic.link_out - link_out == LAYOUT.bytes(cache.boundary - before, offloaded)
    forward(cache, random_qkv(9))
    assert cache.traffic.link_in == LAYOUT.bytes(before + cache.boundary, offloaded)


@every_link
def test_a_retrieval_cache_is_reset_by_a_new_turn(link: Link) -> None:
    """It selects as after a prefill of the whole sequence."""
    shape = RetrievalCacheSpec.of(24, 4, 200, ROWS, 60)
    target, retrieval = cache_pair(link, 1, shape)
    sequence = random_qkv(90)
    prefill(target, sequence, chunk=200)
    for cached, count in [(90, 40), (50, 50), (30, 60), (3, 70)]:
        for _ in range(3):
            forward(target, random_qkv(3))
            target.advance(3)
        target.truncate(cached)
        turn = random_qkv(count)
        prefill(target, turn, chunk=200)
        sequence = concat(first_tokens(sequence, cached), turn)
        whole, reference = cache_pair(link, 1, shape)
        prefill(whole, sequence, chunk=200)
        assert retrieval.length == reference.length == cached + count
        tokens = random_qkv(2)
        torch.testing.assert_close(forward(retrieval, tokens), forward(reference, tokens))
        assert retrieval.selector.selections == 1


def test_prefill_checks_capacity_and_restores_block_alignment() -> None:
    cache = tiered_cache(make_test_link("view"), resident=1)
    prefill(cache, random_qkv(150), chunk=64)
    with pytest.raises(ValueError, match="150 tokens and 51 more do not fit"), Prefill(cache, 51):
        pass
    cache.truncate(100)  # inside a block, where decoding cannot continue
    assert not cache.is_block_aligned
    prefill(cache, random_qkv(3), chunk=3)
    assert cache.is_block_aligned
