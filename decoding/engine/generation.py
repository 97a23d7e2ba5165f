"""One text in the making on rank 0: its session, its decoders, and what it took so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from decoding.engine.request import Request
from decoding.engine.session import SequenceState
from decoding.engine.stats import Stats
from decoding.speculation.coroutines import Steps
from decoding.speculation.decoders import Decoder
from decoding.speculation.draft_length import Lengths, draft_lengths
from decoding.speculation.randomness import make_randomness
from decoding.speculation.rejection_sampler import to_host
from decoding.speculation.sequence import TokenSequence


class Generation:
    """A text whose session is open: the prompt is read first, then round after round is made."""

    decoder: Decoder  # once the prompt has been read

    def __init__(self, request: Request, session: SequenceState, stats: Stats, started: float):
        """`started`: when the text was asked for, by `time.perf_counter`."""
        self.request, self.session, self.stats = request, session, stats
        self._started = started
        self._clock: Callable[[], float] = time.perf_counter
        self._decoding_since = 0.0  # by that clock
        stats.prompt_tokens, stats.truncated_tokens = len(request.prompt), request.truncated_tokens
        stats.plan, stats.mode = session.plan, session.runtime.mode
        stats.strategy = session.choice

    @property
    def is_done(self) -> bool:
        return self.stats.finish_reason is not None

    def sample_first(
        self,
        lengths: dict[str, Lengths],
        logits: Tensor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[int]:
        """Draw the first new token, and return it.

        Raises InvalidRequestError where a law is not made of numbers.

        Args:
            lengths: draft lengths of texts before, by mode.
            logits: (1, V) behind the prompt, which has been read.
            clock: tells seconds.
        """
        session, stats, request = self.session, self.stats, self.request
        sampling, device = request.sampling, session.prompt.device
        runtime = session.runtime
        chance = make_randomness(sampling, device, runtime.settings.deterministic)
        law = chance.probs(sampling, logits)[0]
        new = to_host(chance.draw(law, len(request.prompt)), law)
        if request.on_logits:
            request.on_logits(logits)
        text = TokenSequence([*session.prompt.tolist(), *new])
        own = lengths.setdefault(runtime.mode, draft_lengths(runtime.settings))
        self.decoder = session.decoder(text, sampling, chance, own, clock)
        stats.rounds = self.decoder.rounds
        self.decoder.on_logits = request.on_logits
        stats.attach(session, self.decoder)
        stats.first_token_s = time.perf_counter() - self._started
        self._clock, self._decoding_since = clock, clock()
        return new

    def rollback_drafts(self) -> list[int]:
        """Let no level hold what does not stand; return the text, whose beginning each cache holds.

        To be called between rounds.
        """
        for level in self.decoder.levels():
            level.sync([])
        return self.decoder.sequence.tokens_from(0)

    def round(self) -> Steps[list[int]]:
        """Make one more round, by passes; return its tokens."""
        return self.decoder.round(self.request.max_new_tokens - self.stats.new_tokens)

    def generate(self, new: Sequence[int], stop_tokens: frozenset[int]) -> Iterator[int]:
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
        if self.request.on_stats:
            self.request.on_stats(stats)
        if stats.new_tokens >= self.request.max_new_tokens:
            stats.finish_reason = "length"
