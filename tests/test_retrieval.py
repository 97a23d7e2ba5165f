"""The retrieval cache attends to the chunks its policy names, per head, and to everything since; the target's KV is its truth."""

from __future__ import annotations

import pytest
import torch
from driving import CAPACITY, GROUPS, LAYOUT, QKV, forward, prefill, text, tiered
from links import CPU, make_test_link
from reference import random_rotary, reference_attention
from torch import Tensor

from offload import KVLayout, MeanKey, RetrievalCache, TieredCache

ROTARY = random_rotary(LAYOUT, CAPACITY)
CHUNK, TAIL = 8, 40


def pair(budget: int, link: str = "view", resident: int = 2, layout: KVLayout = LAYOUT) -> tuple[TieredCache, RetrievalCache]:
    """A target's cache and the retrieval cache that follows it."""
    target = tiered(make_test_link(link), resident, layout=layout)
    retrieval = RetrievalCache(layout, budget, CHUNK, TAIL, MeanKey(), random_rotary(layout, CAPACITY), CPU)
    target.followers.append(retrieval)
    return target, retrieval


def by_hand(texts: list[list[QKV]], prompt: int, budget: int) -> Tensor:
    """What a pass over the last of `texts` should give, from keys and values of all of them: brute force, head by head."""
    outs = []
    for layer in range(LAYOUT.layers):
        q, k, v = (torch.cat([tokens[layer][part] for tokens in texts]) for part in range(3))
        q, k, rows = ROTARY(q, 0), ROTARY(k, 0), len(texts[-1][0][0])
        heads = []
        for head in range(LAYOUT.heads):
            queries = slice(head * GROUPS, (head + 1) * GROUPS)
            kept = chosen(q[prompt - 1, queries], k[:prompt, head], budget) + list(range(prompt - prompt % CHUNK, len(k)))
            heads.append(reference_attention(q[-rows:, queries], k[kept, head, None], v[kept, head, None], causal=True)[0])
        outs.append(torch.cat(heads, dim=1))
    return torch.stack(outs)


def chosen(queries: Tensor, keys: Tensor, budget: int) -> list[int]:
    """Positions one KV head keeps: queries (G, D) of the last prompt token, keys (N, D)."""
    whole = len(keys) // CHUNK
    weights = torch.zeros(whole)
    for query in queries:
        means = [keys[chunk * CHUNK : (chunk + 1) * CHUNK].mean(0) @ query / LAYOUT.head_dim**0.5 for chunk in range(whole)]
        weights += torch.stack(means).softmax(0)
    others = [chunk for chunk in weights.argsort(descending=True).tolist() if chunk]
    return [chunk * CHUNK + offset for chunk in sorted([0, *others[: budget // CHUNK - 1]]) for offset in range(CHUNK)]


@pytest.mark.parametrize("link", ["view", "emulated", "delaying"])
@pytest.mark.parametrize("resident", [0, 2, 4])
@pytest.mark.parametrize("prompt", [7, 40, 93])
def test_a_budget_for_everything_gives_the_target_itself(link: str, resident: int, prompt: int) -> None:
    target, retrieval = pair(budget=96, link=link, resident=resident)
    prefill(target, text(prompt), chunk=32)
    for rows in (1, 5, 12):
        tokens = text(rows)
        drafted = forward(retrieval, tokens)
        torch.testing.assert_close(drafted, forward(target, tokens), atol=1e-5, rtol=1e-5)
        target.advance(rows)
    target.link.close()


def test_a_budget_for_everything_gives_a_resident_target_bit_for_bit() -> None:
    target, retrieval = pair(budget=96, resident=LAYOUT.layers)
    prefill(target, text(93), chunk=32)
    tokens = text(5)
    assert torch.equal(forward(retrieval, tokens), forward(target, tokens))


@pytest.mark.parametrize("prompt", [40, 64, 93])  # 93 leaves a remainder of 5 tokens behind the last whole chunk
@pytest.mark.parametrize("budget", [8, 17, 32])
def test_selection_is_the_best_by_mean_key_of_each_head(prompt: int, budget: int) -> None:
    target, retrieval = pair(budget)
    texts = [text(prompt), text(3)]
    prefill(target, texts[0], chunk=32)
    torch.testing.assert_close(forward(retrieval, texts[1]), by_hand(texts, prompt, budget), atol=1e-5, rtol=1e-5)
    target.advance(3)
    assert retrieval.length == prompt + 3


def test_the_selection_stays_and_the_tail_grows() -> None:
    target, retrieval = pair(budget=32)
    texts = [text(61)]
    prefill(target, texts[0], chunk=61)
    for rows in (4, 1, 9):
        texts.append(text(rows))
        torch.testing.assert_close(forward(retrieval, texts[-1]), by_hand(texts, 61, 32), atol=1e-5, rtol=1e-5)
        retrieval.advance(rows)


def test_the_first_chunk_is_always_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    q, chunks = torch.randn(1, 6, 8, generator=generator), torch.randn(3, 10, CHUNK, 8, generator=generator)
    chunks[:, 0] = -100 * q[0].unflatten(0, (3, 2)).sum(1)[:, None]  # nothing scores worse
    for count in range(1, 11):
        index = MeanKey().select(q, chunks, count)
        assert index.shape == (3, count)
        assert (index[:, 0] == 0).all()
        assert (index.diff(dim=1) > 0).all()  # each once, in order of position


def test_the_targets_keys_and_values_replace_its_own() -> None:
    target, retrieval = pair(budget=32)
    prompt, draft, truth, probe = text(61), text(6), text(6), text(2)
    prefill(target, prompt, chunk=61)
    forward(retrieval, draft)
    retrieval.advance(6)
    forward(target, truth)  # the same positions, and other values than a partial context gave
    target.advance(6)
    torch.testing.assert_close(forward(retrieval, probe), by_hand([prompt, truth, probe], 61, 32), atol=1e-5, rtol=1e-5)


def test_lengths_follow_the_target() -> None:
    target, retrieval = pair(budget=32)
    prompt, tokens, probe = text(61), text(10), text(2)
    prefill(target, prompt, chunk=61)
    assert retrieval.length == 61
    forward(retrieval, text(12))
    retrieval.advance(12)  # a draft, longer than what will stand
    forward(target, tokens)
    target.advance(10)
    assert retrieval.length == 71
    first = [tuple(x[:4] for x in qkv) for qkv in tokens]
    for shorten in (target.crop, retrieval.crop, target.settle, retrieval.settle):
        shorten(65)
        assert retrieval.length == 65
        torch.testing.assert_close(forward(retrieval, probe), by_hand([prompt, first, probe], 61, 32), atol=1e-5, rtol=1e-5)
        retrieval.settle(71)
        assert retrieval.length == 71
        forward(target, tokens)
        target.settle(71)


def test_refusals() -> None:
    target, retrieval = pair(budget=32)
    prefill(target, text(61), chunk=61)
    with pytest.raises(ValueError, match="the selection covers the first 56"):
        retrieval.crop(55)
    with pytest.raises(ValueError, match="the selection covers the first 56"):
        target.crop(55)  # and with it the level that drafts from what is cut off
    with pytest.raises(ValueError, match="36 tokens at slot 37 do not fit a buffer of 72"):
        forward(retrieval, text(36))
    with pytest.raises(ValueError, match="1 to budget = 4 tokens, found 8"):
        RetrievalCache(LAYOUT, 4, CHUNK, TAIL, MeanKey(), ROTARY, CPU)


def test_the_last_slot_of_the_tail_can_be_used_and_no_more() -> None:
    target, retrieval = pair(budget=32)
    prefill(target, text(56), chunk=56)
    for _ in range(TAIL):
        forward(retrieval, text(1))
        retrieval.advance(1)
    with pytest.raises(ValueError, match="do not fit a buffer of 72"):
        forward(retrieval, text(1))


def test_device_bytes_and_bytes_attended() -> None:
    target, retrieval = pair(budget=32)
    prefill(target, text(61), chunk=61)
    assert retrieval.device_bytes == LAYOUT.bytes(32 + TAIL)
    forward(retrieval, text(3))
    assert retrieval.traffic.attended == LAYOUT.bytes(32 + 5 + 3)
    assert (retrieval.traffic.link_in, retrieval.traffic.link_out) == (0, 0)
