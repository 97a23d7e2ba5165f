"""Answers in the shapes of OpenAI's interface."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from decoding.app.server.worker.jobs import Failed, TokenLogprobs

Logprobs = Sequence[tuple[int, TokenLogprobs]]


def usage_of(counts: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer took: its tokens as the interface has them, and all counts."""
    prompt, new = counts["prompt_tokens"], counts["new_tokens"]
    cached = counts["reused_tokens"] + counts["loaded_tokens"]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"usage": usage, "tierforce": counts}


def error_of(failed: Failed) -> dict[str, Any]:
    """Return what a client is told that gets no answer."""
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
    """The replies to one request."""

    name: str  # of the whole answer
    piece_name: str  # of a piece of it
    prefix: str

    def __init__(self, model: str):
        self.model = model
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, text: str, laws: Logprobs | None, reason: str, counts: dict[str, Any]) -> Any:
        """Return the answer; `laws` None where no probabilities are wanted."""
        return {**self._reply(self.name, self.said(text), laws, reason), **usage_of(counts)}

    def first(self) -> dict[str, Any] | None:
        """Return what a stream begins with."""
        return None

    def piece(self, text: str, laws: Logprobs | None) -> dict[str, Any]:
        """Return a piece of a stream."""
        return self._reply(self.piece_name, self.added(text), laws, None)

    def last(self, reason: str) -> dict[str, Any]:
        """Return the end of a stream."""
        return self._reply(self.piece_name, self.added(""), None, reason)

    def counts(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Return what comes behind the end where it is asked for."""
        return {**self._head(self.piece_name), "choices": [], **usage_of(counts)}

    @abstractmethod
    def said(self, text: str) -> dict[str, Any]:
        """Return a whole text, as an answer has it."""

    @abstractmethod
    def added(self, text: str) -> dict[str, Any]:
        """Return a piece of text, as a stream has it."""

    @abstractmethod
    def logprobs(self, laws: Logprobs) -> dict[str, Any]:
        """Return the probabilities of tokens."""

    def _reply(
        self, name: str, said: dict[str, Any], laws: Logprobs | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if laws is None else self.logprobs(laws)
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(name), "choices": [choice]}

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


class ChatResponseBuilder(ResponseBuilder):
    """Replies to a conversation."""

    name, piece_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self) -> dict[str, Any]:
        begun = {"delta": {"role": "assistant", "content": ""}}
        return self._reply(self.piece_name, begun, None, None)

    def said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def added(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, laws: Logprobs) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_told(law.token, law.logprob),
                    "sampled_logprob": law.sampled_logprob,
                    "top_logprobs": [_told(*each) for each in law.top],
                }
                for _, law in laws
            ],
            "refusal": None,
        }


class CompletionResponseBuilder(ResponseBuilder):
    """Replies to a text that is continued."""

    name = piece_name = "text_completion"
    prefix = "cmpl"

    def said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    added = said

    def logprobs(self, laws: Logprobs) -> dict[str, Any]:
        return {
            "tokens": [_name(law.token) for _, law in laws],
            "token_logprobs": [law.logprob for _, law in laws],
            "sampled_logprobs": [law.sampled_logprob for _, law in laws],
            "top_logprobs": [{_name(token): p for token, p in law.top} for _, law in laws],
            "text_offset": [at for at, _ in laws],
        }


def _told(token: bytes, logprob: float) -> dict[str, Any]:
    """Return a token with its probability, as answers to conversations have it."""
    text = token.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(token)}


def _name(token: bytes) -> str:
    """Return a token's text; of one that is a part of a character its bytes, spelt out."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
