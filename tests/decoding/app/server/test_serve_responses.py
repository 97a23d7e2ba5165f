"""OpenAI's Responses API, used by its own client."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.request import Request, urlopen

import jsonschema
import pytest

pytest.importorskip("openai")
import openai
from openai.types import responses
from pydantic import BaseModel

from decoding.app.server.formats.neutral_fields import (
    INPUT_MESSAGE_FIELDS,
    INPUT_PART_FIELDS,
    RESPONSE_FIELDS,
)
from decoding.app.server.formats.response_events import ResponsesBuilder
from decoding.app.server.formats.responses import ResponsesBody
from decoding.app.server.worker.jobs import Failed, TextDelta
from support.serving import SLOW, Serving, serving

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
WHO = [{"role": "user", "content": "Who?"}]
LOGPROBS = "message.output_text.logprobs"
EVENTS = {
    "response.created": responses.ResponseCreatedEvent,
    "response.in_progress": responses.ResponseInProgressEvent,
    "response.output_item.added": responses.ResponseOutputItemAddedEvent,
    "response.content_part.added": responses.ResponseContentPartAddedEvent,
    "response.output_text.delta": responses.ResponseTextDeltaEvent,
    "response.output_text.done": responses.ResponseTextDoneEvent,
    "response.content_part.done": responses.ResponseContentPartDoneEvent,
    "response.output_item.done": responses.ResponseOutputItemDoneEvent,
    "response.completed": responses.ResponseCompletedEvent,
    "response.incomplete": responses.ResponseIncompleteEvent,
    "response.failed": responses.ResponseFailedEvent,
}


class Mood(BaseModel):
    mood: Literal["glad", "sad"]


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = Path(model[1])
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template + "{{ reasoning_effort }}")
    options = ("--context", "1024", "--served-model-name", "the book")
    with serving(tmp_path_factory.mktemp("responses") / "run", *model, *options) as running:
        yield running


def chat(server: Serving, **fields: object) -> str:
    """Return the answer of a chat completion."""
    answer = server.ask(CHAT, {"messages": WHO, **fields})
    return str(answer["choices"][0]["message"]["content"])


def respond(server: Serving, **fields: object) -> Any:
    """Return a whole response, of which OpenAI's type is checked."""
    response = server.ask(PATH, {"input": "Who?", **fields})
    responses.Response.model_validate(response)
    return response


def text(response: Any) -> str:
    """Return the text of a response as JSON."""
    ((part,),) = [item["content"] for item in response["output"]]
    return str(part["text"])


def stream(server: Serving, **fields: object) -> tuple[list[tuple[str, Any]], str | None]:
    """Return the events of a stream, of which OpenAI's types are checked, and X-Max-Tokens."""
    body = json.dumps({"input": "Who?", "stream": True, **fields}).encode()
    request = Request(server.url + PATH, body, {"Content-Type": "application/json"})
    with urlopen(request) as reply:
        blocks, clipped = reply.read().decode().strip().split("\n\n"), reply.headers["X-Max-Tokens"]
    events = []
    for block in blocks:
        lines = block.splitlines()
        if lines[0].startswith(":"):
            events.append((":", lines[0]))
            continue
        named, data = lines
        content = json.loads(data.removeprefix("data: "))
        assert named == f"event: {content['type']}"
        EVENTS[content["type"]].model_validate(content)
        events.append((content["type"], content))
    numbers = [data["sequence_number"] for name, data in events if name != ":"]
    assert numbers == list(range(len(numbers)))
    return events, clipped


def test_a_response_has_the_text_of_a_chat_completion(server: Serving) -> None:
    client = server.client()
    response = client.responses.create(
        model=server.model, input="Who?", instructions="Be brief.", metadata={"a": "b"}, user="me"
    )
    responses.Response.model_validate(response.model_dump())
    system = {"role": "system", "content": "Be brief."}
    answer = server.ask(CHAT, {"messages": [system, *WHO]})
    assert response.output_text == answer["choices"][0]["message"]["content"] != ""
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == tuple(
        answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")
    )
    details = usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.temperature, response.max_output_tokens, response.user) == (0, 12, "me")
    assert (response.model, response.store, response.tools) == (server.model, False, [])
    assert response.tierforce["prompt_tokens"] == usage.input_tokens
    (item,) = response.output
    assert (item.status, item.content[0].logprobs) == ("incomplete", [])


def test_a_complete_response(server: Serving) -> None:
    stop = chat(server)[3:6]
    response = respond(server, stop=stop, max_output_tokens=20, top_p=0.5)
    assert text(response) == chat(server, stop=stop)
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert response["output"][0]["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    assert (response["max_output_tokens"], response["top_p"]) == (20, 0.5)
    assert respond(server, n_predict=3)["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_stream_has_the_documented_events(is_complete: bool, server: Serving) -> None:
    """The message comes with the first token: progress of the prefill precedes it."""
    fields: dict[str, Any] = {"input": "It was. " * 100, "include": [LOGPROBS], "top_logprobs": 2}
    if is_complete:
        fields["text"] = {"format": {"type": "json_schema", "name": "a", "schema": {"const": 1}}}
    found, _ = stream(server, **fields)
    whole = respond(server, **fields)
    names = [name for name, _ in found]
    added = names.index("response.output_item.added")
    assert set(names[2:added]) == {":"}
    assert any("prefill" in data for _, data in found[2:added])
    events = [data for name, data in found if name != ":"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed" if is_complete else "response.incomplete",
    ]
    created, last = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert "".join(delta["delta"] for delta in deltas) == text(last) == text(whole)
    (part,) = last["output"][0]["content"]
    assert [each for delta in deltas for each in delta["logprobs"]] == part["logprobs"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"]
    done = events[-4]
    assert (done["text"], done["logprobs"]) == (part["text"], part["logprobs"])
    assert (events[-3]["part"], events[-2]["item"]) == (part, last["output"][0])
    assert {event["item_id"] for event in (*deltas, done)} == {last["output"][0]["id"]}
    same = ("id", "created_at", "text", "instructions", "temperature", "max_output_tokens")
    assert [last[name] for name in same] == [created[name] for name in same]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert last["tierforce"]["new_tokens"] == last["usage"]["output_tokens"]


def test_the_helpers_of_the_client(server: Serving) -> None:
    client, schema = server.client(), {"model": server.model, "input": "How are you?"}
    parsed = client.responses.parse(**schema, text_format=Mood, max_output_tokens=100)
    assert parsed.output_parsed.mood in ("glad", "sad")
    assert parsed.status == "completed"
    assert parsed.text.format.name == "Mood"
    with client.responses.stream(**schema, text_format=Mood, max_output_tokens=100) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    assert "".join(deltas) == final.output_text == parsed.output_text
    streamed = client.responses.create(**schema, text={"format": {"type": "text"}}, stream=True)
    *_, last = streamed
    assert last.type == "response.incomplete"
    assert last.response.output_text == client.responses.create(**schema).output_text


def test_the_output_can_be_passed_back(server: Serving) -> None:
    client, conversation = server.client(), [dict(WHO[0], type="message")]
    for _ in range(2):
        response = client.responses.create(
            model=server.model, input=conversation, include=[LOGPROBS]
        )
        conversation += response.output
        conversation += [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
            {"role": "user", "content": [{"type": "input_text", "text": "And who?"}]},
        ]
    own = [item for item in conversation if not isinstance(item, dict)]
    answers = [item.content[0].text for item in own]
    user = {"role": "user", "content": "And who?"}
    first, second = ({"role": "assistant", "content": answer} for answer in answers)
    assert answers == [chat(server), chat(server, messages=[*WHO, first, user])]
    found = client.responses.create(model=server.model, input=conversation)
    expected = chat(server, messages=[*WHO, first, user, second, user])
    assert found.output_text == expected
    dumped = [item if isinstance(item, dict) else item.model_dump() for item in conversation]
    assert text(respond(server, input=dumped)) == expected


def test_log_probabilities_are_those_of_a_chat_completion(server: Serving) -> None:
    answer = server.ask(CHAT, {"messages": WHO, "logprobs": True, "top_logprobs": 3})
    response = respond(server, include=[LOGPROBS], top_logprobs=3)
    (part,) = response["output"][0]["content"]
    expected = answer["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in part["logprobs"]] == [each["bytes"] for each in expected]
    for found, each in zip(part["logprobs"], expected, strict=True):
        assert len(found["top_logprobs"]) == 3
        for name in ("logprob", "sampled_logprob"):
            assert found[name] == pytest.approx(each[name], abs=1e-4)
    assert response["top_logprobs"] == 3


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_formats_are_those_of_a_chat_completion(kind: str, server: Serving) -> None:
    nested: dict[str, Any] = {"type": kind}
    flat: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        own = {"name": "n", "schema": Mood.model_json_schema(), "strict": True, "description": "d"}
        nested, flat = {"type": kind, "json_schema": own}, {"type": kind, **own}
    response = respond(server, text={"format": flat, "verbosity": "medium"})
    assert text(response) == chat(server, response_format=nested) != chat(server)
    assert response["text"] == {"format": flat, "verbosity": "medium"}
    choice = {"choice": ["yes", "no"]}
    assert text(respond(server, structured_outputs=choice)) in ("yes", "no")


def test_rules_on_logits_and_variables(server: Serving) -> None:
    fields = {"repetition_penalty": 1.3, "logit_bias": {"5": 3}, "seed": 4}
    assert text(respond(server, **fields)) == chat(server, **fields) != chat(server)
    effort = respond(server, reasoning={"effort": "high", "summary": "auto"})
    assert text(effort) == chat(server, reasoning_effort="high")
    assert effort["reasoning"] == {"effort": "high", "summary": None}
    used = [chat(server, reasoning_effort="high"), chat(server)]
    variable = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    assert [text(respond(server, **own)) for own in (variable, {})] == used
    tokens = [effort["usage"]["input_tokens"], respond(server)["usage"]["input_tokens"]]
    assert tokens[0] > tokens[1]
    continued = [*WHO, {"role": "assistant", "content": "It was"}]
    assert text(respond(server, input=continued, continue_final_message=True)) == chat(
        server, messages=continued, continue_final_message=True
    )


def test_more_tokens_than_there_is_room_for_are_clipped(server: Serving) -> None:
    events, clipped = stream(server, input="It was. " * 250, max_output_tokens=5000)
    last = events[-1][1]["response"]
    assert clipped == str(last["max_output_tokens"]) == str(last["usage"]["output_tokens"])
    assert last["usage"]["total_tokens"] == 1024
    assert last["status"] == "incomplete"


@pytest.mark.parametrize("index", [0, -1])
def test_neutral_values_change_no_answer(index: int, server: Serving) -> None:
    fields = {name: own[index] if own else "any" for name, own in RESPONSE_FIELDS.items()}
    fields |= {"parallel_tool_calls": bool(index), "tool_choice": "none", "include": []}
    fields |= {"tools": [[], None][index]}
    fields |= {"text": {"verbosity": "medium"}, "reasoning": {}, "top_logprobs": 0}
    part = {"type": "input_text", "text": "Who?"}
    part |= {name: own[index] if own else [] for name, own in INPUT_PART_FIELDS.items()}
    item = {"role": "user", "content": [part], **dict.fromkeys(INPUT_MESSAGE_FIELDS, "any")}
    response = respond(server, input=[item], **fields)
    assert text(response) == chat(server)
    assert (response["tool_choice"], response["store"]) == ("none", False)
    assert response["parallel_tool_calls"] is bool(index)


def part(**fields: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "a", **fields}]}]


SCHEMA = {"type": "json_schema", "name": "a", "schema": {}}
REASONING = {"type": "reasoning", "id": "a", "summary": []}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "the whole conversation"),
        ({"prompt": {"id": "a"}}, "prompt", "use instructions and input"),
        ({"messages": WHO}, "messages", "use input"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
        ({"background": True}, "background", "leave it out, or send false"),
        ({"truncation": "auto"}, "truncation", 'or send "disabled"'),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options", "not supported"),
        ({"store": "yes"}, "store", "or send false or true"),
        ({"speed": 1}, "speed", "speed is not supported by this server: leave it out."),
        ({"return_token_ids": True}, "return_token_ids", "not supported"),
        ({"include": ["thoughts"]}, "include.0", "Input should be"),
        ({"top_logprobs": 2}, "top_logprobs", f'it requires include: ["{LOGPROBS}"]'),
        ({"text": {"verbosity": "low"}}, "text.verbosity", 'send "medium"'),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "must be text, json_object"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "a name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format",
            "json_schema needs a schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": SCHEMA}}},
            "text.format",
            "'json_schema' is not supported",
        ),
        (
            {"text": {"format": {**SCHEMA, "schema": {"type": "x"}}}},
            "text.format",
            "text.format: the JSON schema is invalid",
        ),
        (
            {"text": {"format": {**SCHEMA, "strict": 1}}},
            "text.format",
            "strict must be true or false",
        ),
        (
            {"text": {"format": {**SCHEMA, "name": "a" * 65}}},
            "text.format",
            "a name of 1 to 64",
        ),
        (
            {"text": {"format": {**SCHEMA, "description": "a" * 10_001}}},
            "text.format",
            "up to 10,000 characters",
        ),
        (
            {"structured_outputs": {"json": {}}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs",
            "send this or text.format, not both",
        ),
        ({"reasoning": {"effort": "great"}}, "reasoning.effort", "Input should be"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", 'send "standard"'),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "low"},
            "reasoning_effort",
            "here or in reasoning",
        ),
        ({"metadata": {"a": 1}}, "metadata", "16 strings of up to 512 characters"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "names of up to 64"),
        ({"user": "a" * 513}, "user", "at most 512"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [REASONING]}, "input", "at least one message"),
        ({"input": ["Who?"]}, "input.0", "a message with role and content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "'assistant'"),
        ({"input": [{"id": "msg_1", "type": "item_reference"}]}, "input.0.type", "type message"),
        ({"input": [{**WHO[0], "type": ["message"]}]}, "input.0.type", "type message"),
        ({"input": [*WHO, {**WHO[0], "audio": {}}]}, "input.1.audio", "not supported"),
        ({"input": part(type="input_image")}, "input.0.content.0.type", "'input_text'"),
        ({"input": part(image_url="a")}, "input.0.content.0.image_url", "not supported"),
        ({"input": part(file_id="a")}, "input.0.content.0.file_id", "not supported"),
        ({"input": part(annotations=[{}])}, "input.0.content.0.annotations", "or send []"),
        (
            {"input": [{**REASONING, "summary": [{"type": "summary_text", "text": "a"}]}, *WHO]},
            "input.0.summary",
            "leave the reasoning out",
        ),
        ({"input": [{**REASONING, "encrypted_content": "a"}]}, "input.0.encrypted_content", "out"),
        ({"input": "It was " * 5000}, "input", "a shorter"),
        ({"continue_final_message": True}, "continue_final_message", "must be the assistant's"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"model": "gpt-4"}, "model", "use 'the book'"),
    ],
)
def test_others_are_refused_by_name(
    fields: dict[str, Any], param: str, message: str, server: Serving
) -> None:
    for is_streamed in (False, True):
        status, error = server.error(PATH, {"input": "Who?", "stream": is_streamed, **fields})
        assert (status, error["param"]) == (404 if param == "model" else 400, param)
        assert message in error["message"]


def test_a_schema_that_is_not_json(server: Serving) -> None:
    body = b'{"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": %s}}}'
    for schema in (b'{"const": NaN}', b'{"x-own": Infinity}'):
        status, error = server.error(PATH, body % schema)
        assert (status, error["param"]) == (400, "text.format")


def test_only_short_instructions_are_kept() -> None:
    for length, is_kept in ((1 << 16, True), ((1 << 16) + 1, False)):
        instructions = "a" * length
        body = ResponsesBody.model_validate({"input": "Who?", "instructions": instructions})
        assert body.repeated["instructions"] == (instructions if is_kept else None)
        assert body.messages[0].text == instructions


def test_nothing_is_stored(server: Serving) -> None:
    client = server.client()
    response = client.responses.create(model=server.model, input="Who?", store=True)
    for method in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=r"stores none\. Send"):
            method(response.id)


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(("status", "code"), [(503, "server_error"), (400, "invalid_prompt")])
def test_a_stream_that_fails(has_begun: bool, status: int, code: str) -> None:
    """The answer so far is part of the response."""
    builder = ResponsesBuilder("model")
    events = builder.opening()
    if has_begun:
        events += builder.first(0)
        for part in ("It ", "w"):
            events += builder.chunk(0, TextDelta(part))
    events.append(builder.failure(Failed(status, "No memory.")))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert (response["error"]["code"], response["error"]["message"]) == (code, "No memory.")
    assert [item["status"] for item in response["output"]] == ["incomplete"] * has_begun
    if has_begun:
        assert text(response) == "It w"


def test_a_shutdown_fails_streams(model: tuple[str, ...], tmp_path: Path) -> None:
    """Also one that waits in the queue, of which the client only knows that it was created."""
    with serving(tmp_path / "run", *model, *SLOW, "--concurrency", "1") as server:
        create, body = server.client().responses.create, {"input": "Who?", "max_output_tokens": 900}
        running = iter(create(**body, stream=True))
        while (delta := next(running)).type != "response.output_text.delta":
            pass
        waiting = iter(create(**body, stream=True))
        opening = [next(waiting).type for _ in range(2)]
        assert opening == ["response.created", "response.in_progress"]
        assert server.end().code == 128 + signal.SIGTERM
        *_, failed = running
        assert failed.type == "response.failed"
        assert failed.response.error.code == "server_error"
        assert "shutting down" in failed.response.error.message
        assert failed.response.output_text.startswith(delta.delta)
        (failed,) = waiting
        assert (failed.type, failed.response.output) == ("response.failed", [])


def test_the_body_is_described(server: Serving) -> None:
    description = server.ask("/openapi.json")
    body = description["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]
    schema = {**body["schema"], "components": description["components"]}
    for own in ("Who?", WHO, part()):
        jsonschema.validate({"input": own, "include": [LOGPROBS], "text": {}}, schema)
    for invalid in (5, [{"role": "critic", "content": "a"}], part(type="input_image")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"input": invalid}, schema)
