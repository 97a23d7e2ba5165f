"""Sampled queries, and each policy's ranking of chunks against its definition, head by head."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.retrieval import selection
from offload.retrieval.policy_specs import POLICY_NAMES, POLICY_SPECS
from offload.retrieval.selection import POLICIES, SCORE_DECAY, QuerySample
from support.reference import reference_scores, reference_selection

HEADS, GROUPS, DIM = 3, 2, 8
every_policy = pytest.mark.parametrize("policy", POLICIES)
chunks = pytest.mark.parametrize("chunk", [1, 4])
Inputs = tuple[Tensor, Tensor, Tensor]  # q (T, Hq, D), prefix keys (Hkv, N, D), recent (Hkv, M, D)


def random_inputs(rows: int, tokens: int, before: int = 5) -> Inputs:
    """Return a forward's queries, `tokens` prefix keys, and `before` keys plus its own."""
    q = torch.randn(rows, HEADS * GROUPS, DIM) * 2
    return q, torch.randn(HEADS, tokens, DIM), torch.randn(HEADS, before + rows, DIM)


def evenly_spaced(rows: int, count: int) -> list[int]:
    count = min(rows, count)
    return [rows * (index + 1) // count - 1 for index in range(count)]


def expected_scores(policy: str, inputs: Inputs, head: int, chunk: int) -> Tensor:
    """Return the reference scores of a head's chunks."""
    q, keys, recent = inputs
    query_tokens = evenly_spaced(len(q), POLICY_SPECS[policy].query_rows)
    queries = q[query_tokens].unflatten(1, (HEADS, GROUPS))[:, head]
    visible = [recent[head, : recent.shape[1] - len(q) + row + 1] for row in query_tokens]
    return reference_scores(policy, queries, keys[head], visible, chunk)


def sample(policy: str, inputs: Inputs) -> QuerySample:
    return QuerySample(*inputs, POLICY_SPECS[policy].query_rows)


def tokens_of(selected: Tensor, chunk: int) -> list[int]:
    return [
        index * chunk + offset for index in sorted(selected.tolist()) for offset in range(chunk)
    ]


@pytest.mark.parametrize(
    ("rows", "count", "query_tokens"),
    [
        (1, 8, [0]),
        (5, 8, [0, 1, 2, 3, 4]),
        (8, 8, [*range(8)]),
        (9, 1, [8]),
        (9, 3, [2, 5, 8]),
        (20, 8, [1, 4, 6, 9, 11, 14, 16, 19]),
    ],
)
def test_queries_are_evenly_spaced_and_include_the_last(
    rows: int, count: int, query_tokens: list[int]
) -> None:
    q, keys, recent = random_inputs(rows, 10)
    actual = QuerySample(q, keys, recent, count).q  # (Hkv, G, R, D)
    by_head = q[query_tokens].unflatten(1, (HEADS, GROUPS))
    torch.testing.assert_close(actual, by_head.permute(1, 2, 0, 3) * DIM**-0.5)


@pytest.mark.parametrize(
    ("dtype", "widened"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("before", [0, 5])
def test_attention_is_a_softmax_over_all_visible_keys(
    before: int, dtype: torch.dtype, widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "has_native_bf16", lambda: not widened)
    q, keys, recent = (x.to(dtype) for x in random_inputs(5, 40, before))
    actual = QuerySample(q, keys, recent, 3).attention
    for head in range(HEADS):
        for place, row in enumerate([0, 2, 4]):
            own = torch.cat((keys[head], recent[head, : before + row + 1]))
            for member in range(GROUPS):
                scores = own.float() @ q[row, head * GROUPS + member].float() * DIM**-0.5
                torch.testing.assert_close(
                    actual[head, member, place],
                    scores.softmax(0)[:40],
                    atol=1e-6 if dtype == torch.float32 else 2e-2,
                    rtol=1e-5 if dtype == torch.float32 else 5e-2,
                )


def test_queries_of_the_prefix_are_ignored() -> None:
    q, keys, recent = random_inputs(9, 40, 0)
    some = recent[:, 6:]  # the first six queries are in the prefix
    actual, expected = (QuerySample(rows, keys, some, 8).attention for rows in (q, q[6:]))
    assert torch.equal(actual, expected)


@chunks
@pytest.mark.parametrize("rows", [1, 6, 30])
@every_policy
def test_chunks_are_ranked_by_score(policy: str, rows: int, chunk: int) -> None:
    inputs = random_inputs(rows, 60)
    selected = POLICIES[policy]().select(sample(policy, inputs), 0, 0, chunk, 5)
    assert selected.shape == (HEADS, 5)
    for head in range(HEADS):
        expected = reference_selection(expected_scores(policy, inputs, head, chunk), chunk, 5)
        assert tokens_of(selected[head], chunk) == expected


@every_policy
def test_the_first_chunk_is_always_kept_and_none_is_repeated(policy: str) -> None:
    q, keys, recent = random_inputs(1, 40)
    keys[:, :4] = -100 * q[0].unflatten(0, (HEADS, GROUPS)).sum(1)[:, None]  # the lowest score
    for count in range(1, 11):
        rows = QuerySample(q, keys, recent, 8)
        selected = POLICIES[policy]().select(rows, 0, 0, 4, count)
        assert (selected == 0).any(1).all()
        assert all(len(set(row)) == count for row in selected.tolist())


def test_only_the_static_policy_selects_once_and_by_the_last_query() -> None:
    once = [(name, spec.query_rows) for name, spec in POLICY_SPECS.items() if not spec.reselects]
    assert once == [("static", 1)]
    q, keys, recent = random_inputs(7, 40)
    sampled, last = (
        POLICIES["static"]().select(QuerySample(rows, keys, recent, 1), 0, 0, 4, 4)
        for rows in (q, q[-1:])
    )
    assert torch.equal(sampled, last)


@chunks
def test_attention_scores_decay(chunk: int) -> None:
    # the prefix grows
    forwards = [
        random_inputs(rows, tokens) for rows, tokens in [(9, 24), (1, 24), (3, 36), (2, 60)]
    ]
    policy = POLICIES["attention"]()
    sums = torch.zeros(HEADS, 60 // chunk)
    for inputs in forwards:
        selected = policy.select(sample("attention", inputs), 0, 0, chunk, 4)
        sums *= SCORE_DECAY
        count = inputs[1].shape[1] // chunk
        for head in range(HEADS):
            sums[head, :count] += expected_scores("attention", inputs, head, chunk)
            expected = reference_selection(sums[head, :count], chunk, 4)
            assert tokens_of(selected[head], chunk) == expected


@every_policy
def test_heads_and_layers_are_independent(policy: str) -> None:
    """A prompt's heads arrive together, an offloaded layer's in groups, as in the ring's slots."""
    together, apart = POLICIES[policy](), POLICIES[policy]()
    for groups in ([3], [2, 1], [1, 1, 1], [1, 2]):
        q, keys, recent = random_inputs(2, 40)
        expected = together.select(QuerySample(q, keys, recent, 8), 0, 0, 4, 4)
        actual = []
        head = 0
        for heads in groups:
            end = head + heads
            rows = q[:, head * GROUPS : end * GROUPS]
            part = QuerySample(rows, keys[head:end], recent[head:end], 8)
            actual.append(apart.select(part, 0, head, 4, 4))
            head = end
        assert torch.equal(torch.cat(actual).sort(1).values, expected.sort(1).values)
        # another layer does not affect this one
        apart.select(QuerySample(*random_inputs(2, 40), 8), 1, 0, 4, 4)


def test_the_state_of_a_policy_takes_the_bytes_of_its_spec() -> None:
    layout = KVLayout(1, HEADS, DIM, torch.float32)
    policy = POLICIES["attention"]()
    policy.select(sample("attention", random_inputs(4, 60)), 0, 0, 4, 4)
    for _ in range(2):  # the second time they replace the first ones
        held = [*policy._last.values(), *chain(*policy._parts.values())]
        taken = sum(tensor.untyped_storage().nbytes() for tensor in held)
        assert taken == policy.spec.state_bytes(layout, 60, 4) > 0
        policy.select(sample("attention", random_inputs(4, 60)), 0, 0, 4, 4)
    keeping_scores = [
        name for name, spec in POLICY_SPECS.items() if spec.state_bytes(layout, 60, 4)
    ]
    assert keeping_scores == ["attention"]


def test_plans_and_caches_know_the_same_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert {name: policy.spec for name, policy in POLICIES.items()} == POLICY_SPECS
