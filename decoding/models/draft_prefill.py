"""Prefill of what drafts: the cache of a draft model, or of the target's prediction block."""

from __future__ import annotations

from torch import Tensor

from decoding.config.defaults import DRAFT_SLACK
from offload.cache.base import Cache
from offload.cache.prediction import PredictionCache
from offload.cache.streaming import StreamingCache
from parallel.model.transformer import Transformer


def prefill_draft(
    model: Transformer, cache: StreamingCache, prompt: Tensor, cached: int = 0
) -> None:
    """Advance the draft cache to the end of `prompt` (T,), whose first `cached` tokens it holds.

    The cache is reset if less of its window would remain than a full prefill fills.
    """
    window = cache.shape.window
    is_short = cache.oldest > 0 and len(prompt) - cache.oldest < window
    if not cached or cached < cache.shortest or is_short or len(prompt) - cached > window:
        cache.reset()
        _prefill(model, cache, prompt)
    else:
        cache.crop(cached)
        _advance(model, cache, prompt[cached:])


def prefill_predictor(
    model: Transformer, cache: PredictionCache, prompt: Tensor, cached: int = 0
) -> None:
    """Advance a prediction block's cache to the end of `prompt` (T,), as `prefill_draft`.

    Its window begins where the target's hidden states are kept, after the target's own prefill.
    """
    tokens = len(prompt)
    # the first token whose predecessor's state is there, of those that fit the window
    first = min(tokens, max(cache.hidden_states.first + 1, tokens - cache.shape.window))
    if cached < first or cache.shortest > first:
        cache.clear()
        cache.skip_tokens(first)
    else:
        cache.crop(cached)
    _advance(model, cache, prompt[cache.length :])


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
        model(chunk, cache, 0)
        cache.advance(len(chunk))
