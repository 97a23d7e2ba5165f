"""Repeated selection: its budget, interval, slots for long sequences, and link traffic (none)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.memory.link import Link
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from support.driving import (
    BLOCK,
    CAPACITY,
    GROUPS,
    LAYOUT,
    QKV,
    RECENT,
    cache_pair,
    forward,
    plain_cache,
    prefill,
    random_qkv,
    speculate,
    tiered_cache,
)
from support.links import every_link, make_test_link

SHAPE = RetrievalCacheSpec(48, 4, 5, 12, CAPACITY, 7, CAPACITY)
TINY = KVLayout(layers=2, heads=2, head_dim=4, dtype=torch.float32)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def test_a_budget_is_spent_and_never_exceeded() -> None:
    for budget, chunk, prefix, recent in product(
        [12, 48, 64], [1, 4, 12], range(0, 121, 12), range(20)
    ):
        selected = replace(SHAPE, budget=budget, chunk=chunk).selected(prefix, recent)
        if prefix + recent <= budget:
            assert selected == prefix
            continue
        assert selected % chunk == 0
        assert min(chunk, prefix) <= selected <= prefix
        if selected < prefix:
            spent = selected + recent
            assert budget - chunk < spent <= budget or (spent > budget and selected == chunk)


@pytest.mark.parametrize(
    ("budget", "chunk"),
    [(1, 1), (8, 8), (13, 4), (48, 1), (200, 8), (4096, 1), (4096, 8)],
)
@pytest.mark.parametrize("context", [1, 300, 130_000])
def test_default_sizes_suit_a_budget(budget: int, chunk: int, context: int) -> None:
    shape = RetrievalCacheSpec.of(budget, chunk, context, rows=7, append_room=20)
    quantised = replace(shape, quantised=True)
    assert shape.block % chunk == 0 < shape.block <= max(64, budget // 4) + chunk
    assert 1 <= shape.window <= max(1, budget // 8)
    for prefix, rows in product(range(0, min(context, 50 * shape.block), shape.block), (1, 7)):
        recent = shape.window + shape.block - 1 + rows  # the maximum
        if prefix + recent <= context:
            selected = shape.selected(prefix, recent)
            assert selected + recent + shape.append_room <= shape.slots
            assert selected <= quantised.selected_slots
            assert quantised.selected_slots + recent + shape.append_room <= quantised.slots


@pytest.mark.parametrize("chunk", [1, 4])
@every_policy
def test_a_forward_right_after_a_selection_attends_to_the_budget(policy: str, chunk: int) -> None:
    target, middle = cache_pair(make_test_link("view"), 2, replace(SHAPE, chunk=chunk), policy)
    prefill(target, random_qkv(70), chunk=32)
    for rows in (0, 7, 1, 5, 7, 7, 3, 6):
        if rows:
            forward(target, random_qkv(rows))
            target.advance(rows)
        before = middle.traffic.attended
        forward(middle, random_qkv(1))
        spent = (middle.traffic.attended - before) // LAYOUT.bytes(1) - 1
        if POLICIES[policy].spec.reselects or not rows:
            assert 48 - chunk < spent <= 48
            assert spent == 48 or chunk > 1


def assert_finite(known: list[QKV], out: Tensor) -> None:
    assert out.isfinite().all()


@every_policy
def test_slots_suffice_for_hundreds_of_tokens(policy: str) -> None:
    """The slots are those that `decoding` plans: tokens between two selections, or the sequence."""
    for (budget, chunk), min_interval in product([(4, 1), (40, 8), (64, 4)], [1, 9]):
        rng = random.Random(budget + min_interval)
        draft, prompt, max_new_tokens = rng.randint(1, 9), rng.randint(20, 90), 200
        rows = draft + 2
        append_room = (
            min(min_interval + 2 * rows, max_new_tokens)
            if POLICIES[policy].spec.reselects
            else max_new_tokens
        )
        shape = RetrievalCacheSpec.of(budget, chunk, prompt + max_new_tokens, rows, append_room)
        shape = replace(shape, quantised=rng.random() < 0.5)
        target, middle = cache_pair(make_test_link("view"), 1, shape, policy, min_interval, TINY)
        sequence = random_qkv(prompt, TINY)
        prefill(target, sequence, chunk=32)
        while (
            target.length + draft + 1 <= target.shape.capacity
        ):  # raises ValueError without a free slot
            sequence, _ = speculate(target, middle, sequence, draft, rng, assert_finite)
        assert (
            middle.selector.selections > max_new_tokens / draft / min_interval / 4
            or not POLICIES[policy].spec.reselects
        )
        assert middle.device_bytes == shape.device_bytes(TINY)


@pytest.mark.parametrize("min_interval", [1, 2, 5, 12, 1000])
@pytest.mark.parametrize("policy", ["attention", "static"])
def test_selections_keep_a_minimum_interval(policy: str, min_interval: int) -> None:
    target, middle = cache_pair(
        make_test_link("view"), 2, replace(SHAPE, append_room=CAPACITY), policy, min_interval
    )
    prefill(target, random_qkv(60), chunk=32)
    assert middle.selector.selections == 1
    selections, selected_at = 1, 60
    rng = random.Random(min_interval)
    for accepted in [1] * 12 + [rng.randint(1, 7) for _ in range(20)]:
        tokens = target.length + 1  # the forward's first token is already accepted
        if policy == "attention" and tokens - selected_at >= min_interval:
            selections, selected_at = selections + 1, tokens
        forward(target, random_qkv(7))
        target.advance(accepted)
        assert middle.selector.selections == selections
    assert target.length > 120


@pytest.mark.parametrize("quantised", [False, True])
@every_policy
def test_selected_tokens_are_unchanged_between_selections(policy: str, quantised: bool) -> None:
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy, min_interval=10)
    sequence = random_qkv(70)
    prefill(target, sequence, chunk=32)

    def selected_kv() -> Tensor:
        end = middle.slot_and_position(middle.selector.base)[0]
        layers = range(LAYOUT.layers)
        parts = [
            middle._store.head_groups(layer, middle.first_valid_slot(), end) for layer in layers
        ]
        return torch.cat([kv.clone() for layer in parts for _, kv in layer], dim=1)

    selected = {middle.selector.selections: selected_kv()}
    for _ in range(14):
        forward(target, random_qkv(4))
        target.advance(2)
        current = selected_kv()
        assert torch.equal(current, selected.setdefault(middle.selector.selections, current))
    assert len(selected) == (1 if policy == "static" else 3)
    # the target's prefix grew all the while
    assert target.boundary > middle.selector.base or policy != "static"


@pytest.mark.parametrize("resident", [0, 1, 4])
@every_link
def test_a_selection_adds_no_link_traffic(link: Link, resident: int) -> None:
    """The same forwards: unobserved, with one selection, and with one at every verification."""
    counts = []
    for policy in ("", *POLICIES):
        unobserved = tiered_cache(
            link, resident, recent=SHAPE.window, block=SHAPE.block, rows=SHAPE.rows
        )
        target = cache_pair(link, resident, SHAPE, policy)[0] if policy else unobserved
        prefill(target, random_qkv(70), chunk=32)
        counts.append([(target.traffic.link_in, target.traffic.link_out)])
        for rows, accepted in [(7, 3), (1, 1), (7, 7), (5, 0), (7, 6), (7, 7)]:
            forward(target, random_qkv(rows))
            target.advance(accepted)
            counts[-1].append((target.traffic.link_in, target.traffic.link_out))
    assert len(counts) == 3
    assert all(count == counts[0] for count in counts)
    assert counts[0][-1][0] > counts[0][0][0] or resident == 4


class RecordingObserver:
    """An observer that records what it is passed."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, int, int]] = []
        # (layer, KV head) -> queries and KV of the last forward
        self.attended: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.lengths: list[int] = []

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        self.forwards.append((boundary, length, end))
        self.attended = {}

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        assert prefix.shape[2] == self.forwards[-1][0]
        kv, groups = torch.cat((prefix, recent), dim=2), q.shape[1] // prefix.shape[1]
        for index in range(kv.shape[1]):
            assert (layer, head + index) not in self.attended
            self.attended[layer, head + index] = (
                q[:, index * groups : (index + 1) * groups],
                kv[:, index].clone(),
            )

    def on_advance(self, length: int) -> None:
        self.lengths.append(length)


@every_link
@pytest.mark.parametrize("resident", [0, 1, 4])
@pytest.mark.parametrize("slot_heads", [1, 2, 3])
def test_observers_receive_every_key_of_every_forward(
    link: Link, resident: int, slot_heads: int
) -> None:
    cache, reference, observer = (
        tiered_cache(link, resident, slot_heads=slot_heads),
        plain_cache(),
        RecordingObserver(),
    )
    cache.observers.append(observer)
    for rows in (50, 1, 9, 24, 3):
        tokens, start = random_qkv(rows), cache.length
        if start:
            forward(cache, tokens)
            cache.advance(rows)
        else:
            prefill(cache, tokens, chunk=16)
        forward(reference, tokens)
        reference.advance(rows)
        assert observer.forwards[-1] == (
            max(0, (start or rows) - RECENT) // BLOCK * BLOCK,
            start or rows,
            start + rows,
        )
        assert observer.lengths[-1] == cache.length
        assert set(observer.attended) == set(product(range(LAYOUT.layers), range(LAYOUT.heads)))
        for (layer, head), (q, kv) in observer.attended.items():
            torch.testing.assert_close(kv, reference.kv[layer, :, :, head], atol=1e-5, rtol=1e-5)
            queries = reference.rotary.queries(tokens[layer][0], start, layer)[
                -len(q) :, head * GROUPS : (head + 1) * GROUPS
            ]
            assert torch.equal(q, queries)  # the last queries, if a prompt
            assert len(q) == (rows if start else 50 % 16)
    assert len(observer.forwards) == len(observer.lengths) == 5
