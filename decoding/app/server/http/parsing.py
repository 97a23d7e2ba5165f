"""Conversion of a request's body to the parameters of a generation."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ValidationError

from decoding.app.server.http.bodies import AnyBody, ChatBody, CompletionBody, StreamOptions
from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.http.receiving import parse_json
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import GenerationParams
from decoding.app.server.worker.prompts import Prompts
from decoding.grammars.grammar import CompiledGrammar, Grammar
from decoding.speculation.sampling import Sampling
from decoding.text.encoding import ContextLengthError
from offload.errors import TierForceError

_SEED_BITS = 53  # precision of a number in JavaScript
_SEEDS = 2**63


@dataclass(frozen=True)
class ServedModel:
    """The model of a server, and the defaults for requests."""

    model: str  # its name for clients
    alias: str  # another accepted name
    context: int  # maximum tokens of a prompt and its answer
    vocab: int
    sampling: Sampling  # defaults; the seed is not used
    max_new_tokens: int


class RequestParser:
    """Parses the bodies of requests; thread-safe."""

    def __init__(self, prompts: Prompts, served: ServedModel):
        self._prompts, self._served = prompts, served

    def parse(
        self, text: bytes, kind: type[AnyBody]
    ) -> tuple[GenerationParams, StreamOptions | None, tuple[str, Grammar] | None]:
        """Return the parameters in a body; the stream options if the answer is streamed; and, if it
        is to match a grammar, the field and the grammar, for `compile`.

        Slow for a long prompt. Raises RequestRefused for an invalid or unsupported request.
        """
        value = parse_json(text, self._served.context + limits.EXTRA_VALUES)
        try:
            body = kind.model_validate(value)
        except ValidationError as error:
            raise _validation_error(error) from error
        self.check_model(body.model)
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        try:
            prompt = self._prompt(body)
        except ContextLengthError as error:
            raise self._too_long(str(error), param, error.tokens) from error
        except TierForceError as error:
            raise RequestRefused(400, str(error), param=param) from error
        options = (body.stream_options or StreamOptions()) if body.stream else None
        return self._params(body, prompt, param), options, body.grammar

    def compile(self, field: str, grammar: Grammar) -> CompiledGrammar:
        """Return a field's grammar for the model's tokenizer.

        May take seconds. Raises RequestRefused for one that cannot be followed.
        """
        try:
            return self._prompts.compile(grammar)
        except TierForceError as error:
            raise RequestRefused(400, f"{field}: {error}", param=field) from error

    def check_model(self, name: str) -> None:
        """Raise RequestRefused for a model that is not served."""
        if name not in (self._served.model, self._served.alias):
            raise RequestRefused(
                404,
                f"the model {name[:200]!r} is not available here: use {self._served.model!r}.",
                "model_not_found",
                "model",
            )

    def _prompt(self, body: ChatBody | CompletionBody) -> list[int]:
        """Return a prompt's tokens. Raises TierForceError for an invalid prompt."""
        if isinstance(body, ChatBody):
            return self._prompts.tokenize_messages(
                [message.as_template() for message in body.messages]
            )
        if isinstance(body.prompt, str):
            return self._prompts.tokenize_text(body.prompt)
        vocab = self._served.vocab
        if body.prompt and not 0 <= min(body.prompt) <= max(body.prompt) < vocab:
            raise TierForceError(
                f"the prompt has token ids outside the model's vocabulary of {vocab:,}."
            )
        return body.prompt

    def _params(self, body: AnyBody, prompt: list[int], param: str) -> GenerationParams:
        """Return the parameters in a body. Raises RequestRefused if they exceed the context."""
        context, length = self._served.context, len(prompt)
        if not prompt:
            raise RequestRefused(400, "the prompt is empty: send at least one token.", param=param)
        if (room := context - length) < 1:
            raise self._too_long(
                f"the prompt has {length:,} tokens, but the context, including the answer, has "
                f"{context:,}: send a shorter one.",
                param,
                length,
            )
        field, maximum = body.token_limit
        max_new_tokens = min(self._served.max_new_tokens, room) if maximum is None else maximum
        if max_new_tokens > room:
            raise self._too_long(
                f"the prompt's {length:,} tokens and {field} {max_new_tokens:,} exceed the context "
                f"of {context:,}: use at most {room:,}.",
                field,
                length,
            )
        names = {field.name for field in fields(Sampling)}
        options: dict[str, Any] = {"seed": secrets.randbits(_SEED_BITS)}
        options |= body.model_dump(include=names, exclude_none=True)
        options["seed"] %= _SEEDS  # adds 2**63 to a negative seed
        try:
            sampling = replace(self._served.sampling, **options)
        except TierForceError as error:
            raise RequestRefused(400, str(error)) from error
        token = max(sampling.logit_bias or (), default=0)
        if token >= self._served.vocab:
            reason = f"logit_bias: token {token} is outside the model's vocabulary."
            raise RequestRefused(400, reason, param="logit_bias")
        return GenerationParams(
            array("i", prompt),
            max_new_tokens,
            sampling,
            body.stops,
            body.num_top_logprobs,
        )

    def _too_long(self, message: str, param: str, tokens: int) -> RequestRefused:
        details = {"prompt_tokens": tokens, "context": self._served.context}
        return RequestRefused(400, message, "context_length_exceeded", param, details)


def _validation_error(error: ValidationError) -> RequestRefused:
    """Return the most specific error of a body, with its field."""
    # a union reports an error per alternative: the deepest one belongs to the intended type
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(errors, key=lambda each: len(each["loc"]))
    parts = [str(part) for part in deepest["loc"]]
    param = ".".join(part for part in parts if "[" not in part) or None
    message = deepest["msg"].removeprefix("Value error, ")
    return RequestRefused(400, f"{param}: {message}." if param else f"{message}.", param=param)
