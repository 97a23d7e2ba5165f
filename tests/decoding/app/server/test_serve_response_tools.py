"""Tools in OpenAI's Responses API, used by its own client: calls are those of chat completions."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

pytest.importorskip("openai")
from openai.types import responses

from decoding.app.server.formats.neutral_fields import FUNCTION_FIELDS, INPUT_CALL_FIELDS
from decoding.app.server.formats.response_events import ResponsesBuilder
from decoding.app.server.formats.responses import ResponsesBody
from decoding.app.server.worker.jobs import Failed, GenerationParams, TextDelta
from decoding.speculation.sampling import Sampling
from decoding.text.tools.forms import HERMES
from decoding.text.tools.parser import ToolCallParser
from support.chat_templates import HERMES_TOOLS
from support.serving import Serving, serving
from support.tools import FORECAST

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
WHO = [{"role": "user", "content": "How is the weather?"}]
FUNCTION: dict[str, Any] = {
    "name": "weather",
    "description": "The weather.",
    "parameters": FORECAST,
}
TOOL, OTHER = {"type": "function", **FUNCTION}, {"type": "function", "name": "now"}
NAMED = {"type": "function", "name": "weather"}
ONE = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tools")
    shutil.copytree(model[1], folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(HERMES_TOOLS)
    options = ("--context", "1024", "--max-new-tokens", "200")
    own = ("--model", str(folder / "model"), *model[2:])
    with serving(folder / "run", *own, *options) as running:
        yield running


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat completions take it."""
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def respond(server: Serving, **fields: object) -> Any:
    """Return a whole response, of which OpenAI's type is checked."""
    response = server.ask(PATH, {"input": WHO, **fields})
    responses.Response.model_validate(response)
    return response


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_are_those_of_a_chat_completion(choice: Any, server: Serving) -> None:
    fields = {"tools": [OTHER, TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    response = respond(server, **fields)
    body = {**fields, "messages": WHO, "tools": [nested(OTHER), nested(TOOL)]}
    (expected,) = server.ask(CHAT, body)["choices"][0]["message"]["tool_calls"]
    (item,) = response["output"]
    assert (item["type"], item["status"], response["status"]) == (
        "function_call",
        *["completed"] * 2,
    )
    assert (item["name"], item["arguments"]) == tuple(expected["function"].values())
    assert len(item["call_id"]) == 9
    if item["name"] == "weather":
        jsonschema.validate(json.loads(item["arguments"]), FORECAST)
    own = {"parameters": None, "description": None, "strict": False}
    assert response["tools"] == [{**own, **OTHER}, {**own, **TOOL}]
    assert (response["tool_choice"], response["parallel_tool_calls"]) == (choice, False)


def test_a_stream_of_a_call(server: Serving) -> None:
    client = server.client().responses
    with client.stream(model=server.model, input=WHO, **ONE) as stream:
        events = list(stream)
    final = stream.get_final_response()
    (item,) = final.output
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type.endswith("arguments.delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert len(deltas) > 2
    whole = respond(server, **ONE)["output"][0]
    assert "".join(deltas) == item.arguments == events[-3].arguments == whole["arguments"]
    assert (events[2].item.arguments, events[2].item.status) == ("", "in_progress")
    assert {event.item_id for event in events[3:-2]} == {events[2].item.id} == {item.id}
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_calls_and_results_are_passed_back(server: Serving) -> None:
    """The next rounds of an agent have the prompts of chat completions."""
    client = server.client().responses
    conversation: list[Any] = list(WHO)
    messages: list[Any] = list(WHO)
    for result in (
        "fine",
        [{"type": "input_text", "text": "rain, "}, {"type": "input_text", "text": "wind"}],
    ):
        response = client.create(model=server.model, input=conversation, **ONE)
        (call,) = response.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        conversation += [*response.output, output]
        function = {"name": call.name, "arguments": call.arguments}
        text = result if isinstance(result, str) else "rain, wind"
        messages += [
            {"role": "assistant", "tool_calls": [{"id": call.call_id, "function": function}]},
            {"role": "tool", "content": text, "tool_call_id": call.call_id},
        ]
        tokens = server.ask("/tokenize", {"messages": messages, "tools": [nested(TOOL)]})["count"]
        dumped = [item if isinstance(item, dict) else item.model_dump() for item in conversation]
        for own in (conversation, dumped):
            answer = client.create(model=server.model, input=own, tools=[TOOL], max_output_tokens=4)
            assert answer.usage.input_tokens == tokens


def test_items_are_the_messages_of_a_chat_completion() -> None:
    """Text after a call, too, is of the message that has the call."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": '{"a": 1}'}

    def text(content: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": content}

    def result(name: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": f"of {name}"}

    items = [text("I look."), call("a"), text("Then"), call("b"), text("So."), result("a")]
    body = ResponsesBody.model_validate({"input": [*WHO, *items, result("b"), text("Fine.")]})
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": name, "type": "function", "function": function} for name in "ab"]
    assert [message.as_template() for message in body.messages] == [
        *WHO,
        {"role": "assistant", "content": "I look.\n\nThen\n\nSo.", "tool_calls": calls},
        *({"role": "tool", "content": f"of {name}", "tool_call_id": name} for name in "ab"),
        {"role": "assistant", "content": "Fine."},
    ]


def test_calls_belong_to_the_message_before_them(server: Serving) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "fine"}
    text = {"role": "assistant", "content": "I look."}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    items = [
        *WHO,
        text,
        reasoning,
        call,
        {**call, "call_id": "b"},
        result,
        {**result, "call_id": "b"},
        call,
    ]
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": name, "function": function} for name in "ab"]
    messages = [
        *WHO,
        {**text, "tool_calls": calls},
        *({"role": "tool", "content": "fine", "tool_call_id": name} for name in "ab"),
        {"role": "assistant", "tool_calls": calls[:1]},
    ]
    fields = {"max_output_tokens": 1, "tools": [TOOL]}
    found = respond(server, input=items, **fields)["usage"]["input_tokens"]
    body = {"messages": messages, "tools": [nested(TOOL)]}
    assert found == server.ask("/tokenize", body)["count"]


def test_a_call_that_is_cut(server: Serving) -> None:
    whole, cut = (respond(server, **ONE, max_output_tokens=count) for count in (200, 45))
    assert (cut["status"], cut["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    (found,), (expected,) = cut["output"], whole["output"]
    assert (found["status"], expected["status"]) == ("incomplete", "completed")
    assert expected["arguments"].startswith(found["arguments"])
    assert 0 < len(found["arguments"]) < len(expected["arguments"])


def test_text_with_tools(server: Serving) -> None:
    body = {"messages": WHO, "tools": [nested(TOOL)], "max_tokens": 12}
    expected = server.ask(CHAT, body)["choices"][0]["message"]["content"]
    stream = server.client().responses.create(
        model=server.model, input=WHO, tools=[TOOL], max_output_tokens=12, stream=True
    )
    *events, last = stream
    assert last.response.output_text == expected != ""
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    none = respond(server, tools=[TOOL], tool_choice="none", max_output_tokens=12)
    (item,), (plain,) = none["output"], respond(server, max_output_tokens=12)["output"]
    assert item["content"] == plain["content"]
    assert none["tools"][0]["name"] == "weather"


def test_tools_that_are_too_long_to_repeat(server: Serving) -> None:
    tool = {**TOOL, "description": "a" * 70_000}
    response = respond(server, tools=[tool], tool_choice="none", max_output_tokens=1)
    (found,) = response["tools"]
    assert (found["name"], found["description"], found["parameters"]) == ("weather", None, {})


@pytest.mark.parametrize("index", [0, -1])
def test_neutral_values(index: int, server: Serving) -> None:
    own = {name: each[index] if each else "any" for name, each in FUNCTION_FIELDS.items()}
    call = {name: each[index] if each else "any" for name, each in INPUT_CALL_FIELDS.items()}
    called = {**call, "type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {**call, "type": "function_call_output", "call_id": "a", "output": "fine"}
    fields = {"tools": [{**TOOL, **own}], "input": [*WHO, called, result], "max_output_tokens": 1}
    assert server.status(PATH, fields) == 200


CALL = {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "b"}
IMAGE = {"type": "input_image", "text": ""}
LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{**TOOL, "parameters": {"x": [float("nan")]}}]}, "tools.0.parameters", "NaN"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "send tools of type function"),
        (
            {"tools": [{"type": "custom", "name": "f"}]},
            "tools.0.type",
            "send tools of type function",
        ),
        ({"tools": [nested(TOOL)]}, "tools.0.function", "description and parameters beside type"),
        ({"tools": [TOOL], "tool_choice": {**NAMED, "x": 1}}, "tool_choice", "send none, auto"),
        ({"input": [*WHO, *[CALL] * 129]}, "input", "more than 128 calls follow each other"),
        ({"tools": [{**TOOL, "name": "<s>"}]}, "tools.0.name", "letters, digits"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "or send false"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions have the same name"),
        ({"tools": [TOOL] * 129}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"tools": [OTHER], "tool_choice": NAMED}, "tool_choice", "no function in tools has"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
            },
            "tool_choice",
            "send none, auto, required, or",
        ),
        ({"tools": [TOOL], "include": [LOGPROBS]}, "include", "not supported with tools"),
        ({"input": [*WHO, {**CALL, "call_id": 1}]}, "input.1.call_id", "valid string"),
        ({"input": [*WHO, {**CALL, "arguments": 1}]}, "input.1.arguments", "in a string"),
        ({"input": [*WHO, {**CALL, "name": "a b"}]}, "input.1.name", "letters, digits"),
        ({"input": [*WHO, {**RESULT, "output": [IMAGE]}]}, "input.1.output.0.type", "'input_text'"),
        ({"input": [*WHO, {**RESULT, "output": None}]}, "input.1.output", "valid string"),
        ({"input": [*WHO, {"type": "custom_tool_call"}]}, "input.1.type", "function_call_output"),
        (
            {"input": [*WHO, *[{**CALL, "arguments": json.dumps([[]] * 50_000)}] * 6]},
            "input",
            "the arguments of all calls have",
        ),
    ],
)
def test_others_are_refused_by_name(
    fields: dict[str, Any], param: str, message: str, server: Serving
) -> None:
    status, error = server.error(PATH, {"input": WHO, **fields})
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_stream_that_fails_in_a_call_has_its_beginning() -> None:
    params = GenerationParams(array("i", [1]), 9, Sampling())
    builder = ResponsesBuilder("model")
    builder.begin([params], "{}", ToolCallParser(HERMES, {"f": {}}))
    begun = 'I look. <tool_call>{"name": "f", "arguments": {"a": 1'
    for part in (begun[:20], begun[20:]):
        builder.chunk(0, TextDelta(part))
    response = builder.failure(Failed(503, "No memory."))["response"]
    message, call = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("completed", "I look.")
    assert (call["status"], call["arguments"]) == ("incomplete", '{"a": 1')
