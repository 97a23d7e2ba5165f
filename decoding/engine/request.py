"""A request to an engine: a prompt, how to continue it, and on rank 0 how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from numbers import Integral

import numpy as np
from torch import Tensor

from decoding.engine.cached_sequence import CachedSequence
from decoding.engine.hierarchy import build_decoder
from decoding.engine.stats import Stats
from decoding.grammars.grammar import CompiledGrammar
from decoding.planning.requirements import noise_positions
from decoding.speculation.coroutines import Steps
from decoding.speculation.decoders import Decoder
from decoding.speculation.draft_length import Lengths, draft_lengths
from decoding.speculation.grammar_mask import GrammarMask
from decoding.speculation.logits_processors import LogitsProcessors, make_processors
from decoding.speculation.randomness import make_randomness
from decoding.speculation.rejection_sampler import overflow_error, to_host
from decoding.speculation.sampling import Sampling
from decoding.speculation.sequence import TokenSequence
from offload.errors import InvalidRequestError, TierForceError
from parallel.execution.batched_forward import ForwardRequest
from parallel.model.pipeline import Progress
from parallel.model.prompt_logprobs import PromptLogprobs

MAX_PROMPT_LOGPROBS = 20  # at each position of a prompt


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and the maximum number of new tokens."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    truncated_tokens: int = 0  # tokens dropped from the prompt, for the record
    progress: Progress | None = None
    name: str = ""  # display name in the prompt cache
    on_stats: Callable[[Stats], None] | None = None  # called after every round
    # called with the target's logits (n, V) of a round's n tokens, and the probabilities (n, V)
    # each is sampled by, before any of them is yielded
    on_logits: Callable[[Tensor, Tensor], None] | None = None
    # polled before each step of prefill
    is_cancelled: Callable[[], bool] = lambda: False
    # tokens by which later requests of a batch that begin alike are longer, at most: they continue
    # in its caches, as in a conversation. None: its caches are freed, unless it is in one
    room: int | None = None
    shared: int = 0  # tokens that begin these, too; a few less are better than one more
    grammar: CompiledGrammar | None = None  # the answer matches it
    # Number of the largest log-probabilities at each position of the prompt, which come with those
    # of its tokens; None: none of them. Otherwise all of it is prefilled, nothing is reused, and
    # there may be no new tokens.
    num_prompt_logprobs: int | None = None
    on_prompt_logprobs: Callable[[PromptLogprobs], None] = lambda _: None  # called after prefill

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the prompt as an array, which is fast to compare with others."""
        return np.asarray(self.prompt)

    def validate(self, context: int, vocab: int) -> None:
        """Raise InvalidRequestError if a model with this context cannot process the request."""
        prompt, new = self.prompt, self.max_new_tokens
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token.")
        if (top := self.num_prompt_logprobs) is not None and not 0 <= top <= MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"`num_prompt_logprobs` must be from 0 to {MAX_PROMPT_LOGPROBS}, found {top}."
            )
        if new < (top is None):
            raise InvalidRequestError(f"no room left to generate: {new} new tokens requested.")
        if len(prompt) + new > context:
            raise InvalidRequestError(
                f"{len(prompt)} prompt tokens and {new} new tokens exceed the context of {context}."
            )
        if (token := max(self.sampling.logit_bias or (), default=0)) >= vocab:
            raise InvalidRequestError(
                f"`logit_bias` has token {token}, outside the model's vocabulary of {vocab}."
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab:
                raise InvalidRequestError(
                    f"the prompt has token {token}, outside the model's vocabulary of {vocab}."
                )


class Status(Enum):
    """The stage that a request is in."""

    WAITING = auto()  # until there is room for it
    PREFILLING = auto()
    RUNNING = auto()  # waits for a forward
    FINISHED = auto()  # has all tokens, was aborted, or failed


@dataclass
class _Decoding:
    """A request's decoders, and the round they are in."""

    decoder: Decoder
    clock: Callable[[], float]
    since: float  # the clock's time when decoding began
    steps: Steps[list[int]] = field(init=False)  # the round's
    forward: ForwardRequest = field(init=False)  # the one that the round waits for

    def begin_round(self, limit: int) -> None:
        """Begin a round of at most `limit` tokens."""
        self.steps = self.decoder.round(limit)
        self.forward = next(self.steps)


class RequestState:
    """A request with its caches, its decoders, its counts, and the forward it waits for."""

    def __init__(self, request: Request):
        self.request = request
        self.stats = Stats(truncated_tokens=request.truncated_tokens)
        self.status = Status.WAITING
        self.error: TierForceError | None = None  # set if the request failed
        self.runs_alone = False  # it does not fit its share of the memory
        self.sequence: CachedSequence | None = None  # from prefill until it finishes
        self._decoding: _Decoding | None = None  # while it is running
        self._started = time.perf_counter()
        self.stepped_at = self._started  # end of the last step of its prefill

    @property
    def tokens(self) -> list[int]:
        """Return the new tokens so far."""
        return self.stats.token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def forward(self) -> ForwardRequest:
        """Return the forward it waits for."""
        assert self._decoding is not None
        return self._decoding.forward

    def depth_of(self, forward: ForwardRequest) -> int:
        """Return the index of the level of one of its forwards; the target is 0."""
        assert self.sequence is not None
        levels = self.sequence.caches.levels
        return [level.cache for level in levels].index(forward.cache)

    @property
    def missing(self) -> int:
        """Return how many tokens of its prompt are still to be prefilled."""
        return len(self.request.prompt) if self.sequence is None else self.sequence.missing

    @property
    def idle_s(self) -> float:
        """Return the seconds since the last step of its prefill."""
        return time.perf_counter() - self.stepped_at

    def begin(
        self, logits: Tensor, lengths: dict[str, Lengths], clock: Callable[[], float]
    ) -> list[int]:
        """Begin to decode after prefill; return the first token, if there are new ones.

        Raises InvalidRequestError if the logits are not finite.

        Args:
            logits: (1, V), those that follow the prompt.
            lengths: draft lengths by mode, adapted over past requests.
            clock: returns seconds.
        """
        assert self.sequence is not None
        caches, stats, request = self.sequence.caches, self.stats, self.request
        sampling, needs = request.sampling, caches.plan.requirements
        stats.prompt_tokens = len(request.prompt)
        stats.plan = caches.plan
        if not request.max_new_tokens:
            stats.attach(caches, [])
            stats.first_token_s = time.perf_counter() - self._started
            self._report_prompt()
            return []
        randomness = make_randomness(sampling, caches.prompt.device, noise_positions(needs))
        processors = self._processors(caches.prompt, logits.shape[1])
        probs = randomness.probs(sampling, processors.process(logits, [], 0))
        tokens = to_host(randomness.draw(probs[0], len(request.prompt)), probs)
        sequence = TokenSequence([*caches.prompt.tolist(), *tokens])
        own_lengths = lengths.setdefault(needs.mode, draft_lengths(needs.settings, needs.mode))
        decoder = build_decoder(caches, sequence, sampling, randomness, own_lengths, clock)
        for level in decoder.levels():
            level.processors = processors
        decoder.on_logits = request.on_logits
        stats.rounds = decoder.rounds
        stats.attach(caches, decoder.levels())
        stats.first_token_s = time.perf_counter() - self._started
        self._report_prompt()  # once, after all that may run out of memory, as the next
        if request.on_logits:
            request.on_logits(logits, probs)
        self._decoding = _Decoding(decoder, clock, clock())
        self.status = Status.RUNNING
        return tokens

    def _report_prompt(self) -> None:
        """Report the log-probabilities of the prompt, if they were requested.

        Raises InvalidRequestError if they are not finite.
        """
        assert self.sequence is not None
        if (scorer := self.sequence.scorer) is None:
            return
        self.sequence.scorer = None  # the caches may be kept
        found = scorer.result()
        if not (found.logprobs.isfinite().all() and found.top_logprobs.isfinite().all()):
            raise overflow_error("the model computed")
        self.request.on_prompt_logprobs(found)

    def _processors(self, prompt: Tensor, vocab: int) -> LogitsProcessors:
        """Return the rules on logits (T, vocab) that follow the prompt (P,)."""
        mask, grammar = None, self.request.grammar
        if grammar is not None:
            mask = GrammarMask(grammar.start, grammar.stop_tokens, grammar.vocab, vocab)
        return make_processors(self.request.sampling, prompt, mask)

    def feed(self, logits: Tensor) -> list[int] | None:
        """Take the logits of the forward it waits for; return the round's tokens at its end."""
        decoding = self._decoding
        assert decoding is not None
        try:
            decoding.forward = decoding.steps.send(logits)
        except StopIteration as end:
            tokens: list[int] = end.value
            return tokens
        return None

    def advance(self, tokens: list[int], stop_tokens: frozenset[int]) -> bool:
        """Count a round's tokens up to a stop token; begin the next round, if there is one."""
        stats, limit, decoding = self.stats, self.request.max_new_tokens, self._decoding
        stop = next((index for index, each in enumerate(tokens) if each in stop_tokens), None)
        stats.token_ids += tokens[:stop]
        if decoding is not None:  # None if there are no new tokens
            stats.decode_s = decoding.clock() - decoding.since
        if stop is not None:
            stats.finish_reason = "stop"
        elif stats.new_tokens >= limit:
            stats.finish_reason = "length"
        if self.request.on_stats:
            self.request.on_stats(stats)
        if stats.finish_reason is not None or decoding is None:
            return False
        decoding.begin_round(limit - stats.new_tokens)
        return True

    def cut(self, count: int) -> None:
        """Drop all new tokens but the first `count`, those that were taken."""
        if count < len(self.tokens):
            del self.tokens[count:]
            self.stats.finish_reason = None

    def finish(self, keep: bool = False) -> CachedSequence | None:
        """End the request, and return its caches; `keep`: for a later request to continue."""
        sequence, decoding = self.sequence, self._decoding
        if keep and sequence is not None and decoding is not None:
            sequence.end_turn(decoding.decoder, self.stats)
        self.sequence = self._decoding = None
        self.status = Status.FINISHED
        return sequence

    def restart_alone(self) -> None:
        """Wait again after `finish`, as if nothing had run, for all of the memory."""
        self.stats = Stats(truncated_tokens=self.request.truncated_tokens)
        self.status, self.runs_alone = Status.WAITING, True


def check_request(
    prompt: object, max_new_tokens: object, sampling: object, takes_tokens: bool = True
) -> None:
    """Raise InvalidRequestError for arguments of the wrong type."""
    mismatch: tuple[str, str, str] | None = None
    if not isinstance(prompt, str) and not (takes_tokens and _are_tokens(prompt)):
        # the type alone: a prompt's content must not get into a log
        kinds = "a string or integer token ids" if takes_tokens else "a string"
        mismatch = ("the prompt", kinds, type(prompt).__name__)
    elif not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool):
        mismatch = ("`max_new_tokens`", "a whole number", repr(max_new_tokens))
    elif sampling is not None and not isinstance(sampling, Sampling):
        mismatch = ("`sampling`", "a Sampling", repr(sampling))
    if mismatch is not None:
        name, kind, value = mismatch
        raise InvalidRequestError(f"{name} must be {kind}, found {value[:80]}.")


def _are_tokens(prompt: object) -> bool:
    # bytes, and iterables without order or that can be read only once
    others = (bytes, bytearray, memoryview, Mapping, Set, Iterator)
    if isinstance(prompt, others) or not isinstance(prompt, Iterable):
        return False
    return all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)
