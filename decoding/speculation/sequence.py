"""The token sequence that all levels of a hierarchy share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MIN_GROWTH = 1024  # tokens


class TokenSequence:
    """The committed tokens of one request, append-only.

    Every level has read them up to its own position. Draft tokens are no part of the sequence until
    they are accepted.
    """

    def __init__(self, tokens: Sequence[int]):
        self._buffer = np.array(tokens, dtype=np.int64)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: Sequence[int]) -> None:
        """Commit tokens at the end of the sequence."""
        self._write(tokens)
        self._length += len(tokens)

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens from index `start` on."""
        return self._buffer[start : self._length].tolist()

    def with_draft(self, draft: Sequence[int]) -> np.ndarray:
        """Return a view (N,) int64 of the sequence followed by draft tokens.

        It is valid until the next call of this or of `append`: they share the buffer past the end.
        """
        self._write(draft)
        return self._buffer[: self._length + len(draft)]

    def _write(self, tokens: Sequence[int]) -> None:
        """Write tokens past the end, without committing them."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            growth = np.zeros(max(_MIN_GROWTH, len(tokens)), dtype=np.int64)
            self._buffer = np.concatenate((self._buffer, growth))
        self._buffer[self._length : end] = tokens


Tokens = Sequence[int] | npt.NDArray[np.int64]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix of two sequences."""
    count = min(len(a), len(b))
    differ = np.asarray(a[:count]) != np.asarray(b[:count])
    return int(differ.argmax()) if differ.any() else count
