"""Texts that go on from what is kept on disk are those that were read; what is kept is whole."""

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
from decoding.prefix_cache.files import locked
from decoding.prefix_cache.fingerprint import WeightDigests, digest_of
from decoding.prefix_cache.manager import PrefixCacheManager
from decoding.prefix_cache.store import PromptCache
from offload.errors import CorruptCacheError, TierForceError
from offload.layout import KVLayout
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVFile
from offload.tiered.prefill import OBSERVED_ROWS
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import IDENTITY, Folders, Pair
from support.keeping import (
    NEW,
    PLACEMENTS,
    PROMPT,
    QUESTIONS,
    SAMPLED,
    SMALL,
    CASES,
    answers,
    prompts_in,
    collect_warnings,
)
from support.models import random_tokens
from support.slow import slow_except


@pytest.mark.parametrize(("mode", "link", "resident"), CASES)
def test_answers_are_those_behind_what_was_read(
    mode: str, link: str, resident: int, models: Pair, cache_folder: str
) -> None:
    choices = {**SMALL, "link": link, "gpu_kv_layers": resident}
    with models.engine(mode, **choices) as engine:
        wanted = answers(engine), answers(engine, SAMPLED)
        read = engine.stats.traffic["target"].link_out
    with models.engine(mode, **choices, prompt_cache=cache_folder) as engine:
        assert answers(engine) == wanted[0]
        assert len(prompts_in(cache_folder)) == 1  # the questions are too short to be kept with it
    with models.engine(mode, **choices, prompt_cache=cache_folder) as engine:
        assert (answers(engine), answers(engine, SAMPLED)) == wanted
        # of the last, all but its own question
        assert engine.stats.loaded_tokens == len(PROMPT)
        assert engine.stats.traffic["target"].link_out < max(1, read)
        list(engine.generate([*PROMPT, *QUESTIONS[0]], NEW, GREEDY))
        tokens = len(PROMPT) + len(QUESTIONS[0]) - OBSERVED_ROWS  # that followers are to see
        assert engine.stats.loaded_tokens == tokens


def test_placements_do_not_matter_to_what_is_kept(models: Pair, cache_folder: str) -> None:
    with models.engine("hierarchical", **SMALL) as engine:
        wanted = answers(engine)
    for link, resident in PLACEMENTS:
        choices = {**SMALL, "link": link, "gpu_kv_layers": resident}
        with models.engine("hierarchical", **choices, prompt_cache=cache_folder) as engine:
            assert answers(engine) == wanted
    assert len(prompts_in(cache_folder)) == 1


def test_so_in_slices(folders: Folders, cache_folder: str) -> None:
    """What is kept of layers in slices is what was computed, bit for bit: in 16 bits a text goes
    on as behind what plain decoding has kept.
    """
    models = Pair(*folders, dtype="bfloat16")
    choices = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 0}
    whole = f"{cache_folder}-whole"
    with models.engine("plain", **choices, prompt_cache=whole) as engine:
        answers(engine)
    with models.engine("plain", **choices, prompt_cache=whole) as engine:
        wanted, loaded = answers(engine), engine.stats.loaded_tokens
    assert loaded
    with models.engine("split-retrieval", **choices, prompt_cache=cache_folder) as engine:
        answers(engine)
    with models.engine("plain", **choices, prompt_cache=cache_folder) as engine:
        assert answers(engine) == wanted
        assert engine.stats.loaded_tokens == loaded
    with models.engine(
        "plain", **choices, compress_offload=True, prompt_cache=cache_folder
    ) as engine:
        assert answers(engine) == wanted


def test_the_longest_beginning_is_found_token_by_token(models: Pair, cache_folder: str) -> None:
    with models.engine("plain", **SMALL) as engine:
        prompts = [PROMPT[:length] + [3] * 40 for length in (310, 500, 640)]
        prompts += [PROMPT[:200] + [4] * 200, [5, *PROMPT]]
        wanted = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        list(engine.generate(PROMPT[:400], NEW, GREEDY))
        list(engine.generate(PROMPT, NEW, GREEDY))
        assert [each.manifest.tokens for each in prompts_in(cache_folder)] == [
            700
        ]  # it has the other one
        loaded = []
        for prompt, want in zip(prompts, wanted, strict=True):
            assert list(engine.generate(prompt, NEW, GREEDY)) == want
            loaded.append(engine.stats.loaded_tokens)
        # too few in common, or none: read
        assert loaded == [310, 500, 640, 0, 0]


def damaged(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what may have happened to a prompt, and what makes it happen."""

    def flip(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 8
        path.write_bytes(raw)

    layer = folder / "rank-0-layer-1.kv"
    yield "a bit", lambda: flip(layer)
    yield "the end", lambda: os.truncate(layer, 1000)
    yield "a file", layer.unlink
    yield "checksums", lambda: flip(folder / "rank-0.json")
    yield "no checksums", lambda: (folder / "rank-0.json").write_text("{}") and None
    yield "checksums of less", lambda: (folder / "rank-0.json").write_text("[[1, 2]]") and None


@pytest.mark.parametrize("link", slow_except(["view", "emulated:50"], 1))
@pytest.mark.parametrize("which", range(6))
def test_what_is_damaged_is_read_anew(
    which: int, link: str, models: Pair, cache_folder: str
) -> None:
    choices = {**SMALL, "link": link, "gpu_kv_layers": 1, "prompt_cache": cache_folder}
    with models.engine("hierarchical", **choices) as engine, collect_warnings(engine) as lines:
        wanted = list(engine.generate(PROMPT, NEW, GREEDY, name="a book"))
        (prompt,) = prompts_in(cache_folder)
        _, harm = list(damaged(prompt.folder))[which]
        harm()
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert engine.stats.loaded_tokens == 0
        assert "a book is damaged" in lines[0]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted  # it was kept again
        assert engine.stats.loaded_tokens
        assert len(lines) == 1


@pytest.mark.parametrize("content", [b"[1]", b"{}", b"[" * 100_000, b"\xff", None])
@pytest.mark.parametrize("name", ["manifest.json", "tokens.bin"])
def test_what_cannot_be_found_is_kept_again(
    name: str, content: bytes | None, models: Pair, cache_folder: str
) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        wanted = list(engine.generate(PROMPT, NEW, GREEDY))
        (prompt,) = prompts_in(cache_folder)
        if content is None:
            (prompt.folder / name).unlink()
        else:
            (prompt.folder / name).write_bytes(content)
        for loaded in (False, True):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
            assert bool(engine.stats.loaded_tokens) == loaded
        assert len(lines) == 1
        assert "is damaged" in lines[0]


def test_what_cannot_be_read_now_may_be_another_time(models: Pair, cache_folder: str) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        wanted = list(engine.generate(PROMPT, NEW, GREEDY))
        busy = OSError(errno.EMFILE, "Too many open files")
        with patch.object(offload.tiered.kv_file._Reader, "__call__", side_effect=busy):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert engine.stats.loaded_tokens == 0
        assert "Too many open files" in lines[0]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert engine.stats.loaded_tokens
        # a folder that is gone keeps nobody from reading
        shutil.rmtree(cache_folder)
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert "not kept: `prompt_cache`" in lines[1]
        assert "No such file" in lines[1]


def test_what_the_disk_cannot_read_is_kept_again(models: Pair, cache_folder: str) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        wanted = list(engine.generate(PROMPT, NEW, GREEDY, name="a book"))
        broken = OSError(errno.EIO, "Input/output error")
        with patch.object(offload.tiered.kv_file._Reader, "__call__", side_effect=broken):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert "a book is damaged (Input/output error)" in lines[0]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert engine.stats.loaded_tokens
        assert len(lines) == 1


def test_what_is_not_ours_is_left_alone(models: Pair, cache_folder: str) -> None:
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


def test_models_are_told_apart(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    config, group = ModelConfig.from_pretrained(folder), TensorParallelGroup()

    def digest(**other: Any) -> str:
        says = {"config": config, "dtype": torch.float32, "group": group, **other}
        return digest_of(WeightDigests.of(folder, tmp_path), **says)

    same = digest()
    with patch.object(decoding.prefix_cache.fingerprint, "_digest", side_effect=AssertionError):
        assert digest() == same  # what was digested once is not read again
    two = TensorParallelGroup()
    two.size = 2
    others = [
        digest(config=replace(config, rope={**config.rope, "rope_theta": 5e5})),
        digest(dtype=torch.bfloat16),
        digest(group=two),
    ]
    (weights,) = folder.glob("*.safetensors")
    about = weights.stat()
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    others.append(digest())
    assert len({same, *others}) == 5
    now = WeightDigests.of(folder, tmp_path)
    for notes in ("[1]", "{", '{"a": 1}', "[" * 100_000):
        (tmp_path / ".digests.json").write_text(notes)
        assert WeightDigests.of(folder, tmp_path) == now
    now.check_unchanged()
    weights.write_bytes(raw)
    with pytest.raises(TierForceError, match="was changed while it was loaded"):
        now.check_unchanged()


def test_pipes_and_absurd_numbers_are_no_prompts(models: Pair, cache_folder: str) -> None:
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        list(engine.generate(PROMPT, NEW, GREEDY))
    (prompt,) = prompts_in(cache_folder)
    manifest = prompt.folder / "manifest.json"
    said = json.loads(manifest.read_text())
    for number in (-5, 10**400):
        manifest.write_text(json.dumps({**said, "nbytes": number}))
        assert PromptCache(Path(cache_folder)).prompts() == []
    manifest.write_text(json.dumps(said))
    layer = next(prompt.folder.glob("rank-0-layer-*.kv"))
    for path in (prompt.folder / "tokens.bin", layer, manifest):
        path.unlink()
        os.mkfifo(path)
    assert len(prompt.tokens()) == 0
    assert PromptCache(Path(cache_folder)).prompts() == []
    layout = KVLayout(1, 1, 4, torch.float32)
    (read,) = KVFile(layer, layout, 3).readers(3, [0])
    with pytest.raises(CorruptCacheError, match="no regular file"):
        read()


def test_a_lock_that_is_never_let_go_of_is_told(
    cache_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "_LOCK_TIMEOUT_S", 0.1)
    cache = PromptCache(Path(cache_folder))
    cache.create()
    lock = Path(cache_folder) / ".lock"
    with locked(lock), pytest.raises(TierForceError, match=r"job has held its .lock for 0.1 s"):
        cache.create()
    cache.create()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(TierForceError, match=r".lock in it is no regular file"):
        cache.create()


def test_what_was_used_longest_ago_goes_first(models: Pair, cache_folder: str) -> None:
    size = 500 * models.target.config.kv_layout(1, torch.float32).bytes(1)
    texts = [random_tokens(500, seed=10 + seed).tolist() for seed in range(4)]
    limited = models.engine(
        "plain", **SMALL, prompt_cache=cache_folder, prompt_cache_limit=2 * size
    )
    with limited as engine, collect_warnings(engine) as lines:
        for name, text in zip("abc", texts, strict=False):
            list(engine.generate(text, NEW, GREEDY, name=name))
            time.sleep(0.02)  # files have times of their own
        assert [each.manifest.name for each in prompts_in(cache_folder)] == ["b", "c"]
        list(engine.generate(texts[1], NEW, GREEDY))
        list(engine.generate(texts[3], NEW, GREEDY, name="d"))
        assert [each.manifest.name for each in prompts_in(cache_folder)] == ["b", "d"]
        assert not lines
        list(engine.generate(PROMPT * 2, NEW, GREEDY))
        assert "more than `prompt_cache_limit`" in lines[0]
        assert [each.manifest.name for each in prompts_in(cache_folder)] == ["b", "d"]


def test_a_full_disk_costs_nothing_but_the_copy(models: Pair, cache_folder: str) -> None:
    with models.engine("plain", **SMALL) as engine:
        wanted = list(engine.generate(PROMPT, NEW, GREEDY))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        with patch.object(KVFile, "write", side_effect=full):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert "not kept" in lines[0]
        assert "No space left" in lines[0]
        usage = shutil.disk_usage(cache_folder)
        with patch("shutil.disk_usage", return_value=usage._replace(free=1000)):
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert "0.00 GB free" in lines[1]
        for trouble in (ValueError("odd"), MemoryError()):
            with patch.object(TieredCache, "host_readers", side_effect=trouble):
                if isinstance(trouble, MemoryError):
                    assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
            with patch.object(KVFile, "write", side_effect=trouble):
                assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert len(lines) == 5
        assert all("not kept" in line for line in lines)
        assert not [each for each in os.listdir(cache_folder) if each.startswith(".writing")]
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
    assert len(prompts_in(cache_folder)) == 1


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierForceError, match=r"`prompt_cache` .*file cannot be used"):
        PrefixCacheManager(str(tmp_path / "file"), None, IDENTITY, TensorParallelGroup())
    with pytest.raises(
        TierForceError, match="`prompt_cache_limit` limits the folder of `prompt_cache`"
    ):
        Settings(prompt_cache_limit=1)


def test_the_weights_are_those_that_the_index_names(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    (folder / "shards").mkdir()
    (folder / "model.safetensors").rename(folder / "shards" / "1.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"nobody loads it")
    index = {"weight_map": {"lm_head.weight": "shards/1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(WeightDigests.of(folder, tmp_path).digests) == ["shards/1.safetensors"]
