"""The folder of the prompt cache: one folder per prompt, published atomically."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

import numpy as np
import numpy.typing as npt

from decoding.prefix_cache.files import (
    file_lock,
    hold_lock,
    is_locked,
    rank_file,
    sync_folder,
    write_synced,
)
from decoding.speculation.sequence import common_prefix
from offload.errors import TierForceError
from offload.regular_files import UnsuitableFileError, read_json, read_regular

MIN_TOKENS = 256  # prefilling fewer is as fast as loading them
MAX_TOKENS = 1 << 24  # more than any context: a manifest that claims more is corrupt
_MAX_MANIFEST = 1 << 14  # bytes
_MAX_NAME = 200  # characters of a stored name
_TOKEN_BYTES = 8
_MANIFEST, _TOKENS, _LOCK, _LOCKS = "manifest.json", "tokens.bin", ".lock", "rank-*.lock"
_WRITING, _DROPPED = ".writing-", ".dropped-"
_ID = "[0-9a-f]{12}"
_LOCK_TIMEOUT_S = 60.0  # ample: other jobs only rename and remove while they hold the lock
_GROWTH = 16  # a prompt is worth saving if more than 1 / _GROWTH of it is not cached
_INVALID = (ValueError, TypeError, KeyError)  # raised by `Manifest.read`


@dataclass(frozen=True)
class Manifest:
    """The metadata of a prompt on disk."""

    identity: str  # digest of all that its KV depends on, except for the tokens
    name: str  # display name
    model: str  # display name
    tokens: int
    ranks: int
    nbytes: int
    checksum: int = 0  # CRC of the token ids; set by `PromptCache.add`
    saved: str = ""  # time in ISO format; set by `PromptCache.add`

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest. Raises OSError, and one of `_INVALID` if it is invalid."""
        content = read_json(folder / _MANIFEST, _MAX_MANIFEST)
        for each in fields(cls):
            if type(content[each.name]).__name__ != each.type:
                raise TypeError(each.name)
            if each.type == "int" and not 0 <= content[each.name] < 2**63:
                raise ValueError(each.name)
        if content["tokens"] > MAX_TOKENS:
            raise ValueError("tokens")
        return cls(**{each.name: content[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt on disk."""

    folder: Path
    manifest: Manifest
    used: float  # time of last use, seconds since the epoch

    @property
    def id(self) -> str:
        return self.folder.name

    def tokens(self) -> npt.NDArray[np.int64]:
        """Return its token ids (T,); an empty array if they are missing or corrupt."""
        raw = b""
        with suppress(OSError, ValueError):
            raw = _read_tokens(self.folder, self.manifest)
        return np.frombuffer(raw, dtype=np.int64)

    def digest(self) -> bytes:
        """Return the digest of all that its KV depends on."""
        return prompt_digest(self.manifest.identity, self.tokens())

    def touch(self) -> None:
        """Mark it as used now."""
        with suppress(OSError):
            os.utime(self.folder / _MANIFEST)


class PromptCache:
    """The prompts of one folder, which several processes may use concurrently.

    A prompt is written under a temporary name, and then renamed. An unfinished prompt of a killed
    process is invisible, and removed by the next process that writes.
    """

    def __init__(self, folder: Path, limit: int | None = None):
        """Open a folder; call `create` before writing to it.

        Args:
            folder: best used for nothing else.
            limit: maximum bytes of all prompts; the least recently used are evicted first.
        """
        self.folder, self.limit = folder, limit
        self.warn: Callable[[str], None] = lambda line: None
        # returns how many of the first tokens of a prompt can be used: usable(common, tokens)
        self.usable: Callable[[int, int], int] = lambda common, tokens: common

    def create(self) -> None:
        """Create the folder if it is missing. Raises TierForceError if it cannot be used."""
        with self._convert_errors():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock():
                pass

    def prompts(self) -> list[CachedPrompt]:
        """Return all prompts, the least recently used first. Raises TierForceError."""
        prompts = []
        for path in self._folders():
            # skips folders that are not ours, and those removed meanwhile
            with suppress(OSError, *_INVALID):
                used = (path / _MANIFEST).stat().st_mtime
                prompts.append(CachedPrompt(path, Manifest.read(path), used))
        return sorted(prompts, key=lambda each: (each.used, each.id))

    def find(self, identity: str, prompt: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return the cached prompt with the longest usable prefix, and the prefix's length.

        Of several the most recently used is returned; None and 0 if there is none. Tokens are
        compared one by one. Raises TierForceError.
        """
        best, longest = None, 0
        tokens = np.array(prompt, dtype=np.int64)
        for cached in self.prompts():
            if cached.manifest.identity == identity:
                stored = cached.tokens()
                count = self.usable(common_prefix(stored, tokens), len(stored))
                if count >= max(1, longest):
                    best, longest = cached, count
        return best, longest

    def drop(self, cached: CachedPrompt) -> None:
        """Remove a prompt, unless another one has replaced it meanwhile. Raises OSError."""
        with self._lock():
            with suppress(*_INVALID):
                if Manifest.read(cached.folder) != cached.manifest:
                    return
            self._remove(cached.folder)

    def collect_garbage(self) -> None:
        """Remove leftovers of killed processes, corrupt prompts, and prompts beyond the limit.

        Raises TierForceError.
        """
        with self._convert_errors(), self._lock():
            self._clean()
            self._evict()

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, nbytes: int) -> tuple[Path, ExitStack]:
        """Return a folder to write a prompt of `nbytes` to, and rank 0's lock in it.

        Other processes leave the folder alone while the lock is held. `add` or `discard` follows.
        Raises TierForceError if there is no room.
        """
        if self.limit is not None and nbytes > self.limit:
            raise TierForceError(
                f"it takes {nbytes / 1e9:.2f} GB, more than `prompt_cache_limit` "
                f"{self.limit / 1e9:g} GB."
            )
        with self._convert_errors(), self._lock():
            self._clean()
            free = shutil.disk_usage(self.folder).free
            if nbytes > free:
                raise TierForceError(
                    f"it takes {nbytes / 1e9:.2f} GB, and the disk of `prompt_cache` {self.folder} "
                    f"has {free / 1e9:.2f} GB free. `tierforce prompt-cache drop` makes room."
                )
            path = self.folder / f"{_WRITING}{token_hex(6)}"
            path.mkdir(mode=0o700)
            return path, hold_lock(rank_file(path, 0, "lock"))

    def add(self, written: Path, manifest: Manifest, prompt: Sequence[int]) -> None:
        """Publish a written prompt; it replaces those that it extends.

        Prompts that then exceed the limit are evicted. Raises OSError.
        """
        tokens = np.array(prompt, dtype=np.int64).tobytes()
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        name, model = manifest.name[:_MAX_NAME], manifest.model[:_MAX_NAME]
        checksum = zlib.crc32(tokens)
        manifest = replace(manifest, name=name, model=model, checksum=checksum, saved=now)
        published = self.folder / prompt_digest(manifest.identity, prompt).hex()[:12]
        write_synced(written / _TOKENS, tokens)
        write_synced(written / _MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
        with self._lock():
            self._remove(published)  # an older copy, corrupt or equivalent
            for path in written.glob(_LOCKS):
                path.unlink()
            sync_folder(written)
            written.rename(published)
            with suppress(OSError, TierForceError):  # the prompt is published already
                sync_folder(self.folder)
                for other in self.prompts():
                    if _extends(manifest, prompt, other, self.usable):
                        self._remove(other.folder)
                self._evict()

    def discard(self, written: Path) -> None:
        """Remove a folder of `begin` that will not be published."""
        with suppress(OSError), self._lock():
            self._remove(written)

    def _lock(self) -> AbstractContextManager[None]:
        return file_lock(self.folder / _LOCK, _LOCK_TIMEOUT_S)

    def _folders(self) -> list[Path]:
        """Return the folders that may be prompts. Raises TierForceError."""
        with self._convert_errors():
            return [
                path
                for path in self.folder.iterdir()
                if re.fullmatch(_ID, path.name) and path.is_dir() and not path.is_symlink()
            ]

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert an OSError to a TierForceError."""
        try:
            yield
        except OSError as error:
            why = "it is a file" if self.folder.is_file() else error.strerror
            raise TierForceError(
                f"`prompt_cache` {self.folder} cannot be used: {why}. Name a writable folder."
            ) from error

    def _evict(self) -> None:
        """Remove the least recently used prompts until the rest is within the limit."""
        if self.limit is None:
            return
        prompts = self.prompts()
        total = sum(each.manifest.nbytes for each in prompts)
        for each in prompts:
            if total <= self.limit:
                return
            self._remove(each.folder)
            total -= each.manifest.nbytes

    def _remove(self, folder: Path) -> None:
        """Remove a folder; it is invisible at once."""
        dropped = self.folder / f"{_DROPPED}{token_hex(6)}"
        with suppress(FileNotFoundError):
            folder.rename(dropped)
            # `_clean` retries what cannot be removed now
            shutil.rmtree(dropped, ignore_errors=True)

    def _clean(self) -> None:
        """Remove leftovers of killed processes, and corrupt prompts, which are never found."""
        for path in self.folder.iterdir():
            is_leftover = bool(re.fullmatch(re.escape(_DROPPED) + _ID, path.name))
            if re.fullmatch(re.escape(_WRITING) + _ID, path.name):
                is_leftover = not any(map(is_locked, path.glob(_LOCKS)))
            if is_leftover:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._folders():
            if (name := _corrupt_name(path)) is None:
                continue
            try:
                self._remove(path)
                self.warn(f"the cached prompt {name} is corrupt: removed")
            except OSError as error:
                self.warn(f"the cached prompt {name} is corrupt, not removed: {error.strerror}")


def is_worth_saving(tokens: int, cached: int) -> bool:
    """Return whether a prompt has many tokens beyond the `cached` ones."""
    return tokens - cached > tokens // _GROWTH


def _extends(
    manifest: Manifest,
    prompt: Sequence[int],
    other: CachedPrompt,
    usable: Callable[[int, int], int],
) -> bool:
    """Return whether nearly all of a shorter prompt can be used of this one."""
    older = other.manifest
    if older.identity != manifest.identity or older.tokens >= manifest.tokens:
        return False
    common = usable(common_prefix(other.tokens(), prompt), manifest.tokens)
    return not is_worth_saving(older.tokens, common)


def prompt_digest(identity: str, tokens: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Return the digest of all that a prompt's KV depends on: its identity and its tokens."""
    return sha256(identity.encode() + np.asarray(tokens, dtype=np.int64).tobytes()).digest()


def _read_tokens(folder: Path, manifest: Manifest) -> bytes:
    """Return the token ids of a prompt. Raises OSError, and ValueError if they are corrupt."""
    size = manifest.tokens * _TOKEN_BYTES
    raw = read_regular(folder / _TOKENS, size)
    if len(raw) != size or zlib.crc32(raw) != manifest.checksum:
        raise ValueError(_TOKENS)
    return raw


def _corrupt_name(folder: Path) -> str | None:
    """Return a description of a corrupt prompt; None if a folder is intact, or not ours.

    A prompt is corrupt if its manifest or tokens are invalid, or its layers' size, which counts
    towards the limit, is not the manifest's.
    """
    layers = list(folder.glob("rank-*-layer-*.kv"))
    if not layers and not os.path.lexists(folder / _TOKENS):
        return None
    name = f"in {folder}"
    try:
        manifest = Manifest.read(folder)
        name = f"of {manifest.name}" if manifest.name else name
        _read_tokens(folder, manifest)
        is_intact = sum(path.stat().st_size for path in layers) == manifest.nbytes
        return None if is_intact else name
    except (FileNotFoundError, UnsuitableFileError, *_INVALID):
        return name
    except OSError:
        return None  # unreadable for now
