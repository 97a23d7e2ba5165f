"""The choices behind a law, without the law itself: reading them needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from decoding.config.option import SAMPLING, check_options, option
from offload.errors import TierForceError

LEAST_TEMPERATURE = 1e-30  # logits divided by less overflow
LEAST_TOP_P = 1e-30  # less is nothing in float32


@dataclass(frozen=True)
class SamplingOptions:
    """How logits are warped."""

    temperature: float = option(
        "How bold the choice of each token is.",
        value=0.6,
        zero="greedy",
        at_least=0,
    )
    top_k: int = option(
        "Draw only from this many of the likeliest tokens.",
        value=0,
        group=SAMPLING,
        unit="tokens",
        zero="off",
        at_least=0,
    )
    top_p: float = option(
        "Keep only the likeliest tokens that together have this probability, which is at most 1.",
        value=0.9,
    )
    seed: int = option(
        "Where the noise starts. Only with --identical does the same seed promise the same text: "
        "else it depends on draft lengths, too, which go by the clock.",
        value=0,
        group=SAMPLING,
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for values of which no law can be made."""
        check_options(self)
        if self.temperature == float("inf"):
            raise TierForceError("`temperature` must be a finite number, found inf.")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise TierForceError(
                f"`temperature` must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, found "
                f"{self.temperature:g}."
            )
        if not LEAST_TOP_P <= self.top_p <= 1:
            raise TierForceError(
                f"`top_p` must be at least {LEAST_TOP_P:g} and at most 1, found {self.top_p}."
            )
        if not 0 <= self.seed < 2**63:
            raise TierForceError(f"`seed` must be between 0 and 2**63 - 1, found {self.seed}.")
