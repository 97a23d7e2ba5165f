"""What layers hold goes to disk while passes go on, and comes back to any other placement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import offload.tiered.kv_file
from offload.errors import CorruptCacheError
from offload.layout import KVLayout
from offload.memory.link import Link
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVFile
from offload.tiered.prefill import Prefill
from support.driving import LAYOUT, ROWS, first, forward, prefill, text, tiered
from support.links import make_test_link, worst_link

ONE = KVLayout(layers=1, heads=3, head_dim=8, dtype=torch.bfloat16)
TOKENS = 50
# resident layers, late ones, split ones, whether the others are packed
PLACES = [(0, 0, 0, False), (1, 0, 0, False), (2, 2, 0, False), (4, 0, 0, False)]
SPLIT = [(1, 0, 2, False), (0, 0, 4, False), (1, 0, 1, True), (2, 1, 0, True), (1, 3, 2, True)]
BFLOAT16 = KVLayout(LAYOUT.layers, LAYOUT.heads, LAYOUT.head_dim, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.tiered.kv_file, "BLOCK_TOKENS", 16)


@pytest.fixture
def kv() -> Tensor:
    return torch.randn(2, ONE.heads, TOKENS, ONE.head_dim).to(ONE.dtype)


def written(folder: Path, kv: Tensor) -> tuple[KVFile, list[int]]:
    file = KVFile(folder / "layer.kv", ONE, TOKENS)
    return file, file.write(lambda head, start, end: kv[:, head, start:end])


def read(file: KVFile, tokens: int, checksums: list[int]) -> Tensor:
    """The first tokens (2, Hkv, T, D), read piece by piece from the last to the first."""
    kv = torch.zeros(2, file.layout.heads, tokens, file.layout.head_dim, dtype=file.layout.dtype)
    for reader in list(file.readers(tokens, checksums))[::-1]:
        piece = reader()
        kv[:, piece.head, piece.start : piece.start + piece.kv.shape[1]] = piece.kv
    return kv


@pytest.mark.parametrize("tokens", [1, 16, 17, 49, TOKENS])
def test_what_was_written_is_read(tokens: int, kv: Tensor, tmp_path: Path) -> None:
    file, checksums = written(tmp_path, kv)
    assert file.path.stat().st_size == file.nbytes == kv.nbytes
    assert torch.equal(read(file, tokens, checksums), kv[:, :, :tokens])


def test_any_bit_that_changes_is_noticed_where_it_is_read(kv: Tensor, tmp_path: Path) -> None:
    file, checksums = written(tmp_path, kv)
    good = file.path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        at, bit = rng.randrange(len(good)), rng.randrange(8)
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        file.path.write_bytes(bad)
        # pieces of a head are behind one another, each with its keys and values
        first = at % (len(good) // ONE.heads) // (ONE.head_dim * 2 * 2 * 16) * 16
        with pytest.raises(CorruptCacheError, match="not what was written"):
            read(file, first + 1, checksums)
        if first:
            assert torch.equal(read(file, first, checksums), kv[:, :, :first])


def test_other_damage_is_noticed_too(kv: Tensor, tmp_path: Path) -> None:
    file, checksums = written(tmp_path, kv)
    good = file.path.read_bytes()
    with pytest.raises(CorruptCacheError, match="checksums"):
        read(file, TOKENS, checksums[:-1])
    for bad in (b"", good[:-1], good + b"0"):
        file.path.write_bytes(bad)
        with pytest.raises(CorruptCacheError, match=f"{len(bad)} of {len(good)} bytes"):
            read(file, 1, checksums)
    file.path.unlink()
    with pytest.raises(OSError, match="No such file"):
        read(file, 1, checksums)


def test_nothing_is_written_over(kv: Tensor, tmp_path: Path) -> None:
    written(tmp_path, kv)
    with pytest.raises(FileExistsError):
        written(tmp_path, kv)


def moved(cache: TieredCache, other: TieredCache, folder: Path, tokens: int, writes: int) -> None:
    """Let `other` hold the first tokens of `cache`, by way of files written behind `writes` more
    passes.
    """
    layout, length, excerpts = cache.layout, cache.length, cache.host_readers()
    for _ in range(writes):
        forward(cache, text(ROWS // 2, layout))
        cache.advance(ROWS // 2)
    files = [KVFile(folder / f"{layer}.kv", layout, length) for layer in range(layout.layers)]
    checksums = [file.write(excerpt) for file, excerpt in zip(files, excerpts, strict=True)]
    with Prefill(other, tokens) as way:
        for layer, (file, sums) in enumerate(zip(files, checksums, strict=True)):
            way.load_blocks(layer, (reader() for reader in file.readers(tokens, sums)))


def check(link: Link, placed: tuple[int, int, int, bool], layout: KVLayout, folder: Path) -> None:
    """What is moved from each placement to another one, and back, is what was read there."""
    resident, deferred, split, compressed = placed
    deferred = deferred if link.copies else 0
    for seed in range(3):
        rng = random.Random(seed)
        story = text(rng.randint(20, 120), layout)
        length = len(story[0][0])
        tokens = rng.randint(1, length)
        want = tiered(make_test_link("view"), layout.layers, layout=layout)
        cache = tiered(link, resident, deferred, split, compressed=compressed, layout=layout)
        near = tiered(make_test_link("view"), layout.layers, layout=layout)
        back = tiered(link, resident, deferred, split, compressed=compressed, layout=layout)
        prefill(cache, story, chunk=rng.choice([7, 32]))
        cache.onload_deferred()
        for each, (source, count) in enumerate([(cache, tokens), (near, tokens)]):
            other = (near, back)[each]
            path = folder / f"{seed}-{each}"
            path.mkdir()
            moved(source, other, path, count, writes=rng.randint(0, 4) * (each == 0))
        rest = text(30, layout)
        prefill(want, first(story, tokens), chunk=32)
        expected = prefill(want, rest, chunk=10)
        for each in (near, back):
            found = prefill(each, rest, chunk=10)
            each.onload_deferred()
            assert each.length == want.length
            if each is near:
                assert torch.equal(found, expected)
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        found = forward(back, more := text(5, layout))
        torch.testing.assert_close(found, forward(want, more), atol=3e-2, rtol=3e-2)


@worst_link
@pytest.mark.parametrize("placed", PLACES)
def test_layers_are_kept_from_anywhere_to_anywhere(
    link: Link, placed: tuple[int, int, int, bool], tmp_path: Path
) -> None:
    check(link, placed, LAYOUT, tmp_path)


@worst_link
@pytest.mark.parametrize("placed", SPLIT)
def test_so_are_layers_in_slices(
    link: Link, placed: tuple[int, int, int, bool], tmp_path: Path
) -> None:
    check(link, placed, BFLOAT16, tmp_path)


@pytest.mark.parametrize("link", ["emulated"], indirect=True)
@pytest.mark.parametrize("resident", range(LAYOUT.layers + 1))
def test_prefixes_on_the_host_do_not_cross_the_link(
    link: Link, resident: int, tmp_path: Path
) -> None:
    cache, other = tiered(link, resident), tiered(link, resident)
    prefill(cache, text(100), chunk=16)
    moved(cache, other, tmp_path, 100, writes=0)
    far = LAYOUT.layers - resident
    tokens = 100 * resident + (100 - other.boundary) * far
    assert other.traffic.link_in == tokens * LAYOUT.layer_token_bytes
    assert not other.traffic.link_out
