"""Conversion of a request's body to the parameters of a generation."""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from decoding.app.server.formats.body import StreamOptions
from decoding.app.server.formats.chat import ChatBody
from decoding.app.server.formats.completions import CompletionBody
from decoding.app.server.formats.responses import ResponsesBody
from decoding.app.server.formats.tokens import DetokenizeBody, TokenizeBody
from decoding.app.server.formats.tool_grammar import call_parser, tool_grammar
from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.http.receiving import parse_json
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import GenerationParams
from decoding.app.server.worker.prompts import Prompts
from decoding.grammars.grammar import CompiledGrammar, Grammar
from decoding.speculation.sampling import Sampling
from decoding.text.encoding import ContextLengthError
from decoding.text.prompt import ToolsError
from decoding.text.tools.parser import AnswerParser
from offload.errors import TierForceError

AnyBody = ChatBody | CompletionBody | ResponsesBody
_Body = TypeVar("_Body", bound=AnyBody | TokenizeBody | DetokenizeBody)
_ALTERNATIVES = ("str", "constrained-str")  # pydantic's names of those of a union
_MAX_EXCESS = 2  # tokens that are returned, relative to the context
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


@dataclass(frozen=True)
class ParsedRequest:
    """What is kept of a request's body while it is queued."""

    # each prompt's, without the grammar, which `RequestParser.compile` returns
    params: list[GenerationParams]
    stream_options: StreamOptions | None  # None: the answer is not streamed
    grammar: tuple[str, Grammar] | None  # the answer's, and the field that has it
    repeated: str  # fields that the response has, too, as JSON: objects would need more memory
    calls: AnswerParser | None = None  # finds calls of tools in the answer


class RequestParser:
    """Parses the bodies of requests; thread-safe."""

    def __init__(self, prompts: Prompts, served: ServedModel):
        self._prompts, self._served = prompts, served

    def parse(self, text: bytes, kind: type[AnyBody]) -> ParsedRequest:
        """Return the request in a body. A grammar is yet to be compiled.

        Slow for a long prompt. Raises RequestRefused for an invalid or unsupported request.
        """
        body = self._validated(text, kind)
        sampling = _sampling(body, self._served)
        if isinstance(body, CompletionBody):
            params = self._completions(body, sampling)
        else:
            params = [self._conversation(body, sampling)]
        params = _within_logprobs(params)
        parsed = ParsedRequest(params, body.streaming, body.grammar, json.dumps(body.repeated))
        if not isinstance(body, CompletionBody) and body.usable_functions:
            return self._with_tools(parsed, body)
        return parsed

    def _with_tools(self, parsed: ParsedRequest, body: ChatBody | ResponsesBody) -> ParsedRequest:
        """Return a request whose answer may call tools, or has to. Raises RequestRefused."""
        (params,) = parsed.params
        try:
            calling = self._prompts.calling(params.prompt)
            grammar = tool_grammar(body, calling) or body.grammar
        except TierForceError as error:
            raise RequestRefused(400, f"tools: {error}", param="tools") from error
        if calling.form.has_channels:
            _check_channels(params)
        own = [replace(params, shown_tokens=calling.shown_tokens)]
        return replace(parsed, params=own, grammar=grammar, calls=call_parser(body, calling))

    def tokenize(self, text: bytes) -> dict[str, Any]:
        """Return the answer to a body with a text or messages, as vLLM's. Raises RequestRefused."""
        body = self._validated(text, TokenizeBody)
        context, own = self._served.context, body.prompt if body.content is None else body.content
        param = "messages" if own is None else "prompt" if body.content is None else "content"
        with self._prompt_errors(param):
            if body.messages is not None:
                messages = [message.as_template() for message in body.messages]
                tokens = self._prompts.tokenize_messages(messages, body.rendering)
            else:
                tokens = self._prompts.tokenize_text(own or "", body.has_prefix)
            if len(tokens) > _MAX_EXCESS * context:
                raise ContextLengthError(len(tokens), context)
        answer = {"count": len(tokens), "max_model_len": context, "tokens": tokens}
        names = {"token_strs": self._prompts.names(tokens)} if body.return_token_strs else {}
        return answer | names

    def detokenize(self, text: bytes) -> dict[str, Any]:
        """Return the answer to a body with token ids, as vLLM's. Raises RequestRefused."""
        body = self._validated(text, DetokenizeBody)
        self._check_tokens(body.tokens, "tokens")
        own = self._prompts.detokenize(body.tokens)
        return {"prompt": own, "content": own}

    @contextmanager
    def _prompt_errors(self, param: str, place: str = "") -> Iterator[None]:
        """Raise RequestRefused for errors of a field that has a prompt, at `place` in a list."""
        try:
            yield
        except ContextLengthError as error:
            raise self._too_long(f"{place}{error}", param, error.tokens) from error
        except ToolsError as error:
            raise RequestRefused(400, f"tools: {error}", param="tools") from error
        except TierForceError as error:
            raise RequestRefused(400, f"{place}{error}", param=param) from error
        except RequestRefused as error:
            own = error.failed
            message = f"{place}{own.message}"
            raise RequestRefused(own.status, message, own.code, own.param, own.details) from error

    def _validated(self, text: bytes, kind: type[_Body]) -> _Body:
        """Return a body. Raises RequestRefused."""
        value = parse_json(text, self._served.context + limits.EXTRA_VALUES)
        try:
            body = cast(_Body, kind.model_validate(value))
        except ValidationError as error:
            raise _validation_error(error) from error
        self.check_model(body.model)
        return body

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise RequestRefused for token ids that the model does not have."""
        vocab = self._served.vocab
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise RequestRefused(
                400,
                f"{param} has token ids outside the model's vocabulary of {vocab:,}.",
                param=param,
            )

    def compile(self, field: str, grammar: Grammar) -> CompiledGrammar:
        """Return a field's grammar for the model's tokenizer.

        May take seconds. Raises RequestRefused for one that cannot be followed.
        """
        try:
            return self._prompts.compile(grammar)
        except TierForceError as error:
            raise RequestRefused(400, f"{field}: {error}", param=field) from error

    def check_model(self, name: str | None) -> None:
        """Raise RequestRefused for a model that is not served; None is the one that is."""
        if name not in (None, self._served.model, self._served.alias):
            raise RequestRefused(
                404,
                f"the model {name[:200]!r} is not available here: use {self._served.model!r}.",
                "model_not_found",
                "model",
            )

    def _conversation(self, body: ChatBody | ResponsesBody, sampling: Sampling) -> GenerationParams:
        """Return the parameters in a body with messages. Raises RequestRefused."""
        with self._prompt_errors(body.prompt_field):
            messages = [message.as_template() for message in body.messages]
            prompt = self._prompts.tokenize_messages(messages, body.rendering)
            return self._params(body, prompt, body.prompt_field, sampling)

    def _completions(self, body: CompletionBody, sampling: Sampling) -> list[GenerationParams]:
        """Return the parameters of each prompt in a body. Raises RequestRefused.

        Each has a seed of its own: the next.
        """
        params = list[GenerationParams]()
        for index, prompt in enumerate(body.prompt):
            place = f"prompt[{index}]: " if len(body.prompt) > 1 else ""
            with self._prompt_errors("prompt", place):
                if isinstance(prompt, str):
                    tokens = self._prompts.tokenize_text(prompt)
                else:
                    self._check_tokens(prompt, "prompt")
                    tokens = prompt
                own = replace(sampling, seed=(sampling.seed + index) % _SEEDS)
                params.append(self._params(body, tokens, "prompt", own))
        return self._with_echo(body, params) if body.echo else params

    def _with_echo(
        self, body: CompletionBody, params: Sequence[GenerationParams]
    ) -> list[GenerationParams]:
        """Return parameters with an echo of each prompt. Raises RequestRefused if it is too long.

        Without new tokens a prompt is scored in any case: only then the engine accepts it.
        """
        top = body.logprobs
        if top is not None:
            tokens = sum(len(each.prompt) for each in params)
            if tokens > (limit := limits.LOGPROBS // (top + 1)):
                raise RequestRefused(
                    400,
                    f"logprobs: {tokens:,} tokens are too many to echo with the top {top} of each: "
                    f"send at most {limit:,} tokens in a request, or fewer logprobs.",
                    param="logprobs",
                )
        elif body.max_tokens == 0:
            top = 0
        with_echo = []
        for each, prompt in zip(params, body.prompt, strict=True):
            text = prompt if isinstance(prompt, str) else None
            with_echo.append(replace(each, has_echo=True, text=text, num_prompt_logprobs=top))
        return with_echo

    def _params(
        self, body: AnyBody, prompt: list[int], param: str, sampling: Sampling
    ) -> GenerationParams:
        """Return the parameters of a prompt. Raises RequestRefused if they exceed the context."""
        context, length = self._served.context, len(prompt)
        if not prompt:
            raise RequestRefused(400, "the prompt is empty: send at least one token.", param=param)
        limit = body.token_limit
        if (room := context - length) < (limit != 0):
            raise self._too_long(
                f"the prompt is too long: it has {length:,} tokens, but the context, including the "
                f"answer, has {context:,}. Send a shorter one.",
                param,
                length,
            )
        maximum = self._served.max_new_tokens if limit is None else limit
        return GenerationParams(
            array("i", prompt),
            room if maximum < 0 else min(maximum, room),
            sampling,
            body.stops,
            body.num_top_logprobs,
            is_clipped=limit is not None and limit > room,
            returns_ids=body.returns_ids,
        )

    def _too_long(self, message: str, param: str, tokens: int) -> RequestRefused:
        details = {"prompt_tokens": tokens, "context": self._served.context}
        return RequestRefused(400, message, "context_length_exceeded", param, details)


def _check_channels(params: GenerationParams) -> None:
    """Raise RequestRefused for what would see all channels of an answer that may call tools."""
    for param, is_used in (("stop", params.stops), ("logprobs", params.top_logprobs is not None)):
        if is_used:
            reason = f"{param} is not supported with tools for this model: send one of them."
            raise RequestRefused(400, reason, param=param)


def _within_logprobs(params: Sequence[GenerationParams]) -> list[GenerationParams]:
    """Return parameters with fewer new tokens, if their log-probabilities would be too many."""
    top = params[0].top_logprobs
    if top is None:
        return list(params)
    echoed = sum(len(each.prompt) for each in params if each.has_echo)
    room = max(1, (limits.LOGPROBS // (top + 1) - echoed) // len(params))
    return [
        replace(each, max_new_tokens=room, is_clipped=True) if each.max_new_tokens > room else each
        for each in params
    ]


def _sampling(body: AnyBody, served: ServedModel) -> Sampling:
    """Return the options of sampling in a body. Raises RequestRefused for an invalid one."""
    names = {field.name for field in fields(Sampling)}
    options: dict[str, Any] = {"seed": secrets.randbits(_SEED_BITS)}
    options |= body.model_dump(include=names, exclude_none=True)
    if body.repeat_penalty is not None:  # llama.cpp's, at its neutral value
        options.setdefault("repetition_penalty", body.repeat_penalty)
    if options["seed"] == -1:  # any, in vLLM and llama.cpp
        options["seed"] = secrets.randbits(_SEED_BITS)
    options["seed"] %= _SEEDS  # adds 2**63 to a negative seed
    try:
        sampling = replace(served.sampling, **options)
    except TierForceError as error:
        raise RequestRefused(400, str(error)) from error
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    has_penalty = any(penalties) or sampling.repetition_penalty != 1
    if has_penalty and body.repeat_last_n not in (None, -1):
        reason = "repeat_last_n is not supported with penalties: leave it out, or send -1."
        raise RequestRefused(400, reason, param="repeat_last_n")
    token = max(sampling.logit_bias or (), default=0)
    if token >= served.vocab:
        reason = f"logit_bias: token {token} is outside the model's vocabulary."
        raise RequestRefused(400, reason, param="logit_bias")
    return sampling


def _validation_error(error: ValidationError) -> RequestRefused:
    """Return the most specific error of a body, with its field."""
    # a union reports an error per alternative: the deepest one belongs to the intended type, and of
    # these one that is not about the type
    errors = error.errors(include_url=False, include_input=False)
    deepest = max(errors, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    parts = [str(part) for part in deepest["loc"]]
    names = [part for part in parts if "[" not in part and part not in _ALTERNATIVES]
    if "field" in (context := deepest.get("ctx", {})):  # the whole object is at fault
        names.append(context["field"])
    param = ".".join(names) or None
    message = deepest["msg"].removeprefix("Value error, ")
    joint = " is " if message.startswith("not supported") else ": "
    return RequestRefused(400, f"{param}{joint}{message}." if param else f"{message}.", param=param)
