"""Reading a prompt: what the draft model reads of it, how far a part of it is, and who wants it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from decoding.config.defaults import DRAFT_SLACK
from offload.cache.base import Cache
from offload.cache.streaming import StreamingCache
from offload.errors import RequestCancelled
from parallel.model.transformer import Progress, Transformer
from parallel.ranks.process_group import TensorParallelGroup


def prefill_draft(model: Transformer, cache: StreamingCache, prompt: Tensor, kept: int = 0) -> None:
    """Let a cache stand behind a prompt (T,), of which it holds the first `kept` tokens.

    It begins anew where less of its window would be left than reading that again fills.
    """
    window = cache.shape.window
    is_short = cache.oldest > 0 and len(prompt) - cache.oldest < window
    if not kept or kept < cache.oldest or is_short or len(prompt) - kept > window:
        cache.reset()
        _read(model, cache, prompt)
    else:
        cache.crop(kept)
        _advance(model, cache, prompt[kept:])


def partial_progress(progress: Progress, done: int, part: int, tokens: int) -> Progress:
    """Return what tells of a part, behind `done` of so many tokens, as `progress` of all of them.

    The part has `part` tokens.
    """

    def tell(units: int, total: int) -> None:
        progress(done * total + part * units, tokens * total)

    return tell


def check_cancelled(group: TensorParallelGroup, is_cancelled: Callable[[], bool]) -> None:
    """Raise RequestCancelled on all ranks where rank 0's `is_cancelled` says so; all of them call it."""
    (given_up,) = group.broadcast_ints([int(group.rank == 0 and is_cancelled())], 1)
    if given_up:
        raise RequestCancelled("the text was given up while its prompt was read.")


def _read(model: Transformer, cache: StreamingCache, prompt: Tensor) -> None:
    """Read what the draft's cache can keep of the prompt: the sinks and the last window."""
    rest = prompt
    if (skipped := len(rest) - cache.shape.sinks - cache.shape.window) > 0:
        _advance(model, cache, rest[: cache.shape.sinks])
        cache.skip_tokens(skipped)
        rest = rest[cache.shape.sinks + skipped :]
    _advance(model, cache, rest)


def _advance(model: Transformer, cache: Cache, tokens: Tensor) -> None:
    for part in tokens.split(DRAFT_SLACK):
        model(part, cache, 1)
        cache.advance(len(part))
