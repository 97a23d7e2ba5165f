"""Tools over HTTP: calls in every form, whole and streamed, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("openai")

from support.chat_model import TEMPLATE
from support.chat_templates import (
    APERTUS_TOOLS,
    GLM_COMPACT_TOOLS,
    GRANITE_TOOLS,
    HARMONY_TOOLS,
    HERMES_TOOLS,
    LLAMA_TOOLS,
    MISTRAL_TOOLS,
    NEMOTRON_TOOLS,
    QWEN_CODER_TOOLS,
    SEED_OSS_TOOLS,
)
from support.serving import Serving, serving
from support.slow import slow_except
from support.tools import FORECAST

CHAT = "/v1/chat/completions"
WHO = [{"role": "user", "content": "How is the weather?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": FORECAST},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATES = {
    "hermes": HERMES_TOOLS,
    "llama": LLAMA_TOOLS + "{# <|python_tag|> #}",
    "mistral": MISTRAL_TOOLS,
    "none": TEMPLATE,
    "qwen-coder": QWEN_CODER_TOOLS,
    "glm": GLM_COMPACT_TOOLS,
    "gpt-oss": HARMONY_TOOLS,
    "seed-oss": SEED_OSS_TOOLS,
    "nemotron": NEMOTRON_TOOLS,
    "granite": GRANITE_TOOLS,
    "apertus": APERTUS_TOOLS,
}
# special tokens in place of the last ones of the vocabulary
MARKERS = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "glm": ("</arg_value>",),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    "granite": ("<|tool_call|>",),
    "apertus": ("<|tools_suffix|>",),
}


def add_markers(folder: Path, markers: tuple[str, ...]) -> None:
    """Make markers the last tokens of a model's vocabulary."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    last = sorted(vocab.items(), key=lambda each: -each[1])[: len(markers)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for marker, (name, token) in zip(markers, last, strict=True):
        del vocab[name]
        vocab[marker] = token
        merges = content["model"]["merges"]
        content["model"]["merges"] = [each for each in merges if "".join(each) != name]
        content["added_tokens"].append({"id": token, "content": marker, "special": True, **flags})
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def servers(
    model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Serving]]:
    """Start the server of each template once."""
    running = []

    @cache
    def start(name: str) -> Serving:
        folder = tmp_path_factory.mktemp("tools")
        shutil.copytree(model[1], folder / "model")
        (folder / "model" / "chat_template.jinja").write_text(TEMPLATES[name])
        if name in MARKERS:
            add_markers(folder / "model", MARKERS[name])
        options = ("--context", "1024", "--max-new-tokens", "200")
        context = serving(folder / "run", "--model", str(folder / "model"), *model[2:], *options)
        running.append(context)
        return context.__enter__()

    yield start
    for context in running:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("template", slow_except(TEMPLATES))
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_are_valid(
    template: str, choice: Any, servers: Callable[[str], Serving]
) -> None:
    server = servers(template)
    tools = [TOOL] if choice == "required" else [OTHER, TOOL]
    body = {"messages": WHO, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    reply = server.ask(CHAT, body)
    choice = reply["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["type"] == "function"
    assert len(call["id"]) == 9
    jsonschema.validate(json.loads(call["function"]["arguments"]), FORECAST)
    stream = server.client().chat.completions.create(model=server.model, stream=True, **body)
    deltas = [chunk.choices[0].delta for chunk in stream]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert len(parts) > 2
    assert [bool(part.id) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert "".join(part.function.arguments for part in parts) == call["function"]["arguments"]
    assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("template", slow_except(TEMPLATES, 0, 2))
def test_results_are_answered(template: str, servers: Callable[[str], Serving]) -> None:
    """The next round of an agent: the call is sent back with its result."""
    server = servers(template)
    client = server.client().chat.completions
    tools: Any = [TOOL]
    messages: list[Any] = list(WHO)
    forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    first = client.create(model=server.model, messages=messages, tools=tools, **forced)
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "content": "fine", "tool_call_id": message.tool_calls[0].id}
    messages += [message.model_dump(exclude_none=True), result]
    second = client.create(model=server.model, messages=messages, tools=tools, max_tokens=4)
    assert second.choices[0].finish_reason == "length"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 10
    tokens = server.ask("/tokenize", {"messages": messages, "tools": tools})
    assert tokens["count"] == second.usage.prompt_tokens


def test_a_call_that_is_cut_has_a_part_of_its_arguments(
    servers: Callable[[str], Serving],
) -> None:
    body = {"messages": WHO, "tools": [TOOL], "tool_choice": NAMED}
    whole, cut = (
        servers("mistral").ask(CHAT, {**body, "max_tokens": count})["choices"][0]
        for count in (200, 45)
    )
    assert (whole["finish_reason"], cut["finish_reason"]) == ("tool_calls", "length")
    found, expected = (
        each["message"]["tool_calls"][0]["function"]["arguments"] for each in (cut, whole)
    )
    assert 0 < len(found) < len(expected)
    assert expected.startswith(found)


def test_tools_are_in_the_prompt_unless_none_may_be_called(
    servers: Callable[[str], Serving],
) -> None:
    server = servers("hermes")

    def prompt(**fields: Any) -> int:
        reply = server.ask(CHAT, {"messages": WHO, "max_tokens": 1, **fields})
        return int(reply["usage"]["prompt_tokens"])

    plain = prompt()
    assert prompt(tools=[TOOL], tool_choice="none") == prompt(tools=[]) == plain
    assert prompt(tools=[TOOL]) == prompt(tools=[TOOL], tool_choice="auto") > plain + 20


@pytest.mark.parametrize("template", ["hermes", "llama", "none", "qwen-coder", "glm"])
def test_strict_functions_leave_text_as_it_is(
    template: str, servers: Callable[[str], Serving]
) -> None:
    server = servers(template)
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    body = {"messages": WHO, "max_tokens": 20}
    plain, own = (server.ask(CHAT, {**body, "tools": [each]}) for each in (TOOL, strict))
    assert own["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert own["choices"][0]["finish_reason"] == "length"


def test_limits_of_strings_that_are_no_json(servers: Callable[[str], Serving]) -> None:
    """A function that is named or strict is refused with one that cannot be followed."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "hostname"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    body = {"messages": WHO, "max_tokens": 1, "tools": [tool], "tool_choice": named}
    assert servers("hermes").status(CHAT, body) == 200
    status, error = servers("qwen-coder").error(CHAT, body)
    assert (status, error["param"]) == (400, "tools")
    assert "property a: format hostname (in calls between tags)" in error["message"]
    assert servers("qwen-coder").status(CHAT, {**body, "tool_choice": "required"}) == 200


def test_answers_in_a_format_beside_tools(servers: Callable[[str], Serving]) -> None:
    body = {"messages": WHO, "tools": [TOOL], "response_format": {"type": "json_object"}}
    reply = servers("hermes").ask(CHAT, {**body, "max_tokens": 60})
    message = reply["choices"][0]["message"]
    assert message.get("tool_calls") or message["content"].startswith("{")
    status, error = servers("llama").error(CHAT, body)
    assert status == 400
    assert "not supported with this response_format for this model" in error["message"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web"}]}, "tools.0.type", "should be 'function'"),
    ({"tools": [{**TOOL, "x": 1}]}, "tools.0.x", "not supported"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions have the same name"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128"),
    ({"tool_choice": "required"}, "tool_choice", "send tools"),
    ({"tools": [OTHER], "tool_choice": NAMED}, "tool_choice", "no function in tools has the name"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice", "send none, auto, required, or"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice", "send none, auto,"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_refused_fields(
    fields: dict[str, Any], param: str, message: str, servers: Callable[[str], Serving]
) -> None:
    status, error = servers("hermes").error(CHAT, {"messages": WHO, **fields})
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("function", "param"),
    [
        ({"name": "a b"}, "tools.0.function.name"),
        ({"name": "<s>"}, "tools.0.function.name"),
        ({"name": "f", "parameters": {"type": "array"}}, "tools.0.function.parameters"),
        ({"name": "f", "parameters": {"a": "b" * 300_000}}, "tools.0.function.parameters"),
        ({"name": "f", "strict": True, "parameters": {"minProperties": [1]}}, "tools"),
    ],
)
def test_refused_functions(
    function: dict[str, Any], param: str, servers: Callable[[str], Serving]
) -> None:
    tools = [{"type": "function", "function": function}]
    body = {"messages": WHO, "tools": tools, "tool_choice": "required"}
    status, error = servers("hermes").error(CHAT, body)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]},
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {"tools": [TOOL], "tool_choice": "any", "parallel_tool_calls": None},
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": None, "required": None}},
                }
            ]
        },
    ],
)
def test_variants_that_clients_send(
    fields: dict[str, Any], servers: Callable[[str], Serving]
) -> None:
    assert servers("hermes").status(CHAT, {"messages": WHO, "max_tokens": 1, **fields}) == 200


def test_functions_without_properties(servers: Callable[[str], Serving]) -> None:
    """Some templates list them."""
    for schema in ({"type": "object"}, {"type": "object", "properties": None}):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {"messages": WHO, "max_tokens": 1, "tools": [tool]}
        assert servers("gpt-oss").status(CHAT, body) == 200


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_schema_that_the_template_cannot_render(
    path: str, servers: Callable[[str], Serving]
) -> None:
    """Of tools and messages the one at fault is named."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "default": 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    status, error = servers("gpt-oss").error(path, {"messages": WHO, "tools": [tool]})
    assert (status, error["param"]) == (400, "tools")
    assert "does not support these tools (can only concatenate str" in error["message"]
    result = {"role": "tool", "content": "a", "tool_call_id": "b"}
    body = {"messages": [result, *WHO], "tools": [TOOL]}
    status, error = servers("gpt-oss").error(path, body)
    assert (status, error["param"]) == (400, "messages")
    assert "does not support these messages (there was no previous tool call" in error["message"]


def with_call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


REFUSED_MESSAGES = [
    ({"role": "user", "content": "a", "tool_calls": [{"function": {}}]}, "tool_calls.0"),
    ({"role": "user", "content": "a", "tool_call_id": "b"}, "tool_call_id"),
    ({"role": "user"}, "content"),
    ({"role": "tool", "content": "a", "tool_call_id": "b" * 300}, "tool_call_id"),
    (with_call(arguments=1), "tool_calls.0.function.arguments"),
]


@pytest.mark.parametrize(("message", "param"), REFUSED_MESSAGES)
def test_refused_messages(
    message: dict[str, Any], param: str, servers: Callable[[str], Serving]
) -> None:
    status, error = servers("hermes").error(CHAT, {"messages": [*WHO, message]})
    assert status == 400
    assert error["param"].startswith(f"messages.1.{param}")


@pytest.mark.parametrize("template", slow_except(TEMPLATES, *range(6)))
@pytest.mark.parametrize(
    "message",
    [
        with_call(arguments='{"a": [1'),  # cut
        with_call(arguments=None),
        with_call(),
        with_call(arguments="[" * 300),
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": None},
    ],
)
def test_what_models_and_clients_send_back(
    template: str, message: dict[str, Any], servers: Callable[[str], Serving]
) -> None:
    message = {"tool_call_id": "call_1", **message} if message["role"] == "tool" else message
    body = {"messages": [*WHO, message, *WHO], "max_tokens": 1}
    assert servers(template).status(CHAT, body) == 200


def test_several_calls_in_a_message_where_the_template_has_one(
    servers: Callable[[str], Serving],
) -> None:
    calls = [{"id": name, "function": {"name": name}} for name in "fg"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "gf"]
    together = [{"role": "assistant", "content": "So", "tool_calls": calls}, *results]
    apart = [
        {"role": "assistant", "content": "So", "tool_calls": calls[:1]},
        results[1],
        {"role": "assistant", "content": None, "tool_calls": calls[1:]},
        results[0],
    ]
    own, expected = (
        servers("gpt-oss").ask("/tokenize", {"messages": [*WHO, *each, *WHO]})["tokens"]
        for each in (together, apart)
    )
    assert own == expected


@pytest.mark.parametrize(("param", "value"), [("stop", "."), ("logprobs", True)])
def test_what_would_see_all_channels_is_refused(
    param: str, value: Any, servers: Callable[[str], Serving]
) -> None:
    body = {"messages": WHO, "tools": [TOOL], "max_tokens": 1, param: value}
    status, error = servers("gpt-oss").error(CHAT, body)
    assert (status, error["param"]) == (400, param)
    assert "not supported with tools for this model" in error["message"]
    assert servers("gpt-oss").status(CHAT, {**body, "tool_choice": "none"}) == 200


def test_all_arguments_together_are_limited(servers: Callable[[str], Serving]) -> None:
    call = with_call(arguments=json.dumps({"a": [[]] * 50_000}))
    status, error = servers("hermes").error(CHAT, {"messages": [*WHO, *[call] * 6]})
    assert (status, error["param"]) == (400, "messages")
    assert "the arguments of all calls have" in error["message"]


def test_other_forms_are_refused(
    model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(model[1], folder / "model")
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    (folder / "model" / "chat_template.jinja").write_text(template)
    with serving(folder / "run", "--model", str(folder / "model"), *model[2:]) as server:
        status, error = server.error(CHAT, {"messages": WHO, "tools": [TOOL]})
        assert (status, error["param"]) == (400, "tools")
        assert "in a form that is not supported" in error["message"]
        assert server.status(CHAT, {"messages": WHO, "tools": [TOOL], "tool_choice": "none"}) == 200
