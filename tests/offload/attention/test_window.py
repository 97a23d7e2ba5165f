"""Attention to windows equals plain arithmetic, whichever way it is computed."""

from __future__ import annotations

import pytest
import torch

from offload.attention import window as window_module
from offload.attention.folding import Partial
from offload.attention.window import attend_slots, windowed_attention
from offload.kernels.batch_invariant_attention import batch_invariant_window
from offload.traffic import ByteCounters
from support.reference import reference_attention, window_mask

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# keys, rows, window: shorter than the keys, or not; of one row; of blocks that are not whole
SIZES = [(10, 10, 3), (300, 100, 7), (300, 300, 50), (700, 450, 64), (50, 1, 9), (65, 60, 64)]
SIZES += [(20, 20, 20), (20, 6, 100), (9, 9, 1)]


def as_float(partial: Partial) -> Partial:
    return partial[0].float(), partial[1]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("keys", "rows", "window"), SIZES)
def test_windowed_attention_equals_plain_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
    keys: int,
    rows: int,
    window: int,
    masked: bool,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(window_module, "MASKED_SCORES", 1 << 30 if masked else 0)
    q = torch.randn(rows, 4, 16).to(dtype)
    k, v = torch.randn(2, keys, 2, 16).to(dtype)
    mask = window_mask(rows, keys, window)
    expected = reference_attention(q, k, v, causal=True, mask=mask)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    out = windowed_attention(q, k, v, window)
    assert out[0].dtype == dtype
    torch.testing.assert_close(as_float(out), expected, **tolerance)
    seen = max(0, keys - rows - window + 1)
    torch.testing.assert_close(windowed_attention(q, k[seen:], v[seen:], window), out)
    kv = torch.stack((k, v)).transpose(1, 2).contiguous()
    traffic = ByteCounters()
    out = batch_invariant_window(q, kv[:, :, seen:], seen, window, traffic)
    torch.testing.assert_close(as_float(out), expected, **tolerance)
    slots = attend_slots(kv, q, keys, traffic := ByteCounters(), window)
    torch.testing.assert_close(as_float(slots), expected, **tolerance)
    assert traffic.attended == kv[:, :, seen:].nbytes


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [1, 7, 64])
def test_a_row_does_not_depend_on_others_or_on_what_was_dropped(
    window: int, dtype: torch.dtype
) -> None:
    kv = torch.randn(2, 2, 150, 16).to(dtype)
    q = torch.randn(150, 6, 16).to(dtype)
    traffic = ByteCounters()
    whole = batch_invariant_window(q, kv, 0, window, traffic)
    for start, end in [(0, 3), (40, 41), (41, 60), (100, 150), (149, 150)]:
        for dropped in {0, max(0, start - window + 1), max(0, start - window - 2)}:
            part = kv[:, :, dropped:end]
            own = batch_invariant_window(q[start:end], part, dropped, window, traffic)
            for actual, expected in zip(own, whole, strict=True):  # output and log-sum-exp
                assert torch.equal(actual, expected[start:end])
