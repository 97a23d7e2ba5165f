"""The caches of requests: those of the last one, if the next shares enough with it, or new ones."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from decoding.engine.cached_sequence import CachedSequence, room_for_turns
from decoding.engine.request import Request, RequestState
from decoding.engine.session import SequenceState
from decoding.engine.session_manager import SequenceManager
from decoding.prefix_cache.store import MIN_TOKENS
from offload.errors import InsufficientMemoryError


class CachePool:
    """Gives requests their caches, and in a conversation keeps those of the last request.

    A prompt that shares a prefix with the last sequence continues in its caches from where the two
    differ; any other prompt gets new ones. So only a new turn is prefilled, or a question that
    replaces the last one, and the distribution is that of one long prompt.
    """

    def __init__(self, sessions: SequenceManager, context: int):
        """Open sequences of at most `context` tokens."""
        self.sessions, self.context = sessions, context
        # tokens of later turns that memory is planned for; None outside a conversation
        self.room: int | None = None
        self.kept: CachedSequence | None = None  # the last request's

    def prefill(self, state: RequestState, concurrency: int) -> Tensor:
        """Give a request caches, and prefill what they lack; return the logits (1, V).

        All of `concurrency` requests share the memory. Raises InsufficientMemoryError and
        RequestCancelled.
        """
        kept, self.kept = self.kept, None
        if kept is not None:
            state.sequence = kept
            cached = kept.caches.target.length
            logits = self._extend(state, kept)
            state.stats.discarded_tokens = max(0, cached - state.stats.reused_tokens)
            if logits is not None:
                return logits
            state.sequence = None
            self.sessions.close(kept.caches)
        request = state.request
        state.sequence = CachedSequence(self._open(request, concurrency))
        return state.sequence.prefill(request.progress, request.is_cancelled)

    def release(self, sequence: CachedSequence, keep: bool) -> None:
        """Take a request's caches back: keep them in a conversation, if wanted, or free them."""
        if keep and self.room is not None:
            self.kept = sequence
        else:
            self.sessions.close(sequence.caches)

    def close(self) -> None:
        """Free the caches that are kept."""
        kept, self.kept = self.kept, None
        if kept is not None:
            self.sessions.close(kept.caches)

    def _extend(self, state: RequestState, kept: CachedSequence) -> Tensor | None:
        """Prefill what the last request's caches lack, reallocating them if they are too small.

        Returns None if the whole prompt has to be prefilled.
        """
        request, caches = state.request, kept.caches
        tokens, new = len(request.prompt), request.max_new_tokens
        if not (cached := kept.reusable_tokens(request.prompt, new)):
            return None
        is_long = tokens - cached > MIN_TOKENS  # more of it may be on disk
        if is_long and self.sessions.cached_prefix(request.prompt, new) > cached + MIN_TOKENS:
            return None
        reserve: list[int] = []
        if tokens + new > caches.capacity or new > caches.max_new_tokens:
            reserve = [new + self._room(request), new]
        try:
            logits = self.sessions.executor.extend(
                caches, request.prompt, cached, reserve, request.progress, request.is_cancelled
            )
        except InsufficientMemoryError:
            if not reserve:
                raise
            return None
        state.stats.reused_tokens = cached
        return logits

    def _open(self, request: Request, concurrency: int) -> SequenceState:
        """Open a sequence with room for later turns if memory allows, else for this one alone."""
        prompt, new = request.prompt, request.max_new_tokens
        if room := self._room(request):
            with suppress(InsufficientMemoryError):
                return self.sessions.open(prompt, new + room, concurrency, request.name)
        return self.sessions.open(prompt, new, concurrency, request.name)

    def _room(self, request: Request) -> int:
        """Return the tokens to reserve for turns after a request."""
        tokens, new = len(request.prompt), request.max_new_tokens
        room = min(self.room or 0, self.context - tokens - new)
        return room_for_turns(self.sessions.runtime, tokens, new, room)
