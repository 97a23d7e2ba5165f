"""A cache's layers can be written to disk during forwards, and loaded into any placement."""

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
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVFile
from support.driving import (
    BFLOAT16,
    LAYOUT,
    PLACEMENTS,
    ROWS,
    first_tokens,
    forward,
    prefill,
    random_qkv,
    tiered_cache,
)
from support.links import make_test_link, worst_link

ONE_LAYER = KVLayout(layers=1, heads=3, head_dim=8, dtype=torch.bfloat16)
TOKENS = 50
# fields as in PLACEMENTS
SPLIT_PLACEMENTS = [
    (1, 0, 2, False),
    (0, 0, 4, False),
    (1, 0, 1, True),
    (2, 1, 0, True),
    (1, 3, 2, True),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.tiered.kv_file, "BLOCK_TOKENS", 16)


@pytest.fixture
def kv() -> Tensor:
    return torch.randn(2, ONE_LAYER.heads, TOKENS, ONE_LAYER.head_dim).to(ONE_LAYER.dtype)


def write_file(folder: Path, kv: Tensor) -> tuple[KVFile, list[int]]:
    file = KVFile(folder / "layer.kv", ONE_LAYER, TOKENS)
    return file, file.write(lambda head, start, end: kv[:, head, start:end])


def read_file(file: KVFile, tokens: int, checksums: list[int]) -> Tensor:
    """Read the first tokens (2, Hkv, T, D), block by block from the last to the first."""
    kv = torch.zeros(2, file.layout.heads, tokens, file.layout.head_dim, dtype=file.layout.dtype)
    for reader in list(file.readers(tokens, checksums))[::-1]:
        block = reader()
        kv[:, block.head, block.start : block.start + block.kv.shape[1]] = block.kv
    return kv


@pytest.mark.parametrize("tokens", [1, 16, 17, 49, TOKENS])
def test_a_file_roundtrips(tokens: int, kv: Tensor, tmp_path: Path) -> None:
    file, checksums = write_file(tmp_path, kv)
    assert file.path.stat().st_size == file.nbytes == kv.nbytes
    assert torch.equal(read_file(file, tokens, checksums), kv[:, :, :tokens])


def test_a_flipped_bit_is_detected_in_its_block(kv: Tensor, tmp_path: Path) -> None:
    file, checksums = write_file(tmp_path, kv)
    valid = file.path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        at, bit = rng.randrange(len(valid)), rng.randrange(8)
        damaged = bytearray(valid)
        damaged[at] ^= 1 << bit
        file.path.write_bytes(damaged)
        # a head's blocks are consecutive, each with its keys and values
        start = at % (len(valid) // ONE_LAYER.heads) // (ONE_LAYER.head_dim * 2 * 2 * 16) * 16
        with pytest.raises(CorruptCacheError, match="does not match its checksum"):
            read_file(file, start + 1, checksums)
        if start:
            assert torch.equal(read_file(file, start, checksums), kv[:, :, :start])


def test_other_damage_is_detected(kv: Tensor, tmp_path: Path) -> None:
    file, checksums = write_file(tmp_path, kv)
    valid = file.path.read_bytes()
    with pytest.raises(CorruptCacheError, match="checksums"):
        read_file(file, TOKENS, checksums[:-1])
    for damaged in (b"", valid[:-1], valid + b"0"):
        file.path.write_bytes(damaged)
        with pytest.raises(CorruptCacheError, match=f"{len(damaged)} of {len(valid)} bytes"):
            read_file(file, 1, checksums)
    file.path.unlink()
    with pytest.raises(OSError, match="No such file"):
        read_file(file, 1, checksums)


def test_files_are_not_overwritten(kv: Tensor, tmp_path: Path) -> None:
    write_file(tmp_path, kv)
    with pytest.raises(FileExistsError):
        write_file(tmp_path, kv)


def copy_via_files(
    cache: TieredCache, other: TieredCache, folder: Path, tokens: int, forwards: int
) -> None:
    """Load the first tokens of `cache` into `other`, from files written after more forwards."""
    layout, length, host_readers = cache.layout, cache.length, cache.host_readers()
    for _ in range(forwards):
        forward(cache, random_qkv(ROWS // 2, layout))
        cache.advance(ROWS // 2)
    files = [KVFile(folder / f"{layer}.kv", layout, length) for layer in range(layout.layers)]
    checksums = [
        file.write(host_reader) for file, host_reader in zip(files, host_readers, strict=True)
    ]
    with Prefill(other, tokens) as context:
        for layer, (file, file_checksums) in enumerate(zip(files, checksums, strict=True)):
            context.load_blocks(
                layer, (reader() for reader in file.readers(tokens, file_checksums))
            )


def check_roundtrip(
    link: Link, placement: tuple[int, int, int, bool], layout: KVLayout, folder: Path
) -> None:
    """Copy prompts from a placement to the device and back, and compare their outputs."""
    resident, deferred, split, compressed = placement
    deferred = deferred if link.copies else 0
    for seed in range(3):
        rng = random.Random(seed)
        sequence = random_qkv(rng.randint(20, 120), layout)
        length = len(sequence[0][0])
        tokens = rng.randint(1, length)
        reference = tiered_cache(make_test_link("view"), layout.layers, layout=layout)
        cache = tiered_cache(link, resident, deferred, split, compressed=compressed, layout=layout)
        on_device = tiered_cache(make_test_link("view"), layout.layers, layout=layout)
        copied_back = tiered_cache(
            link, resident, deferred, split, compressed=compressed, layout=layout
        )
        prefill(cache, sequence, chunk=rng.choice([7, 32]))
        cache.onload_deferred()
        for step, (source, count) in enumerate([(cache, tokens), (on_device, tokens)]):
            other = (on_device, copied_back)[step]
            path = folder / f"{seed}-{step}"
            path.mkdir()
            copy_via_files(source, other, path, count, forwards=rng.randint(0, 4) * (step == 0))
        turn = random_qkv(30, layout)
        prefill(reference, first_tokens(sequence, tokens), chunk=32)
        expected = prefill(reference, turn, chunk=10)
        for loaded in (on_device, copied_back):
            actual = prefill(loaded, turn, chunk=10)
            loaded.onload_deferred()
            assert loaded.length == reference.length
            if loaded is on_device:
                assert torch.equal(actual, expected)
            torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
        actual = forward(copied_back, probe := random_qkv(5, layout))
        torch.testing.assert_close(actual, forward(reference, probe), atol=3e-2, rtol=3e-2)


@worst_link
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_layers_roundtrip_between_placements(
    link: Link, placement: tuple[int, int, int, bool], tmp_path: Path
) -> None:
    check_roundtrip(link, placement, LAYOUT, tmp_path)


@worst_link
@pytest.mark.parametrize("placement", SPLIT_PLACEMENTS)
def test_split_layers_roundtrip(
    link: Link, placement: tuple[int, int, int, bool], tmp_path: Path
) -> None:
    check_roundtrip(link, placement, BFLOAT16, tmp_path)


@pytest.mark.parametrize("link", ["emulated"], indirect=True)
@pytest.mark.parametrize("resident", range(LAYOUT.layers + 1))
def test_loaded_prefixes_on_the_host_do_not_cross_the_link(
    link: Link, resident: int, tmp_path: Path
) -> None:
    cache, other = tiered_cache(link, resident), tiered_cache(link, resident)
    prefill(cache, random_qkv(100), chunk=16)
    copy_via_files(cache, other, tmp_path, 100, forwards=0)
    offloaded = LAYOUT.layers - resident
    tokens = 100 * resident + (100 - other.boundary) * offloaded
    assert other.traffic.link_in == tokens * LAYOUT.bytes(1, 1)
    assert not other.traffic.link_out
