"""What is asked of an engine: a prompt, and how it is to be continued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from decoding.engine.stats import Stats
from decoding.speculation.sampling import Sampling
from offload.errors import InvalidRequestError

Progress = Callable[[int, int], None]  # prefill: units done, units in all


@dataclass(frozen=True)
class Request:
    """A text to be continued: token ids, and by how many at most."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    truncated_tokens: int = 0  # tokens left out of the prompt, for the record
    progress: Progress | None = None
    name: str = ""  # that people know it by, where it is kept on disk
    on_stats: Callable[[Stats], None] | None = None  # told of the counts after every round
    # told of the target's logits (n, V) of the n tokens that a round makes, before any is yielded
    on_logits: Callable[[Tensor], None] | None = None
    # asked before each layer in which the prompt is read, where the text is alone
    is_cancelled: Callable[[], bool] = lambda: False

    def validate(self, context: int, vocab: int) -> None:
        """Raise InvalidRequestError for a text that makes no sense to a model of this context."""
        prompt, new = self.prompt, self.max_new_tokens
        if not prompt:
            raise InvalidRequestError("the prompt is empty: there is nothing to read.")
        if new < 1:
            raise InvalidRequestError(f"no room left to generate: {new} new tokens asked for.")
        if len(prompt) + new > context:
            raise InvalidRequestError(
                f"{len(prompt)} prompt tokens and {new} new ones are more than the context of "
                f"{context}."
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab:
                raise InvalidRequestError(
                    f"the prompt has token {token}, outside the model's vocabulary of {vocab}."
                )


def check_request(text: object, new: object, sampling: object, takes_tokens: bool = True) -> None:
    """Raise InvalidRequestError for arguments of a type that no text can be made of."""
    wrong: tuple[str, str, str] | None = None
    if not isinstance(text, str) and not (takes_tokens and _are_tokens(text)):
        # the type alone: what a text says must not get into a log
        kinds = "a string, or whole numbers that are token ids" if takes_tokens else "a string"
        wrong = ("the text", kinds, type(text).__name__)
    elif not isinstance(new, Integral) or isinstance(new, bool):
        wrong = ("`max_new_tokens`", "a whole number", repr(new))
    elif sampling is not None and not isinstance(sampling, Sampling):
        wrong = ("`sampling`", "a Sampling", repr(sampling))
    if wrong is not None:
        name, kind, found = wrong
        raise InvalidRequestError(f"{name} must be {kind}, found {found[:80]}.")


def _are_tokens(given: object) -> bool:
    # bytes, and what has no order or is gone once it was looked at
    others = (bytes, bytearray, memoryview, Mapping, Set, Iterator)
    if isinstance(given, others) or not isinstance(given, Iterable):
        return False
    return all(isinstance(token, Integral) and not isinstance(token, bool) for token in given)
