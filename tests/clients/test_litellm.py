"""litellm, through its providers for OpenAI's interface and for vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clients import MARKS, run_script
from support.serving import Serving

pytestmark = MARKS


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_gets_what_plain_http_gets(provider: str, server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script("newest", "use_litellm.py", provider, url, server.model, home=home)
    whole = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}]})
    content, usage = whole["choices"][0]["message"]["content"], whole["usage"]
    assert len(content) > 12
    assert found["answer"] == found["stream"] == content
    assert found["async"] == [content, content]
    assert found["finish"] == "length"
    tokens = [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
    assert found["usage"] == found["stream usage"] == tokens
    assert found["typed"]["kind"] in ("stone", "wood")
    errors = found["errors"]
    for name, kind, message in (
        ("field", "BadRequestError", "speed is not supported by this server"),
        ("model", "NotFoundError", "the model 'gpt-4' is not available here"),
        ("context", "ContextWindowExceededError", "Send a shorter one"),
    ):
        assert errors[name]["class"] == f"litellm.exceptions.{kind}"
        assert message in errors[name]["message"]
