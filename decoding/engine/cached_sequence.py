"""The caches of a sequence, on rank 0, as a later request with the same beginning finds them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from decoding.engine.session import SequenceState, SwappedSequence
from decoding.engine.stats import Stats
from decoding.models.runtime import Runtime
from decoding.speculation.decoders import Decoder
from decoding.speculation.sequence import Tokens, common_prefix
from offload.layout import ceil_div
from parallel.model.prompt_logprobs import PromptScorer

DEFAULT_ROOM = 4096  # tokens of later turns that memory is planned for


@dataclass(eq=False)
class HeldSequence:
    """The KV of a sequence, in caches or swapped out, and its tokens so far."""

    caches: SequenceState | SwappedSequence
    # each cache holds a prefix of them; the whole prompt from the start of its prefill on
    tokens: Tokens = ()
    missing: int = 0  # tokens that are still to be prefilled, or copied

    def copyable(self, tokens: int) -> int:
        """Return how many of its first `tokens` may be copied: none during a prefill."""
        target = self.caches.target
        return 0 if self.missing else target.copyable(min(tokens, target.length))

    def copyable_later(self, tokens: int) -> int:
        """Return how many of its first `tokens` may be copied once its prefill has ended."""
        return self.caches.target.layout.resumable(tokens, len(self.tokens))

    def common_tokens(self, prompt: Tokens, max_new_tokens: int) -> int:
        """Return the length of the prefix that a prompt shares, whose KV is that of its own."""
        caches, common = self.caches, common_prefix(self.tokens, prompt)
        if not common or caches.runtime.settings.deterministic:
            return 0  # KV of decoding, or of a shorter prefill, differs bitwise from one prefill
        rope_key = caches.runtime.target.config.rope_key
        is_same = caches.rope_key == rope_key(len(prompt), len(prompt) + max_new_tokens)
        return common if is_same else 0


@dataclass(eq=False)
class CachedSequence(HeldSequence):
    """The caches of a sequence, its tokens so far, and what forwards on them take."""

    caches: SequenceState
    prefill_s: float = 0.0  # seconds of prefill so far
    token_s: float = 0.0  # prefill seconds per token, when the whole prompt was last prefilled
    forward_s: float = 0.0  # seconds per forward of the target, in the last turn that made one
    scorer: PromptScorer | None = None  # during a prefill that scores the prompt

    def reusable_tokens(self, prompt: Tokens, max_new_tokens: int) -> int:
        """Return how many tokens of a prompt stay in the caches; 0 to prefill all of it."""
        caches, tokens = self.caches, len(prompt)
        common = self.common_tokens(prompt, max_new_tokens)
        cached = caches.target.resumable(min(common, caches.target.length, tokens - 1))
        # each chunk streams all cached KV, as a decoding forward does
        chunks = ceil_div(tokens - cached, caches.extend_chunk)
        is_slower = chunks > 1 and chunks * self.forward_s > cached * self.token_s
        return 0 if is_slower else cached

    def end_turn(self, decoder: Decoder, stats: Stats) -> None:
        """Drop unaccepted draft tokens from every level, and keep what a later turn needs."""
        for level in decoder.levels():
            level.sync([])
        self.tokens = np.array(decoder.sequence.tokens_from(0))
        if verify_s := [each.verify_s for each in stats.rounds]:
            self.forward_s = median(verify_s)
        elif forwards := stats.levels[0].stats.forwards:
            self.forward_s = stats.decode_s / forwards


def room_for_turns(runtime: Runtime, prompt_tokens: int, max_new_tokens: int, room: int) -> int:
    """Return how many of `room` tokens to reserve for turns after a request of this size."""
    if runtime.settings.deterministic:
        return 0  # every turn prefills its whole prompt
    end, rope_key = prompt_tokens + max_new_tokens, runtime.target.config.rope_key
    while room and rope_key(prompt_tokens, end) != rope_key(prompt_tokens, end + room):
        room //= 2  # LongRoPE depends on the maximum length
    return room
