"""A request to an engine: a prompt, and how to continue it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from decoding.engine.stats import Stats
from decoding.speculation.sampling import Sampling
from offload.errors import InvalidRequestError

Progress = Callable[[int, int], None]  # finished units of prefill, and their total


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
    # called with the target's logits (n, V) of a round's n tokens, before any of them is yielded
    on_logits: Callable[[Tensor], None] | None = None
    # polled before each layer of prefill; not for requests of a batch
    is_cancelled: Callable[[], bool] = lambda: False

    def validate(self, context: int, vocab: int) -> None:
        """Raise InvalidRequestError if a model with this context cannot process the request."""
        prompt, new = self.prompt, self.max_new_tokens
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token.")
        if new < 1:
            raise InvalidRequestError(f"no room left to generate: {new} new tokens requested.")
        if len(prompt) + new > context:
            raise InvalidRequestError(
                f"{len(prompt)} prompt tokens and {new} new tokens exceed the context of {context}."
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab:
                raise InvalidRequestError(
                    f"the prompt has token {token}, outside the model's vocabulary of {vocab}."
                )


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
