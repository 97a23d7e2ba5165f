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

from decoding.prefix_cache.files import hold_lock, locked
from decoding.prefix_cache.store import (
    LEAST_TOKENS,
    MAX_TOKENS,
    KeptPrompt,
    Manifest,
    PromptCache,
    digest_of_text,
    is_new,
    rank_lock,
)
from decoding.prefix_cache.writer import Saving, files_of, is_written, saved, was_given_up
from offload.errors import DamagedError, TierForceError, one_line
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import LAST_ROWS, Prefill
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import Group


@dataclass(frozen=True)
class Identity:
    """What the KV of a model's texts depends on, and what people call the model."""

    digest: str  # of weights, config, number format, ranks and device
    model: str

    def of_text(self, config: ModelConfig, prompt: int, length: int) -> str:
        """Return that of a prompt in a text of `length` tokens, whose angles may depend on both."""
        return sha256(self.digest.encode() + config.angles(prompt, length)).hexdigest()


@dataclass(frozen=True)
class _Stored:
    """What rank 0 tells the others to load."""

    folder: Path
    tokens: int  # that are there
    used: int  # of these
    text: bytes  # digest of what its KV depends on


class Keeper:
    """Prompts on disk, as the texts of an engine use them."""

    def __init__(self, folder: str, limit: int | None, identity: Identity, group: Group):
        """Open the folder; all ranks call it. Raises TierForceError, on all of them."""
        self.identity, self.group = identity, group
        # on rank 0; from another thread, too
        self.warn: Callable[[str], None] = partial(warnings.warn, stacklevel=2)
        self._cache: PromptCache | None = None
        self._is_tidy = False
        with group.together():
            if group.rank == 0:
                self._cache = PromptCache(Path(folder).absolute(), limit)
                self._cache.warn = lambda line: self.warn(line)  # whatever it is by then
                self._cache.make()

    def find(self, identity: str, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt need not be read; on rank 0."""
        return self._found(identity, prompt)[1]

    def has(self, identity: str, prompt: Sequence[int]) -> bool:
        """Return whether a prompt is kept, or nearly all of it; on rank 0."""
        return not is_new(len(prompt), self._known(identity, prompt)[1])

    def load(self, identity: str, prompt: Sequence[int], cache: TieredCache) -> int:
        """Let an empty cache hold the first tokens of a prompt, and return how many; on all ranks.

        At least those are left that the prompt's followers see. Where a rank cannot read its part,
        none holds anything, and it is told; what is damaged is removed.
        """
        stored, kept = None, None
        if self.group.rank == 0:
            kept, count = self._found(identity, prompt)
            if kept is not None:
                stored = _Stored(kept.folder, kept.manifest.tokens, count, kept.digest())
        stored = self.group.broadcast(stored)
        if stored is None:
            return 0
        trouble = None
        with self.group.together():
            try:
                self._load(stored, cache)
            except DamagedError as error:
                trouble = str(error), True
            except OSError as error:
                # what lacks a file is damaged, unless another process has removed all of it
                is_missing = isinstance(error, FileNotFoundError) and stored.folder.exists()
                is_damage = is_missing or error.errno == errno.EIO
                trouble = error.strerror or one_line(error), is_damage
            if trouble is not None:
                cache.link.drain()
        troubles = [each for each in self.group.gather(trouble) if each]
        if kept is not None:
            self._used(kept, troubles)
        cache.go_back(0 if troubles else stored.used)
        return cache.length

    def save(
        self,
        identity: str,
        name: str,
        prompt: Sequence[int],
        cache: TieredCache,
        may_save: bool = True,
    ) -> Saving | None:
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
                lock = hold_lock(rank_lock(folder, group.rank))
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
            layers = list(zip(files, cache.excerpts(), strict=True))
            return Saving(folder, group.rank, lock, layers, finish)
        except (RuntimeError, MemoryError, TierForceError) as error:  # no memory, no thread
            lock.close()
            if self._cache is not None:
                self._cache.discard(folder)
                self._not_kept(one_line(error))
            return None

    def _known(self, identity: str, prompt: Sequence[int]) -> tuple[KeptPrompt | None, int]:
        """Return what is kept of a prompt, and how many tokens; nothing if it cannot be told."""
        assert self._cache is not None
        with suppress(TierForceError):  # writing will tell
            if not self._is_tidy:
                self._cache.tidy()
                self._is_tidy = True
            return self._cache.find(identity, prompt)
        return None, 0

    def _found(self, identity: str, prompt: Sequence[int]) -> tuple[KeptPrompt | None, int]:
        """Return what is kept of a prompt, and how much of it is of use."""
        kept, count = self._known(identity, prompt)
        count = min(count, len(prompt) - LAST_ROWS)
        return (kept, count) if count >= LEAST_TOKENS else (None, 0)

    def _load(self, stored: _Stored, cache: TieredCache) -> None:
        """Fill a cache on this rank. Raises DamagedError, OSError."""
        rank = self.group.rank
        files = files_of(stored.folder, rank, cache.layout, stored.tokens, stored.text)
        with Prefill(cache, stored.used) as way:
            for layer, pieces in saved(stored.folder, rank, files, stored.used):
                way.fill(layer, pieces)

    def _used(self, kept: KeptPrompt, troubles: list[tuple[str, bool]]) -> None:
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
        if LEAST_TOKENS <= len(prompt) <= MAX_TOKENS and not self.has(identity, prompt):
            try:
                return self._cache.begin(nbytes)
            except TierForceError as error:
                self._not_kept(str(error))
        return None

    def _finish(
        self,
        folder: Path,
        manifest: Manifest,
        prompt: list[int],
        saving: Saving,
        trouble: str | None,
    ) -> None:
        """Let what all ranks have written be a prompt; on the thread that wrote rank 0's part."""
        assert self._cache is not None
        ranks = range(self.group.size)
        is_given_up = False
        try:
            for rank in ranks[1:]:
                with locked(rank_lock(folder, rank)):
                    pass  # it has written all that it will
            is_given_up = saving.is_given_up or any(was_given_up(folder, rank) for rank in ranks)
            missing = [rank for rank in ranks if not is_written(folder, rank)]
            if missing:
                trouble = trouble or f"rank {missing[0]} could not write its part"
            if trouble is None:
                self._cache.add(folder, manifest, prompt)
        except Exception as error:  # whatever it is, the text goes on
            trouble = one_line(error)
        if trouble is not None:
            self._cache.discard(folder)
            if not is_given_up:
                self._not_kept(trouble)

    def _not_kept(self, why: str) -> None:
        self.warn(f"the text that was read is not kept: {why}")
