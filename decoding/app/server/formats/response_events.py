"""Responses of OpenAI's Responses API, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from decoding.app.server.formats.replies import Answer, ReplyBuilder, error_body, usage_fields
from decoding.app.server.formats.response_items import OutputItems
from decoding.app.server.worker.jobs import Failed, Finished, GenerationParams, TextDelta
from decoding.text.tools.parser import AnswerParser

# the same in all responses
_FIXED: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "object": "response",
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


class ResponsesBuilder(ReplyBuilder):
    """Builds a response with the items of the answer.

    In a stream the response comes at once, so that clients understand an error before the first
    token, too; its message comes with the first token, or, if there may be calls, with its text.
    """

    ends_with_done = False

    def __init__(self, model: str):
        """`model` is the model's name for clients."""
        self.model = model
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._repeated = "{}"  # JSON
        self._used: dict[str, Any] = {}  # parameters, as they are used
        self._items = OutputItems(None)
        self._sent = 0  # number of events

    def begin(
        self, params: Sequence[GenerationParams], repeated: str, calls: AnswerParser | None
    ) -> None:
        (own,) = params
        sampling = own.sampling
        self._repeated, self._items = repeated, OutputItems(calls)
        self._used = {
            "frequency_penalty": sampling.frequency_penalty,
            "max_output_tokens": own.max_new_tokens,
            "presence_penalty": sampling.presence_penalty,
            "temperature": sampling.temperature,
            "top_logprobs": own.top_logprobs or 0,
            "top_p": sampling.top_p,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self._items.add(answer.content)
        return self._end(answer.reason, answer.counts)[1]

    def opening(self) -> list[dict[str, Any]]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response("in_progress")) for name in names]

    def first(self, index: int) -> list[dict[str, Any]]:
        return self._events(self._items.begin())

    def chunk(self, index: int, part: TextDelta) -> list[dict[str, Any]]:
        return self._events(self._items.add(part))

    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        events, response = self._end(finished.reason, finished.counts)
        last = self._event(f"response.{response['status']}", response=response)
        return [*events, last]

    def usage(self, counts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return []  # the response has it

    def failure(self, failed: Failed) -> dict[str, Any]:
        code = "server_error" if failed.status >= 500 else "invalid_prompt"  # those of OpenAI's API
        response = self._response(
            "failed",
            error={**error_body(failed)["error"], "code": code},
            output=self._items.as_json(),
        )
        return self._event("response.failed", response=response)

    def _end(
        self, reason: str, counts: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the last events of the items, and the response."""
        is_complete = reason != "length"
        events = self._events(self._items.end(is_complete))
        response = self._response(
            "completed" if is_complete else "incomplete",
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            output=self._items.as_json(),
            usage=_usage(counts),
            tierforce=counts,
        )
        return events, response

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Return the response with a status. `fields`: those that it has by then."""
        return {
            "id": self.id,
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **_FIXED,
            **json.loads(self._repeated),
            **self._used,
            **fields,
        }

    def _events(self, events: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [self._event(f"response.{name}", **fields) for name, fields in events]

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """Return the next event of a stream."""
        self._sent += 1
        return {"type": name, "sequence_number": self._sent - 1, **fields}


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the field `usage`. Reasoning is a part of the text, and not counted on its own."""
    usage = usage_fields([counts])["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": usage["prompt_tokens"] - cached,  # any later prompt can use them
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
