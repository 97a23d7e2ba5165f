"""Clients of OpenAI's Responses API, whose answers are those of chat completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.clients import MARKS, run_script
from support.serving import Serving

pytestmark = MARKS
WHO = {"role": "user", "content": "Who?"}
WHY = {"role": "user", "content": "Why?"}


def chat(server: Serving, *messages: dict[str, str]) -> tuple[str, list[int]]:
    """Return the text of an answer, and its numbers of tokens."""
    reply: Any = server.ask("/v1/chat/completions", {"messages": messages})
    usage = reply["usage"]
    tokens = [usage["prompt_tokens"], usage["completion_tokens"]]
    return reply["choices"][0]["message"]["content"], tokens


@pytest.mark.parametrize("environment", ["previous", "newest"])
def test_openai(environment: str, server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script(environment, "use_responses.py", url, server.model, home=home)
    text, tokens = chat(server, WHO)
    assert found["answer"] == found["stream"] == found["stream answer"] == text
    assert found["async"] == [text, text]
    assert found["status"] == ["incomplete", "incomplete"]  # at the server's --max-new-tokens
    assert found["usage"] == tokens
    assert found["events"] == list(range(len(found["events"])))
    assert found["instructed"] == chat(server, {"role": "system", "content": "Be brief."}, WHO)[0]
    answer = {"role": "assistant", "content": text}
    assert found["second"] == chat(server, WHO, answer, WHY)[0]
    assert found["typed"]["kind"] in ("stone", "wood")
    assert found["typed stream"] == found["typed"]
    overflow = {"code": "context_length_exceeded", "param": "input"}
    missing = {"code": "model_not_found", "param": "model"}
    assert found["errors"] == {
        "field": {"class": "BadRequestError", "code": None, "param": "speed"},
        "model": {"class": "NotFoundError", **missing},
        "context": {"class": "BadRequestError", **overflow},
    }


def test_pydantic_ai(server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script("newest", "use_responses_pydantic_ai.py", url, server.model, home=home)
    text, tokens = chat(server, WHO)
    assert found["answer"] == found["stream"] == text
    assert found["usage"] == tokens
    assert found["second"] == chat(server, WHO, {"role": "assistant", "content": text}, WHY)[0]
    assert found["typed"]["kind"] in ("stone", "wood")
    assert {each["kind"] for each in found["called"]} <= {"stone", "wood"}
    first, again = found["prompt tokens"]
    assert again > first + 10  # The call and its result are part of the conversation.
