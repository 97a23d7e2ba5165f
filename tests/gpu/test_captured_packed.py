"""Packed weights in captured forwards, with fused kernels and without them, match a CPU."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from decoding import GREEDY, Engine, Settings
from support.commands import TARGET
from support.models import WIDE, build_checkpoint, random_tokens
from support.slow import slow_except

pytestmark = pytest.mark.cuda
PROMPT, NEW = random_tokens(70).tolist(), 24


def tokens_of(path: Path, device: str, weights: str, graphs: bool) -> list[int]:
    settings = Settings(
        mode="retrieval",
        retrieval_budget=32,
        chunk_size=4,
        dtype="float32",
        weights=weights,
        graphs=graphs,
    )
    engine = Engine.from_pretrained(path, settings=settings, device=device)
    with closing(engine):
        tokens = list(engine.generate(PROMPT, NEW, GREEDY))
        counts = engine.stats.cuda_graphs
    if graphs:
        assert counts is not None
        assert counts["replayed"] > 0
        assert (counts["refused"], counts["why"]) == (0, None)
    return tokens


CASES = [("Q4_0", False), ("Q4_K", False), ("Q2_K", False), ("Q4_K", True), ("Q2_K", True)]


@pytest.mark.parametrize(("name", "has_experts"), slow_except(CASES))
def test_captured_forwards(tmp_path: Path, name: str, has_experts: bool) -> None:
    pytest.importorskip("gguf")
    from gguf import GGMLQuantizationType

    from support.gguf import convert

    folder = TARGET
    if has_experts:
        folder = shutil.copytree(TARGET, tmp_path / "mixture")
        build_checkpoint(folder, "mixtral", **WIDE, vocab_size=2048)
    path = convert(folder, tmp_path / "model.gguf", GGMLQuantizationType[name])
    expected = tokens_of(path, "cpu", "16-bit", graphs=False)
    assert tokens_of(path, "cuda", "packed", graphs=True) == expected
