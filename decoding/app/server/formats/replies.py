"""Responses in OpenAI's format."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from decoding.app.server.formats.tools import formatted_calls
from decoding.app.server.worker.jobs import (
    Failed,
    Finished,
    GenerationParams,
    TextDelta,
    TokenLogprobs,
)
from decoding.text.tools.parser import AnswerDelta, ToolCallParser

Logprobs = Sequence[tuple[int, TokenLogprobs]]


def usage_fields(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the fields `usage`, as in OpenAI's API, and `tierforce`, all statistics."""
    prompt, new = counts["prompt_tokens"], counts["new_tokens"]
    cached = counts["reused_tokens"] + counts["loaded_tokens"]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"usage": usage, "tierforce": counts}


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

    An object's `type`, if it has one, is also the name of its event.
    """

    ends_with_done: bool  # a stream ends with `[DONE]`

    @abstractmethod
    def begin(self, params: GenerationParams, echo: str, calls: ToolCallParser | None) -> None:
        """Take the parameters of the request.

        Args:
            params: as the engine gets them.
            echo: fields of the request that the reply repeats, as JSON.
            calls: finds calls of tools in the answer; None if it has none.
        """

    @abstractmethod
    def whole(self, answer: TextDelta, finished: Finished) -> dict[str, Any]:
        """Return the whole reply."""

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Return the beginning of a stream, before there is a token."""

    @abstractmethod
    def first(self) -> list[dict[str, Any]]:
        """Return what precedes the text in a stream; called once there is a token."""

    @abstractmethod
    def chunk(self, part: TextDelta) -> list[dict[str, Any]]:
        """Return the next part of a stream; empty if it needs more of the answer."""

    @abstractmethod
    def ending(self, finished: Finished, with_usage: bool) -> list[dict[str, Any]]:
        """Return the end of a stream. `with_usage`: `stream_options` asks for a chunk with it."""

    @abstractmethod
    def failure(self, failed: Failed) -> dict[str, Any]:
        """Return the end of a stream that fails."""


class ResponseBuilder(ReplyBuilder):
    """Builds chat and plain completions."""

    ends_with_done = True
    name: str  # `object` of a whole response
    chunk_name: str  # `object` of a chunk in a stream
    prefix: str  # beginning of the id

    def __init__(self, model: str):
        self.model = model
        self.has_logprobs = False
        self.prompt_ids: Sequence[int] | None = None  # set for an answer with the ids of tokens
        self.calls: ToolCallParser | None = None  # set for an answer that may call tools
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def begin(self, params: GenerationParams, echo: str, calls: ToolCallParser | None) -> None:
        self.has_logprobs, self.calls = params.top_logprobs is not None, calls
        if params.returns_ids:
            self.prompt_ids = params.prompt

    def whole(self, answer: TextDelta, finished: Finished) -> dict[str, Any]:
        message = self.message(answer.text)
        reason = self._reason(finished.reason)
        response = self._response(self.name, message, answer, self.has_logprobs, reason)
        self._add_prompt_ids(response)
        return {**response, **usage_fields(finished.counts)}

    def opening(self) -> list[dict[str, Any]]:
        return []  # clients time the prefill by the first chunk

    def chunk(self, part: TextDelta) -> list[dict[str, Any]]:
        delta = self.delta(part.text)
        if not any(delta.values()) and not (part.logprobs or part.token_ids):
            return []
        return [self._response(self.chunk_name, delta, part, self.has_logprobs, None)]

    def ending(self, finished: Finished, with_usage: bool) -> list[dict[str, Any]]:
        delta = self.delta("", is_last=True)
        reason = self._reason(finished.reason)
        last = self._response(self.chunk_name, delta, TextDelta(""), False, reason)
        usage = {**self._head(self.chunk_name), "choices": [], **usage_fields(finished.counts)}
        return [last, usage] if with_usage else [last]

    def failure(self, failed: Failed) -> dict[str, Any]:
        return error_body(failed)

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

    def _response(
        self,
        name: str,
        text: dict[str, Any],
        part: TextDelta,
        has_logprobs: bool,
        reason: str | None,
    ) -> dict[str, Any]:
        formatted = self.format_logprobs(part.logprobs) if has_logprobs else None
        choice = {"index": 0, **text, "logprobs": formatted, "finish_reason": reason}
        if self.prompt_ids is not None:
            choice["token_ids"] = list(part.token_ids)
        return {**self._head(name), "choices": [choice]}

    def _add_prompt_ids(self, response: dict[str, Any]) -> None:
        """Add the ids of the prompt's tokens, where vLLM has them."""
        if self.prompt_ids is not None:
            response["prompt_token_ids"] = list(self.prompt_ids)

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


class ChatResponseBuilder(ResponseBuilder):
    """Builds responses to chat completions."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self) -> list[dict[str, Any]]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        response = self._response(self.chunk_name, delta, TextDelta(""), False, None)
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
        part = AnswerDelta(text)
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

    def first(self) -> list[dict[str, Any]]:
        if self.prompt_ids is None:
            return []
        response = self._response(self.chunk_name, self.delta(""), TextDelta(""), False, None)
        self._add_prompt_ids(response)
        return [response]

    def _add_prompt_ids(self, response: dict[str, Any]) -> None:
        if self.prompt_ids is not None:
            response["choices"][0]["prompt_token_ids"] = list(self.prompt_ids)

    def format_logprobs(self, logprobs: Logprobs) -> dict[str, Any]:
        tokens = [token for _, token in logprobs]
        return {
            "tokens": [_name(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "sampled_logprobs": [token.sampled_logprob for token in tokens],
            "top_logprobs": [{_name(name): p for name, p in token.top} for token in tokens],
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


def _token_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    """Return a token with its log-probability, in the format of chat completions."""
    text = token.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(token)}


def _name(token: bytes) -> str:
    """Return a token's text, or its escaped bytes if it is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
