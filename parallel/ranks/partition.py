"""Partitioning of rows and columns over ranks: integer arithmetic, independent of models."""

from __future__ import annotations

from offload.layout import ceil_div
from parallel.errors import ConfigError

# bytes of a tensor from which on its all-reduce may go through shared memory, a piece at a time
LARGE_SUM_BYTES = 1 << 20


def share(total: int, rank: int, ranks: int, unit: int = 1) -> slice:
    """Return the slice of `total` rows or columns that a rank holds, as evenly as possible.

    It consists of whole units of `unit` rows, such as those of a head.
    """
    units = total // unit
    return slice(units * rank // ranks * unit, units * (rank + 1) // ranks * unit)


def share_size(total: int, rank: int, ranks: int, unit: int = 1) -> int:
    """Return the size of a rank's share; the last rank has at least as many as any other."""
    part = share(total, rank, ranks, unit)
    return part.stop - part.start


def check_ranks(kv_heads: int, ranks: int) -> None:
    """Raise ConfigError if there are fewer key/value heads than ranks."""
    if kv_heads < ranks:
        raise ConfigError(
            f"{kv_heads} key/value heads cannot be split over {ranks} ranks: use `gpus` {kv_heads} "
            "or less."
        )


def vocab_rows(vocab: int, ranks: int) -> int:
    """Return the number of embedding rows on each rank; those of the last ranks are padded."""
    return ceil_div(vocab, ranks)
