"""How rows and columns are split over ranks: integer arithmetic that knows no model."""

from __future__ import annotations

from offload.layout import ceil_div
from parallel.errors import ConfigError


def share(total: int, rank: int, ranks: int, unit: int = 1) -> slice:
    """Return the part of `total` rows or columns that a rank holds: as even as can be.

    It has whole units, such as the rows of a head.
    """
    units = total // unit
    return slice(units * rank // ranks * unit, units * (rank + 1) // ranks * unit)


def share_size(total: int, rank: int, ranks: int, unit: int = 1) -> int:
    """Return how many rows or columns that part has; the last rank has no fewer than any other."""
    part = share(total, rank, ranks, unit)
    return part.stop - part.start


def check_ranks(kv_heads: int, ranks: int) -> None:
    """Raise ConfigError when there are too few key/value heads for so many ranks."""
    if kv_heads < ranks:
        raise ConfigError(
            f"{kv_heads} key/value heads cannot be split over {ranks} ranks: use `gpus` {kv_heads} "
            "or less."
        )


def vocab_rows(vocab: int, ranks: int) -> int:
    """Return the rows of an embedding on every rank; the last ranks' are padded."""
    return ceil_div(vocab, ranks)
