"""A choice made anew: how its budget is spent, how often it comes, that it fits however long the
text, and costs no link byte.
"""

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


def test_a_budget_is_spent_whole_and_never_exceeded() -> None:
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
def test_sizes_that_suit_a_budget(budget: int, chunk: int, context: int) -> None:
    shape = RetrievalCacheSpec.of(budget, chunk, context, rows=7, append_room=20)
    quantised = replace(shape, quantised=True)
    assert shape.block % chunk == 0 < shape.block <= max(64, budget // 4) + chunk
    assert 1 <= shape.window <= max(1, budget // 8)
    for prefix, rows in product(range(0, min(context, 50 * shape.block), shape.block), (1, 7)):
        recent = shape.window + shape.block - 1 + rows  # the most there may be
        if prefix + recent <= context:
            selected = shape.selected(prefix, recent)
            assert selected + recent + shape.append_room <= shape.slots
            assert selected <= quantised.selected_slots
            assert quantised.selected_slots + recent + shape.append_room <= quantised.slots


@pytest.mark.parametrize("chunk", [1, 4])
@every_policy
def test_what_a_pass_attends_to_right_after_a_choice_is_the_budget(policy: str, chunk: int) -> None:
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


def sound(known: list[QKV], out: Tensor) -> None:
    assert out.isfinite().all()


@every_policy
def test_everything_fits_for_hundreds_of_tokens(policy: str) -> None:
    """With the slots that `decoding` sets aside: what may come between two choices, or the whole
    text.
    """
    for (budget, chunk), every in product([(4, 1), (40, 8), (64, 4)], [1, 9]):
        rng = random.Random(budget + every)
        draft, prompt, new = rng.randint(1, 9), rng.randint(20, 90), 200
        rows = draft + 2
        fresh = min(every + 2 * rows, new) if POLICIES[policy].spec.reselects else new
        shape = RetrievalCacheSpec.of(budget, chunk, prompt + new, rows, fresh)
        shape = replace(shape, quantised=rng.random() < 0.5)
        target, middle = cache_pair(make_test_link("view"), 1, shape, policy, every, TINY)
        sequence = random_qkv(prompt, TINY)
        prefill(target, sequence, chunk=32)
        while (
            target.length + draft + 1 <= target.shape.capacity
        ):  # a slot too few raises ValueError
            sequence, _ = speculate(target, middle, sequence, draft, rng, sound)
        assert (
            middle.selector.selections > new / draft / every / 4
            or not POLICIES[policy].spec.reselects
        )
        assert middle.device_bytes == shape.device_bytes(TINY)


@pytest.mark.parametrize("every", [1, 2, 5, 12, 1000])
@pytest.mark.parametrize("policy", ["attention", "static"])
def test_a_choice_serves_so_many_tokens_at_least(policy: str, every: int) -> None:
    target, middle = cache_pair(
        make_test_link("view"), 2, replace(SHAPE, append_room=CAPACITY), policy, every
    )
    prefill(target, random_qkv(60), chunk=32)
    assert middle.selector.selections == 1
    choices, chosen_at, rng = 1, 60, random.Random(every)
    for stand in [1] * 12 + [rng.randint(1, 7) for _ in range(20)]:
        tokens = target.length + 1  # the pass's first row stands already: it is pending
        if policy == "attention" and tokens - chosen_at >= every:
            choices, chosen_at = choices + 1, tokens
        forward(target, random_qkv(7))
        target.advance(stand)
        assert middle.selector.selections == choices
    assert target.length > 120


@pytest.mark.parametrize("quantised", [False, True])
@every_policy
def test_between_choices_what_was_chosen_stays(policy: str, quantised: bool) -> None:
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy, min_interval=10)
    sequence = random_qkv(70)
    prefill(target, sequence, chunk=32)

    def in_front() -> Tensor:
        end = middle.slot_and_position(middle.selector.base)[0]
        layers = range(LAYOUT.layers)
        parts = [
            middle._store.head_groups(layer, middle.first_valid_slot(), end) for layer in layers
        ]
        return torch.cat([kv.clone() for layer in parts for _, kv in layer], dim=1)

    chosen = {middle.selector.selections: in_front()}
    for _ in range(14):
        forward(target, random_qkv(4))
        target.advance(2)
        kept = in_front()
        assert torch.equal(kept, chosen.setdefault(middle.selector.selections, kept))
    assert len(chosen) == (1 if policy == "static" else 3)
    # the target's prefix grew all the while
    assert target.boundary > middle.selector.base or policy != "static"


@pytest.mark.parametrize("resident", [0, 1, 4])
@every_link
def test_a_choice_costs_no_byte_over_the_link(link: Link, resident: int) -> None:
    """The same passes, followed by nobody, by a choice that stays, and by choices at every
    verification.
    """
    counts = []
    for policy in ("", *POLICIES):
        alone = tiered_cache(
            link, resident, recent=SHAPE.window, block=SHAPE.block, rows=SHAPE.rows
        )
        target = cache_pair(link, resident, SHAPE, policy)[0] if policy else alone
        prefill(target, random_qkv(70), chunk=32)
        counts.append([(target.traffic.link_in, target.traffic.link_out)])
        for rows, stand in [(7, 3), (1, 1), (7, 7), (5, 0), (7, 6), (7, 7)]:
            forward(target, random_qkv(rows))
            target.advance(stand)
            counts[-1].append((target.traffic.link_in, target.traffic.link_out))
    assert len(counts) == 3
    assert all(each == counts[0] for each in counts)
    assert counts[0][-1][0] > counts[0][0][0] or resident == 4


class Witness:
    """A follower that writes down what it is shown."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int, int]] = []
        # by layer and KV head, of the last pass
        self.shown: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.lengths: list[int] = []

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        self.passes.append((boundary, length, end))
        self.shown = {}

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        assert prefix.shape[2] == self.passes[-1][0]
        kv, groups = torch.cat((prefix, recent), dim=2), q.shape[1] // prefix.shape[1]
        for index in range(kv.shape[1]):
            assert (layer, head + index) not in self.shown
            self.shown[layer, head + index] = (
                q[:, index * groups : (index + 1) * groups],
                kv[:, index].clone(),
            )

    def on_advance(self, length: int) -> None:
        self.lengths.append(length)


@every_link
@pytest.mark.parametrize("resident", [0, 1, 4])
@pytest.mark.parametrize("slot_heads", [1, 2, 3])
def test_a_follower_is_shown_every_key_of_every_pass(
    link: Link, resident: int, slot_heads: int
) -> None:
    cache, want, witness = (
        tiered_cache(link, resident, slot_heads=slot_heads),
        plain_cache(),
        Witness(),
    )
    cache.observers.append(witness)
    for rows in (50, 1, 9, 24, 3):
        tokens, start = random_qkv(rows), cache.length
        if start:
            forward(cache, tokens)
            cache.advance(rows)
        else:
            prefill(cache, tokens, chunk=16)
        forward(want, tokens)
        want.advance(rows)
        assert witness.passes[-1] == (
            max(0, (start or rows) - RECENT) // BLOCK * BLOCK,
            start or rows,
            start + rows,
        )
        assert witness.lengths[-1] == cache.length
        assert set(witness.shown) == set(product(range(LAYOUT.layers), range(LAYOUT.heads)))
        for (layer, head), (q, kv) in witness.shown.items():
            torch.testing.assert_close(kv, want.kv[layer, :, :, head], atol=1e-5, rtol=1e-5)
            queries = want.rotary(tokens[layer][0], start, layer)[
                -len(q) :, head * GROUPS : (head + 1) * GROUPS
            ]
            assert torch.equal(q, queries)  # of a prompt the last rows
            assert len(q) == (rows if start else 50 % 16)
    assert len(witness.passes) == len(witness.lengths) == 5
