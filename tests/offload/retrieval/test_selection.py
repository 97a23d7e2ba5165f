"""What a policy sees of a pass, and that each ranks chunks as its one-line definition says, head by
head.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.retrieval import selection
from offload.retrieval.policy_specs import POLICY_NAMES, POLICY_SPECS
from offload.retrieval.selection import POLICIES, SCORE_DECAY, QuerySample
from support.reference import chosen_by_hand, worths_by_hand

HEADS, GROUPS, DIM = 3, 2, 8
every_policy = pytest.mark.parametrize("policy", POLICIES)
chunks = pytest.mark.parametrize("chunk", [1, 4])
Seen = tuple[Tensor, Tensor, Tensor]  # q (T, Hq, D), prefix keys (Hkv, N, D), recent (Hkv, M, D)


def draw(rows: int, tokens: int, before: int = 5) -> Seen:
    """The rows of a pass, behind a prefix of `tokens` keys and `before` more."""
    q = torch.randn(rows, HEADS * GROUPS, DIM) * 2
    return q, torch.randn(HEADS, tokens, DIM), torch.randn(HEADS, before + rows, DIM)


def evenly(rows: int, count: int) -> list[int]:
    count = min(rows, count)
    return [rows * (index + 1) // count - 1 for index in range(count)]


def worths(policy: str, seen: Seen, head: int, chunk: int) -> Tensor:
    """The worth of a head's chunks, by hand."""
    q, keys, recent = seen
    kept = evenly(len(q), POLICY_SPECS[policy].query_rows)
    queries = q[kept].unflatten(1, (HEADS, GROUPS))[:, head]
    behind = [recent[head, : recent.shape[1] - len(q) + row + 1] for row in kept]
    return worths_by_hand(policy, queries, keys[head], behind, chunk)


def observed(policy: str, seen: Seen) -> QuerySample:
    return QuerySample(*seen, POLICY_SPECS[policy].query_rows)


def tokens_of(picked: Tensor, chunk: int) -> list[int]:
    return [index * chunk + offset for index in sorted(picked.tolist()) for offset in range(chunk)]


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
    q, keys, recent = draw(rows, 10)
    found = QuerySample(q, keys, recent, wanted).q  # (Hkv, G, R, D)
    by_head = q[kept].unflatten(1, (HEADS, GROUPS))
    torch.testing.assert_close(found, by_head.permute(1, 2, 0, 3) * DIM**-0.5)


@pytest.mark.parametrize(
    ("dtype", "widened"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("before", [0, 5])
def test_attention_is_that_of_the_softmax_over_all_a_row_sees(
    before: int, dtype: torch.dtype, widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "has_native_bf16", lambda: not widened)
    q, keys, recent = (x.to(dtype) for x in draw(5, 40, before))
    found = QuerySample(q, keys, recent, 3).attention
    for head in range(HEADS):
        for place, row in enumerate([0, 2, 4]):
            own = torch.cat((keys[head], recent[head, : before + row + 1]))
            for member in range(GROUPS):
                scores = own.float() @ q[row, head * GROUPS + member].float() * DIM**-0.5
                torch.testing.assert_close(
                    found[head, member, place],
                    scores.softmax(0)[:40],
                    atol=1e-6 if dtype == torch.float32 else 2e-2,
                    rtol=1e-5 if dtype == torch.float32 else 5e-2,
                )


def test_rows_of_the_prefix_itself_have_no_say() -> None:
    q, keys, recent = draw(9, 40, 0)
    some = recent[:, 6:]  # the first six rows stand in the prefix
    found, wanted = (QuerySample(rows, keys, some, 8).attention for rows in (q, q[6:]))
    assert torch.equal(found, wanted)


@chunks
@pytest.mark.parametrize("rows", [1, 6, 30])
@every_policy
def test_chunks_are_ranked_by_worth(policy: str, rows: int, chunk: int) -> None:
    seen = draw(rows, 60)
    picked = POLICIES[policy]().select(observed(policy, seen), 0, 0, chunk, 5)
    assert picked.shape == (HEADS, 5)
    for head in range(HEADS):
        wanted = chosen_by_hand(worths(policy, seen, head, chunk), chunk, 5)
        assert tokens_of(picked[head], chunk) == wanted


@every_policy
def test_the_first_chunk_is_always_kept_and_none_twice(policy: str) -> None:
    q, keys, recent = draw(1, 40)
    keys[:, :4] = -100 * q[0].unflatten(0, (HEADS, GROUPS)).sum(1)[:, None]  # nothing scores worse
    for count in range(1, 11):
        rows = QuerySample(q, keys, recent, 8)
        picked = POLICIES[policy]().select(rows, 0, 0, 4, count)
        assert (picked == 0).any(1).all()
        assert all(len(set(row)) == count for row in picked.tolist())


def test_only_the_static_choice_is_made_once_and_by_the_last_row() -> None:
    once = [(name, each.query_rows) for name, each in POLICY_SPECS.items() if not each.reselects]
    assert once == [("static", 1)]
    q, keys, recent = draw(7, 40)
    one, other = (
        POLICIES["static"]().select(QuerySample(rows, keys, recent, 1), 0, 0, 4, 4)
        for rows in (q, q[-1:])
    )
    assert torch.equal(one, other)


@chunks
def test_attention_remembers_ever_less_of_what_was_seen_before(chunk: int) -> None:
    # the prefix grows
    passes = [draw(rows, tokens) for rows, tokens in [(9, 24), (1, 24), (3, 36), (2, 60)]]
    one, sums = POLICIES["attention"](), torch.zeros(HEADS, 60 // chunk)
    for seen in passes:
        picked = one.select(observed("attention", seen), 0, 0, chunk, 4)
        sums *= SCORE_DECAY
        count = seen[1].shape[1] // chunk
        for head in range(HEADS):
            sums[head, :count] += worths("attention", seen, head, chunk)
            wanted = chosen_by_hand(sums[head, :count], chunk, 4)
            assert tokens_of(picked[head], chunk) == wanted


@every_policy
def test_heads_may_be_seen_together_or_apart_and_layers_are_strangers(policy: str) -> None:
    """A prompt is seen all heads at once, a host layer's prefix group by group of heads, as the
    slots bring them.
    """
    together, apart = POLICIES[policy](), POLICIES[policy]()
    for groups in ([3], [2, 1], [1, 1, 1], [1, 2]):
        q, keys, recent = draw(2, 40)
        want = together.select(QuerySample(q, keys, recent, 8), 0, 0, 4, 4)
        found, head = [], 0
        for heads in groups:
            end = head + heads
            rows = q[:, head * GROUPS : end * GROUPS]
            part = QuerySample(rows, keys[head:end], recent[head:end], 8)
            found.append(apart.select(part, 0, head, 4, 4))
            head = end
        assert torch.equal(torch.cat(found).sort(1).values, want.sort(1).values)
        # another layer: no business of this one's
        apart.select(QuerySample(*draw(2, 40), 8), 1, 0, 4, 4)


def test_what_a_policy_remembers_is_what_it_says_it_takes() -> None:
    layout, policy = KVLayout(1, HEADS, DIM, torch.float32), POLICIES["attention"]()
    policy.select(observed("attention", draw(4, 60)), 0, 0, 4, 4)
    held = {each.untyped_storage().data_ptr(): each for each in policy._worth.values()}
    taken = sum(each.untyped_storage().nbytes() for each in held.values())
    assert taken == policy.spec.state_bytes(layout, 60, 4) > 0
    remembering = [name for name, each in POLICY_SPECS.items() if each.state_bytes(layout, 60, 4)]
    assert remembering == ["attention"]


def test_plans_and_caches_know_the_same_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert {name: policy.spec for name, policy in POLICIES.items()} == POLICY_SPECS
