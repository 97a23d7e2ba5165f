"""How long to draft: a fixed length, or the one that pays best by what past rounds took."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decoding.config.defaults import MAX_DRAFT, MAX_INNER_DRAFT
from decoding.config.settings import Settings

NOISE_POSITIONS = 128  # whose noise is remembered, where it is bound to positions
MAX_CATCH_UP = 32  # pending tokens that a model reads in one pass

# of adaptive lengths
_DECAY = 0.95  # what a round still counts after the next
_PRIOR = 24.0  # tokens that an acceptance rate of _RATE was seen on before the first
_RATE = 0.93
_KEPT = 96.0  # tokens that the acceptance rate of the text before counts for
# rows squared: how much variation it takes to believe in a slope other than the one supposed
_STIFF = 4.0
_FLAT_ROWS = 32.0  # supposed at first: a pass of so many rows more costs twice as much
_FLATTEST = 1024.0


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the tokens that a verification of `length` drafted ones yields on average.

    Leviathan et al. 2023, arXiv 2211.17192, equation 1: 1 + a + ... + a^length, where each token
    stands with probability a if all before it do.
    """
    if acceptance == 1:
        return length + 1
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def best_length(
    lengths: Iterable[int], acceptance: float, round_s: Callable[[int], float]
) -> tuple[int, float]:
    """Return the draft length with the fewest seconds a token, and these seconds.

    `round_s` tells the seconds of a round by its draft length. Of equals the shortest is taken.
    """
    token_s = {n: round_s(n) / expected_tokens(acceptance, n) for n in lengths}
    best = min(token_s, key=token_s.__getitem__)
    return best, token_s[best]


@dataclass(frozen=True)
class RoundStats:
    """The counts and seconds of one round of a level."""

    drafted: int  # tokens the level below proposed
    accepted: int  # of these, the tokens that stood
    rows: int  # tokens of the verifying pass
    draft_s: float
    verify_s: float


class DraftLength(ABC):
    """The length of a level's next draft.

    It may follow from past rounds only: then the output law stays what it is.
    """

    @abstractmethod
    def reset(self, start: int) -> None:
        """Begin another text; `start` is a fair length where nothing is known yet."""

    @abstractmethod
    def next(self) -> int:
        """Return the length of the next draft, at least 1."""

    @abstractmethod
    def record(self, past: RoundStats) -> None:
        """Learn from a round that is over."""


class Fixed(DraftLength):
    """A length that is always the same."""

    def __init__(self, length: int):
        if length < 1:
            raise ValueError(f"a draft has at least 1 token, found length {length}")
        self.max_length = length

    def reset(self, start: int) -> None:
        pass

    def next(self) -> int:
        return self.max_length

    def record(self, past: RoundStats) -> None:
        pass


class ForwardSeconds:
    """The seconds of a verifying pass as a line in its rows: least squares over fading rounds."""

    def __init__(self) -> None:
        self._flat_rows = _FLAT_ROWS
        self._weight = self._rows = self._seconds = self._rows2 = self._cross = 0.0

    def reset(self) -> None:
        """Begin another text.

        Behind another context a pass costs something else, but is about as flat in its rows.
        """
        if self._weight:
            slope = self._slope()
            base = (self._seconds - slope * self._rows) / self._weight
            self._flat_rows = min(_FLATTEST, max(1.0, base / slope)) if slope else _FLATTEST
            self._weight = self._rows = self._seconds = self._rows2 = self._cross = 0.0

    def record(self, rows: int, seconds: float) -> None:
        """Take in a pass of so many rows."""
        # a machine that was away for a moment says nothing of a pass; a new text does
        if self._weight > 1:
            seconds = min(seconds, 3 * self.line()(rows))
        self._weight = _DECAY * self._weight + 1
        self._rows = _DECAY * self._rows + rows
        self._rows2 = _DECAY * self._rows2 + rows**2
        self._seconds = _DECAY * self._seconds + seconds
        self._cross = _DECAY * self._cross + rows * seconds

    def line(self) -> Callable[[int], float]:
        """Return a function from the rows of a pass to its seconds."""
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        slope = self._slope()
        return lambda rows: max(0.1 * mean, mean + slope * (rows - mean_rows))

    def _slope(self) -> float:
        """Return the seconds a row: what is supposed, where past rounds say little."""
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows2 - self._weight * mean_rows**2
        together = self._cross - self._weight * mean_rows * mean
        supposed = mean / (mean_rows + self._flat_rows)
        return max(0.0, (together + _STIFF * supposed) / (spread + _STIFF))


class Adaptive(DraftLength):
    """The length n from 1 to `max_length` that makes most tokens a second.

    That is the n with the greatest (1 - a^(n+1)) / (1 - a) / (t_verify(n) + n t_draft). The
    numerator is what a draft of n yields when each token stands with probability a (Leviathan et
    al. 2023, arXiv 2211.17192, equation 1). Three things are averages of past rounds: a, the
    seconds a drafted token takes, and those of a verifying pass, a line in its rows. The averages
    forget, for a text changes, and so does a machine. Of one text a little is remembered in the
    next.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._next = 1
        self._accepted, self._tested = _PRIOR * _RATE, _PRIOR
        self._drafted = self._draft_s = 0.0
        self._verify_s = ForwardSeconds()

    def reset(self, start: int) -> None:
        if not self._drafted:
            self._next = min(start, self.max_length)
        kept = min(1.0, _KEPT / self._tested)
        self._accepted, self._tested = kept * self._accepted, kept * self._tested
        self._verify_s.reset()

    def next(self) -> int:
        return self._next

    def record(self, past: RoundStats) -> None:
        self._verify_s.record(past.rows, past.verify_s)
        if not past.drafted:
            return
        draft_s = past.draft_s
        # a draft model that had to catch up says nothing of what a drafted token takes
        if self._drafted:
            draft_s = min(draft_s, 3 * past.drafted * self._draft_s / self._drafted)
        self._accepted = _DECAY * self._accepted + past.accepted
        self._tested = _DECAY * self._tested + past.accepted + (past.accepted < past.drafted)
        self._drafted = _DECAY * self._drafted + past.drafted
        self._draft_s = _DECAY * self._draft_s + draft_s
        per_token, verify_s = self._draft_s / self._drafted, self._verify_s.line()
        self._next, _ = best_length(
            range(1, self.max_length + 1),
            self.acceptance,
            lambda n: verify_s(n + 1) + n * per_token,
        )

    @property
    def acceptance(self) -> float:
        """Return the chance that a drafted token stands when all before it do."""
        return self._accepted / self._tested


Lengths = tuple[DraftLength, ...]


def draft_lengths(settings: Settings) -> Lengths:
    """Return fixed lengths where they are set, else adaptive ones, to be used text after text."""
    inner = (settings.num_inner_draft_tokens, MAX_INNER_DRAFT)
    rows = ((settings.num_draft_tokens, MAX_DRAFT), inner, inner)
    return tuple(Adaptive(longest) if given is None else Fixed(given) for given, longest in rows)
