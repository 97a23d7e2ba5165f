"""The draft's cache: all of a short sequence; sinks and a recent window of a long one.

Positions are counted in slots.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.layout import KVLayout
from support.driving import (
    GROUPS,
    LAYOUT,
    QKV,
    assert_same_forward,
    forward,
    plain_cache,
    random_qkv,
)
from support.links import CPU
from support.reference import random_rotary, reference_attention

SINKS, WINDOW, SLACK = 3, 16, 8
SHAPE = StreamingCacheSpec(SINKS, WINDOW, SLACK)
SLOTS = SINKS + WINDOW + SLACK
ROTARY = random_rotary(LAYOUT, SLOTS)  # no longer than the slots, however long the sequence


def streaming() -> StreamingCache:
    return StreamingCache(LAYOUT, SHAPE, ROTARY, CPU)


class ReferenceStreaming:
    """The remaining tokens, never rotated, with attention from scratch in every forward."""

    def __init__(self) -> None:
        self.tokens_kv: list[list[QKV]] = []  # per token

    def forward(self, tokens: list[QKV]) -> Tensor:
        rows = len(tokens[0][0])
        if len(self.tokens_kv) + rows > SLOTS:
            self.tokens_kv = self.tokens_kv[:SINKS] + self.tokens_kv[-WINDOW:]
        outs = []
        for layer in range(LAYOUT.layers):
            parts = [token[layer] for token in self.tokens_kv] + [tokens[layer]]
            q, k, v = (torch.cat([part[i] for part in parts]) for i in range(3))
            q, k = ROTARY.queries(q, 0, layer)[-rows:], ROTARY.keys(k, 0, layer)
            outs.append(reference_attention(q, k, v, causal=True)[0])
        return torch.stack(outs)

    def append(self, tokens: list[QKV], count: int) -> None:
        self.tokens_kv += [
            [tuple(x[i : i + 1] for x in qkv) for qkv in tokens] for i in range(count)
        ]


def test_a_short_sequence_is_kept_whole() -> None:
    cache, reference = streaming(), plain_cache()
    for rows, accepted, crop in [
        (8, 8, None),
        (1, 1, None),
        (8, 5, None),
        (4, 4, 2),
        (SLOTS - 2, SLOTS - 2, None),
    ]:
        assert_same_forward(cache, reference, rows, accepted, crop)


def test_a_long_sequence_keeps_sinks_and_window_at_slot_positions() -> None:
    cache, reference = streaming(), ReferenceStreaming()
    rows = [8, 1, 5, 8, 3, 1, 1, 7, 8, 2]
    for count in rows * 6:
        tokens = random_qkv(count)
        torch.testing.assert_close(
            forward(cache, tokens), reference.forward(tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(count)
        reference.append(tokens, count)
    assert cache.length == 6 * sum(rows) > 9 * SLOTS


def test_drafts_can_be_cropped_after_sliding() -> None:
    cache, reference = streaming(), ReferenceStreaming()
    for step in range(40):
        drafted, accepted = 1 + step % 8, step % 6
        for _ in range(drafted):  # token by token; the window may slide meanwhile
            tokens = random_qkv(1)
            torch.testing.assert_close(
                forward(cache, tokens), reference.forward(tokens), atol=1e-5, rtol=1e-5
            )
            cache.advance(1)
            reference.append(tokens, 1)
        dropped = max(0, drafted - accepted)
        cache.crop(cache.length - dropped)
        reference.tokens_kv = reference.tokens_kv[: len(reference.tokens_kv) - dropped]
    assert cache.length > 2 * SLOTS


def test_a_forward_without_advance_has_no_effect() -> None:
    cache, reference = streaming(), ReferenceStreaming()
    for rows in [8, 8, 8, 8, 8, 6, 8]:
        forward(cache, random_qkv(rows))
        tokens = random_qkv(rows)
        torch.testing.assert_close(
            forward(cache, tokens), reference.forward(tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(rows)
        reference.append(tokens, rows)


def test_tokens_that_left_the_window_cannot_be_restored() -> None:
    cache = streaming()
    for _ in range(8):
        forward(cache, random_qkv(8))
        cache.advance(8)
    # the window last slid when the 8 tokens from 56 on did not fit: of 64 tokens, 40 on remain
    oldest = 56 - WINDOW
    cache.crop(oldest)
    assert cache.length == oldest
    with pytest.raises(
        ValueError, match=f"cannot crop to {oldest - 1} tokens: those up to {oldest} have left"
    ):
        cache.crop(oldest - 1)


@pytest.mark.parametrize("skipped", [1, 1000])
def test_skipped_tokens_take_no_slots(skipped: int) -> None:
    cache, reference = streaming(), ReferenceStreaming()
    sequences = [random_qkv(SINKS), random_qkv(8), random_qkv(8), random_qkv(8), random_qkv(5)]
    for index, tokens in enumerate(sequences):
        torch.testing.assert_close(
            forward(cache, tokens), reference.forward(tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(len(tokens[0][0]))
        reference.append(tokens, len(tokens[0][0]))
        if index == 0:
            cache.skip_tokens(skipped)
    assert cache.length == SINKS + 29 + skipped
    with pytest.raises(ValueError, match="right after the 3 sinks, not at"):
        cache.skip_tokens(1)


def test_tokens_cannot_be_skipped_before_the_sinks_are_cached() -> None:
    cache = streaming()
    forward(cache, random_qkv(SINKS - 1))
    cache.advance(SINKS - 1)
    with pytest.raises(ValueError, match="right after the 3 sinks, not at 2"):
        cache.skip_tokens(5)


def test_a_forward_larger_than_the_slack_is_an_error() -> None:
    cache = streaming()
    forward(cache, random_qkv(SLOTS))  # an empty cache has more room
    cache.advance(SLOTS)
    forward(cache, random_qkv(SLACK))
    with pytest.raises(ValueError, match="9 tokens do not fit the 8 slots of slack"):
        forward(cache, random_qkv(SLACK + 1))


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_that_are_too_small_are_errors(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1, and sinks at least 0"):
        StreamingCacheSpec(*sizes)


def test_bfloat16_agrees_with_float32() -> None:
    layout = KVLayout(1, 1, 8, torch.bfloat16)
    rotary = random_rotary(layout, SLOTS)
    cache = StreamingCache(layout, SHAPE, rotary, CPU)
    sequences = [random_qkv(SLACK, layout) for _ in range(6)]
    for tokens in sequences:
        out = forward(cache, tokens)
        cache.advance(SLACK)
    k, v = (torch.cat([tokens[0][part] for tokens in sequences]) for part in (1, 2))
    positions = [*range(SINKS), *range(40 - WINDOW, 48)]
    q = rotary.queries(sequences[-1][0][0], SINKS + WINDOW, 0)
    assert q.shape[1] == GROUPS
    expected = reference_attention(q, rotary.keys(k[positions], 0, 0), v[positions], causal=True)[0]
    torch.testing.assert_close(out[0].float(), expected, atol=2e-2, rtol=2e-2)


def test_device_and_attended_bytes() -> None:
    cache = streaming()
    # keys twice, before and after rotation, and a slot for padding
    assert cache.device_bytes == SHAPE.device_bytes(LAYOUT) == LAYOUT.bytes(SLOTS + 1) * 3 // 2
    forward(cache, random_qkv(SLOTS))
    cache.advance(SLOTS)
    forward(cache, random_qkv(2))
    assert cache.traffic.attended == LAYOUT.bytes(SLOTS) + LAYOUT.bytes(SINKS + WINDOW + 2)
