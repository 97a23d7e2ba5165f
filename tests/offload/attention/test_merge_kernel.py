"""The fused kernel that merges partial attention, in triton's interpreter, and its self-test."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from offload.attention import folding
from support.interpreter import import_interpreted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The interpreted kernel; on a machine with a GPU, tests/gpu tests the compiled one."""
    return import_interpreted("offload.attention.merge_kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 80])
def test_merging_equals_plain_operations(dtype: torch.dtype, dim: int, kernels: ModuleType) -> None:
    folding._test_merge(kernels, CPU, dtype, dim)


def test_the_self_test_detects_a_wrong_kernel(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = kernels.merge_parts
    wrong = {
        "a part is left out": lambda outs, lses, other: merge(outs[1:], lses[1:], other),
        "log-sum-exp": lambda *parts: (merge(*parts)[0], merge(*parts)[1] + 0.1),
    }
    for function in wrong.values():
        monkeypatch.setattr(kernels, "merge_parts", function)
        with pytest.raises(RuntimeError, match=r"merged attention in .* is wrong"):
            folding._test_merge(kernels, CPU, torch.float32, 16)


def test_parts_of_wide_heads_are_merged_by_plain_operations(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's parts have a batch, and may be two."""
    monkeypatch.setattr(folding, "merge_kernels", lambda *_: (kernels, ""))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    parts = [(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3)) for _ in range(2)]
    rows = [(out[0].transpose(0, 1), lse[0].transpose(0, 1)) for out, lse in parts]
    (out, lse), (row_out, row_lse) = folding.merge(parts), folding.merge(rows)
    torch.testing.assert_close(out[0].transpose(0, 1), row_out)
    torch.testing.assert_close(lse[0].transpose(0, 1), row_lse)
