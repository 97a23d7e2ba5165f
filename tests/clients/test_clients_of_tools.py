"""Clients that call tools, most of them to get objects. The calls are forced: a small model chooses
badly, but a call that it must make is valid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.clients import MARKS, needs_smollm2, run_script
from support.serving import Serving

pytestmark = MARKS
CITIES = ("Paris", "Rome", "Berlin")


def check_calls(found: dict[str, Any]) -> dict[str, Any]:
    """Check a call, whole and as a stream, and the answer to its result; return its arguments."""
    assert found["finish"] == ["tool_calls", "tool_calls"]
    assert found["name"] == found["stream name"] == "weather"
    assert found["stream"] == found["arguments"]
    assert found["second"]
    arguments = json.loads(found["arguments"])
    assert arguments["city"] in CITIES
    assert arguments["days"] in (1, 2)
    assert len(arguments) == 2
    return arguments


@pytest.mark.parametrize("environment", ["previous", "newest"])
def test_openai(environment: str, server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script(environment, "use_tools_openai.py", url, server.model, home=home)
    assert found["parsed"] == found["required"] == check_calls(found)
    assert found["done"]
    body = {"messages": found["messages"], "tools": found["tools"], "max_tokens": 8}
    message = server.ask("/v1/chat/completions", body)["choices"][0]["message"]
    assert found["second"] == message["content"]


@pytest.mark.parametrize("environment", ["previous", "newest"])
def test_openai_responses(environment: str, server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script(environment, "use_tools_responses.py", url, server.model, home=home)
    found["finish"] = ["tool_calls" if each == "completed" else each for each in found["finish"]]
    assert found["parsed"] == found["required"] == check_calls(found)
    assert found["done"]
    body = {"input": found["turns"], "tools": found["tools"], "max_output_tokens": 8}
    (item,) = server.ask("/v1/responses", body)["output"]
    assert found["second"] == item["content"][0]["text"]


@needs_smollm2
@pytest.mark.parametrize("model", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_openai_agents(model: str, smollm2: Serving, home: Path) -> None:
    """Answers must end: the SDK raises an error for one that is cut."""
    url = f"{smollm2.url}/v1"
    found = run_script("newest", "use_agents.py", url, smollm2.model, model, home=home)
    assert found["items"] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert found["answer"] == found["stream"] != ""
    assert found["calls"][0] == found["calls"][1]
    city, days = found["calls"][0]
    assert city in CITIES
    assert days in (1, 2)
    assert found["typed"]["name"] in CITIES


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(provider: str, server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    check_calls(
        run_script("newest", "use_tools_litellm.py", provider, url, server.model, home=home)
    )


def test_langchain(server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script("newest", "use_tools_langchain.py", url, server.model, home=home)
    city = found["typed"]
    assert city["name"] in CITIES
    assert found["typed stream"] == city
    assert found["name"] == "weather"
    assert found["stream"] == [found["arguments"]]
    assert found["result"].startswith(f"sunny in {found['arguments']['name']}")
    assert found["second"]


def test_instructor(server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script("previous", "use_tools_instructor.py", url, server.model, home=home)
    city = found["typed"]
    assert city["name"] in CITIES
    assert json.loads(found["arguments"]) == city
    assert found["partial"][0]["name"] is None  # The stream began before the name was complete.
    assert found["partial"][-1] == city
    assert ["is odd" in error for error in found["invalid"]] == [True, True]


def test_pydantic_ai(server: Serving, home: Path) -> None:
    url = f"{server.url}/v1"
    found = run_script("newest", "use_tools_pydantic_ai.py", url, server.model, home=home)
    city = found["typed"]
    assert city["name"] in CITIES
    assert found["typed stream"] == city
    assert found["calls"] == [city]
    assert len(found["results"]) == 1
    assert found["second"]["name"] in CITIES
    first, second = found["prompt tokens"]
    assert second > first + 10  # The call and its result are part of the conversation.
