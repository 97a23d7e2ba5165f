"""A folder of prompts that were read: a folder for each, which is there whole or not at all."""

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
    hold_lock,
    is_locked,
    locked,
    rank_file,
    sync_folder,
    write_synced,
)
from decoding.speculation.sequence import common_prefix
from offload.errors import TierForceError
from offload.regular_files import UnsuitableFileError, read_json, read_regular

MIN_TOKENS = 256  # fewer are read again as soon
MAX_TOKENS = 1 << 24  # more than any context: what says that it has more is not believed
_MAX_MANIFEST = 1 << 14  # bytes
_MAX_NAME = 200  # characters of a name that is kept
_TOKEN_BYTES = 8
_MANIFEST, _TOKENS, _LOCK, _LOCKS = "manifest.json", "tokens.bin", ".lock", "rank-*.lock"
_WRITING, _DROPPED = ".writing-", ".dropped-"
_ID = "[0-9a-f]{12}"
_LOCK_TIMEOUT_S = (
    60.0  # that other jobs, which only rename and remove under it, hold the lock at most
)
_GROWTH = 16  # a prompt is new where more than a part of this is
_NONE = (ValueError, TypeError, KeyError)  # what reading no manifest raises


@dataclass(frozen=True)
class Manifest:
    """What is said of a prompt on disk."""

    identity: str  # of all that its KV depends on, beside the tokens
    name: str  # that people know it by
    model: str  # likewise
    tokens: int
    ranks: int
    nbytes: int
    checksum: int = 0  # of its tokens; with the next one for `PromptCache.add` to say
    saved: str = ""  # when

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read what is said of a folder's prompt. Raises OSError, and _NONE for what is nothing."""
        said = read_json(folder / _MANIFEST, _MAX_MANIFEST)
        for each in fields(cls):
            if type(said[each.name]).__name__ != each.type:
                raise TypeError(each.name)
            if each.type == "int" and not 0 <= said[each.name] < 2**63:
                raise ValueError(each.name)
        if said["tokens"] > MAX_TOKENS:
            raise ValueError("tokens")
        return cls(**{each.name: said[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt on disk."""

    folder: Path
    manifest: Manifest
    used: float  # when it was, last; seconds since the epoch

    @property
    def id(self) -> str:
        return self.folder.name

    def tokens(self) -> npt.NDArray[np.int64]:
        """Return its token ids (T,); none where they are not there as they were written."""
        raw = b""
        with suppress(OSError, ValueError):
            raw = _read_tokens(self.folder, self.manifest)
        return np.frombuffer(raw, dtype=np.int64)

    def digest(self) -> bytes:
        """Return the digest of all that its KV depends on."""
        return digest_of_text(self.manifest.identity, self.tokens())

    def touch(self) -> None:
        """Note that it was used just now."""
        with suppress(OSError):
            os.utime(self.folder / _MANIFEST)


class PromptCache:
    """The prompts of one folder, which several processes may use at a time.

    A prompt is written under another name, and then renamed. What a process that was killed leaves
    behind is no prompt; the next one that writes removes it.
    """

    def __init__(self, folder: Path, limit: int | None = None):
        """Look into a folder; who writes to it calls `make` first.

        Args:
            folder: with nothing else in it, best.
            limit: bytes that the prompts may take; what was used longest ago goes first.
        """
        self.folder, self.limit = folder, limit
        self.warn: Callable[[str], None] = lambda line: None

    def create(self) -> None:
        """Make the folder, if it is not there. Raises TierForceError where it cannot be used."""
        with self._usable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                pass

    def prompts(self) -> list[CachedPrompt]:
        """Return what is kept, the least recently used first. Raises TierForceError."""
        found = []
        for path in self._folders():
            # what is not ours is left alone; what has gone meanwhile, too
            with suppress(OSError, *_NONE):
                used = (path / _MANIFEST).stat().st_mtime
                found.append(CachedPrompt(path, Manifest.read(path), used))
        return sorted(found, key=lambda each: (each.used, each.id))

    def find(self, identity: str, prompt: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return what begins like a prompt with the most tokens, and how many these are.

        Of several the one used last is taken; None and 0 where there is none. Tokens are compared,
        one by one. Raises TierForceError.
        """
        best, most = None, 0
        tokens = np.array(prompt, dtype=np.int64)
        for kept in self.prompts():
            if kept.manifest.identity == identity:
                count = common_prefix(kept.tokens(), tokens)
                if count >= max(1, most):
                    best, most = kept, count
        return best, most

    def drop(self, kept: CachedPrompt) -> None:
        """Remove a prompt, unless there is another one in its place by now. Raises OSError."""
        with self._locked():
            with suppress(*_NONE):
                if Manifest.read(kept.folder) != kept.manifest:
                    return
            self._remove(kept.folder)

    def collect_garbage(self) -> None:
        """Remove what killed processes have left, what is damaged, and what exceeds the limit.

        Raises TierForceError.
        """
        with self._usable(), self._locked():
            self._clean()
            self._make_room()

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, nbytes: int) -> tuple[Path, ExitStack]:
        """Return a folder to write a prompt of so many bytes to, and the lock of rank 0 in it.

        As long as the lock is held, others leave it alone; `add` or `discard` is to follow. Raises
        TierForceError where there is no room.
        """
        if self.limit is not None and nbytes > self.limit:
            raise TierForceError(
                f"it takes {nbytes / 1e9:.2f} GB, more than `prompt_cache_limit` {self.limit / 1e9:g} GB."
            )
        with self._usable(), self._locked():
            self._clean()
            free = shutil.disk_usage(self.folder).free
            if nbytes > free:
                raise TierForceError(
                    f"it takes {nbytes / 1e9:.2f} GB, and the disk of `prompt_cache` {self.folder} has "
                    f"{free / 1e9:.2f} GB free. `tierforce prompt-cache drop` makes room."
                )
            path = self.folder / f"{_WRITING}{token_hex(6)}"
            path.mkdir(mode=0o700)
            return path, hold_lock(rank_file(path, 0, "lock"))

    def add(self, written: Path, manifest: Manifest, prompt: Sequence[int]) -> None:
        """Let what was written be a prompt, in place of those that it goes on from.

        What then exceeds the limit goes. Raises OSError.
        """
        tokens = np.array(prompt, dtype=np.int64).tobytes()
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        name, model = manifest.name[:_MAX_NAME], manifest.model[:_MAX_NAME]
        checksum = zlib.crc32(tokens)
        manifest = replace(manifest, name=name, model=model, checksum=checksum, saved=now)
        kept = self.folder / digest_of_text(manifest.identity, prompt).hex()[:12]
        write_synced(written / _TOKENS, tokens)
        write_synced(written / _MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
        with self._locked():
            self._remove(kept)  # which was damaged, or is as good
            for path in written.glob(_LOCKS):
                path.unlink()
            sync_folder(written)
            written.rename(kept)
            with suppress(OSError, TierForceError):  # it is there, whatever comes
                sync_folder(self.folder)
                for other in self.prompts():
                    if _extends(manifest, prompt, other):
                        self._remove(other.folder)
                self._make_room()

    def discard(self, written: Path) -> None:
        """Let go of what was begun and will not be a prompt."""
        with suppress(OSError), self._locked():
            self._remove(written)

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self.folder / _LOCK, _LOCK_TIMEOUT_S)

    def _folders(self) -> list[Path]:
        """Return the folders that may be prompts. Raises TierForceError."""
        with self._usable():
            return [
                path
                for path in self.folder.iterdir()
                if re.fullmatch(_ID, path.name) and path.is_dir() and not path.is_symlink()
            ]

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise TierForceError for an OSError."""
        try:
            yield
        except OSError as error:
            why = "it is a file" if self.folder.is_file() else error.strerror
            raise TierForceError(
                f"`prompt_cache` {self.folder} cannot be used: {why}. Name a folder that can be written to."
            ) from error

    def _make_room(self) -> None:
        """Drop what was used longest ago, until the rest is within the limit."""
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
        """Remove a folder, which is no prompt from the first moment on."""
        gone = self.folder / f"{_DROPPED}{token_hex(6)}"
        with suppress(FileNotFoundError):
            folder.rename(gone)
            # what cannot be removed now is no prompt any more, and is tried again another time
            shutil.rmtree(gone, ignore_errors=True)

    def _clean(self) -> None:
        """Remove what processes that were killed have left, and what can never be found."""
        for path in self.folder.iterdir():
            is_left = bool(re.fullmatch(re.escape(_DROPPED) + _ID, path.name))
            if re.fullmatch(re.escape(_WRITING) + _ID, path.name):
                is_left = not any(map(is_locked, path.glob(_LOCKS)))
            if is_left:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._folders():
            if (name := _damaged(path)) is None:
                continue
            try:
                self._remove(path)
                self.warn(f"what was kept {name} is damaged: it is removed")
            except OSError as error:
                self.warn(f"what was kept {name} is damaged, and stays: {error.strerror}")


def is_worth_saving(tokens: int, known: int) -> bool:
    """Tell whether much of a prompt is beyond the tokens of it that are kept."""
    return tokens - known > tokens // _GROWTH


def _extends(manifest: Manifest, prompt: Sequence[int], other: CachedPrompt) -> bool:
    """Tell whether a longer prompt has nearly all of another one."""
    older = other.manifest
    if older.identity != manifest.identity or older.tokens >= manifest.tokens:
        return False
    return not is_worth_saving(older.tokens, common_prefix(other.tokens(), prompt))


def digest_of_text(identity: str, tokens: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Return the digest of all that a text's KV depends on: its identity and its tokens."""
    return sha256(identity.encode() + np.asarray(tokens, dtype=np.int64).tobytes()).digest()


def _read_tokens(folder: Path, manifest: Manifest) -> bytes:
    """Return the token ids of a prompt. Raises OSError, and ValueError where they are others."""
    size = manifest.tokens * _TOKEN_BYTES
    raw = read_regular(folder / _TOKENS, size)
    if len(raw) != size or zlib.crc32(raw) != manifest.checksum:
        raise ValueError(_TOKENS)
    return raw


def _damaged(folder: Path) -> str | None:
    """Say what a folder is of that is damaged; None where it is whole, or none of ours.

    Here it is damaged if it does not say which prompt it is of, or has not as many bytes as it
    says, by which the limit goes.
    """
    layers = list(folder.glob("rank-*-layer-*.kv"))
    if not layers and not os.path.lexists(folder / _TOKENS):
        return None
    name = f"in {folder}"
    try:
        manifest = Manifest.read(folder)
        name = f"of {manifest.name}" if manifest.name else name
        _read_tokens(folder, manifest)
        is_whole = sum(path.stat().st_size for path in layers) == manifest.nbytes
        return None if is_whole else name
    except (FileNotFoundError, UnsuitableFileError, *_NONE):
        return name
    except OSError:
        return None  # now it cannot be read
