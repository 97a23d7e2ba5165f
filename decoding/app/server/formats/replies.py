"""Responses in OpenAI's format."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.app.server.formats.tools import formatted_calls
from decoding.app.server.worker.jobs import (
    Failed,
    Finished,
    GenerationParams,
    TextDelta,
    TokenLogprobs,
)
from decoding.text.tools.parser import AnswerDelta, AnswerParser

Logprobs = Sequence[tuple[int, TokenLogprobs]]


@dataclass(frozen=True)
class Answer:
    """The whole answer to a prompt."""

    content: TextDelta
    reason: str  # why it ended
    counts: dict[str, Any]  # its statistics


def usage_fields(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields `usage`, as in OpenAI's API, and `tierforce`, all statistics.

    `counts`: those of each prompt. `usage` sums them, and `tierforce` lists those of several.
    """
    prompt, new, reused, loaded = (
        sum(each[name] for each in counts)
        for name in ("prompt_tokens", "new_tokens", "reused_tokens", "loaded_tokens")
    )
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused + loaded},
    }
    return {"usage": usage, "tierforce": counts if len(counts) > 1 else counts[0]}


def error_body(failed: Failed) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if failed.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": failed.message,
            "type": kinds.get(failed.status, kind),
            "param": failed.param,
            "code": failed.code,
            **({"tierforce": failed.details} if failed.details else {}),
        }
    }


class ReplyBuilder(ABC):
    """Builds the reply to one request, whole or as a stream of JSON objects.

    An object's `type`, if it has one, is also the name of its event. A request may have several
    prompts, whose answers have an `index`.
    """

    ends_with_done: bool  # a stream ends with `[DONE]`

    @abstractmethod
    def begin(
        self, params: Sequence[GenerationParams], repeated: str, calls: AnswerParser | None
    ) -> None:
        """Take the parameters of the request.

        Args:
            params: those of each prompt, as the engine gets them.
            repeated: fields of the request that the reply repeats, as JSON.
            calls: finds calls of tools in the answer; None if it has none.
        """

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the whole reply."""

    def opening(self) -> list[dict[str, Any]]:
        """Return the beginning of a stream, before there is a token."""
        return []  # clients time the prefill by the first object

    @abstractmethod
    def first(self, index: int) -> list[dict[str, Any]]:
        """Return what precedes an answer in a stream; called once it has a token."""

    @abstractmethod
    def chunk(self, index: int, part: TextDelta) -> list[dict[str, Any]]:
        """Return the next part of an answer; empty if it needs more of it."""

    @abstractmethod
    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        """Return the end of an answer in a stream."""

    @abstractmethod
    def usage(self, counts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what follows all answers if `stream_options` asks for usage.

        `counts`: the statistics of each answer.
        """

    def failure(self, failed: Failed) -> dict[str, Any]:
        """Return the end of a stream that fails."""
        return error_body(failed)


class ResponseBuilder(ReplyBuilder):
    """Builds chat and plain completions."""

    ends_with_done = True
    name: str  # `object` of a whole response
    chunk_name: str  # `object` of a chunk in a stream
    prefix: str  # beginning of the id

    def __init__(self, model: str):
        self.model = model
        self.has_logprobs = False
        # tokens of each prompt; set for answers with the ids of tokens
        self.prompt_ids: Sequence[Sequence[int]] | None = None
        self.calls: AnswerParser | None = None  # set for an answer that may call tools
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def begin(
        self, params: Sequence[GenerationParams], repeated: str, calls: AnswerParser | None
    ) -> None:
        self.has_logprobs, self.calls = params[0].top_logprobs is not None, calls
        if params[0].returns_ids:
            self.prompt_ids = [each.prompt for each in params]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            text = self.message(answer.content.text)
            reason = self._reason(answer.reason)
            choices.append(self._choice(index, text, answer.content, reason))
        response = self._reply(self.name, choices)
        self._add_prompt_ids(response)
        return {**response, **usage_fields([answer.counts for answer in answers])}

    def chunk(self, index: int, part: TextDelta) -> list[dict[str, Any]]:
        delta = self.delta(part.text)
        if not any(delta.values()) and not (part.logprobs or part.token_ids):
            return []
        return [self._chunk(index, delta, part)]

    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        delta = self.delta("", is_last=True)
        reason = self._reason(finished.reason)
        return [self._chunk(index, delta, reason=reason)]

    def usage(self, counts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**self._reply(self.chunk_name, []), **usage_fields(counts)}]

    @abstractmethod
    def message(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice with the whole text."""

    @abstractmethod
    def delta(self, text: str, is_last: bool = False) -> dict[str, Any]:
        """Return the fields of a choice with a piece of text, and the rest of it if it is last."""

    @abstractmethod
    def format_logprobs(self, logprobs: Logprobs) -> dict[str, Any]:
        """Return the field `logprobs` of a choice."""

    def _reason(self, reason: str) -> str:
        """Return why an answer ended, in this format."""
        has_calls = self.calls is not None and self.calls.has_calls
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _choice(
        self, index: int, text: dict[str, Any], part: TextDelta | None, reason: str | None
    ) -> dict[str, Any]:
        """Return a choice; `part` is None if it has no tokens."""
        logprobs = None
        if self.has_logprobs and part is not None:
            logprobs = self.format_logprobs(part.logprobs)
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        if self.prompt_ids is not None:
            choice["token_ids"] = list(part.token_ids) if part is not None else []
        return choice

    def _chunk(
        self,
        index: int,
        text: dict[str, Any],
        part: TextDelta | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return self._reply(self.chunk_name, [self._choice(index, text, part, reason)])

    def _add_prompt_ids(self, response: dict[str, Any]) -> None:
        """Add the ids of the prompt's tokens, where vLLM has them."""
        if self.prompt_ids is not None:
            response["prompt_token_ids"] = list(self.prompt_ids[0])

    def _reply(self, name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


class ChatResponseBuilder(ResponseBuilder):
    """Builds responses to chat completions."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, index: int) -> list[dict[str, Any]]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        response = self._chunk(index, delta)
        self._add_prompt_ids(response)
        return [response]

    def message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls is not None:
            answer = self.calls.feed(text) + self.calls.rest()
            message["content"] = answer.content
            if answer.calls:
                message["content"] = answer.content or None
                message["tool_calls"] = formatted_calls(answer.calls, has_index=False)
        return {"message": message}

    def delta(self, text: str, is_last: bool = False) -> dict[str, Any]:
        part = AnswerDelta([text])
        if self.calls is not None:
            part = self.calls.feed(text)
            part = part + self.calls.rest() if is_last else part
        delta: dict[str, Any] = {"content": part.content} if part.content else {}
        if part.calls:
            delta["tool_calls"] = formatted_calls(part.calls, has_index=True)
        return {"delta": delta}

    def format_logprobs(self, logprobs: Logprobs) -> dict[str, Any]:
        return {"content": token_logprobs(logprobs), "refusal": None}


class CompletionResponseBuilder(ResponseBuilder):
    """Builds responses to plain completions."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str, is_last: bool = False) -> dict[str, Any]:
        return self.message(text)

    def first(self, index: int) -> list[dict[str, Any]]:
        if self.prompt_ids is None:
            return []
        response = self._chunk(index, self.delta(""))
        self._add_prompt_ids(response)
        return [response]

    def _add_prompt_ids(self, response: dict[str, Any]) -> None:
        if self.prompt_ids is not None:
            for choice in response["choices"]:
                choice["prompt_token_ids"] = list(self.prompt_ids[choice["index"]])

    def format_logprobs(self, logprobs: Logprobs) -> dict[str, Any]:
        tokens = [token for _, token in logprobs]
        return {
            "tokens": [_name(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "sampled_logprobs": [token.sampled_logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": [offset for offset, _ in logprobs],
        }


def token_logprobs(logprobs: Logprobs) -> list[dict[str, Any]]:
    """Return tokens with their log-probabilities, in the format of chat completions."""
    return [
        {
            **_token_logprob(token.token, token.logprob),
            "sampled_logprob": token.sampled_logprob,
            "top_logprobs": [_token_logprob(*each) for each in token.top],
        }
        for _, token in logprobs
    ]


def _top(token: TokenLogprobs) -> dict[str, float] | None:
    """Return the log-probabilities of the most likely tokens, and of the token itself, by name.

    Of several tokens with a name, that of the most likely one. None if nothing precedes the token.
    """
    if token.logprob is None:
        return None
    by_name = dict[str, float]()
    for name, logprob in (*token.top, (token.token, token.logprob)):
        by_name.setdefault(_name(name), logprob)
    return by_name


def _token_logprob(token: bytes, logprob: float | None) -> dict[str, Any]:
    """Return a token with its log-probability, in the format of chat completions."""
    text = token.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(token)}


def _name(token: bytes) -> str:
    """Return a token's text, or its escaped bytes if it is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
