"""The text that all levels of a hierarchy share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROOM = 1024  # tokens the buffer grows by, at least


class TokenSequence:
    """The tokens of one text that stand: they are only ever added to.

    Levels read it, each up to its own position. What they propose is not part of it before it
    stands.
    """

    def __init__(self, tokens: Sequence[int]):
        self._buffer = np.array(tokens, dtype=np.int64)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: Sequence[int]) -> None:
        """Let these tokens stand behind the others."""
        self._write(tokens)
        self._length += len(tokens)

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens from index `start` on."""
        return self._buffer[start : self._length].tolist()

    def with_draft(self, ahead: Sequence[int]) -> np.ndarray:
        """Return a view of all tokens with those `ahead` behind them, (N,) int64.

        It is good until the next call of this or of `append`: the room behind the end is shared.
        """
        self._write(ahead)
        return self._buffer[: self._length + len(ahead)]

    def _write(self, tokens: Sequence[int]) -> None:
        """Put tokens behind the end, where they do not stand yet."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            room = np.zeros(max(_ROOM, len(tokens)), dtype=np.int64)
            self._buffer = np.concatenate((self._buffer, room))
        self._buffer[self._length : end] = tokens


Tokens = Sequence[int] | npt.NDArray[np.int64]


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return how many tokens the two have in common before they differ."""
    count = min(len(one), len(other))
    differ = np.asarray(one[:count]) != np.asarray(other[:count])
    return int(differ.argmax()) if differ.any() else count
