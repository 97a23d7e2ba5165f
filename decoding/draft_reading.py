"""What a draft model reads of a prompt: as much as its cache can keep."""

from __future__ import annotations

from torch import Tensor

from decoding.planning.defaults import DRAFT_SLACK
from offload.cache import Cache
from offload.streaming import StreamingCache
from parallel.model import Llama


def read_draft(model: Llama, cache: StreamingCache, prompt: Tensor, kept: int = 0) -> None:
    """Let a cache stand behind a prompt (T,), of which it holds the first `kept` tokens.

    It begins anew where less of its window would be left than reading that again fills.
    """
    window = cache.shape.window
    is_short = cache.oldest > 0 and len(prompt) - cache.oldest < window
    if not kept or kept < cache.oldest or is_short or len(prompt) - kept > window:
        cache.begin_anew()
        _read(model, cache, prompt)
    else:
        cache.crop(kept)
        _advance(model, cache, prompt[kept:])


def _read(model: Llama, cache: StreamingCache, prompt: Tensor) -> None:
    """Read what the draft's cache can keep of the prompt: the sinks and the last window."""
    rest = prompt
    if (skipped := len(rest) - cache.shape.sinks - cache.shape.window) > 0:
        _advance(model, cache, rest[: cache.shape.sinks])
        cache.skip(skipped)
        rest = rest[cache.shape.sinks + skipped :]
    _advance(model, cache, rest)


def _advance(model: Llama, cache: Cache, tokens: Tensor) -> None:
    for part in tokens.split(DRAFT_SLACK):
        model(part, cache, 1)
        cache.advance(len(part))
