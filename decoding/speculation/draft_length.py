"""Draft lengths: fixed, or adapted to the acceptance rate and the seconds of past rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decoding.config.settings import Settings

MAX_CATCH_UP = 32  # pending tokens per forward

# adaptive lengths
_DECAY = 0.95  # weight of a round after the next one
_PRIOR_TOKENS = 24.0  # weight of the prior acceptance rate, in tokens
_PRIOR_RATE = 0.93  # prior acceptance rate
_MAX_CARRIED_TOKENS = 96.0  # weight of the previous request's acceptance rate, in tokens
_SLOPE_WEIGHT = 4.0  # weight of the assumed slope against the measured one, in rows squared
_FLAT_ROWS = 32.0  # initial assumption: this many additional rows double the seconds of a forward
_MAX_FLAT_ROWS = 1024.0


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the expected number of tokens from one verification of `length` draft tokens.

    Leviathan et al. 2023, arXiv 2211.17192, equation 1: 1 + a + ... + a^length, where a is the
    probability that a draft token is accepted if all before it are.
    """
    if acceptance == 1:
        return length + 1
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def timed_tokens(length: int, acceptance: float, meanwhile: float) -> float:
    """Return the expected tokens of a draft that are not drafted during the verification before.

    That drafts `meanwhile` tokens, the first of which it tests itself. The others begin the draft,
    if that one and all before it are accepted.
    """
    return length - acceptance ** (length + 1) * min(length, max(0.0, meanwhile - 1))


def best_length(
    lengths: Iterable[int], acceptance: float, round_s: Callable[[int], float]
) -> tuple[int, float]:
    """Return the draft length with the fewest seconds per token, and these seconds.

    `round_s` returns the seconds of a round by its draft length. Ties go to the first length.
    """
    token_s = {n: round_s(n) / expected_tokens(acceptance, n) for n in lengths}
    best = min(token_s, key=token_s.__getitem__)
    return best, token_s[best]


@dataclass(frozen=True)
class RoundStats:
    """The counts and seconds of one round of a level."""

    drafted: int  # draft tokens
    accepted: int  # accepted draft tokens
    rows: int  # query tokens of the verification forward
    draft_s: float
    verify_s: float
    ahead: int = 0  # draft tokens that were drafted during a verification, this or the one before
    meanwhile: int = 0  # tokens drafted during this verification
    # whether the last draft token is the first of these, tested where a bonus token would follow
    has_tested: bool = False

    @property
    def timed(self) -> int:
        """Return the draft tokens that took `draft_s`."""
        return self.drafted - self.ahead


class DraftLength(ABC):
    """The length of a level's next draft.

    It may depend on past rounds only: verification then keeps the output distribution exact.
    """

    @abstractmethod
    def reset(self, start: int) -> None:
        """Start another request; `start` is the first length if nothing has been measured yet."""

    @abstractmethod
    def next(self) -> int:
        """Return the length of the next draft, at least 1."""

    @abstractmethod
    def record(self, stats: RoundStats) -> None:
        """Record a finished round."""


class Fixed(DraftLength):
    """A constant length."""

    def __init__(self, length: int):
        if length < 1:
            raise ValueError(f"the draft length must be at least 1 token, found {length}")
        self.max_length = length

    def reset(self, start: int) -> None:
        pass

    def next(self) -> int:
        return self.max_length

    def record(self, stats: RoundStats) -> None:
        pass


class ForwardSeconds:
    """The seconds of a verification forward, linear in its rows: decaying least squares."""

    def __init__(self) -> None:
        self._flat_rows = _FLAT_ROWS
        self._weight = self._rows = self._seconds = self._rows2 = self._cross = 0.0

    def reset(self) -> None:
        """Start another request.

        The seconds of a forward depend on the context length, but the ratio of slope to base stays
        about the same.
        """
        if self._weight:
            slope = self._slope()
            base = (self._seconds - slope * self._rows) / self._weight
            self._flat_rows = (
                min(_MAX_FLAT_ROWS, max(1.0, base / slope)) if slope else _MAX_FLAT_ROWS
            )
            self._weight = self._rows = self._seconds = self._rows2 = self._cross = 0.0

    def record(self, rows: int, seconds: float) -> None:
        """Record the seconds of a forward with this many rows."""
        # limits outliers, such as a stall of the machine; the first forwards are taken as they are
        if self._weight > 1:
            seconds = min(seconds, 3 * self.line()(rows))
        self._weight = _DECAY * self._weight + 1
        self._rows = _DECAY * self._rows + rows
        self._rows2 = _DECAY * self._rows2 + rows**2
        self._seconds = _DECAY * self._seconds + seconds
        self._cross = _DECAY * self._cross + rows * seconds

    def line(self) -> Callable[[int], float]:
        """Return a function from the rows of a forward to its seconds."""
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        slope = self._slope()
        return lambda rows: max(0.1 * mean, mean + slope * (rows - mean_rows))

    def _slope(self) -> float:
        """Return the seconds per row; close to the assumed slope if the rows have varied little."""
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows2 - self._weight * mean_rows**2
        covariance = self._cross - self._weight * mean_rows * mean
        assumed = mean / (mean_rows + self._flat_rows)
        return max(0.0, (covariance + _SLOPE_WEIGHT * assumed) / (spread + _SLOPE_WEIGHT))


class Adaptive(DraftLength):
    """The length n from 1 to `max_length` with the most tokens per second.

    It maximizes (1 - a^(n+1)) / (1 - a) / (t_verify(n) + n t_draft). The first factor is the
    expected number of tokens from n draft tokens with acceptance rate a (Leviathan et al. 2023,
    arXiv 2211.17192, equation 1). Estimated from past rounds are a, the seconds per draft token,
    and the seconds of a verification forward, linear in its rows. The estimates are decaying
    averages, since content and machine load change over time; some weight is carried over to the
    next request.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._next = 1
        self._accepted, self._tested = _PRIOR_TOKENS * _PRIOR_RATE, _PRIOR_TOKENS
        self._drafted = self._draft_s = 0.0
        self._meanwhile = 0.0  # tokens drafted during a verification
        self._verify_s = ForwardSeconds()

    def reset(self, start: int) -> None:
        if not self._drafted:
            self._next = min(start, self.max_length)
        scale = min(1.0, _MAX_CARRIED_TOKENS / self._tested)
        self._accepted, self._tested = scale * self._accepted, scale * self._tested
        self._verify_s.reset()

    def next(self) -> int:
        return self._next

    def record(self, stats: RoundStats) -> None:
        self._verify_s.record(stats.rows, stats.verify_s)
        if not stats.drafted:
            return
        draft_s = stats.draft_s
        # limits outliers, such as a draft model that had to catch up
        if self._drafted:
            draft_s = min(draft_s, 3 * stats.timed * self._draft_s / self._drafted)
        self._accepted = _DECAY * self._accepted + stats.accepted
        self._tested = _DECAY * self._tested + stats.accepted + (stats.accepted < stats.drafted)
        if stats.timed:
            self._drafted = _DECAY * self._drafted + stats.timed
            self._draft_s = _DECAY * self._draft_s + draft_s
        self._meanwhile += (1 - _DECAY) * (stats.meanwhile - self._meanwhile)
        if not self._drafted:
            return
        per_token, verify_s = self._draft_s / self._drafted, self._verify_s.line()

        def round_s(n: int) -> float:
            timed = timed_tokens(n, self.acceptance, self._meanwhile)
            return verify_s(n + 1) + timed * per_token

        self._next, _ = best_length(range(1, self.max_length + 1), self.acceptance, round_s)

    @property
    def acceptance(self) -> float:
        """Return the probability that a draft token is accepted if all before it are."""
        return self._accepted / self._tested


Lengths = tuple[DraftLength, ...]


def draft_lengths(settings: Settings, mode: str) -> Lengths:
    """Return the lengths in a mode: fixed ones for options that are set, else adaptive ones.

    They are reused across requests.
    """
    inner = settings.inner_draft_length_range
    ranges = settings.draft_length_range(mode), inner, inner
    return tuple(
        Fixed(lengths[0]) if len(lengths) == 1 else Adaptive(lengths[-1]) for lengths in ranges
    )
