"""The decoders of a sequence, nested over its levels as its mode says."""

from __future__ import annotations

import time
from collections.abc import Callable

from decoding.config.defaults import (
    FIRST_DRAFT_ON_DEVICE,
    FIRST_DRAFT_OVER_LINK,
    FIRST_INNER_DRAFT,
    LOOKUP_NGRAM,
)
from decoding.engine.session import SequenceState
from decoding.planning.plan import tokens_ahead
from decoding.planning.requirements import Requirements
from decoding.speculation.decoders import (
    Autoregressive,
    Decoder,
    Proposer,
    SelfPrediction,
    Speculative,
)
from decoding.speculation.draft_length import Lengths, draft_lengths
from decoding.speculation.draft_vocabulary import PaddedVocabDraft
from decoding.speculation.prompt_lookup import PromptLookup
from decoding.speculation.randomness import Randomness
from decoding.speculation.sampling import Sampling
from decoding.speculation.sequence import TokenSequence
from parallel.execution.executor import Level


def build_decoder(
    caches: SequenceState,
    sequence: TokenSequence,
    sampling: Sampling,
    randomness: Randomness,
    lengths: Lengths | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Decoder:
    """Return the nested decoders of the sequence's mode, to continue `sequence`.

    For rank 0, after prefill: `sequence` is the prompt and the first token. `lengths` defaults
    to those of the settings. `clock` returns seconds.
    """
    runtime, needs = caches.runtime, caches.plan.requirements
    lengths = lengths or draft_lengths(needs.settings, needs.mode)
    first = FIRST_DRAFT_OVER_LINK if caches.plan.uses_link else FIRST_DRAFT_ON_DEVICE
    for length in lengths:
        length.reset(first if length is lengths[0] else FIRST_INNER_DRAFT)
    verifying = [level for level in caches.levels if level.model is runtime.target]
    inner: Proposer | None = None
    for level in caches.levels[len(verifying) :]:
        inner = _draft_decoder(level, runtime.target.config.vocab, sequence, sampling, randomness)
    if ngram := _lookup_ngram(needs):
        inner = PromptLookup(
            sequence, ngram, runtime.target.config.vocab, caches.prompt.device, inner
        )
    for level, length in reversed(list(zip(verifying, lengths, strict=False))):
        name, model, cache = level.name, level.model, level.cache
        if inner is None:
            inner = Autoregressive(name, model, cache, sequence, sampling, randomness)
        else:
            outer = Speculative(name, model, cache, inner, length, sampling, randomness)
            outer.clock = clock
            inner = outer
    assert isinstance(inner, Decoder)
    if isinstance(inner, Speculative):
        inner.max_ahead = tokens_ahead(caches.plan)
    inner.sync([])
    return inner


def _lookup_ngram(requirements: Requirements) -> int:
    """Return the n-gram length of prompt lookup; 0 without prompt lookup."""
    if requirements.mode == "plain":
        return 0
    if (ngram := requirements.settings.prompt_lookup_ngram) is not None:
        return ngram
    return 0 if requirements.has_draft else LOOKUP_NGRAM


def _draft_decoder(
    level: Level,
    vocab: int,
    sequence: TokenSequence,
    sampling: Sampling,
    randomness: Randomness,
) -> Decoder:
    """Return the draft model's decoder, with probs over the target's vocabulary."""
    if level.model.config.is_predictor:
        return SelfPrediction(level.name, level.model, level.cache, sequence, sampling, randomness)
    rows = level.model.config.vocab
    args = (level.name, level.model, level.cache, sequence, sampling, randomness)
    return Autoregressive(*args) if rows == vocab else PaddedVocabDraft(rows, vocab, *args)
