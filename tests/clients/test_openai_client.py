"""OpenAI's own client, from its first version with today's interface to the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.clients import MARKS, run_script
from support.serving import Serving

pytestmark = MARKS
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TYPED = {"oldest": (), "previous": ("typed",), "newest": ("typed",)}


@pytest.mark.parametrize("environment", TYPED)
def test_the_client_gets_what_plain_http_gets(
    environment: str, server: Serving, home: Path
) -> None:
    url = f"{server.url}/v1"
    found = run_script(
        environment, "use_openai.py", url, server.model, *TYPED[environment], home=home
    )
    check_chat(found, server)
    check_completions(found, server)
    assert found["models"] == [found["model"]] == [server.model]
    errors = found["errors"]
    assert errors["field"] == {"class": "BadRequestError", "code": None, "param": "speed"}
    missing = {"class": "NotFoundError", "code": "model_not_found", "param": "model"}
    assert errors["model"] == missing
    overflow = {"code": "context_length_exceeded", "param": "prompt"}
    assert errors["context"] == {"class": "BadRequestError", **overflow}
    assert errors["path"]["class"] == "NotFoundError"
    if TYPED[environment]:
        house = found["typed"]
        assert house["rooms"] in (1, 2, 3)
        assert house["kind"] in ("stone", "wood")
        assert found["typed stream"] == house


def check_chat(found: dict[str, Any], server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    whole = server.ask(CHAT, body)
    content, usage = whole["choices"][0]["message"]["content"], whole["usage"]
    assert len(content) > 12
    assert found["answer"] == found["stream"] == found["async stream"] == content
    assert found["async"] == [content] * 3
    assert found["finish"] == "length"
    tokens = [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
    assert found["usage"] == found["stream usage"] == tokens
    assert found["raw"] == content[: content.index(content[6:9])]
    assert int(found["max tokens"]) == 1024 - usage["prompt_tokens"]


def check_completions(found: dict[str, Any], server: Serving) -> None:
    text = server.ask(TEXT, {"prompt": "It was", "max_tokens": 8})["choices"][0]["text"]
    assert found["text"] == found["text stream"] == text
    assert len(found["tokens"]) == 8
