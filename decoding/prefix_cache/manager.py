"""What texts have to do with prompts on disk: on each rank, in step with the others."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from decoding.prefix_cache.files import hold_lock, locked, rank_file
from decoding.prefix_cache.store import (
    MAX_TOKENS,
    MIN_TOKENS,
    CachedPrompt,
    Manifest,
    PromptCache,
    digest_of_text,
    is_worth_saving,
)
from decoding.prefix_cache.writer import BackgroundWriter, files_of, load_saved
from offload.errors import CorruptCacheError, TierForceError, one_line
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import OBSERVED_ROWS, Prefill
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup


@dataclass(frozen=True)
class ModelFingerprint:
    """What the KV of a model's texts depends on, and what people call the model."""

    digest: str  # of weights, config, number format, ranks and device
    model: str

    def of_text(self, config: ModelConfig, prompt: int, length: int) -> str:
        """Return that of a prompt in a text of `length` tokens, whose angles may depend on both."""
        return sha256(self.digest.encode() + config.rope_key(prompt, length)).hexdigest()


class PrefixCacheManager:
    """Prompts on disk, as the texts of an engine use them."""

    def __init__(
        self, folder: str, limit: int | None, identity: ModelFingerprint, group: TensorParallelGroup
    ):
        """Open the folder; all ranks call it. Raises TierForceError, on all of them."""
        self.identity, self.group = identity, group
        # on rank 0; from another thread, too
        self.warn: Callable[[str], None] = partial(warnings.warn, stacklevel=2)
        self._cache: PromptCache | None = None
        self._is_tidy = False
        with group.sync_errors():
            if group.rank == 0:
                self._cache = PromptCache(Path(folder).absolute(), limit)
                self._cache.warn = lambda line: self.warn(line)  # whatever it is by then
                self._cache.create()

    def find(self, identity: str, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt need not be read; on rank 0."""
        return self._found(identity, prompt)[1]

    def has(self, identity: str, prompt: Sequence[int]) -> bool:
        """Return whether a prompt is kept, or nearly all of it; on rank 0."""
        return not is_worth_saving(len(prompt), self._known(identity, prompt)[1])

    def load(self, identity: str, prompt: Sequence[int], cache: TieredCache) -> int:
        """Let an empty cache hold the first tokens of a prompt, and return how many; on all ranks.

        At least those are left that the prompt's followers see. Where a rank cannot read its part,
        none holds anything, and it is told; what is damaged is removed.
        """
        found: tuple[CachedPrompt, int, bytes] | None = None
        if self.group.rank == 0:
            best, count = self._found(identity, prompt)
            if best is not None:
                found = best, count, best.digest()
        found = self.group.broadcast(found)
        if found is None:
            return 0
        kept, count, text = found
        trouble = None
        with self.group.sync_errors():
            try:
                self._load(kept, count, text, cache)
            except CorruptCacheError as error:
                trouble = str(error), True
            except OSError as error:
                # what lacks a file is damaged, unless another process has removed all of it
                is_missing = isinstance(error, FileNotFoundError) and kept.folder.exists()
                is_damage = is_missing or error.errno == errno.EIO
                trouble = error.strerror or one_line(error), is_damage
            if trouble is not None:
                cache.link.drain()
        troubles = [each for each in self.group.gather(trouble) if each]
        if self.group.rank == 0:
            self._used(kept, troubles)
        cache.truncate(0 if troubles else count)
        return cache.length

    def save(
        self,
        identity: str,
        name: str,
        prompt: Sequence[int],
        cache: TieredCache,
        may_save: bool = True,
    ) -> BackgroundWriter | None:
        """Begin to write a prompt that was read, where it is worth it; all ranks call it.

        Nothing is begun where rank 0 says that it `may_save` nothing.
        """
        group, layout = self.group, cache.layout
        nbytes = sum(group.gather(layout.bytes(len(prompt))))
        begun, lock = None, None
        if group.rank == 0 and may_save and (own := self._begun(identity, prompt, nbytes)):
            lock = own[1]
            begun = own[0], digest_of_text(identity, prompt)  # the other ranks have no identity
        begun = group.broadcast(begun)
        if begun is None:
            return None
        folder, text = begun
        if lock is None:
            with suppress(OSError):  # rank 0 will find no part of this one
                lock = hold_lock(rank_file(folder, group.rank, "lock"))
        group.gather(None)  # rank 0 waits for the locks of all
        if lock is None:
            return None
        finish = None
        if self._cache is not None:
            counts = len(prompt), group.size, nbytes
            manifest = Manifest(identity, name, self.identity.model, *counts)
            finish = partial(self._finish, folder, manifest, list(prompt))
        try:
            files = files_of(folder, group.rank, layout, len(prompt), text)
            layers = list(zip(files, cache.host_readers(), strict=True))
            return BackgroundWriter(folder, group.rank, lock, layers, finish)
        except (RuntimeError, MemoryError, TierForceError) as error:  # no memory, no thread
            lock.close()
            if self._cache is not None:
                self._cache.discard(folder)
                self._warn_not_saved(one_line(error))
            return None

    def _known(self, identity: str, prompt: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return what is kept of a prompt, and how many tokens; nothing if it cannot be told."""
        assert self._cache is not None
        with suppress(TierForceError):  # writing will tell
            if not self._is_tidy:
                self._cache.collect_garbage()
                self._is_tidy = True
            return self._cache.find(identity, prompt)
        return None, 0

    def _found(self, identity: str, prompt: Sequence[int]) -> tuple[CachedPrompt | None, int]:
        """Return what is kept of a prompt, and how much of it is of use."""
        kept, count = self._known(identity, prompt)
        count = min(count, len(prompt) - OBSERVED_ROWS)
        return (kept, count) if count >= MIN_TOKENS else (None, 0)

    def _load(self, kept: CachedPrompt, count: int, text: bytes, cache: TieredCache) -> None:
        """Fill a cache on this rank with so many tokens. Raises CorruptCacheError, OSError."""
        rank = self.group.rank
        files = files_of(kept.folder, rank, cache.layout, kept.manifest.tokens, text)
        with Prefill(cache, count) as way:
            for layer, pieces in load_saved(kept.folder, rank, files, count):
                way.load_blocks(layer, pieces)

    def _used(self, kept: CachedPrompt, troubles: list[tuple[str, bool]]) -> None:
        """Note that a prompt was used, or tell why it was not, and remove it if it is damaged."""
        assert self._cache is not None
        if not troubles:
            kept.touch()
            return
        name = f"what was kept of {kept.manifest.name}"
        damage = [text for text, is_damage in troubles if is_damage]
        if not damage:
            self.warn(f"{name} cannot be read ({troubles[0][0]}): the text is read anew")
            return
        self.warn(f"{name} is damaged ({damage[0]}): it is removed, and the text is read anew")
        with suppress(OSError):
            self._cache.drop(kept)

    def _begun(
        self, identity: str, prompt: Sequence[int], nbytes: int
    ) -> tuple[Path, ExitStack] | None:
        """Return a folder for a prompt; None where it is not worth it, or there is no room."""
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
        saving: BackgroundWriter,
        trouble: str | None,
    ) -> None:
        """Let what all ranks have written be a prompt; on the thread that wrote rank 0's part."""
        assert self._cache is not None
        ranks = range(self.group.size)
        is_cancelled = False
        try:
            for rank in ranks[1:]:
                with locked(rank_file(folder, rank, "lock")):
                    pass  # it has written all that it will
            given_up = [rank_file(folder, rank, "given-up").exists() for rank in ranks]
            is_cancelled = saving.is_cancelled or any(given_up)
            missing = [rank for rank in ranks if not rank_file(folder, rank, "json").exists()]
            if missing:
                trouble = trouble or f"rank {missing[0]} could not write its part"
            if trouble is None:
                self._cache.add(folder, manifest, prompt)
        except Exception as error:  # whatever it is, the text goes on
            trouble = one_line(error)
        if trouble is not None:
            self._cache.discard(folder)
            if not is_cancelled:
                self._warn_not_saved(trouble)

    def _warn_not_saved(self, why: str) -> None:
        self.warn(f"the text that was read is not kept: {why}")
