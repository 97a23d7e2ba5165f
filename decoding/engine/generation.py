"""The generation of one request on rank 0: its sequence state, its decoders, and its counts."""

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
    """A request with an open sequence: prefill comes first, then round after round."""

    decoder: Decoder  # set by `sample_first`

    def __init__(self, request: Request, session: SequenceState, stats: Stats, started: float):
        """`started`: the `time.perf_counter` when the request arrived."""
        self.request, self.session, self.stats = request, session, stats
        self._started = started
        self._clock: Callable[[], float] = time.perf_counter
        self._decoding_since = 0.0  # seconds of `_clock`
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
        """Sample the first new token, and return it.

        Raises InvalidRequestError if the logits are not finite.

        Args:
            lengths: draft lengths by mode, adapted over past requests.
            logits: (1, V), those that follow the prefilled prompt.
            clock: returns seconds.
        """
        session, stats, request = self.session, self.stats, self.request
        sampling, runtime = request.sampling, session.runtime
        device = session.prompt.device
        randomness = make_randomness(sampling, device, runtime.settings.deterministic)
        probs = randomness.probs(sampling, logits)[0]
        tokens = to_host(randomness.draw(probs, len(request.prompt)), probs)
        if request.on_logits:
            request.on_logits(logits)
        sequence = TokenSequence([*session.prompt.tolist(), *tokens])
        own_lengths = lengths.setdefault(runtime.mode, draft_lengths(runtime.settings))
        self.decoder = session.decoder(sequence, sampling, randomness, own_lengths, clock)
        stats.rounds = self.decoder.rounds
        self.decoder.on_logits = request.on_logits
        stats.attach(session, self.decoder)
        stats.first_token_s = time.perf_counter() - self._started
        self._clock, self._decoding_since = clock, clock()
        return tokens

    def rollback_drafts(self) -> list[int]:
        """Drop unaccepted draft tokens from every level, and return the committed sequence.

        Each cache then holds a prefix of it. Called between rounds.
        """
        for level in self.decoder.levels():
            level.sync([])
        return self.decoder.sequence.tokens_from(0)

    def round(self) -> Steps[list[int]]:
        """Run one more round, as steps of one forward each; return its tokens."""
        return self.decoder.round(self.request.max_new_tokens - self.stats.new_tokens)

    def emit(self, tokens: Sequence[int], stop_tokens: frozenset[int]) -> Iterator[int]:
        """Yield a round's tokens up to and excluding a stop token, and count them.

        After a stop token, or the request's last token, the generation `is_done`.
        """
        stats = self.stats
        for token in tokens:
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
