"""langchain-openai, with answers as text and as objects."""

from __future__ import annotations

import json
from pathlib import Path

from support.clients import SMOLLM2_MARKS, run_script
from support.serving import Serving

pytestmark = SMOLLM2_MARKS
QUESTION = {"role": "user", "content": "What is the capital of France?"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]


def test_langchain_gets_what_plain_http_gets(smollm2: Serving, home: Path) -> None:
    found = run_script("newest", "use_langchain.py", f"{smollm2.url}/v1", smollm2.model, home=home)

    def chat(messages: list[dict[str, str]]) -> dict[str, object]:
        return smollm2.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 60})

    whole = chat([QUESTION])
    content, usage = whole["choices"][0]["message"]["content"], whole["usage"]
    assert "Paris" in content
    assert found["answer"] == found["stream"] == found["async"] == content
    assert found["batch"] == [content, content]
    tokens = [usage["prompt_tokens"], usage["completion_tokens"]]
    assert found["usage"] == found["stream usage"] == tokens
    second = chat(CONVERSATION)["choices"][0]["message"]["content"]
    assert found["conversation"] == second != content
    text = smollm2.ask("/v1/completions", {"prompt": "It was", "max_tokens": 8})
    assert found["text"] == text["choices"][0]["text"]
    assert found["typed"]["name"] in ("Paris", "Rome", "Berlin")
    assert isinstance(found["typed"]["has_river"], bool)
    assert found["typed stream"] == found["typed dictionary"] == found["typed"]
    assert json.loads(found["raw"]) == found["typed"]
    field, model = found["errors"]
    assert "speed is not supported by this server" in field
    assert "the model 'gpt-4' is not available here" in model
