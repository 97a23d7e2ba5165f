"""A text that is written turn after turn: what caches hold of it is not read again; on rank 0."""

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
    """One text at a time, on caches that stay from turn to turn.

    A prompt that begins as the text before did goes on in its caches, from where the two differ.
    Any other is a new text. So what is read anew is the turn alone, or a question in place of the
    last one, and the law is that of one long prompt.
    """

    def __init__(
        self,
        sessions: SequenceManager,
        stop_tokens: frozenset[int],
        lengths: dict[str, Lengths],
        context: int,
        room: int,
    ):
        """Keep caches of texts of up to `context` tokens.

        Args:
            sessions: which open them on all ranks.
            stop_tokens: that end a turn.
            lengths: draft lengths by mode, which learn from text to text.
            context: tokens of the longest text.
            room: tokens of later turns that memory is planned for at once.
        """
        self.sessions, self.stop_tokens, self.lengths = sessions, stop_tokens, lengths
        self.context, self.room = context, room
        self._session: SequenceState | None = None
        self._writing: Generation | None = None  # of the turn before
        self._token_s = 0.0  # that reading the whole text took, for each of its tokens
        self._pass_s = 0.0  # that a pass of the target took, when last one was made

    def generate(self, request: Request, stats: Stats) -> Generator[int, None, None]:
        """Yield what follows a prompt, as it is verified; count in `stats`.

        A generator that is closed ends the turn: what stands by then stands. Raises InvalidRequestError,
        InsufficientMemoryError where memory does not do, and RequestCancelled; nothing is kept then.
        """
        started = time.perf_counter()
        try:
            stats.truncated_tokens = request.truncated_tokens  # which progress may tell
            cached = self._session.target.length if self._session is not None else 0
            logits = self._read_on(request, stats)
            if logits is None:
                logits = self._read(request)
            stats.discarded_tokens = max(0, cached - stats.reused_tokens)
            session = self._session
            assert session is not None
            writing = self._writing = Generation(request, session, stats, started)
            written = writing.sample_first(self.lengths, logits)
            yield from writing.generate(written, self.stop_tokens)
            while not writing.is_done:
                written = run(writing.round(), self._make)
                yield from writing.generate(written, self.stop_tokens)
            self.sessions.record(session, stats.rounds)
        except (Exception, KeyboardInterrupt):
            self.close()  # a pass that is left half made is not made again
            raise

    def close(self) -> None:
        """Let go of the caches, on all ranks."""
        session, self._session, self._writing = self._session, None, None
        if session is not None:
            self.sessions.close(session)

    def _read_on(self, request: Request, stats: Stats) -> Tensor | None:
        """Read what the caches lack of a prompt, in larger ones where these do not do.

        Returns the logits (1, V) behind it; None where it has to be read anew.
        """
        session, new, kept = self._session, request.max_new_tokens, self._kept(request)
        if session is None or not kept:
            return None
        rest = len(request.prompt) - kept
        if (
            rest > MIN_TOKENS
            and self.sessions.cached_prefix(request.prompt, new) > kept + MIN_TOKENS
        ):
            return None
        self._writing = None  # whose decoders hold caches that may have to go
        rooms: list[int] = []
        if len(request.prompt) + new > session.capacity or new > session.new:
            rooms = [new + self._later(request), new]
        session.is_cancelled = request.is_cancelled
        try:
            logits = self.sessions.extend(session, request.prompt, kept, rooms, request.progress)
        except InsufficientMemoryError:
            if not rooms:
                raise
            return None
        stats.reused_tokens = kept
        return logits

    def _read(self, request: Request) -> Tensor:
        """Read a prompt into caches of its own; return the logits (1, V) behind it."""
        self.close()
        session = self._session = self._open(request)
        session.is_cancelled = request.is_cancelled
        started = time.perf_counter()
        logits = session.prefill(request.progress)
        logits[0, 0].item()  # until all compute is over
        self._token_s = (time.perf_counter() - started) / len(request.prompt)
        return logits

    def _open(self, request: Request) -> SequenceState:
        """Open a text with room for turns to come, if there is; else for this one."""
        prompt, new = request.prompt, request.max_new_tokens
        if later := self._later(request):
            try:
                return self.sessions.open(prompt, new + later, name=request.name)
            except InsufficientMemoryError:
                pass
        return self.sessions.open(prompt, new, name=request.name)

    def _later(self, request: Request) -> int:
        """Return for how many tokens of later turns there is to be room."""
        tokens, end = len(request.prompt), len(request.prompt) + request.max_new_tokens
        room = min(self.room, self.context - end)
        if self.sessions.runtime.settings.deterministic:
            return 0  # they begin anew
        angles = self.sessions.runtime.target.config.rope_key
        while room and angles(tokens, end) != angles(tokens, end + room):
            room //= 2  # LongRoPE goes by all that may follow
        return room

    def _kept(self, request: Request) -> int:
        """Return how many tokens of a prompt are not read again; 0 where all of it is."""
        session, writing = self._session, self._writing
        if session is None or writing is None or session.runtime.settings.deterministic:
            return 0  # passes, and the reading of a shorter prompt, write other bits
        tokens = len(request.prompt)
        if not session.same_rope_as(tokens, request.max_new_tokens):
            return 0
        known = common_prefix(writing.rollback_drafts(), request.prompt)
        kept = min(known, session.target.length, tokens - 1)
        stats = writing.stats
        if waits := [each.verify_s for each in stats.rounds]:
            self._pass_s = median(waits)
        elif passes := stats.levels[0].stats.forwards:
            self._pass_s = stats.decode_s / passes
        stats.release()
        # each part that is read at once waits for all that the caches hold, as a pass does
        parts = ceil_div(tokens - kept, session.extend_chunk)
        return 0 if parts > 1 and parts * self._pass_s > kept * self._token_s else kept

    def _make(self, asked: ForwardRequest) -> Tensor:
        """Make a pass of this text alone, on all ranks of its model."""
        (logits,) = self.sessions.executor([asked])
        return logits
