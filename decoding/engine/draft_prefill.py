"""Prefill of the draft model, progress of a partial prefill, and cancellation of a prefill."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from decoding.config.defaults import DRAFT_SLACK
from offload.cache.base import Cache
from offload.cache.streaming import StreamingCache
from offload.errors import RequestCancelled
from parallel.model.transformer import Progress, Transformer
from parallel.ranks.process_group import TensorParallelGroup


def prefill_draft(
    model: Transformer, cache: StreamingCache, prompt: Tensor, cached: int = 0
) -> None:
    """Advance the draft cache to the end of `prompt` (T,), whose first `cached` tokens it holds.

    The cache is reset if less of its window would remain than a full prefill fills.
    """
    window = cache.shape.window
    is_short = cache.oldest > 0 and len(prompt) - cache.oldest < window
    if not cached or cached < cache.oldest or is_short or len(prompt) - cached > window:
        cache.reset()
        _prefill(model, cache, prompt)
    else:
        cache.crop(cached)
        _advance(model, cache, prompt[cached:])


def partial_progress(progress: Progress, done: int, part: int, tokens: int) -> Progress:
    """Return a callback for the progress of one part, reported to `progress` as that of the whole.

    The part has `part` of all `tokens`, after `done` finished ones.
    """

    def report(units: int, total: int) -> None:
        progress(done * total + part * units, tokens * total)

    return report


def check_cancelled(group: TensorParallelGroup, is_cancelled: Callable[[], bool]) -> None:
    """Raise RequestCancelled on all ranks if rank 0's `is_cancelled` returns True.

    All ranks call it.
    """
    (cancelled,) = group.broadcast_ints([int(group.rank == 0 and is_cancelled())], 1)
    if cancelled:
        raise RequestCancelled("the request was cancelled during prefill.")


def _prefill(model: Transformer, cache: StreamingCache, prompt: Tensor) -> None:
    """Prefill the tokens that the draft's cache retains: the sinks and the last window."""
    rest = prompt
    if (skipped := len(rest) - cache.shape.sinks - cache.shape.window) > 0:
        _advance(model, cache, rest[: cache.shape.sinks])
        cache.skip_tokens(skipped)
        rest = rest[cache.shape.sinks + skipped :]
    _advance(model, cache, rest)


def _advance(model: Transformer, cache: Cache, tokens: Tensor) -> None:
    for chunk in tokens.split(DRAFT_SLACK):
        model(chunk, cache, 1)
        cache.advance(len(chunk))
