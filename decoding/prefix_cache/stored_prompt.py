"""A sequence's prompt in the prompt cache: loaded before its prefill, saved while it is decoded."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from decoding.prefix_cache.manager import PrefixCacheManager
from decoding.prefix_cache.store import is_worth_saving
from decoding.prefix_cache.writer import BackgroundWriter
from offload.tiered.cache import TieredCache


class StoredPrompt:
    """The last prompt of one sequence, as it is loaded from disk and saved there."""

    def __init__(self, manager: PrefixCacheManager | None = None, name: str = ""):
        """Save prompts under a display name; without a prompt cache, nowhere."""
        self.loaded_tokens = 0  # tokens of the last prompt that were loaded
        self._manager, self._name = manager, name
        self._writer: BackgroundWriter | None = None

    def load(
        self, rope_key: bytes, prompt: Tensor, cache: TieredCache
    ) -> Generator[int, None, None]:
        """Load a prefix of the prompt (T,) in steps (`PrefixCacheManager.load`)."""
        if self._manager is not None:
            identity = self._manager.fingerprint.kv_identity(rope_key, cache.layout)
            loading = self._manager.load(identity, prompt.tolist(), cache)
            self.loaded_tokens = yield from loading

    def save(self, rope_key: bytes, prompt: Tensor, cache: TieredCache, logits: Tensor) -> None:
        """Start to save the prompt (T,), which these logits (1, V) follow; all ranks call it.

        Nothing is saved if rank 0 is still saving, or logits are not finite.
        """
        if self._manager is None:
            return
        previous = self._writer
        is_free = previous is None or not previous.is_busy  # rank 0's waits for the others'
        may_save = is_free and bool(logits.isfinite().all())
        identity = self._manager.fingerprint.kv_identity(rope_key, cache.layout)
        writer = self._manager.save(identity, self._name, prompt.tolist(), cache, may_save)
        self._writer = writer or previous

    def replace(self, cached: int, is_freed: bool = False) -> None:
        """Finish saving before a turn after `cached` tokens changes the KV that is being read.

        With `is_freed` the KV is freed. Saving is cancelled if the turn shares nearly all of it,
        and will be saved in its place.
        """
        self.loaded_tokens = 0
        writer = self._writer
        if writer is None or not (is_freed or cached < writer.tokens):
            return
        if is_worth_saving(writer.tokens, cached):
            writer.wait()
        else:
            writer.cancel()

    def wait(self) -> None:
        """Wait until all is saved."""
        if self._writer is not None:
            self._writer.wait()

    def cancel(self) -> None:
        """Stop saving: a rank is lost, so the prompt could not be completed."""
        if self._writer is not None:
            self._writer.cancel()
