"""The prompt cache does not change outputs, detects corruption, and evicts within its limit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import decoding.prefix_cache.fingerprint
import offload.tiered.kv_file
from decoding import GREEDY, Settings
from decoding.prefix_cache import store as prompt_cache
from decoding.prefix_cache.files import file_lock
from decoding.prefix_cache.fingerprint import WeightDigests, digest_of
from decoding.prefix_cache.manager import PrefixCacheManager
from decoding.prefix_cache.store import PromptCache
from offload.errors import CorruptCacheError, TierForceError
from offload.layout import OBSERVED_ROWS, KVLayout
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVFile
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import IDENTITY, Folders, Pair
from support.keeping import (
    CASES,
    NEW,
    PLACEMENTS,
    PROMPT,
    QUESTIONS,
    SAMPLED,
    SMALL,
    answers,
    collect_warnings,
    prompts_in,
)
from support.models import random_tokens
from support.slow import slow_except


@pytest.mark.parametrize(("mode", "link", "resident"), slow_except(CASES, -1))
def test_answers_after_a_cached_prompt_equal_those_after_prefill(
    mode: str, link: str, resident: int, models: Pair, cache_folder: str
) -> None:
    options = {**SMALL, "link": link, "gpu_kv_layers": resident}
    with models.engine(mode, **options) as engine:
        expected = answers(engine), answers(engine, SAMPLED)
        link_out = engine.stats.traffic["target"].link_out
    with models.engine(mode, **options, prompt_cache=cache_folder) as engine:
        assert answers(engine) == expected[0]
        assert len(prompts_in(cache_folder)) == 1  # the questions are too short to be worth saving
    with models.engine(mode, **options, prompt_cache=cache_folder) as engine:
        assert (answers(engine), answers(engine, SAMPLED)) == expected
        # all of the last prompt but its question
        assert engine.stats.loaded_tokens == len(PROMPT)
        assert engine.stats.traffic["target"].link_out < max(1, link_out)
        list(engine.generate([*PROMPT, *QUESTIONS[0]], NEW, GREEDY))
        # the observers need the last rows
        tokens = len(PROMPT) + len(QUESTIONS[0]) - OBSERVED_ROWS
        assert engine.stats.loaded_tokens == tokens


def test_cached_prompts_are_independent_of_placement(models: Pair, cache_folder: str) -> None:
    with models.engine("hierarchical", **SMALL) as engine:
        expected = answers(engine)
    for link, resident in PLACEMENTS:
        options = {**SMALL, "link": link, "gpu_kv_layers": resident}
        with models.engine("hierarchical", **options, prompt_cache=cache_folder) as engine:
            assert answers(engine) == expected
    assert len(prompts_in(cache_folder)) == 1


def test_split_layers_roundtrip(folders: Folders, cache_folder: str) -> None:
    """Split layers are saved bit for bit: answers in 16 bits equal those after a prompt that plain
    decoding has saved.
    """
    models = Pair(*folders, dtype="bfloat16")
    options = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 0}
    plain = f"{cache_folder}-plain"
    with models.engine("plain", **options, prompt_cache=plain) as engine:
        answers(engine)
    with models.engine("plain", **options, prompt_cache=plain) as engine:
        expected, loaded = answers(engine), engine.stats.loaded_tokens
    assert loaded
    with models.engine("split-retrieval", **options, prompt_cache=cache_folder) as engine:
        answers(engine)
    with models.engine("plain", **options, prompt_cache=cache_folder) as engine:
        assert answers(engine) == expected
        assert engine.stats.loaded_tokens == loaded
    with models.engine(
        "plain", **options, compress_offload=True, prompt_cache=cache_folder
    ) as engine:
        assert answers(engine) == expected


def test_the_longest_common_prefix_is_loaded(models: Pair, cache_folder: str) -> None:
    with models.engine("plain", **SMALL) as engine:
        prompts = [PROMPT[:length] + [3] * 40 for length in (310, 500, 640)]
        prompts += [PROMPT[:200] + [4] * 200, [5, *PROMPT]]
        expected = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        list(engine.generate(PROMPT[:400], NEW, GREEDY))
        list(engine.generate(PROMPT, NEW, GREEDY))
        # the longer prompt has replaced the one that it extends
        assert [each.manifest.tokens for each in prompts_in(cache_folder)] == [700]
        loaded = []
        for prompt, answer in zip(prompts, expected, strict=True):
            assert list(engine.generate(prompt, NEW, GREEDY)) == answer
            loaded.append(engine.stats.loaded_tokens)
        # the last two have too short a common prefix, and none
        assert loaded == [310, 500, 640, 0, 0]


def corruptions(folder: Path) -> Iterator[Callable[[], None]]:
    """Yield functions that each corrupt a prompt in another way."""

    def flip_bit(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 8
        path.write_bytes(raw)

    layer = folder / "rank-0-layer-1.kv"
    yield lambda: flip_bit(layer)
    yield lambda: os.truncate(layer, 1000)
    yield layer.unlink
    yield lambda: flip_bit(folder / "rank-0.json")
    yield lambda: (folder / "rank-0.json").write_text("{}") and None
    yield lambda: (folder / "rank-0.json").write_text("[[1, 2]]") and None


@pytest.mark.parametrize("link", slow_except(["view", "emulated:50"], 1))
@pytest.mark.parametrize("index", range(6))
def test_a_corrupt_prompt_is_prefilled_again(
    index: int, link: str, models: Pair, cache_folder: str
) -> None:
    options = {**SMALL, "link": link, "gpu_kv_layers": 1, "prompt_cache": cache_folder}
    with models.engine("hierarchical", **options) as engine, collect_warnings(engine) as lines:
        expected = list(engine.generate(PROMPT, NEW, GREEDY, name="a book"))
        (prompt,) = prompts_in(cache_folder)
        corrupt = list(corruptions(prompt.folder))[index]
        corrupt()
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert engine.stats.loaded_tokens == 0
        assert "a book is corrupt" in lines[0]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected  # it was saved again
        assert engine.stats.loaded_tokens
        assert len(lines) == 1


@pytest.mark.parametrize("content", [b"[1]", b"{}", b"[" * 100_000, b"\xff", None])
@pytest.mark.parametrize("name", ["manifest.json", "tokens.bin"])
def test_prompts_with_invalid_metadata_are_saved_again(
    name: str, content: bytes | None, models: Pair, cache_folder: str
) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
        (prompt,) = prompts_in(cache_folder)
        if content is None:
            (prompt.folder / name).unlink()
        else:
            (prompt.folder / name).write_bytes(content)
        for loaded in (False, True):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
            assert bool(engine.stats.loaded_tokens) == loaded
        assert len(lines) == 1
        assert "is corrupt" in lines[0]


def test_temporary_read_errors_do_not_remove_a_prompt(models: Pair, cache_folder: str) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
        busy = OSError(errno.EMFILE, "Too many open files")
        with patch.object(offload.tiered.kv_file._Reader, "__call__", side_effect=busy):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert engine.stats.loaded_tokens == 0
        assert "Too many open files" in lines[0]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert engine.stats.loaded_tokens
        # a missing folder does not fail requests
        shutil.rmtree(cache_folder)
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert "not cached: `prompt_cache`" in lines[1]
        assert "No such file" in lines[1]


def test_a_prompt_with_input_output_errors_is_saved_again(models: Pair, cache_folder: str) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        expected = list(engine.generate(PROMPT, NEW, GREEDY, name="a book"))
        broken = OSError(errno.EIO, "Input/output error")
        with patch.object(offload.tiered.kv_file._Reader, "__call__", side_effect=broken):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert "a book is corrupt (Input/output error)" in lines[0]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert engine.stats.loaded_tokens
        assert len(lines) == 1


def test_foreign_files_are_left_alone(models: Pair, cache_folder: str) -> None:
    other = Path(cache_folder) / "holiday"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text('{"name": "holiday"}')
    (Path(cache_folder) / "notes.txt").write_text("notes")
    with models.engine(
        "plain", **SMALL, prompt_cache=cache_folder, prompt_cache_limit=400_000
    ) as engine:
        list(engine.generate(PROMPT, NEW, GREEDY))
    assert (other / "manifest.json").exists()
    assert (Path(cache_folder) / "notes.txt").exists()


def test_fingerprints_distinguish_models(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    config, group = ModelConfig.from_pretrained(folder), TensorParallelGroup()

    def digest(**overrides: Any) -> str:
        parts = {"config": config, "dtype": torch.float32, "group": group, **overrides}
        return digest_of(WeightDigests.compute(folder, tmp_path), **parts)

    first = digest()
    with patch.object(decoding.prefix_cache.fingerprint, "_digest", side_effect=AssertionError):
        assert digest() == first  # digests of files are cached
    two = TensorParallelGroup()
    two.size = 2
    others = [
        digest(config=replace(config, rope={**config.rope, "rope_theta": 5e5})),
        digest(dtype=torch.bfloat16),
        digest(group=two),
    ]
    (weights,) = folder.glob("*.safetensors")
    stat = weights.stat()
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    others.append(digest())
    for version in ("gptq", "gptq_v2"):  # The same zero points are read as others.
        fields = {"bits": 4, "quant_method": "gptq", "checkpoint_format": version}
        path = folder / "config.json"
        content = {**json.loads(path.read_text()), "quantization_config": fields}
        path.write_text(json.dumps(content))
        others.append(digest())
    assert len({first, *others}) == 7
    digests = WeightDigests.compute(folder, tmp_path)
    for content in ("[1]", "{", '{"a": 1}', "[" * 100_000):
        (tmp_path / ".digests.json").write_text(content)
        assert WeightDigests.compute(folder, tmp_path) == digests
    digests.check_unchanged()
    weights.write_bytes(raw)
    with pytest.raises(TierForceError, match="was changed while it was loaded"):
        digests.check_unchanged()


def test_pipes_and_implausible_numbers_are_not_prompts(models: Pair, cache_folder: str) -> None:
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        list(engine.generate(PROMPT, NEW, GREEDY))
    (prompt,) = prompts_in(cache_folder)
    manifest = prompt.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    for number in (-5, 10**400):
        manifest.write_text(json.dumps({**content, "nbytes": number}))
        assert PromptCache(Path(cache_folder)).prompts() == []
    manifest.write_text(json.dumps(content))
    layer = next(prompt.folder.glob("rank-0-layer-*.kv"))
    for path in (prompt.folder / "tokens.bin", layer, manifest):
        path.unlink()
        os.mkfifo(path)
    assert len(prompt.tokens()) == 0
    assert PromptCache(Path(cache_folder)).prompts() == []
    layout = KVLayout(1, 1, 4, torch.float32)
    (read,) = KVFile(layer, layout, 3).readers(3, [0])
    with pytest.raises(CorruptCacheError, match="not a regular file"):
        read()


def test_a_lock_that_is_never_released_is_reported(
    cache_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "_LOCK_TIMEOUT_S", 0.1)
    cache = PromptCache(Path(cache_folder))
    cache.create()
    lock = Path(cache_folder) / ".lock"
    with file_lock(lock), pytest.raises(TierForceError, match=r"job has held its .lock for 0.1 s"):
        cache.create()
    cache.create()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(TierForceError, match=r".lock in it is not a regular file"):
        cache.create()


def test_lru_prompt_is_evicted_first(models: Pair, cache_folder: str) -> None:
    size = 500 * models.target.config.kv_layout(1, torch.float32).bytes(1)
    prompts = [random_tokens(500, seed=10 + seed).tolist() for seed in range(4)]
    limited = models.engine(
        "plain", **SMALL, prompt_cache=cache_folder, prompt_cache_limit=2 * size
    )
    with limited as engine, collect_warnings(engine) as lines:
        for name, prompt in zip("abc", prompts, strict=False):
            list(engine.generate(prompt, NEW, GREEDY, name=name))
            time.sleep(0.02)  # gives each file another mtime
        assert [each.manifest.name for each in prompts_in(cache_folder)] == ["b", "c"]
        list(engine.generate(prompts[1], NEW, GREEDY))
        list(engine.generate(prompts[3], NEW, GREEDY, name="d"))
        assert [each.manifest.name for each in prompts_in(cache_folder)] == ["b", "d"]
        assert not lines
        list(engine.generate(PROMPT * 2, NEW, GREEDY))
        assert "more than `prompt_cache_limit`" in lines[0]
        assert [each.manifest.name for each in prompts_in(cache_folder)] == ["b", "d"]


def test_failed_saves_do_not_affect_requests(models: Pair, cache_folder: str) -> None:
    with models.engine("plain", **SMALL) as engine:
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        with patch.object(KVFile, "write", side_effect=full):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert "not cached" in lines[0]
        assert "No space left" in lines[0]
        usage = shutil.disk_usage(cache_folder)
        with patch("shutil.disk_usage", return_value=usage._replace(free=1000)):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert "0.00 GB free" in lines[1]
        for error in (ValueError("odd"), MemoryError()):
            with patch.object(TieredCache, "host_readers", side_effect=error):
                if isinstance(error, MemoryError):
                    assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
            with patch.object(KVFile, "write", side_effect=error):
                assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert len(lines) == 5
        assert all("not cached" in line for line in lines)
        assert not [each for each in os.listdir(cache_folder) if each.startswith(".writing")]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
    assert len(prompts_in(cache_folder)) == 1


def test_an_unusable_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierForceError, match=r"`prompt_cache` .*file cannot be used"):
        PrefixCacheManager(str(tmp_path / "file"), None, IDENTITY, TensorParallelGroup())
    with pytest.raises(
        TierForceError, match="`prompt_cache_limit` limits the folder of `prompt_cache`"
    ):
        Settings(prompt_cache_limit=1)


def test_digests_cover_the_files_in_the_index(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    (folder / "shards").mkdir()
    (folder / "model.safetensors").rename(folder / "shards" / "1.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"not in the index")
    index = {"weight_map": {"lm_head.weight": "shards/1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(WeightDigests.compute(folder, tmp_path).digests) == ["shards/1.safetensors"]
