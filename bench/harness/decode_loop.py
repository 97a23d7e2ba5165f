"""A prompt that was read, continued to its end: what benchmarks time and count."""

from __future__ import annotations

import time

import torch

from decoding import Sampling
from decoding.session import Lengths, Session
from decoding.speculation.decoders import Decoder
from decoding.speculation.text import Text
from parallel.lockstep import PassLeader


def continued(
    session: Session, first: int, sampling: Sampling, lengths: Lengths | None = None
) -> tuple[Decoder, float]:
    """Decode all of the session's new tokens but the `first`, which is given; what did it, with its
    counts, and the seconds.
    """
    generator = torch.Generator(session.prompt.device).manual_seed(sampling.seed)
    leader = PassLeader(session.announced, session.max_tokens, session.forward)
    text = Text([*session.prompt.tolist(), first])
    decoder = session.decoder(text, leader, sampling, generator, lengths)
    started = time.perf_counter()
    while (missing := session.new - 1 - decoder.stats.produced) > 0:
        decoder.round(missing)
    return decoder, time.perf_counter() - started
