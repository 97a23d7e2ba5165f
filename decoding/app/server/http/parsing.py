"""From the body of a request to what the engine is asked for."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, replace

from pydantic import ValidationError

from decoding.app.server.http.bodies import AnyBody, ChatBody, CompletionBody, StreamOptions
from decoding.app.server.http.guards import Refused
from decoding.app.server.http.receiving import parse_json
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import GenerationParams
from decoding.app.server.worker.prompts import Prompts
from decoding.speculation.sampling import Sampling
from decoding.text.encoding import ContextLengthError
from offload.errors import TierForceError

_SEED_BITS = 53  # as many as a number in JavaScript has
_SEEDS = 2**63


@dataclass(frozen=True)
class ServedModel:
    """The model of a server, and how it answers where a request does not say."""

    model: str  # what clients call it
    alias: str  # what they may call it, too
    context: int  # tokens of the longest text
    vocab: int
    sampling: Sampling  # its seed is not used
    max_new_tokens: int


class RequestParser:
    """Makes of a request's body what the engine takes; safe to call from several threads."""

    def __init__(self, prompts: Prompts, served: ServedModel):
        self._prompts, self._served = prompts, served

    def parse(
        self, text: bytes, kind: type[AnyBody]
    ) -> tuple[GenerationParams, StreamOptions | None]:
        """Return what a body asks for; options only if the answer is to be streamed.

        It takes a while for a long prompt. Raises Refused for what cannot be done.
        """
        value = parse_json(text, self._served.context + limits.EXTRA_VALUES)
        try:
            body = kind.model_validate(value)
        except ValidationError as error:
            raise _invalid(error) from error
        self.check_model(body.model)
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        try:
            prompt = self._prompt(body)
        except ContextLengthError as error:
            raise self._too_long(str(error), param, error.tokens) from error
        except TierForceError as error:
            raise Refused(400, str(error), param=param) from error
        options = (body.stream_options or StreamOptions()) if body.stream else None
        return self._asked(body, prompt, param), options

    def check_model(self, name: str) -> None:
        """Raise Refused for a model that is not served."""
        if name not in (self._served.model, self._served.alias):
            raise Refused(
                404,
                f"the model {name[:200]!r} is not served here: ask for {self._served.model!r}.",
                "model_not_found",
                "model",
            )

    def _prompt(self, body: ChatBody | CompletionBody) -> list[int]:
        """Return a prompt's tokens. Raises TierForceError where they cannot be made."""
        if isinstance(body, ChatBody):
            return self._prompts.of_messages([each.as_template() for each in body.messages])
        if isinstance(body.prompt, str):
            return self._prompts.of_text(body.prompt)
        vocab = self._served.vocab
        if body.prompt and not 0 <= min(body.prompt) <= max(body.prompt) < vocab:
            raise TierForceError(
                f"the prompt has tokens outside the model's vocabulary of {vocab:,}."
            )
        return body.prompt

    def _asked(self, body: AnyBody, prompt: list[int], param: str) -> GenerationParams:
        """Return what a body asks for. Raises Refused for what cannot be done."""
        context, length = self._served.context, len(prompt)
        if not prompt:
            raise Refused(400, "the prompt is empty: there is nothing to read.", param=param)
        if (room := context - length) < 1:
            raise self._too_long(
                f"the prompt has {length:,} tokens, and the model's context is {context:,}, "
                "answer included: send a shorter one.",
                param,
                length,
            )
        field, most = body.most
        new = min(self._served.max_new_tokens, room) if most is None else most
        if new > room:
            raise self._too_long(
                f"the prompt has {length:,} tokens, and {field} {new:,} more are beyond the "
                f"model's context of {context:,}: ask for at most {room:,}.",
                field,
                length,
            )
        names = {"temperature", "top_p", "top_k", "seed"}
        own = {"seed": secrets.randbits(_SEED_BITS)}
        own |= body.model_dump(include=names, exclude_none=True)
        own["seed"] %= _SEEDS  # a negative one counts from the end
        try:
            sampling = replace(self._served.sampling, **own)
        except TierForceError as error:
            raise Refused(400, str(error)) from error
        return GenerationParams(array("i", prompt), new, sampling, body.stops, body.top)

    def _too_long(self, message: str, param: str, tokens: int) -> Refused:
        length = {"prompt_tokens": tokens, "context": self._served.context}
        return Refused(400, message, "context_length_exceeded", param, length)


def _invalid(error: ValidationError) -> Refused:
    """Return what is wrong with a body, and where."""
    # of several, such as those of each kind that a field may be of, what went furthest
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(errors, key=lambda each: len(each["loc"]))
    parts = [str(part) for part in first["loc"]]
    param = ".".join(part for part in parts if "[" not in part) or None
    said = first["msg"].removeprefix("Value error, ")
    return Refused(400, f"{param}: {said}." if param else f"{said}.", param=param)
