"""The draft's cache: all of a short text; of a long one sinks and a recent window, at positions
counted in slots.
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
ROTARY = random_rotary(LAYOUT, SLOTS)  # no longer than the slots, however long the text


def streaming() -> StreamingCache:
    return StreamingCache(LAYOUT, SHAPE, ROTARY, CPU)


class ByHand:
    """The same by bookkeeping: the tokens that remain, never rotated, and attention from scratch on
    every pass.
    """

    def __init__(self) -> None:
        self.kept: list[list[QKV]] = []  # one token each

    def forward(self, tokens: list[QKV]) -> Tensor:
        rows = len(tokens[0][0])
        if len(self.kept) + rows > SLOTS:
            self.kept = self.kept[:SINKS] + self.kept[-WINDOW:]
        outs = []
        for layer in range(LAYOUT.layers):
            parts = [token[layer] for token in self.kept] + [tokens[layer]]
            q, k, v = (torch.cat([part[i] for part in parts]) for i in range(3))
            q, k = ROTARY(q, 0, layer)[-rows:], ROTARY(k, 0, layer)
            outs.append(reference_attention(q, k, v, causal=True)[0])
        return torch.stack(outs)

    def keep(self, tokens: list[QKV], count: int) -> None:
        self.kept += [[tuple(x[i : i + 1] for x in qkv) for qkv in tokens] for i in range(count)]


def test_a_text_that_fits_is_kept_whole() -> None:
    cache, want = streaming(), plain_cache()
    for rows, stand, crop in [
        (8, 8, None),
        (1, 1, None),
        (8, 5, None),
        (4, 4, 2),
        (SLOTS - 2, SLOTS - 2, None),
    ]:
        assert_same_forward(cache, want, rows, stand, crop)


def test_a_long_text_is_sinks_and_window_at_slots() -> None:
    cache, want, rows = streaming(), ByHand(), [8, 1, 5, 8, 3, 1, 1, 7, 8, 2]
    for count in rows * 6:
        tokens = random_qkv(count)
        torch.testing.assert_close(
            forward(cache, tokens), want.forward(tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(count)
        want.keep(tokens, count)
    assert cache.length == 6 * sum(rows) > 9 * SLOTS


def test_drafts_are_taken_back_after_sliding() -> None:
    cache, want = streaming(), ByHand()
    for step in range(40):
        proposed, stand = 1 + step % 8, step % 6
        for _ in range(proposed):  # a draft, token by token; the window may slide in its midst
            tokens = random_qkv(1)
            torch.testing.assert_close(
                forward(cache, tokens), want.forward(tokens), atol=1e-5, rtol=1e-5
            )
            cache.advance(1)
            want.keep(tokens, 1)
        back = max(0, proposed - stand)
        cache.crop(cache.length - back)
        want.kept = want.kept[: len(want.kept) - back]
    assert cache.length > 2 * SLOTS


def test_a_pass_that_never_counted_leaves_nothing_behind() -> None:
    cache, want = streaming(), ByHand()
    for rows in [8, 8, 8, 8, 8, 6, 8]:
        forward(cache, random_qkv(rows))
        tokens = random_qkv(rows)
        torch.testing.assert_close(
            forward(cache, tokens), want.forward(tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(rows)
        want.keep(tokens, rows)


def test_what_left_the_window_cannot_be_cropped_to() -> None:
    cache = streaming()
    for _ in range(8):
        forward(cache, random_qkv(8))
        cache.advance(8)
    # 64 tokens in; the last slide came when the 8 tokens from 56 on did not fit: 40 and more tokens
    # remain
    oldest = 56 - WINDOW
    cache.crop(oldest)
    assert cache.length == oldest
    with pytest.raises(
        ValueError, match=f"cannot crop to {oldest - 1} tokens: those up to {oldest} have left"
    ):
        cache.crop(oldest - 1)


@pytest.mark.parametrize("skipped", [1, 1000])
def test_skipped_tokens_take_no_room(skipped: int) -> None:
    cache, want = streaming(), ByHand()
    passes = [random_qkv(SINKS), random_qkv(8), random_qkv(8), random_qkv(8), random_qkv(5)]
    for index, tokens in enumerate(passes):
        torch.testing.assert_close(
            forward(cache, tokens), want.forward(tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(len(tokens[0][0]))
        want.keep(tokens, len(tokens[0][0]))
        if index == 0:
            cache.skip_tokens(skipped)
    assert cache.length == SINKS + 29 + skipped
    with pytest.raises(ValueError, match="right behind the 3 sinks only, not at"):
        cache.skip_tokens(1)


def test_tokens_cannot_be_skipped_before_the_sinks_are_in() -> None:
    cache = streaming()
    forward(cache, random_qkv(SINKS - 1))
    cache.advance(SINKS - 1)
    with pytest.raises(ValueError, match="right behind the 3 sinks only, not at 2"):
        cache.skip_tokens(5)


def test_a_pass_larger_than_the_slack_is_refused() -> None:
    cache = streaming()
    forward(cache, random_qkv(SLOTS))  # an empty cache has more room
    cache.advance(SLOTS)
    forward(cache, random_qkv(SLACK))
    with pytest.raises(ValueError, match="9 tokens do not fit the 8 slots of slack"):
        forward(cache, random_qkv(SLACK + 1))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_of_nothing_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StreamingCacheSpec(*sizes)


def test_bfloat16_rotates_by_slot_as_float32_does() -> None:
    layout = KVLayout(1, 1, 8, torch.bfloat16)
    rotary = random_rotary(layout, SLOTS)
    cache = StreamingCache(layout, SHAPE, rotary, CPU)
    texts = [random_qkv(SLACK, layout) for _ in range(6)]
    for tokens in texts:
        out = forward(cache, tokens)
        cache.advance(SLACK)
    k, v = (torch.cat([tokens[0][part] for tokens in texts]) for part in (1, 2))
    kept = [*range(SINKS), *range(40 - WINDOW, 48)]
    q = rotary(texts[-1][0][0], SINKS + WINDOW, 0)
    assert q.shape[1] == GROUPS
    want = reference_attention(q, rotary(k[kept], 0, 0), v[kept], causal=True)[0]
    torch.testing.assert_close(out[0].float(), want, atol=2e-2, rtol=2e-2)


def test_device_bytes_and_bytes_attended() -> None:
    cache = streaming()
    assert (
        cache.device_bytes == SHAPE.device_bytes(LAYOUT) == LAYOUT.bytes(SLOTS) * 3 // 2
    )  # keys twice, as computed and rotated
    forward(cache, random_qkv(SLOTS))
    cache.advance(SLOTS)
    forward(cache, random_qkv(2))
    assert cache.traffic.attended == LAYOUT.bytes(SLOTS) + LAYOUT.bytes(SINKS + WINDOW + 2)
