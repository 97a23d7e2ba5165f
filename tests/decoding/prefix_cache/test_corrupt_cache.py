"""No file in the prompt cache's folder fails a request, or is loaded as another prompt's KV."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding import GREEDY
from decoding.prefix_cache import fingerprint
from decoding.prefix_cache.fingerprint import WeightDigests
from decoding.prefix_cache.manager import ModelFingerprint
from decoding.prefix_cache.store import MAX_TOKENS, CachedPrompt, PromptCache
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup
from support import engines
from support.engines import IDENTITY, Pair
from support.irregular import IRREGULAR
from support.keeping import NEW, PROMPT, SMALL, collect_warnings, prompts_in
from support.models import random_tokens
from support.slow import slow_except

OTHER = random_tokens(len(PROMPT), seed=2).tolist()


def save_prompts(cache_folder: str, models: Pair, *prompts: list[int]) -> list[list[int]]:
    """Generate after prompts, which are saved, and return the outputs."""
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        return [list(engine.generate(prompt, NEW, GREEDY, name="a book")) for prompt in prompts]


def check_prefilled_again(cache_folder: str, models: Pair, expected: list[int]) -> list[str]:
    """Check that PROMPT is prefilled once more, then loaded; return the warnings."""
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        for is_cached in (False, True):
            assert list(engine.generate(PROMPT, NEW, GREEDY, name="a book")) == expected
            assert bool(engine.stats.loaded_tokens) == is_cached
    return lines


def edit_manifest(cached: CachedPrompt, **fields: Any) -> None:
    path = cached.folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


KV, CHECKSUMS, TOKENS = "rank-0-layer-*.kv", "rank-0.json", "tokens.bin"


@pytest.mark.parametrize("patterns", [(KV,), (CHECKSUMS,), (KV, CHECKSUMS), (TOKENS,)])
def test_files_of_another_prompt_are_detected(
    patterns: tuple[str, ...], models: Pair, cache_folder: str
) -> None:
    expected, _ = save_prompts(cache_folder, models, PROMPT, OTHER)
    first, second = prompts_in(cache_folder)
    for pattern in patterns:
        for path in first.folder.glob(pattern):
            shutil.copy(second.folder / path.name, path)
    lines = check_prefilled_again(cache_folder, models, expected)
    assert "of a book is corrupt" in lines[0]


def test_swapped_tokens_and_checksum_are_detected(models: Pair, cache_folder: str) -> None:
    expected, _ = save_prompts(cache_folder, models, PROMPT, OTHER)
    first, second = prompts_in(cache_folder)
    assert second.tokens().tolist() == OTHER
    shutil.rmtree(first.folder)
    raw = np.array(PROMPT, dtype=np.int64).tobytes()
    (second.folder / TOKENS).write_bytes(raw)
    edit_manifest(second, checksum=zlib.crc32(raw))
    lines = check_prefilled_again(cache_folder, models, expected)
    assert "of a book is corrupt (rank-0-layer-0.kv does not match its checksum)" in lines[0]


def test_swapped_layers_are_detected(models: Pair, cache_folder: str) -> None:
    (expected,) = save_prompts(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    sums = json.loads((prompt.folder / CHECKSUMS).read_text())
    (prompt.folder / CHECKSUMS).write_text(json.dumps([sums[1], sums[0], *sums[2:]]))
    one, two = (prompt.folder / f"rank-0-layer-{layer}.kv" for layer in range(2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert "is corrupt" in check_prefilled_again(cache_folder, models, expected)[0]


def test_an_edited_identity_is_detected(
    models: Pair, cache_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engines, "IDENTITY", ModelFingerprint("4567", "another pair"))
        (expected,) = save_prompts(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    config = models.target.config
    rope_key = config.rope_key(len(PROMPT), len(PROMPT) + NEW)
    own = IDENTITY.kv_identity(rope_key, config.kv_layout(1, torch.float32))
    edit_manifest(prompt, identity=own)
    assert "of a book is corrupt" in check_prefilled_again(cache_folder, models, expected)[0]


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, CHECKSUMS, "rank-0-layer-1.kv"])
@pytest.mark.parametrize("kind", slow_except(IRREGULAR, 1))
def test_irregular_files_are_corruption(
    kind: str, name: str, models: Pair, cache_folder: str
) -> None:
    (expected,) = save_prompts(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    (prompt.folder / name).unlink()
    IRREGULAR[kind](prompt.folder / name)
    (line,) = check_prefilled_again(cache_folder, models, expected)
    assert "is corrupt" in line
    assert not list(Path(cache_folder).glob(".dropped-*"))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 2**62},
        {"tokens": MAX_TOKENS + 1},
        {"tokens": len(PROMPT) - 1},
        {"tokens": 0},
        {"tokens": True},
        {"nbytes": 2**62},  # would evict all other prompts
        {"nbytes": 0},
        {"name": "x" * 100_000},
        {"name": None},
        {"checksum": 0},
        {"ranks": float("nan")},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_an_edited_manifest_is_corruption(
    fields: dict[str, Any], models: Pair, cache_folder: str
) -> None:
    expected, _ = save_prompts(cache_folder, models, PROMPT, OTHER)
    first, second = prompts_in(cache_folder)
    edit_manifest(first, **fields)
    limited = PromptCache(Path(cache_folder), limit=10**9)
    limited.collect_garbage()
    assert [each.id for each in limited.prompts()] == [second.id]
    assert check_prefilled_again(cache_folder, models, expected) == []


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, CHECKSUMS, "rank-0-layer-1.kv"])
@pytest.mark.parametrize("size", slow_except([0, 3, 1 << 40], 1))
def test_files_of_another_size_are_corruption(
    size: int, name: str, models: Pair, cache_folder: str
) -> None:
    (expected,) = save_prompts(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    os.truncate(prompt.folder / name, size)  # a sparse file: the larger size takes no disk
    (line,) = check_prefilled_again(cache_folder, models, expected)
    assert "is corrupt" in line


@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_digest_files_are_ignored(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    expected = WeightDigests.compute(checkpoint(), tmp_path)
    cache_file = tmp_path / ".digests.json"
    content = cache_file.read_bytes()
    cache_file.unlink()
    IRREGULAR[kind](cache_file)
    assert WeightDigests.compute(checkpoint(), tmp_path) == expected
    if kind != "folder":  # a folder cannot be replaced
        assert cache_file.read_bytes() == content
        os.truncate(cache_file, 1 << 40)
        assert WeightDigests.compute(checkpoint(), tmp_path) == expected
        assert cache_file.read_bytes() == content


def test_foreign_files_in_the_folder_are_harmless(models: Pair, cache_folder: str) -> None:
    (expected,) = save_prompts(cache_folder, models, PROMPT)
    folder = Path(cache_folder)
    leftover, dropped = folder / f".writing-{'a' * 12}", folder / f".dropped-{'b' * 12}"
    leftover.mkdir()
    os.mkfifo(leftover / "rank-0.lock")
    (leftover / "rank-1.lock").symlink_to("/dev/zero")
    dropped.symlink_to(folder)
    os.mkfifo(folder / ("c" * 12))
    (folder / ("d" * 12)).mkdir()
    (folder / ("e" * 12)).symlink_to(prompts_in(cache_folder)[0].folder)
    os.mkdir(os.fsencode(folder) + b"/\xff\xfe")
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert engine.stats.loaded_tokens
        assert list(engine.generate(OTHER, NEW, GREEDY))
    assert not lines
    assert len(prompts_in(cache_folder)) == 2
    assert not leftover.exists()


def test_long_names_are_truncated(models: Pair, cache_folder: str) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        list(engine.generate(PROMPT, NEW, GREEDY, name="\ud800" + "n" * 100_000))
    assert not lines
    assert len(prompts_in(cache_folder)[0].manifest.name) == 200


def test_the_format_version_changes_the_digest(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, group = ModelConfig.from_pretrained(checkpoint()), TensorParallelGroup()
    weights = WeightDigests.compute(checkpoint(), tmp_path)
    current = fingerprint.digest_of(weights, config, torch.float32, group)
    monkeypatch.setattr(fingerprint, "VERSION", fingerprint.VERSION - 1)
    assert fingerprint.digest_of(weights, config, torch.float32, group) != current
