"""What a policy sees of a pass, and that each ranks chunks as its one-line definition says, head by
head.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.policies import POLICY_NAMES, POLICY_TRAITS
from offload.selection import POLICIES, ObservedRows
from support.reference import chosen_by_hand, worths_by_hand

HEADS, GROUPS, DIM = 3, 2, 8
every_policy = pytest.mark.parametrize("policy", POLICIES)
chunks = pytest.mark.parametrize("chunk", [1, 4])


def draw(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """q (T, Hq, D) and keys (Hkv, N, D)."""
    return torch.randn(rows, HEADS * GROUPS, DIM) * 2, torch.randn(HEADS, tokens, DIM)


def of_head(q: Tensor, head: int) -> Tensor:
    """The queries (R, D) that share a KV head."""
    return q[:, head * GROUPS : (head + 1) * GROUPS].flatten(0, 1)


@pytest.mark.parametrize(
    ("rows", "wanted", "kept"),
    [
        (1, 8, [0]),
        (5, 8, [0, 1, 2, 3, 4]),
        (8, 8, [*range(8)]),
        (9, 1, [8]),
        (9, 3, [2, 5, 8]),
        (20, 8, [1, 4, 6, 9, 11, 14, 16, 19]),
    ],
)
def test_rows_are_evenly_spaced_and_the_last_is_among_them(
    rows: int, wanted: int, kept: list[int]
) -> None:
    q, keys = draw(rows, 10)
    found = ObservedRows(q, keys, wanted).q  # (Hkv, R, D)
    for head in range(HEADS):
        torch.testing.assert_close(found[head], of_head(q[kept], head) * DIM**-0.5)


def test_weights_and_mass_are_those_of_the_softmax() -> None:
    q, keys = draw(5, 40)
    seen = ObservedRows(q, keys, 8)
    for head in range(HEADS):
        scores = of_head(q, head) @ keys[head].T * DIM**-0.5  # (R, N)
        torch.testing.assert_close(seen.max_scores[head], scores.max(1).values)
        torch.testing.assert_close(
            seen.weights[head], (scores - scores.max(1, keepdim=True).values).exp()
        )
        torch.testing.assert_close(seen.mass[head], scores.softmax(1).sum(0))
    # each row has 1 to give
    torch.testing.assert_close(seen.mass.sum(1), torch.full((HEADS,), 5.0 * GROUPS))


@chunks
@pytest.mark.parametrize("rows", [1, 6, 30])
@every_policy
def test_chunks_are_ranked_by_worth(policy: str, rows: int, chunk: int) -> None:
    q, keys = draw(rows, 60)
    one = POLICIES[policy]()
    count = min(rows, one.traits.rows)
    kept = q[[rows * (index + 1) // count - 1 for index in range(count)]]
    picked = one.select(ObservedRows(q, keys, one.traits.rows), 0, 0, chunk, 5)
    assert picked.shape == (HEADS, 5)
    for head in range(HEADS):
        worths = worths_by_hand(policy, of_head(kept, head), keys[head], chunk)
        tokens = [
            index * chunk + offset
            for index in sorted(picked[head].tolist())
            for offset in range(chunk)
        ]
        assert tokens == chosen_by_hand(worths, chunk, 5)


@every_policy
def test_the_first_chunk_is_always_kept_and_none_twice(policy: str) -> None:
    q, keys = draw(1, 40)
    keys[:, :4] = -100 * q[0].unflatten(0, (HEADS, GROUPS)).sum(1)[:, None]  # nothing scores worse
    for count in range(1, 11):
        picked = POLICIES[policy]().select(ObservedRows(q, keys, 8), 0, 0, 4, count)
        assert (picked == 0).any(1).all()
        assert all(len(set(row)) == count for row in picked.tolist())


def test_only_the_static_choice_is_made_once_and_by_the_last_row() -> None:
    once = [(name, each.rows) for name, each in POLICY_TRAITS.items() if not each.reselects]
    assert once == [("static", 1)]
    q, keys = draw(7, 40)
    one, other = (
        POLICIES["static"]().select(ObservedRows(rows, keys, 1), 0, 0, 4, 4) for rows in (q, q[-1:])
    )
    assert torch.equal(one, other)


@chunks
def test_accumulated_remembers_what_was_seen_before(chunk: int) -> None:
    # the prefix grows
    passes = [draw(rows, tokens) for rows, tokens in [(9, 24), (1, 24), (3, 36), (2, 60)]]
    one, sums = POLICIES["accumulated"](), torch.zeros(HEADS, 60 // chunk)
    for q, keys in passes:
        count = min(one.traits.rows, len(q))
        kept = q[[len(q) * (index + 1) // count - 1 for index in range(count)]]
        for head in range(HEADS):
            worths = worths_by_hand("accumulated", of_head(kept, head), keys[head], chunk)
            sums[head, : len(worths)] += worths
        seen = ObservedRows(q, keys, one.traits.rows)
        picked = one.select(seen, 0, 0, chunk, 4)
        for head in range(HEADS):
            tokens = [
                index * chunk + offset
                for index in sorted(picked[head].tolist())
                for offset in range(chunk)
            ]
            assert tokens == chosen_by_hand(sums[head, : keys.shape[1] // chunk], chunk, 4)


@every_policy
def test_heads_may_be_seen_together_or_apart_and_layers_are_strangers(policy: str) -> None:
    """A prompt is seen all heads at once, a host layer's prefix group by group of heads, as the
    slots bring them.
    """
    together, apart = POLICIES[policy](), POLICIES[policy]()
    for groups in ([3], [2, 1], [1, 1, 1], [1, 2]):
        q, keys = draw(2, 40)
        want, found, head = together.select(ObservedRows(q, keys, 8), 0, 0, 4, 4), [], 0
        for heads in groups:
            rows = q[:, head * GROUPS : (head + heads) * GROUPS]
            found.append(
                apart.select(ObservedRows(rows, keys[head : head + heads], 8), 0, head, 4, 4)
            )
            head += heads
        assert torch.equal(torch.cat(found).sort(1).values, want.sort(1).values)
        apart.select(
            ObservedRows(*draw(2, 40), 8), 1, 0, 4, 4
        )  # another layer: no business of this one's


def test_what_accumulated_remembers_is_what_it_says_it_takes() -> None:
    layout, policy = KVLayout(1, HEADS, DIM, torch.float32), POLICIES["accumulated"]()
    q, keys = draw(4, 60)
    policy.select(ObservedRows(q, keys, policy.traits.rows), 0, 0, 4, 4)
    held = sum(each.nbytes for each in policy._sums.values())
    assert held == policy.traits.state_bytes(layout, 60, 4) > 0
    keeping = [name for name, each in POLICY_TRAITS.items() if each.state_bytes(layout, 60, 4)]
    assert keeping == ["accumulated"]


def test_plans_and_caches_know_the_same_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert {name: policy.traits for name, policy in POLICIES.items()} == POLICY_TRAITS
