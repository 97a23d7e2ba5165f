"""Generation turn by turn, on rank 0, in caches that keep the common prefix of two turns."""

from __future__ import annotations

import time
from collections.abc import Generator
from statistics import median

from torch import Tensor

from decoding.engine.generation import Generation
from decoding.engine.request import Request
from decoding.engine.session import SequenceState
from decoding.engine.session_manager import SequenceManager
from decoding.engine.stats import Stats
from decoding.prefix_cache.store import MIN_TOKENS
from decoding.speculation.coroutines import run
from decoding.speculation.draft_length import Lengths
from decoding.speculation.sequence import common_prefix
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div
from parallel.execution.batched_forward import ForwardRequest

DEFAULT_ROOM = 4096  # tokens of later turns that memory is planned for


class Conversation:
    """One sequence at a time, with caches that persist from turn to turn.

    A prompt that shares a prefix with the previous sequence continues in its caches from where the
    two differ; any other prompt starts a new sequence. So only the new turn is prefilled, or a
    question that replaces the last one, and the distribution is that of one long prompt.
    """

    def __init__(
        self,
        sessions: SequenceManager,
        stop_tokens: frozenset[int],
        lengths: dict[str, Lengths],
        context: int,
        room: int,
    ):
        """Start without caches; sequences have up to `context` tokens.

        Args:
            sessions: opens sequences on all ranks.
            stop_tokens: tokens that end a turn.
            lengths: draft lengths by mode, adapted from sequence to sequence.
            context: maximum tokens of a sequence.
            room: tokens of later turns that memory is planned for at once.
        """
        self.sessions, self.stop_tokens, self.lengths = sessions, stop_tokens, lengths
        self.context, self.room = context, room
        self._session: SequenceState | None = None
        self._generation: Generation | None = None  # the previous turn's
        self._token_s = 0.0  # prefill seconds per token, when the whole prompt was last prefilled
        self._forward_s = 0.0  # seconds per forward of the target, in the last turn that made one

    def generate(self, request: Request, stats: Stats) -> Generator[int, None, None]:
        """Yield the tokens that follow a prompt as they are verified; count in `stats`.

        Closing the generator ends the turn: the tokens verified by then remain. Raises
        InvalidRequestError, InsufficientMemoryError and RequestCancelled; the caches are freed
        then.
        """
        started = time.perf_counter()
        try:
            stats.truncated_tokens = request.truncated_tokens  # read by progress callbacks
            cached = self._session.target.length if self._session is not None else 0
            logits = self._extend(request, stats)
            if logits is None:
                logits = self._prefill(request)
            stats.discarded_tokens = max(0, cached - stats.reused_tokens)
            session = self._session
            assert session is not None
            generation = self._generation = Generation(request, session, stats, started)
            tokens = generation.sample_first(self.lengths, logits)
            yield from generation.emit(tokens, self.stop_tokens)
            while not generation.is_done:
                tokens = run(generation.round(), self._forward)
                yield from generation.emit(tokens, self.stop_tokens)
            self.sessions.record(session, stats.rounds)
        except (Exception, KeyboardInterrupt):
            self.close()  # an interrupted forward cannot be resumed
            raise

    def close(self) -> None:
        """Free the caches on all ranks."""
        session, self._session, self._generation = self._session, None, None
        if session is not None:
            self.sessions.close(session)

    def _extend(self, request: Request, stats: Stats) -> Tensor | None:
        """Prefill what the caches lack of a prompt, reallocating them if they are too small.

        Returns the logits (1, V) that follow it, or None if the whole prompt has to be prefilled.
        """
        session, new = self._session, request.max_new_tokens
        cached = self._reusable_tokens(request)
        if session is None or not cached:
            return None
        rest = len(request.prompt) - cached
        if (
            rest > MIN_TOKENS
            and self.sessions.cached_prefix(request.prompt, new) > cached + MIN_TOKENS
        ):
            return None
        self._generation = None  # its decoders reference caches that may have to be freed
        reserve: list[int] = []
        if len(request.prompt) + new > session.capacity or new > session.max_new_tokens:
            reserve = [new + self._room_for_turns(request), new]
        session.is_cancelled = request.is_cancelled
        try:
            logits = self.sessions.executor.extend(
                session, request.prompt, cached, reserve, request.progress
            )
        except InsufficientMemoryError:
            if not reserve:
                raise
            return None
        stats.reused_tokens = cached
        return logits

    def _prefill(self, request: Request) -> Tensor:
        """Prefill a prompt into new caches; return the logits (1, V) that follow it."""
        self.close()
        session = self._session = self._open(request)
        session.is_cancelled = request.is_cancelled
        started = time.perf_counter()
        logits = session.prefill(request.progress)
        logits[0, 0].item()  # waits for the device
        self._token_s = (time.perf_counter() - started) / len(request.prompt)
        return logits

    def _open(self, request: Request) -> SequenceState:
        """Open a sequence with room for later turns if memory allows, else for this one alone."""
        prompt, new = request.prompt, request.max_new_tokens
        if room := self._room_for_turns(request):
            try:
                return self.sessions.open(prompt, new + room, name=request.name)
            except InsufficientMemoryError:
                pass
        return self.sessions.open(prompt, new, name=request.name)

    def _room_for_turns(self, request: Request) -> int:
        """Return the number of tokens to reserve for later turns."""
        tokens, end = len(request.prompt), len(request.prompt) + request.max_new_tokens
        room = min(self.room, self.context - end)
        if self.sessions.runtime.settings.deterministic:
            return 0  # every turn prefills its whole prompt
        rope_key = self.sessions.runtime.target.config.rope_key
        while room and rope_key(tokens, end) != rope_key(tokens, end + room):
            room //= 2  # LongRoPE depends on the maximum length
        return room

    def _reusable_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt stay in the caches; 0 to prefill all of it."""
        session, generation = self._session, self._generation
        if session is None or generation is None or session.runtime.settings.deterministic:
            return 0  # KV of decoding, or of a shorter prefill, differs bitwise from one prefill
        tokens = len(request.prompt)
        if not session.same_rope_as(tokens, request.max_new_tokens):
            return 0
        common = common_prefix(generation.rollback_drafts(), request.prompt)
        cached = min(common, session.target.length, tokens - 1)
        stats = generation.stats
        if verify_s := [each.verify_s for each in stats.rounds]:
            self._forward_s = median(verify_s)
        elif forwards := stats.levels[0].stats.forwards:
            self._forward_s = stats.decode_s / forwards
        stats.release()
        # each chunk streams all cached KV, as a decoding forward does
        chunks = ceil_div(tokens - cached, session.extend_chunk)
        is_slower = chunks > 1 and chunks * self._forward_s > cached * self._token_s
        return 0 if is_slower else cached

    def _forward(self, request: ForwardRequest) -> Tensor:
        """Run a forward of this sequence alone, on all ranks of its model."""
        (logits,) = self.sessions.executor.forward([request])
        return logits
