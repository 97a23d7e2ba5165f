"""Responses of OpenAI's Responses API, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from decoding.app.server.formats.replies import (
    Answer,
    ReplyBuilder,
    error_body,
    token_logprobs,
    usage_fields,
)
from decoding.app.server.worker.jobs import Failed, Finished, GenerationParams, TextDelta
from decoding.text.tools.parser import ToolCallParser

# the same in all responses
_FIXED: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "object": "response",
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "tools": [],
    "truncation": "disabled",
}


class ResponsesBuilder(ReplyBuilder):
    """Builds a response with one message, which has one part: the text of the answer.

    In a stream the response comes at once, so that clients understand an error before the first
    token, too; its message comes with the first token.
    """

    ends_with_done = False

    def __init__(self, model: str):
        """`model` is the model's name for clients."""
        self.model = model
        self.id, self.item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._repeated = "{}"  # JSON
        self._used: dict[str, Any] = {}  # parameters, as they are used
        self._has_message = False  # whether the stream has the message by now
        self._parts: list[TextDelta] = []  # its text
        self._sent = 0  # number of events

    def begin(
        self, params: Sequence[GenerationParams], repeated: str, calls: ToolCallParser | None
    ) -> None:
        (own,) = params
        sampling = own.sampling
        self._repeated = repeated
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
        is_complete = answer.reason != "length"
        status = "completed" if is_complete else "incomplete"
        return self._response(
            status,
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            output=[self._message(answer.content, status)],
            usage=_usage(answer.counts),
            tierforce=answer.counts,
        )

    def opening(self) -> list[dict[str, Any]]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response("in_progress")) for name in names]

    def first(self, index: int) -> list[dict[str, Any]]:
        self._has_message = True
        item = {**self._message(TextDelta(""), "in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._part_event("content_part.added", part=_part(TextDelta(""))),
        ]

    def chunk(self, index: int, part: TextDelta) -> list[dict[str, Any]]:
        self._parts.append(part)
        logprobs = token_logprobs(part.logprobs)
        return [self._part_event("output_text.delta", delta=part.text, logprobs=logprobs)]

    def last(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        answer = TextDelta.joined(self._parts)
        response = self.whole([Answer(answer, finished.reason, finished.counts)])
        (item,) = response["output"]
        (part,) = item["content"]
        done = {"text": answer.text, "logprobs": part["logprobs"]}
        return [
            self._part_event("output_text.done", **done),
            self._part_event("content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def usage(self, counts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return []  # the response has it

    def failure(self, failed: Failed) -> dict[str, Any]:
        answer = TextDelta.joined(self._parts)
        code = "server_error" if failed.status >= 500 else "invalid_prompt"  # those of OpenAI's API
        response = self._response(
            "failed",
            error={**error_body(failed)["error"], "code": code},
            output=[self._message(answer, "incomplete")] if self._has_message else [],
        )
        return self._event("response.failed", response=response)

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

    def _message(self, answer: TextDelta, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_part(answer)],
        }

    def _part_event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the message's part."""
        place = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return the next event of a stream."""
        self._sent += 1
        return {"type": name, "sequence_number": self._sent - 1, **fields}


def _part(answer: TextDelta) -> dict[str, Any]:
    """Return the part of the message that has the answer."""
    return {
        "type": "output_text",
        "annotations": [],
        "logprobs": token_logprobs(answer.logprobs),
        "text": answer.text,
    }


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
