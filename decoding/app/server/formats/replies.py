"""Responses in OpenAI's format."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.app.server.worker.jobs import Failed, TextDelta, TokenLogprobs

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


class ResponseBuilder(ABC):
    """Builds the response to one request, whole or as a stream."""

    name: str  # `object` of a whole response
    chunk_name: str  # `object` of a chunk in a stream
    prefix: str  # beginning of the id

    def __init__(self, model: str):
        self.model = model
        # tokens of each prompt; set for answers with the ids of tokens
        self.prompt_ids: Sequence[Sequence[int]] | None = None
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, answers: Sequence[Answer], has_logprobs: bool) -> dict[str, Any]:
        """Return the whole response: a choice for each prompt."""
        choices = []
        for index, answer in enumerate(answers):
            text = self.message(answer.content.text)
            choices.append(self._choice(index, text, answer.content, has_logprobs, answer.reason))
        response = {**self._head(self.name), "choices": choices}
        self._add_prompt_ids(response)
        return {**response, **usage_fields([answer.counts for answer in answers])}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return a prompt's first chunk of a stream, if the format has one before the text."""
        return None

    def chunk(self, index: int, part: TextDelta, has_logprobs: bool) -> dict[str, Any]:
        """Return a chunk of a stream, of a prompt's answer."""
        return self._chunk(self._choice(index, self.delta(part.text), part, has_logprobs, None))

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """Return the last chunk of a prompt's answer in a stream."""
        return self._chunk(self._choice(index, self.delta(""), TextDelta(""), False, reason))

    def usage(self, counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the chunk with usage and statistics, which follows the last one on request."""
        return {**self._head(self.chunk_name), "choices": [], **usage_fields(counts)}

    @abstractmethod
    def message(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice with the whole text."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice with a piece of text."""

    @abstractmethod
    def format_logprobs(self, logprobs: Logprobs) -> dict[str, Any]:
        """Return the field `logprobs` of a choice."""

    def _choice(
        self,
        index: int,
        text: dict[str, Any],
        part: TextDelta,
        has_logprobs: bool,
        reason: str | None,
    ) -> dict[str, Any]:
        formatted = self.format_logprobs(part.logprobs) if has_logprobs else None
        choice = {"index": index, **text, "logprobs": formatted, "finish_reason": reason}
        if self.prompt_ids is not None:
            choice["token_ids"] = list(part.token_ids)
        return choice

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_name), "choices": [choice]}

    def _add_prompt_ids(self, response: dict[str, Any]) -> None:
        """Add the ids of the prompt's tokens, where vLLM has them."""
        if self.prompt_ids is not None:
            response["prompt_token_ids"] = list(self.prompt_ids[0])

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


class ChatResponseBuilder(ResponseBuilder):
    """Builds responses to chat completions."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, index: int) -> dict[str, Any]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        response = self._chunk(self._choice(index, delta, TextDelta(""), False, None))
        self._add_prompt_ids(response)
        return response

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def format_logprobs(self, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_token_logprob(token.token, token.logprob),
                    "sampled_logprob": token.sampled_logprob,
                    "top_logprobs": [_token_logprob(*each) for each in token.top],
                }
                for _, token in logprobs
            ],
            "refusal": None,
        }


class CompletionResponseBuilder(ResponseBuilder):
    """Builds responses to plain completions."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    delta = message

    def first(self, index: int) -> dict[str, Any] | None:
        if self.prompt_ids is None:
            return None
        response = self._chunk(self._choice(index, self.delta(""), TextDelta(""), False, None))
        self._add_prompt_ids(response)
        return response

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
