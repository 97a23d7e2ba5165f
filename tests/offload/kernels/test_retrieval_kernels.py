"""Fused kernels for the retrieval cache, in triton's interpreter, match plain operations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from offload.codec.int8 import quantise
from offload.kernels import selection
from offload.kernels.selection import retrieval_kernels
from offload.layout import KVLayout
from offload.retrieval import selection as policies
from offload.retrieval import store as stores
from offload.retrieval.selection import QuerySample
from offload.retrieval.shape import RetrievalCacheSpec
from support.interpreter import import_interpreted
from support.slow import slow_except

pytest.importorskip("triton")
CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.bfloat16, torch.float16]), ids=str
)


@pytest.fixture
def kernels() -> Any:
    """The interpreted kernels; on a machine with a GPU, tests/gpu tests the compiled ones."""
    return import_interpreted("offload.kernels.retrieval")


@every_dtype
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 0, 8, 16), (5, 3, 120, 4, 4, 80), (33, 4, 1024, 0, 8, 32), (9, 8, 640, 70, 64, 16)],
)
def test_chunk_scores_match_plain_operations(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, groups, tokens, before, chunk, dim = shape
    monkeypatch.setattr(kernels, "_SPLIT_KEYS", 256)  # several programs per head
    heads = 2
    q = torch.randn(rows, 3 * heads * groups, dim).to(dtype)[:, : heads * groups]
    keys = torch.randn(heads, tokens + 5, dim).to(dtype)[:, :tokens]
    recent = torch.randn(heads, before + rows, dim).to(dtype)
    sample = QuerySample(q, keys, recent, 8)
    assert kernels.supports(min(rows, 8), groups, chunk)
    expected = sample.chunk_attention(chunk)  # there are no kernels for a CPU
    actual = kernels.chunk_scores(q, keys, recent, min(rows, 8), chunk)
    # plain operations round scores to 16 bits
    scale = expected.amax()
    torch.testing.assert_close(actual / scale, expected / scale, atol=3e-2, rtol=3e-2)
    exact = QuerySample(q.float(), keys.float(), recent.float(), 8).chunk_attention(chunk)
    torch.testing.assert_close(actual, exact, atol=1e-4, rtol=1e-3)
    earlier = torch.rand(3, tokens // chunk)[1:, :-1]  # a part of more heads, and a shorter prefix
    added = kernels.chunk_scores(q, keys, recent, min(rows, 8), chunk, earlier, 0.9)
    exact[:, :-1] += 0.9 * earlier
    torch.testing.assert_close(added, exact, atol=1e-4, rtol=1e-3)


def test_unsupported_shapes_use_plain_operations(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in ((9, 1, 8), (8, 9, 8), (8, 1, 12), (8, 1, 128)):
        assert not kernels.supports(*shape)
    monkeypatch.setattr(policies, "retrieval_kernels", lambda *_: (kernels, ""))
    q, keys, recent = (
        torch.randn(*shape).bfloat16() for shape in ((3, 9, 16), (1, 24, 16), (1, 3, 16))
    )
    scores = QuerySample(q, keys, recent, 8).chunk_attention(8)
    weights = QuerySample(q, keys, recent, 8).attention.amax(2).mean(1)
    assert torch.equal(scores, weights.unflatten(1, (-1, 8)).sum(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("chunk", "dim"), [(1, 16), (8, 80), (5, 64)])
def test_quantised_tokens_match_plain_operations(
    dtype: torch.dtype, chunk: int, dim: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout(1, 3, dim, dtype)
    prefix = (torch.randn(2, 3, 20 * chunk, dim) * 3).to(dtype)
    prefix[:, :, 0] = 0
    prefix[:, 1, 2] *= torch.finfo(dtype).max / 16  # the scale is limited
    chunks = torch.stack([torch.randperm(20)[:6] for _ in range(3)])
    chunks[:, 0] = 0
    shape = RetrievalCacheSpec.of(6 * chunk, chunk, 40 * chunk, 4, 4)
    plain, fused = (
        stores.Int8Store(layout, RetrievalCacheSpec(**vars(shape) | {"quantised": True}), CPU)
        for _ in range(2)
    )
    plain.select(0, 0, prefix, chunks)
    monkeypatch.setattr(stores, "retrieval_kernels", lambda *_: (kernels, ""))
    fused.select(0, 0, prefix, chunks)
    assert plain._codes.any()
    if dtype == torch.float16:
        assert torch.equal(fused._scales, plain._scales)
        assert torch.equal(fused._codes, plain._codes)
        return
    # the interpreter truncates a scale to bfloat16, which a compiled kernel rounds
    torch.testing.assert_close(fused._scales, plain._scales, atol=0, rtol=2**-7)
    actual, expected = (each._codes.float() * each._scales.float() for each in (fused, plain))
    assert ((actual - expected).abs() <= 1.01 * plain._scales.float() + expected.abs() / 64).all()


def test_self_test_detects_wrong_kernels(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert retrieval_kernels("cpu", torch.bfloat16, 64, 1) == (None, "there are none for cpu")
    _, reason = retrieval_kernels("cuda", torch.float32, 64, 1)
    assert reason == "there are none for torch.float32"
    for groups in (1, 4, 16):  # 16: no kernel
        selection._test_retrieval(kernels, CPU, torch.bfloat16, 32, groups)
    scores = kernels.chunk_scores
    monkeypatch.setattr(kernels, "chunk_scores", lambda *arguments: scores(*arguments) * 1.5)
    with pytest.raises(RuntimeError, match=r"selection in torch\.bfloat16 is off by 0\."):
        selection._test_retrieval(kernels, CPU, torch.bfloat16, 32, 2)
    monkeypatch.undo()

    def wrong_scale(
        x: torch.Tensor, chunks: torch.Tensor, chunk: int, codes: Any, scales: Any
    ) -> None:
        quantise(x[:, :, : codes.shape[2]], codes, scales)  # the first tokens, not the chunks

    monkeypatch.setattr(kernels, "store_lows", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"low bits of .* are stored incorrectly"):
        selection._test_retrieval(kernels, CPU, torch.bfloat16, 32, 2)
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "store_int8", wrong_scale)
    with pytest.raises(RuntimeError, match="are quantised incorrectly"):
        selection._test_retrieval(kernels, CPU, torch.bfloat16, 32, 2)
