"""Digests of what KV depends on besides the tokens: weights, config, dtype, ranks and device."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from decoding.prefix_cache.files import write_atomic
from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.config.model_config import ModelConfig
from parallel.formats.gguf.header import part_files
from parallel.formats.locate import is_gguf
from parallel.formats.quantisation import find_quantisation
from parallel.formats.weight_headers import weight_files
from parallel.ranks.process_group import TensorParallelGroup

VERSION = 2  # file format version: a change invalidates all cached prompts
_BLOCK_BYTES = 64 << 20  # bytes of a file per digest
_THREADS = 8
_DIGESTS = ".digests.json"  # cached digests of weight files
_MAX_DIGESTS = 1 << 20  # bytes of that file, about 150 per weight file; a larger one is ignored


@dataclass(frozen=True)
class WeightDigests:
    """The digests of a model's weight files, and the files' state when they were digested."""

    digests: dict[str, str]  # file names are relative to the model's folder
    stats: dict[Path, str]

    @classmethod
    def compute(cls, model: Path, folder: Path) -> WeightDigests:
        """Digest the files of a model, a folder or a GGUF file. Raises OSError, CheckpointError.

        The digests are cached in `folder`, keyed by stat, so that each file is read once.
        """
        paths = part_files(model) if is_gguf(model) else weight_files(model)
        cache_file = folder / _DIGESTS
        cached = _read_digests(cache_file)
        stats = {path: _stat(path) for path in paths}
        for path, stat in stats.items():
            if stat not in cached:
                cached[stat] = _digest(path)
                with suppress(OSError):  # digested again next time
                    write_atomic(cache_file, json.dumps(cached).encode())
        root = model.parent if is_gguf(model) else model
        digests = {os.path.relpath(path, root): cached[stat] for path, stat in stats.items()}
        if model.is_dir() and (quantisation := find_quantisation(model)) is not None:
            digests["quantisation"] = repr(quantisation)  # the same codes may stand for others
        return cls(digests, stats)

    def check_unchanged(self) -> None:
        """Raise TierForceError if a file has changed since it was digested. Raises OSError."""
        for path, stat in self.stats.items():
            if _stat(path) != stat:
                raise TierForceError(f"{path} was changed while it was loaded: start again.")


def digest_of(
    weights: WeightDigests, config: ModelConfig, dtype: torch.dtype, group: TensorParallelGroup
) -> str:
    """Return the digest of all that KV depends on, except for tokens and rotary angles."""
    fields = {
        "version": VERSION,
        "weights": weights.digests,
        "config": repr(config),
        "dtype": str(dtype),
        "ranks": group.size,
        "device": group.device.type,
    }
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _read_digests(cache_file: Path) -> dict[str, str]:
    """Return the cached digests by stat; none if the file is unusable."""
    with suppress(OSError, ValueError, AttributeError):  # JSON that is not an object has no items
        cached = read_json(cache_file, _MAX_DIGESTS).items()
        return {stat: digest for stat, digest in cached if isinstance(digest, str)}
    return {}


def _stat(path: Path) -> str:
    """Return a key of a file's state: any change to the file changes at least its ctime."""
    stat = path.stat()
    numbers = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return ":".join(map(str, numbers))


def _digest(path: Path) -> str:
    """Return the digest of the digests of a file's blocks."""
    size = path.stat().st_size

    def digest_block(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return sha256(file.read(_BLOCK_BYTES)).digest()

    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        return sha256(b"".join(pool.map(digest_block, range(0, size, _BLOCK_BYTES)))).hexdigest()
