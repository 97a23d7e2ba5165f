"""The caches of requests: those of an earlier one that shares enough with it, or new ones."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from torch import Tensor

from decoding.engine.cached_sequence import CachedSequence, room_for_turns
from decoding.engine.request import Request, RequestState
from decoding.engine.session import SequenceState
from decoding.engine.session_manager import SequenceManager
from decoding.prefix_cache.store import MIN_TOKENS
from decoding.speculation.sequence import Tokens
from offload.errors import InsufficientMemoryError, RequestCancelled
from offload.tiered.prefill import OBSERVED_ROWS


class CachePool:
    """Gives requests their caches, and in a conversation keeps those of the last ones.

    A prompt that shares a prefix with the last sequence continues in its caches from where the two
    differ; any other prompt gets new ones. So only a new turn is prefilled, or a question that
    replaces the last one, and the distribution is that of one long prompt.

    With several sequences, a prompt continues the one it shares most with if that shares at least
    half of its own tokens with it; else it copies the common prefix. The least recently used one is
    replaced where there is no room for another.
    """

    def __init__(self, sessions: SequenceManager, context: int):
        """Open sequences of at most `context` tokens."""
        self.sessions, self.context = sessions, context
        # tokens of later turns that memory is planned for; None outside a conversation
        self.room: int | None = None
        self.kept: list[CachedSequence] = []  # least recently used first
        self._in_use: list[CachedSequence] = []

    def begin(self, state: RequestState, concurrency: int) -> None:
        """Give a request caches, in which `prefill` computes what they lack of its prompt.

        All of `concurrency` requests share the memory. Raises InsufficientMemoryError, also if the
        request continues a sequence that has more than its share.
        """
        request, stats = state.request, state.stats
        previous = self._previous(request, concurrency)
        if previous is not None:
            self.kept.remove(previous)
            self._use(state, previous)
            self._make_room(concurrency, 0)
            cached = previous.caches.target.length
            is_only = concurrency == 1 and not state.runs_alone
            is_shared = is_only or previous.common_tokens(*_size(request)) > 0
            is_best = previous.reusable_tokens(*_size(request)) >= self._source(request)[1]
            is_extended = is_best and self._extend(state, previous)
            if is_shared:  # otherwise it is another conversation, which makes room
                stats.discarded_tokens = max(0, cached - stats.reused_tokens)
            if not is_extended:
                state.sequence = None
                self.release(previous, keep=False)
        if state.sequence is None:
            self._make_room(concurrency, 1)
            self._use(state, CachedSequence(self._open(state, concurrency)))
            stats.discarded_tokens = max(0, stats.discarded_tokens - stats.reused_tokens)
        sequence = state.sequence
        assert sequence is not None
        sequence.tokens = request.tokens
        sequence.missing = len(request.prompt) - stats.reused_tokens
        sequence.stepped_at = time.perf_counter()

    def is_worth_waiting(self, request: Request) -> bool:
        """Return whether a prefix of a prompt is being prefilled for another request.

        It is worth waiting for if that saves more work than half of what is left to do there.
        """
        sequences = [*self.kept, *self._in_use]
        common = [each.common_tokens(*_size(request)) for each in sequences]
        pairs = list(zip(sequences, common, strict=True))
        held = max((min(count, each.copyable) for each, count in pairs), default=0)
        return any(
            count >= held + MIN_TOKENS and 0 < each.missing <= 2 * (count - held)
            for each, count in pairs
        )

    def prefill(self, state: RequestState, whole_layer: bool, waits: bool = False) -> Tensor | None:
        """Run the next step of a request's prefill; return the logits (1, V) after the last one.

        A step is a chunk of a layer, or with `whole_layer` all of it. Raises
        InsufficientMemoryError, and RequestCancelled if the request is cancelled.

        Args:
            state: the request.
            whole_layer: whether to run all chunks up to the end of a layer.
            waits: whether to wait for the device, so that the step's time is known.
        """
        sequence, request = state.sequence, state.request
        assert sequence is not None
        if request.is_cancelled():
            raise RequestCancelled("the request was cancelled during prefill.")
        rest = len(request.prompt) - state.stats.reused_tokens
        whole = rest if sequence.token_s else len(request.prompt)  # the progress is in these tokens

        def report(done: int, total: int) -> None:
            sequence.missing = max(1, whole * (total - done) // total)  # until there are logits
            if request.progress:
                request.progress(done, total)

        started = time.perf_counter()
        logits = self.sessions.executor.prefill(sequence.caches, whole_layer, report)
        if logits is not None:
            sequence.missing = 0
            logits[0, 0].item()  # waits for the device
        elif waits:
            sequence.caches.runtime.link.finish_compute()
        sequence.stepped_at = time.perf_counter()
        sequence.prefill_s += sequence.stepped_at - started
        if logits is not None and not sequence.token_s:
            sequence.token_s = sequence.prefill_s / rest
        return logits

    def release(self, sequence: CachedSequence, keep: bool) -> None:
        """Take a request's caches back: keep them in a conversation, if wanted, or free them."""
        self._in_use.remove(sequence)
        if keep and self.room is not None:
            self.kept.append(sequence)
        else:
            self.sessions.close(sequence.caches)

    def close(self) -> None:
        """Free the caches that are kept."""
        with ExitStack() as closing:  # closes all of them, even if one raises
            while self.kept:
                closing.callback(self.sessions.close, self.kept.pop().caches)

    def _use(self, state: RequestState, sequence: CachedSequence) -> None:
        self._in_use.append(sequence)
        state.sequence = sequence

    def _previous(self, request: Request, concurrency: int) -> CachedSequence | None:
        """Return the kept sequence that a request continues or replaces, if it does.

        Raises InsufficientMemoryError if it continues one that has more than its share.
        """
        if not self.kept:
            return None
        is_full = len(self.kept) + len(self._in_use) >= concurrency
        best = max(self.kept, key=lambda each: each.reusable_tokens(*_size(request)))
        reusable = best.reusable_tokens(*_size(request))
        if 2 * reusable >= len(best.tokens) and reusable >= self._source(request)[1]:
            if best.caches.plan.concurrency < concurrency:
                raise InsufficientMemoryError(
                    f"the conversation does not fit one of {concurrency} shares of the memory."
                )
            return best
        return self.kept[0] if is_full else None

    def _make_room(self, concurrency: int, new: int) -> None:
        """Close kept sequences, those used longest ago first, so that `new` can be opened.

        One that ran alone has more than its share of the memory, and is closed in any case.
        """
        for each in [*self.kept]:
            is_large = each.caches.plan.concurrency < concurrency
            if is_large or len(self.kept) + len(self._in_use) + new > concurrency:
                self.kept.remove(each)
                self.sessions.close(each.caches)

    def _extend(self, state: RequestState, kept: CachedSequence) -> bool:
        """Begin to extend the last request's caches, reallocating them if they are too small.

        Returns False if the whole prompt has to be prefilled.
        """
        request, caches = state.request, kept.caches
        tokens, new = len(request.prompt), request.max_new_tokens
        if not (cached := kept.reusable_tokens(*_size(request))):
            return False
        is_long = tokens - cached > MIN_TOKENS  # more of it may be on disk
        if is_long and self.sessions.cached_prefix(request.prompt, new) > cached + MIN_TOKENS:
            return False
        reserve: list[int] = []
        if tokens + new > caches.capacity or new > caches.plan.spec.max_new_tokens:
            reserve = [new + self._room(request), new]
        self.sessions.executor.extend(caches, request.prompt, cached, reserve)
        try:
            self.sessions.executor.prefill(caches, whole_layer=True)  # reallocates
        except InsufficientMemoryError:
            if not reserve:
                raise
            return False
        state.stats.reused_tokens = cached
        return True

    def _open(self, state: RequestState, concurrency: int) -> SequenceState:
        """Open a sequence with room for later turns if memory allows, else for this one alone.

        It begins with the longest prefix that another sequence shares, if that is worth copying.
        Kept sequences make room for it.
        """
        while True:
            try:
                return self._open_in_share(state, concurrency)
            except InsufficientMemoryError:
                if not self.kept:
                    raise
                self.sessions.close(self.kept.pop(0).caches)

    def _open_in_share(self, state: RequestState, concurrency: int) -> SequenceState:
        request = state.request
        prompt, new = request.prompt, request.max_new_tokens
        source, shared = self._source(request)
        if source is not None and self.sessions.cached_prefix(prompt, new) > shared + MIN_TOKENS:
            source, shared = None, 0
        state.stats.reused_tokens = shared
        options = concurrency, request.name, source, shared
        if room := self._room(request):
            with suppress(InsufficientMemoryError):
                return self.sessions.open(prompt, new + room, *options)
        return self.sessions.open(prompt, new, *options)

    def _source(self, request: Request) -> tuple[SequenceState | None, int]:
        """Return the sequence with the longest prefix of a prompt to copy, and its length."""
        source, shared = None, MIN_TOKENS - 1
        for each in [*self.kept, *self._in_use]:
            common = min(each.common_tokens(*_size(request)), each.copyable)
            if (common := min(common, len(request.prompt) - OBSERVED_ROWS)) > shared:
                source, shared = each.caches, common
        return (source, shared) if source is not None else (None, 0)

    def _room(self, request: Request) -> int:
        """Return the tokens to reserve for turns after a request."""
        tokens, new = len(request.prompt), request.max_new_tokens
        room = min(self.room or 0, self.context - tokens - new)
        return room_for_turns(self.sessions.runtime, tokens, new, room)


def _size(request: Request) -> tuple[Tokens, int]:
    return request.tokens, request.max_new_tokens
