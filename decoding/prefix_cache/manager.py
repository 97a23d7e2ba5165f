"""Loading and saving of prompts in the prompt cache, on all ranks in step."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from decoding.prefix_cache.files import file_lock, hold_lock, rank_file
from decoding.prefix_cache.store import (
    MAX_TOKENS,
    MIN_TOKENS,
    CachedPrompt,
    Manifest,
    PromptCache,
    is_worth_saving,
    prompt_digest,
)
from decoding.prefix_cache.writer import BackgroundWriter, files_of, load_saved
from offload.errors import CorruptCacheError, TierForceError, one_line
from offload.layout import OBSERVED_ROWS, KVLayout, Segment
from offload.prefill.layer_major import Prefill, loaded_segments
from offload.tiered.cache import TieredCache
from offload.tiered.windowed import WindowedLayer
from parallel.ranks.process_group import TensorParallelGroup


@dataclass(frozen=True)
class ModelFingerprint:
    """A digest of all that makes a model's KV, and the model's display name."""

    digest: str  # covers weights, config, dtype, ranks and device
    model: str

    def kv_identity(self, rope_key: bytes, layout: KVLayout) -> str:
        """Return the digest for a sequence with these rotary angles (`ModelConfig.rope_key`).

        Keys that are values as well are stored once, but in split modes.
        """
        planes = b"" if layout.planes == 2 else b"keys"
        return sha256(self.digest.encode() + rope_key + planes).hexdigest()


class PrefixCacheManager:
    """The prompt cache as an engine's sequences use it."""

    def __init__(
        self,
        folder: str,
        limit: int | None,
        fingerprint: ModelFingerprint,
        group: TensorParallelGroup,
        layout: KVLayout | None = None,
    ):
        """Open the folder; all ranks call it. Raises TierForceError on all ranks.

        `layout`: the model's, if not all of its layers have full attention.
        """
        self.fingerprint, self.group, self._layout = fingerprint, group, layout
        # called on rank 0, from any thread
        self.warn: Callable[[str], None] = partial(warnings.warn, stacklevel=2)
        self._cache: PromptCache | None = None
        self._is_clean = False
        with group.sync_errors():
            if group.rank == 0:
                self._cache = PromptCache(Path(folder).absolute(), limit)
                self._cache.warn = lambda line: self.warn(line)  # `warn` may be replaced later
                self._cache.usable = self.usable
                self._cache.create()

    def find(self, identity: str, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt can be loaded; on rank 0."""
        return self._find_usable(identity, prompt)[1]

    def has(self, identity: str, prompt: Sequence[int]) -> bool:
        """Return whether a prompt, or nearly all of it, is cached; on rank 0."""
        return not is_worth_saving(len(prompt), self._find(identity, prompt)[1])

    def prompts(self) -> list[CachedPrompt]:
        """Return all prompts, the least recently used first; on rank 0, from any thread.

        Raises TierForceError if the folder cannot be read.
        """
        assert self._cache is not None
        return self._cache.prompts()

    def usable(self, common: int, tokens: int) -> int:
        """Return how many of the `common` tokens with a cached prompt of `tokens` can be used.

        Where layers have a window or a state, a prompt goes on from where it is kept.
        """
        return common if self._layout is None else self._layout.resumable(common, tokens)

    def load(
        self, identity: str, prompt: Sequence[int], cache: TieredCache
    ) -> Generator[int, None, int]:
        """Load a prefix of a prompt into an empty cache, in steps, and return its length.

        All ranks run the steps, one for each layer; they yield the number of tokens. At least those
        tokens are left that the prompt's observers see. If a rank cannot read its part, nothing is
        loaded on any and a warning is issued; a corrupt prompt is removed.
        """
        match: tuple[CachedPrompt, int, bytes] | None = None
        if self.group.rank == 0:
            best, count = self._find_usable(identity, prompt)
            if best is not None:
                match = best, count, best.digest()
        match = self.group.broadcast(match)
        if match is None:
            return 0
        cached, count, digest = match
        failure: tuple[str, bool] | None = None
        with closing(self._load(cached, count, digest, cache)) as layers:
            for is_last in [*[False] * cache.layout.layers, True]:
                with self.group.sync_errors():
                    failure = failure or _next(layers, cached)
                if not is_last:
                    yield count
        with self.group.sync_errors():
            if failure is not None:
                cache.link.drain()
        failures = [each for each in self.group.gather(failure) if each]
        if self.group.rank == 0:
            self._finish_load(cached, failures)
        cache.truncate(0 if failures else count)
        return cache.length

    def save(
        self,
        identity: str,
        name: str,
        prompt: Sequence[int],
        cache: TieredCache,
        may_save: bool = True,
    ) -> BackgroundWriter | None:
        """Start to save a prefilled prompt if it is worth it; all ranks call it.

        Nothing is saved if `may_save` is False on rank 0, nor if recurrent states or windows of the
        prompt are not kept: it was extended by few tokens.
        """
        group, layout = self.group, cache.layout
        states = [] if cache.recurrent is None else cache.recurrent.positions
        wanted = [] if layout.recurrent is None else layout.recurrent.positions(len(prompt))
        if not set(wanted) <= set(states) or not _holds_windows(cache, len(prompt)):
            return None
        nbytes = sum(group.gather(layout.stored_bytes(len(prompt))))
        entry, lock = None, None
        if group.rank == 0 and may_save and (begun := self._begin(identity, prompt, nbytes)):
            lock = begun[1]
            entry = begun[0], prompt_digest(identity, prompt)  # other ranks have no identity
        entry = group.broadcast(entry)
        if entry is None:
            return None
        folder, digest = entry
        if lock is None:
            with suppress(OSError):  # rank 0 then finds this rank's part missing
                lock = hold_lock(rank_file(folder, group.rank, "lock"))
        group.gather(None)  # until all ranks hold their locks
        if lock is None:
            return None
        finish = None
        if self._cache is not None:
            counts = len(prompt), group.size, nbytes
            manifest = Manifest(identity, name, self.fingerprint.model, *counts)
            finish = partial(self._finish, folder, manifest, list(prompt))
        try:
            readers = cache.host_readers()
            files = files_of(folder, group.rank, layout, len(prompt), digest)
            layers = [(each.file, readers[each.layer]) for each in files]
            return BackgroundWriter(folder, group.rank, lock, layers, len(prompt), finish)
        except (RuntimeError, MemoryError, TierForceError) as error:  # out of memory or threads
            lock.close()
            if self._cache is not None:
                self._cache.discard(folder)
                self._warn_not_saved(one_line(error))
            return None

    def _find(self, identity: str, prompt: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return the best match, and its number of common tokens; none if the folder fails."""
        assert self._cache is not None
        with suppress(TierForceError):  # saving reports it
            if not self._is_clean:
                self._cache.collect_garbage()
                self._is_clean = True
            return self._cache.find(identity, prompt)
        return None, 0

    def _find_usable(self, identity: str, prompt: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return the best match, and the number of tokens to load; none if these are too few."""
        cached, count = self._find(identity, prompt)
        count = min(count, len(prompt) - OBSERVED_ROWS)
        if cached is not None:
            count = self.usable(count, cached.manifest.tokens)
        return (cached, count) if count >= MIN_TOKENS else (None, 0)

    def _load(
        self, cached: CachedPrompt, count: int, digest: bytes, cache: TieredCache
    ) -> Generator[int, None, None]:
        """Load the first `count` tokens on this rank, and yield each layer's index.

        Raises CorruptCacheError, OSError.
        """
        rank, layout = self.group.rank, cache.layout
        files = files_of(cached.folder, rank, layout, cached.manifest.tokens, digest)
        with Prefill(cache, count) as prefill:
            for each, blocks in load_saved(cached.folder, rank, files, count):
                held = [other.segment for other in files if other.layer == each.layer]
                parts = dict(loaded_segments(layout, each.layer, held, count))
                if each.segment in parts:
                    prefill.load_blocks(each.layer, blocks, parts[each.segment])
                if each.segment == held[-1]:
                    yield each.layer

    def _finish_load(self, cached: CachedPrompt, failures: list[tuple[str, bool]]) -> None:
        """Mark a prompt as used, or warn why it was not, and remove it if it is corrupt."""
        assert self._cache is not None
        if not failures:
            cached.touch()
            return
        name = f"the cached prompt of {cached.manifest.name}"
        corruption = [reason for reason, is_corrupt in failures if is_corrupt]
        if not corruption:
            self.warn(f"{name} cannot be read ({failures[0][0]}): prefilling it again")
            return
        self.warn(f"{name} is corrupt ({corruption[0]}): removing it, and prefilling it again")
        with suppress(OSError):
            self._cache.drop(cached)

    def _begin(
        self, identity: str, prompt: Sequence[int], nbytes: int
    ) -> tuple[Path, ExitStack] | None:
        """Return a folder for a prompt; None if it is not worth saving, or there is no room."""
        assert self._cache is not None
        if MIN_TOKENS <= len(prompt) <= MAX_TOKENS and not self.has(identity, prompt):
            try:
                return self._cache.begin(nbytes)
            except TierForceError as error:
                self._warn_not_saved(str(error))
        return None

    def _finish(
        self,
        folder: Path,
        manifest: Manifest,
        prompt: list[int],
        writer: BackgroundWriter,
        failure: str | None,
    ) -> None:
        """Publish a prompt that all ranks have written; on the thread that wrote rank 0's part."""
        assert self._cache is not None
        ranks = range(self.group.size)
        is_cancelled = False
        try:
            for rank in ranks[1:]:
                with file_lock(rank_file(folder, rank, "lock")):
                    pass  # waits until the rank has finished
            cancelled = [rank_file(folder, rank, "given-up").exists() for rank in ranks]
            is_cancelled = writer.is_cancelled or any(cancelled)
            missing = [rank for rank in ranks if not rank_file(folder, rank, "json").exists()]
            if missing:
                failure = failure or f"rank {missing[0]} could not write its part"
            if failure is None:
                self._cache.add(folder, manifest, prompt)
        except Exception as error:  # no error may end decoding
            failure = one_line(error)
        if failure is not None:
            self._cache.discard(folder)
            if not is_cancelled:
                self._warn_not_saved(failure)

    def _warn_not_saved(self, why: str) -> None:
        self.warn(f"the prompt is not cached: {why}")


def _next(layers: Iterator[int], cached: CachedPrompt) -> tuple[str, bool] | None:
    """Load the next layer; return why it failed, and whether the prompt is corrupt, or None."""
    try:
        next(layers, None)
    except CorruptCacheError as error:
        return str(error), True
    except OSError as error:
        # a missing file is corruption, unless another process has removed the whole prompt
        is_missing = isinstance(error, FileNotFoundError) and cached.folder.exists()
        return error.strerror or one_line(error), is_missing or error.errno == errno.EIO
    return None


def _holds_windows(cache: TieredCache, tokens: int) -> bool:
    """Return whether a cache has what is stored of a prompt's layers with a window."""
    layer = next((each for each in cache.layers if isinstance(each, WindowedLayer)), None)
    if layer is None or cache.layout.window is None:
        return True
    held = [Segment(layer.first, cache.length), *layer.checkpoints.segments]
    return all(
        any(each.start <= start and end <= each.end for each in held)
        for start, end in cache.layout.window.segments(tokens)
    )
