"""pydantic-ai: agents with answers as text, and as objects under a schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.clients import SMOLLM2_MARKS, run_script
from support.serving import Serving

pytestmark = SMOLLM2_MARKS
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def test_agents_get_what_plain_http_gets(smollm2: Serving, home: Path) -> None:
    found = run_script(
        "newest", "use_pydantic_ai.py", f"{smollm2.url}/v1", smollm2.model, home=home
    )

    def chat(*messages: dict[str, str]) -> dict[str, Any]:
        return smollm2.ask("/v1/chat/completions", {"messages": messages})

    whole = chat(QUESTION)
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert "Paris" in message["content"]
    assert found["answer"] == found["stream"] == message["content"]
    tokens = [usage["prompt_tokens"], usage["completion_tokens"]]
    assert found["usage"] == found["stream usage"] == tokens
    answer = {"role": "assistant", "content": message["content"]}
    second = chat(QUESTION, answer, {"role": "user", "content": "And of Italy?"})
    assert found["second"] == second["choices"][0]["message"]["content"] != found["answer"]
    assert found["typed"]["name"] in ("Paris", "Rome", "Berlin")
    assert isinstance(found["typed"]["has_river"], bool)
    assert found["typed stream"] == found["typed"]
    assert found["errors"] == {
        "field": {
            "class": "ModelRequestRejectedError",
            "status": 400,
            "code": None,
            "param": "speed",
        },
        "model": {
            "class": "ModelNotFoundError",
            "status": 404,
            "code": "model_not_found",
            "param": "model",
        },
        "context": {
            "class": "ModelContextWindowExceededError",
            "status": 400,
            "code": "context_length_exceeded",
            "param": "messages",
        },
    }
