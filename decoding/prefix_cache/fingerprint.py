"""What KV depends on beside the tokens: weights, config, number format, ranks and device."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from decoding.prefix_cache.files import write_whole
from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.config.model_config import ModelConfig
from parallel.formats.locate import is_gguf
from parallel.formats.weight_headers import weight_files
from parallel.ranks.process_group import TensorParallelGroup

VERSION = 2  # of what is written: another one is another identity
_PIECE = 64 << 20  # bytes of a file that are digested at once
_THREADS = 8
_DIGESTS = ".digests.json"  # of files that were digested before
_MAX_DIGESTS = 1 << 20  # bytes of that file, which has some 150 a weight file; more is begun anew


@dataclass(frozen=True)
class WeightDigests:
    """The weight files of a model, as they were when they were digested."""

    digests: dict[str, str]  # by name, as the index of a folder has it
    marks: dict[Path, str]

    @classmethod
    def of(cls, model: Path, folder: Path) -> WeightDigests:
        """Digest the files of a model, a folder or a GGUF file. Raises OSError, CheckpointError.

        What they digest to is noted in `folder`, by what the system says of them, so that they are
        read once.
        """
        paths = [model] if is_gguf(model) else weight_files(model)
        notes = folder / _DIGESTS
        known, marks = _known(notes), {path: _mark(path) for path in paths}
        for path, mark in marks.items():
            if mark not in known:
                known[mark] = _digest(path)
                with suppress(OSError):  # another time
                    write_whole(notes, json.dumps(known).encode())
        root = model.parent if is_gguf(model) else model
        digests = {os.path.relpath(path, root): known[mark] for path, mark in marks.items()}
        return cls(digests, marks)

    def check_unchanged(self) -> None:
        """Raise TierForceError where a file is another one by now. Raises OSError."""
        for path, mark in self.marks.items():
            if _mark(path) != mark:
                raise TierForceError(f"{path} was changed while it was loaded: start again.")


def digest_of(
    weights: WeightDigests, config: ModelConfig, dtype: torch.dtype, group: TensorParallelGroup
) -> str:
    """Return the digest of all that a text's KV depends on, beside its tokens and its angles."""
    says = {
        "version": VERSION,
        "weights": weights.digests,
        "config": repr(config),
        "dtype": str(dtype),
        "ranks": group.size,
        "device": group.device.type,
    }
    return sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()


def _known(notes: Path) -> dict[str, str]:
    """Return what was noted."""
    with suppress(OSError, ValueError, AttributeError):  # no dict has no items
        known = read_json(notes, _MAX_DIGESTS).items()
        return {mark: digest for mark, digest in known if isinstance(digest, str)}
    return {}


def _mark(path: Path) -> str:
    """Return what the system says of a file: what is changed gets another ctime, at least."""
    about = path.stat()
    numbers = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return ":".join(map(str, numbers))


def _digest(path: Path) -> str:
    """Return the digest of the digests of a file's pieces."""
    size = path.stat().st_size

    def of_piece(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return sha256(file.read(_PIECE)).digest()

    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        return sha256(b"".join(pool.map(of_piece, range(0, size, _PIECE)))).hexdigest()
