"""The caches of requests: those of an earlier one that shares enough with it, or new ones."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from torch import Tensor

from decoding.engine.cached_sequence import CachedSequence, HeldSequence, room_for_turns
from decoding.engine.request import Request, RequestState
from decoding.engine.session import SequenceState
from decoding.engine.session_manager import SequenceManager
from decoding.engine.swap_space import SwapOut, SwapSpace
from decoding.prefix_cache.store import MIN_TOKENS
from decoding.speculation.sequence import Tokens
from offload.errors import InsufficientMemoryError, RequestCancelled
from offload.layout import OBSERVED_ROWS
from parallel.execution.executor import Score, TensorParallelExecutor
from parallel.model.prompt_logprobs import PromptScorer


class CachePool:
    """Gives requests their caches, and in a conversation keeps those of the last ones, as of
    requests that say that others like them follow.

    A prompt that shares a prefix with the last sequence continues in its caches from where the two
    differ; any other prompt gets new ones. So only a new turn is prefilled, or a question that
    replaces the last one, and the distribution is that of one long prompt.

    With several sequences, a prompt continues the one it shares most with if that shares at least
    half of its own tokens with it; else it copies the common prefix. Where there is no room for
    another, the caches used longest ago are freed. Their KV is swapped out to host memory before,
    where it is copied from like that of other sequences, as long as there is room for it.
    """

    def __init__(self, sessions: SequenceManager, context: int):
        """Open sequences of at most `context` tokens."""
        self.sessions, self.context = sessions, context
        # tokens of later turns that memory is planned for; None outside a conversation
        self.room: int | None = None
        self.kept: list[CachedSequence] = []  # least recently used first
        self._in_use: list[CachedSequence] = []
        self.swap_space = SwapSpace(sessions)
        self._swaps: dict[RequestState, SwapOut] = {}  # keys: the requests that wait

    def begin(self, state: RequestState, concurrency: int) -> None:
        """Give a request caches, in which `prefill` computes what they lack of its prompt.

        If another sequence has to be swapped out before, `prefill` does so. All of `concurrency`
        requests share the memory. Raises InsufficientMemoryError, also if the request continues a
        sequence that has more than its share.
        """
        request, stats = state.request, state.stats
        previous = self._previous(request, concurrency)
        if not self._make_room(state, concurrency, previous):
            return
        extended = closed = 0  # tokens of the previous sequence
        if previous is not None:
            length = previous.caches.target.length
            self.kept.remove(previous)
            reused = self._reused_tokens(request, previous)
            stats.discarded_tokens = length - reused if reused else 0
            if not reused:
                is_only = concurrency == 1 and not state.runs_alone
                is_turn = self.room is not None  # not another document of a batch
                if is_turn and (is_only or previous.common_tokens(*_size(request))):
                    closed = length  # otherwise it is another conversation, which makes room
                self.sessions.close(previous.caches)
            elif _fits(request, previous):
                self.sessions.extend(previous.caches, request.prompt, reused)
                state.sequence, stats.reused_tokens, extended = previous, reused, reused
            else:  # larger caches copy it
                swap = self.swap_space.begin(previous, concurrency, cached=reused)
                self._swaps[state] = swap
                return
        del previous  # frees the caches before others are allocated
        if state.sequence is None:
            state.sequence = CachedSequence(self._open(state, concurrency))
        self._in_use.append(state.sequence)
        if (top := request.num_prompt_logprobs) is not None:
            _begin_to_score(state.sequence, top, self.sessions.executor)
        if closed:
            stats.discarded_tokens = max(0, closed - stats.reused_tokens)
        state.sequence.tokens = request.tokens
        state.sequence.missing = len(request.prompt) - extended

    @property
    def is_blocked(self) -> bool:
        """Return whether a sequence that ran alone, and has all memory, is being swapped out."""
        return any(swap.is_large for swap in self._swaps.values())

    def cancel(self, state: RequestState) -> None:
        """Stop making room for a request."""
        if (swap := self._swaps.pop(state, None)) is not None:
            self.kept.insert(len(self.kept) if swap.is_continued else 0, swap.sequence)
            self.swap_space.cancel(swap)

    def is_worth_waiting(self, request: Request) -> bool:
        """Return whether a prefix of a prompt is being prefilled for another request.

        It is worth waiting for if that saves more work than half of what is left to do there.
        """
        sequences = self._held()
        common = [each.common_tokens(*_size(request)) for each in sequences]
        pairs = list(zip(sequences, common, strict=True))
        held = max((each.copyable(count) for each, count in pairs), default=0)
        gains = [(each.missing, each.copyable_later(count) - held) for each, count in pairs]
        return any(gain >= MIN_TOKENS and 0 < missing <= 2 * gain for missing, gain in gains)

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
        if request.is_cancelled():
            raise RequestCancelled("the request was cancelled during prefill.")
        if sequence is None:
            swap = self._swaps[state]
            if self.swap_space.step(swap, whole_layer):
                concurrency = swap.concurrency
                del self._swaps[state], swap  # frees the caches before others are allocated
                self.begin(state, concurrency)
            return None
        rest = len(request.prompt) - state.stats.reused_tokens
        whole = rest if sequence.token_s else len(request.prompt)  # the progress is in these tokens

        def report(done: int, total: int) -> None:
            sequence.missing = max(1, whole * (total - done) // total)  # until there are logits
            if request.progress:
                request.progress(done, total)

        started, is_copying = time.perf_counter(), sequence.caches.copied is not None
        logits = self.sessions.executor.prefill(sequence.caches, whole_layer, report)
        if logits is not None:
            sequence.missing = 0
            logits[0, 0].item()  # waits for the device
            self.swap_space.drop_prefixes(sequence)
        elif waits:
            sequence.caches.runtime.link.finish_compute()
        if not is_copying:
            sequence.prefill_s += time.perf_counter() - started
        if logits is not None and not sequence.token_s:
            sequence.token_s = sequence.prefill_s / rest
        return logits

    def release(self, sequence: CachedSequence, keep: bool) -> None:
        """Take a request's caches back: keep them for a later one, or free them."""
        self._in_use.remove(sequence)
        if keep:
            self.kept.append(sequence)
        else:
            self.sessions.close(sequence.caches)

    def close(self) -> None:
        """Free the caches that are kept, and what is swapped out."""
        with ExitStack() as closing:  # closes all of them, even if one raises
            closing.callback(self.swap_space.close)
            while self.kept:
                closing.callback(self.sessions.close, self.kept.pop().caches)

    def _previous(self, request: Request, concurrency: int) -> CachedSequence | None:
        """Return the kept sequence that a request continues or replaces, if it does.

        Raises InsufficientMemoryError if it continues one that has more than its share.
        """
        if not self.kept:
            return None
        is_full = len(self.kept) + len(self._in_use) + len(self._swaps) >= concurrency
        best = max(self.kept, key=lambda each: each.reusable_tokens(*_size(request)))
        reusable, (source, shared) = best.reusable_tokens(*_size(request)), self._source(request)
        if 2 * reusable >= len(best.tokens) and reusable >= shared:
            if best.caches.plan.concurrency >= concurrency:
                return best
            share = self.sessions.memory.whole.divided(concurrency)
            if not self.sessions.planner.fits(len(request.prompt), request.max_new_tokens, share):
                raise InsufficientMemoryError(
                    f"the conversation does not fit one of {concurrency} shares of the memory."
                )
        # its caches are reused, unless they hold what is worth more
        oldest = self.kept[0]
        is_worth = self.swap_space.is_worth(oldest, self._held(), source)
        return oldest if is_full and not is_worth else None

    def _make_room(
        self, state: RequestState, concurrency: int, previous: CachedSequence | None
    ) -> bool:
        """Close kept sequences until a request can continue in `previous`, or in new caches.

        Those used longest ago come first. One that ran alone has more than its share of the memory,
        and is closed in any case. Returns False if one is to be swapped out before: `prefill` goes
        on with it.
        """
        source, _ = self._source(state.request)
        others = [each for each in self._held() if each is not previous]
        for each in [each for each in self.kept if each is not previous]:
            is_large = each.caches.plan.concurrency < concurrency
            count = len(self.kept) + len(self._in_use) + len(self._swaps)
            if not is_large and count + (previous is None) <= concurrency:
                continue
            self.kept.remove(each)
            if self.swap_space.is_worth(each, others, source):
                self._swaps[state] = self.swap_space.begin(each, concurrency, source)
                return False
            self.sessions.close(each.caches)
        return True

    def _held(self) -> list[HeldSequence]:
        """Return all sequences whose KV a request may copy."""
        return [*self.kept, *self._in_use, *self.swap_space.held()]

    def _reused_tokens(self, request: Request, kept: CachedSequence) -> int:
        """Return how many tokens of a prompt a kept sequence's caches are reused for."""
        cached = kept.reusable_tokens(*_size(request))
        if cached < self._source(request)[1]:
            return 0  # more can be copied
        copied = kept.copyable(min(cached, len(request.prompt) - OBSERVED_ROWS))
        if copied < MIN_TOKENS and not _fits(request, kept):
            return 0  # too few to copy them to larger caches
        if len(request.prompt) - cached > MIN_TOKENS:  # more of it may be on disk
            on_disk = self.sessions.cached_prefix(request.prompt, request.max_new_tokens)
            return cached if on_disk <= cached + MIN_TOKENS else 0
        return cached

    def _open(self, state: RequestState, concurrency: int) -> SequenceState:
        """Open a sequence with room for later turns if memory allows, else for this one alone.

        It begins with the longest prefix that another sequence shares, if that is worth copying.
        """
        request = state.request
        prompt, new = request.prompt, request.max_new_tokens
        source, shared = self._source(request)
        if source is not None and self.sessions.cached_prefix(prompt, new) > shared + MIN_TOKENS:
            source, shared = None, 0
        caches, session = source.caches if source is not None else None, None
        options = concurrency, request.name, caches, shared, request.shared
        if room := self._room(request):
            with suppress(InsufficientMemoryError):
                session = self.sessions.open(prompt, new + room, *options)
        session = session or self.sessions.open(prompt, new, *options)
        # the source may have been closed to make room
        state.stats.reused_tokens = shared if session.copied is not None else 0
        if source is not None:
            self.swap_space.touch(source)
        return session

    def _source(self, request: Request) -> tuple[HeldSequence | None, int]:
        """Return the sequence with the longest prefix of a prompt to copy, and its length."""
        source, shared = None, MIN_TOKENS - 1
        for each in self._held():
            common = min(each.common_tokens(*_size(request)), len(request.prompt) - OBSERVED_ROWS)
            if (common := each.copyable(common)) > shared:
                source, shared = each, common
        return (source, shared) if source is not None else (None, 0)

    def _room(self, request: Request) -> int:
        """Return the tokens to reserve for turns after a request."""
        tokens, new = len(request.prompt), request.max_new_tokens
        room = self.room if request.room is None else request.room
        room = min(room or 0, self.context - tokens - new)
        return room_for_turns(self.sessions.runtime, tokens, new, room)


def _fits(request: Request, kept: CachedSequence) -> bool:
    """Return whether a kept sequence's caches are large enough for a request."""
    tokens, new = len(request.prompt), request.max_new_tokens
    caches = kept.caches
    return tokens + new <= caches.target.shape.capacity and new <= caches.plan.spec.max_new_tokens


def _begin_to_score(sequence: CachedSequence, top: int, executor: TensorParallelExecutor) -> None:
    """Let the prefill of a sequence that was just opened score its prompt."""
    caches = sequence.caches
    max_rows = caches.plan.requirements.max_forward_tokens
    scorer = executor.run(Score(executor.sequences.index(caches), top, max_rows))
    assert isinstance(scorer, PromptScorer)
    sequence.scorer = scorer


def _size(request: Request) -> tuple[Tokens, int]:
    """Return the tokens of a prompt whose KV may be that of others, and the maximum of new ones.

    To score a prompt, all of it is prefilled: it shares its first token at most, which is too
    little to be reused.
    """
    end = None if request.num_prompt_logprobs is None else 1
    return request.tokens[:end], request.max_new_tokens
