"""Timed and counted decoding after a prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from decoding import Engine, Sampling, Settings
from decoding.engine.hierarchy import build_decoder
from decoding.engine.request import Request, RequestState
from decoding.engine.session import SequenceState
from decoding.planning.requirements import noise_positions
from decoding.speculation.coroutines import run
from decoding.speculation.decoders import Decoder
from decoding.speculation.draft_length import Lengths, RoundStats
from decoding.speculation.randomness import make_randomness
from decoding.speculation.sequence import TokenSequence


@contextmanager
def endless(
    target: str | Path, draft: str | Path | None, settings: Settings, device: str = "auto"
) -> Iterator[Engine]:
    """Yield an engine without stop tokens, so that all outputs have the same length."""
    engine = Engine.from_pretrained(target, draft, settings, device=device)
    engine.scheduler.stop_tokens = frozenset()
    yield engine
    engine.close()


@dataclass(frozen=True)
class Run:
    """One timed decoding, with its counts."""

    seconds: float
    tokens: int
    tokens_per_verification: float | None = None
    acceptance: float | None = None  # share of draft tokens that the target accepts
    link_bytes: int = 0
    rounds: list[RoundStats] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / self.tokens


class PrefilledPrompt:
    """A prompt that is prefilled once, and continued any number of times."""

    def __init__(self, session: SequenceState):
        self.session = session
        self.first = int(session.prefill().argmax())
        self._start = [level.cache.snapshot() for level in session.levels]

    def run(
        self, sampling: Sampling, lengths: Lengths | None = None, limit: float = math.inf
    ) -> Run:
        """Decode all new tokens after the first, or as many as take `limit` seconds.

        `lengths`: draft lengths; None for those of the settings.
        """
        session = self.session
        for level, state in zip(session.levels, self._start, strict=True):
            level.cache.restore(state)
        before = session.target.traffic.link_in
        decoder, seconds = decode_loop(session, self.first, sampling, lengths, limit)
        return Run(
            seconds,
            decoder.stats.produced,
            decoder.stats.tokens_per_forward,
            decoder.stats.acceptance_rate,
            session.target.traffic.link_in - before,
            decoder.rounds,
        )


def decode_loop(
    session: SequenceState,
    first: int,
    sampling: Sampling,
    lengths: Lengths | None = None,
    limit: float = math.inf,
    on_logits: Callable[[Tensor, Tensor], None] | None = None,
) -> tuple[Decoder, float]:
    """Decode all new tokens of a sequence after `first`, or as many as take `limit` seconds.

    `on_logits` is called as `Request.on_logits` is. Returns the decoder, with its counts, and the
    seconds it took.
    """
    positions = noise_positions(session.plan.requirements)
    randomness = make_randomness(sampling, session.prompt.device, positions)
    sequence = TokenSequence([*session.prompt.tolist(), first])
    decoder = build_decoder(session, sequence, sampling, randomness, lengths)
    decoder.on_logits = on_logits
    started = time.perf_counter()
    while (missing := session.plan.spec.max_new_tokens - 1 - decoder.stats.produced) > 0:
        run(decoder.round(missing), lambda request: session.slot.graphs.run([request])[0])
        if time.perf_counter() - started > limit:
            break
    return decoder, time.perf_counter() - started


def run_together(engine: Engine, batch: Sequence[Request]) -> list[RequestState]:
    """Return the finished states of requests that arrive together; raise their errors."""
    states = [engine.scheduler.add(request) for request in batch]
    while engine.scheduler.is_busy:
        engine.scheduler.step()
    for state in states:
        if state.error is not None:
            raise state.error
    return states
