"""Nothing in the folder of kept prompts stops a text, or is taken for the KV of another one."""

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
from decoding.prefix_cache import fingerprint as identity
from decoding.prefix_cache.fingerprint import WeightDigests
from decoding.prefix_cache.manager import ModelFingerprint
from decoding.prefix_cache.store import MAX_TOKENS, CachedPrompt, PromptCache
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup
from support import engines
from support.engines import IDENTITY, Pair
from support.irregular import IRREGULAR
from support.keeping import NEW, PROMPT, SMALL, prompts_in, collect_warnings
from support.models import random_tokens
from support.slow import slow_except

OTHER = random_tokens(len(PROMPT), seed=2).tolist()


def written(cache_folder: str, models: Pair, *prompts: list[int]) -> list[list[int]]:
    """Read prompts, which are kept, and return what was written behind each."""
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        return [list(engine.generate(prompt, NEW, GREEDY, name="a book")) for prompt in prompts]


def check_read_anew(cache_folder: str, models: Pair, wanted: list[int]) -> list[str]:
    """Check that PROMPT is read once more, and kept again; return what was told."""
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        for is_kept in (False, True):
            assert list(engine.generate(PROMPT, NEW, GREEDY, name="a book")) == wanted
            assert bool(engine.stats.loaded_tokens) == is_kept
    return lines


def edit_manifest(cache_folder: CachedPrompt, **fields: Any) -> None:
    path = cache_folder.folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


KV, CHECKSUMS, TOKENS = "rank-0-layer-*.kv", "rank-0.json", "tokens.bin"


@pytest.mark.parametrize("patterns", [(KV,), (CHECKSUMS,), (KV, CHECKSUMS), (TOKENS,)])
def test_files_of_another_text_of_the_same_length_are_noticed(
    patterns: tuple[str, ...], models: Pair, cache_folder: str
) -> None:
    wanted, _ = written(cache_folder, models, PROMPT, OTHER)
    first, second = prompts_in(cache_folder)
    for pattern in patterns:
        for path in first.folder.glob(pattern):
            shutil.copy(second.folder / path.name, path)
    lines = check_read_anew(cache_folder, models, wanted)
    assert "of a book is damaged" in lines[0]


def test_tokens_and_what_is_said_of_them_do_not_make_another_texts_kv_theirs(
    models: Pair, cache_folder: str
) -> None:
    wanted, _ = written(cache_folder, models, PROMPT, OTHER)
    first, second = prompts_in(cache_folder)
    assert second.tokens().tolist() == OTHER
    shutil.rmtree(first.folder)
    raw = np.array(PROMPT, dtype=np.int64).tobytes()
    (second.folder / TOKENS).write_bytes(raw)
    edit_manifest(second, checksum=zlib.crc32(raw))
    lines = check_read_anew(cache_folder, models, wanted)
    assert "of a book is damaged (rank-0-layer-0.kv is not what was written)" in lines[0]


def test_layers_in_each_others_place_are_noticed(models: Pair, cache_folder: str) -> None:
    (wanted,) = written(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    sums = json.loads((prompt.folder / CHECKSUMS).read_text())
    (prompt.folder / CHECKSUMS).write_text(json.dumps([sums[1], sums[0], *sums[2:]]))
    one, two = (prompt.folder / f"rank-0-layer-{layer}.kv" for layer in range(2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert "is damaged" in check_read_anew(cache_folder, models, wanted)[0]


def test_what_is_said_of_an_entry_does_not_make_another_models_kv_this_ones(
    models: Pair, cache_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engines, "IDENTITY", ModelFingerprint("4567", "another pair"))
        (wanted,) = written(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    own = ModelFingerprint.of_text(IDENTITY, models.target.config, len(PROMPT), len(PROMPT) + NEW)
    edit_manifest(prompt, identity=own)
    assert "of a book is damaged" in check_read_anew(cache_folder, models, wanted)[0]


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, CHECKSUMS, "rank-0-layer-1.kv"])
@pytest.mark.parametrize("kind", slow_except(IRREGULAR, 1))
def test_what_is_no_file_is_damage(kind: str, name: str, models: Pair, cache_folder: str) -> None:
    (wanted,) = written(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    (prompt.folder / name).unlink()
    IRREGULAR[kind](prompt.folder / name)
    (line,) = check_read_anew(cache_folder, models, wanted)
    assert "is damaged" in line
    assert not list(Path(cache_folder).glob(".dropped-*"))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 2**62},
        {"tokens": MAX_TOKENS + 1},
        {"tokens": len(PROMPT) - 1},
        {"tokens": 0},
        {"tokens": True},
        {"nbytes": 2**62},  # by which others would have to go
        {"nbytes": 0},
        {"name": "x" * 100_000},
        {"name": None},
        {"checksum": 0},
        {"ranks": float("nan")},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_a_manifest_that_was_edited_is_damage(
    fields: dict[str, Any], models: Pair, cache_folder: str
) -> None:
    wanted, _ = written(cache_folder, models, PROMPT, OTHER)
    first, second = prompts_in(cache_folder)
    edit_manifest(first, **fields)
    limited = PromptCache(Path(cache_folder), limit=10**9)
    limited.collect_garbage()
    assert [each.id for each in limited.prompts()] == [second.id]
    assert check_read_anew(cache_folder, models, wanted) == []


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, CHECKSUMS, "rank-0-layer-1.kv"])
@pytest.mark.parametrize("size", slow_except([0, 3, 1 << 40], 1))
def test_files_of_any_size_are_damage(
    size: int, name: str, models: Pair, cache_folder: str
) -> None:
    (wanted,) = written(cache_folder, models, PROMPT)
    (prompt,) = prompts_in(cache_folder)
    os.truncate(prompt.folder / name, size)  # what it has beyond its end takes no disk
    (line,) = check_read_anew(cache_folder, models, wanted)
    assert "is damaged" in line


@pytest.mark.parametrize("kind", IRREGULAR)
def test_digests_that_are_no_file_are_made_anew(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    wanted = WeightDigests.of(checkpoint(), tmp_path)
    notes = tmp_path / ".digests.json"
    content = notes.read_bytes()
    notes.unlink()
    IRREGULAR[kind](notes)
    assert WeightDigests.of(checkpoint(), tmp_path) == wanted
    if kind != "folder":  # which stays where it is
        assert notes.read_bytes() == content
        os.truncate(notes, 1 << 40)
        assert WeightDigests.of(checkpoint(), tmp_path) == wanted
        assert notes.read_bytes() == content


def test_what_lies_beside_the_prompts_stops_nothing(models: Pair, cache_folder: str) -> None:
    (wanted,) = written(cache_folder, models, PROMPT)
    folder = Path(cache_folder)
    left, closed = folder / f".writing-{'a' * 12}", folder / f".dropped-{'b' * 12}"
    left.mkdir()
    os.mkfifo(left / "rank-0.lock")
    (left / "rank-1.lock").symlink_to("/dev/zero")
    closed.symlink_to(folder)
    os.mkfifo(folder / ("c" * 12))
    (folder / ("d" * 12)).mkdir()
    (folder / ("e" * 12)).symlink_to(prompts_in(cache_folder)[0].folder)
    os.mkdir(os.fsencode(folder) + b"/\xff\xfe")
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert engine.stats.loaded_tokens
        assert list(engine.generate(OTHER, NEW, GREEDY))
    assert not lines
    assert len(prompts_in(cache_folder)) == 2
    assert not left.exists()


def test_names_of_any_length_are_kept_short(models: Pair, cache_folder: str) -> None:
    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        list(engine.generate(PROMPT, NEW, GREEDY, name="\ud800" + "n" * 100_000))
    assert not lines
    assert len(prompts_in(cache_folder)[0].manifest.name) == 200


def test_an_entry_of_an_older_layout_is_not_found(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, group = ModelConfig.from_pretrained(checkpoint()), TensorParallelGroup()
    weights = WeightDigests.of(checkpoint(), tmp_path)
    now = identity.digest_of(weights, config, torch.float32, group)
    monkeypatch.setattr(identity, "VERSION", identity.VERSION - 1)
    assert identity.digest_of(weights, config, torch.float32, group) != now
