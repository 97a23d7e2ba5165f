"""One text in the making on rank 0: its session, its decoders, and what it took so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from decoding.engine.request import Request
from decoding.engine.session import Session
from decoding.engine.stats import Stats
from decoding.speculation.coroutines import Passes
from decoding.speculation.decoders import Decoder
from decoding.speculation.draft_length import Lengths, draft_lengths
from decoding.speculation.randomness import chance_of
from decoding.speculation.rejection_sampler import read
from decoding.speculation.sequence import Text


class Writing:
    """A text whose session is open: the prompt is read first, then round after round is made."""

    decoder: Decoder  # once the prompt has been read

    def __init__(self, request: Request, session: Session, stats: Stats, started: float):
        """`started`: when the text was asked for, by `time.perf_counter`."""
        self.request, self.session, self.stats = request, session, stats
        self._started = started
        self._clock: Callable[[], float] = time.perf_counter
        self._decoding_since = 0.0  # by that clock
        stats.prompt_tokens, stats.dropped_tokens = len(request.prompt), request.dropped
        stats.plan, stats.mode = session.plan, session.runtime.mode
        stats.choice = session.choice

    @property
    def is_done(self) -> bool:
        return self.stats.finish_reason is not None

    def begin(
        self,
        lengths: dict[str, Lengths],
        logits: Tensor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[int]:
        """Draw the first new token, and return it.

        Raises DocumentError where a law is not made of numbers.

        Args:
            lengths: draft lengths of texts before, by mode.
            logits: (1, V) behind the prompt, which has been read.
            clock: tells seconds.
        """
        session, stats, request = self.session, self.stats, self.request
        sampling, device = request.sampling, session.prompt.device
        runtime = session.runtime
        chance = chance_of(sampling, device, runtime.settings.identical)
        law = chance.law(sampling, logits)[0]
        new = read(chance.draw(law, len(request.prompt)), law)
        if request.observe:
            request.observe(logits)
        text = Text([*session.prompt.tolist(), *new])
        own = lengths.setdefault(runtime.mode, draft_lengths(runtime.settings))
        self.decoder = session.decoder(text, sampling, chance, own, clock)
        stats.rounds = self.decoder.rounds
        self.decoder.observe = request.observe
        stats.watch(session, self.decoder)
        stats.first_token_s = time.perf_counter() - self._started
        self._clock, self._decoding_since = clock, clock()
        return new

    def settle(self) -> list[int]:
        """Let no level hold what does not stand; return the text, whose beginning each cache holds.

        To be called between rounds.
        """
        for level in self.decoder.levels():
            level.sync([])
        return self.decoder.text.since(0)

    def round(self) -> Passes[list[int]]:
        """Make one more round, by passes; return its tokens."""
        return self.decoder.round(self.request.new - self.stats.new_tokens)

    def write(self, new: Sequence[int], stop_tokens: frozenset[int]) -> Iterator[int]:
        """Yield a round's tokens up to and without a stop token, and count them.

        Behind the last of a text that is as long as it may be, or that stops, it `is_done`.
        """
        stats = self.stats
        for token in new:
            if token in stop_tokens:
                stats.finish_reason = "stop"
                return
            stats.token_ids.append(token)
            stats.decode_s = self._clock() - self._decoding_since
            yield token
        if self.request.watch:
            self.request.watch(stats)
        if stats.new_tokens >= self.request.new:
            stats.finish_reason = "length"
