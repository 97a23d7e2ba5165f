"""Fields that clients of other servers send: taken, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema
import pytest

pytest.importorskip("openai")
from transformers import AutoTokenizer

from decoding.app.server.formats.neutral_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGE_FIELDS,
)
from support.chat_model import TEMPLATE
from support.commands import forked, refused
from support.serving import Serving, serving
from support.slow import slow_except

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WHO = [{"role": "user", "content": "Who?"}]
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def folder(model: tuple[str, ...]) -> Path:
    """Return the model's folder; its template has a variable."""
    path = Path(model[1])
    named = "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}"
    template = TEMPLATE.replace("{{ m.content }}", named) + "{{ mood }}{{ reasoning_effort }}"
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def server(
    folder: Path, model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    options = ("--served-model-name", "the book", "--context", "1024")
    options += ("--allow-origin", PAGE.upper().replace("HTTP", "http"))
    with serving(tmp_path_factory.mktemp("server") / "run", *model, *options) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(folder)


def content(server: Serving, **fields: object) -> str:
    reply = server.ask(CHAT, {"messages": WHO, "max_tokens": 8, **fields})
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("index", [0, -1])
def test_neutral_values_change_no_answer(path: str, index: int, server: Serving) -> None:
    """Of those with two, both."""
    body: dict[str, Any] = {"messages": WHO} if path == CHAT else {"prompt": "Who?"}
    neutral = CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS
    fields = {name: values[index] if values else "any" for name, values in neutral.items()}
    more = {"min_p": 0, "repetition_penalty": 1, "top_k": -1, "repeat_last_n": 64, "stop": ""}
    more |= {"repeat_penalty": 1}
    more |= {"logit_bias": []}
    if path == CHAT:
        more |= {"add_generation_prompt": True, "chat_template_kwargs": {}, "top_logprobs": 0}
    body |= {"max_tokens": 8, "temperature": 0}
    expected, found = (server.ask(path, {**body, **own}) for own in ({}, {**fields, **more}))
    for key in ("text", "message"):
        assert found["choices"][0].get(key) == expected["choices"][0].get(key)


def test_neutral_values_of_messages(server: Serving) -> None:
    expected = content(server)
    for name, values in MESSAGE_FIELDS.items():
        for value in (None, *(("any",) if values is None else values)):
            assert content(server, messages=[{**WHO[0], name: value}]) == expected
    part = {"type": "text", "text": "Who?", "cache_control": {"type": "ephemeral"}}
    assert content(server, messages=[{"role": "user", "content": [part]}]) == expected


def test_the_seed_of_others_is_random(server: Serving) -> None:
    seeds = {
        server.ask(CHAT, {"messages": WHO, "max_tokens": 1, "seed": -1})["tierforce"]["seed"]
        for _ in range(2)
    }
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"min_tokens": 5}, "min_tokens", "leave it out, or send 0"),
        ({"mirostat": 2}, "mirostat", "leave it out, or send 0"),
        ({"ignore_eos": True}, "ignore_eos", "leave it out, or send false"),
        ({"guided_json": {}}, "guided_json", "use response_format, or structured_outputs"),
        ({"speed": 1}, "speed", "speed is not supported by this server: leave it out."),
        ({"messages": [*WHO, {**WHO[0], "audio": {}}]}, "messages.1.audio", "not supported"),
        ({"stream_options": {"often": 1}}, "stream_options.often", "not supported"),
        ({"reasoning_effort": "great"}, "reasoning_effort", "Input should be"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs", "a must be true, false"),
        ({"chat_template_kwargs": {"a": "<|end|>"}}, "chat_template_kwargs", "a short text"),
        ({"chat_template_kwargs": {"a": 10**7}}, "chat_template_kwargs", "up to 1,000,000"),
        ({"chat_template_kwargs": {"conversations": 1}}, "chat_template_kwargs", "cannot be"),
        ({"chat_template_kwargs": {"bos_token": "a"}}, "chat_template_kwargs", "cannot be"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "cannot be"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "send an object"),
        ({"continue_final_message": True}, "continue_final_message", "must be the assistant's"),
        (
            {
                "continue_final_message": True,
                "messages": [*WHO, {"role": "assistant", "content": " "}],
            },
            "continue_final_message",
            "have text",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt", "send false with"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
            "here or in chat_template_kwargs",
        ),
        ({"presence_penalty": 1, "repeat_last_n": 64}, "repeat_last_n", "or send -1"),
        ({"repeat_penalty": 1.1}, "repeat_penalty", "send 1, and repetition_penalty"),
        ({"stop": 5}, "stop", "valid"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": "a" * 501}, "stop", "at most 500"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid"),
        ({"top_logprobs": 2}, "top_logprobs", "it requires logprobs: true"),
        ({"cache_salt": "a"}, "cache_salt", "not supported"),
        ({"json_schema": {}}, "json_schema", "use response_format"),
        ({"a[b]": 1}, "'a[b]'", "not supported"),
        ({"messages": [{**WHO[0], "name": "<|end|>"}]}, "messages.0.name", "1 to 64 characters"),
    ],
)
def test_others_are_refused_by_name(
    fields: dict[str, Any], param: str | None, message: str, server: Serving
) -> None:
    status, error = server.error(CHAT, {"messages": WHO, **fields})
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_the_model_has_a_name_of_ones_own(server: Serving) -> None:
    assert server.model == "the book"
    assert content(server, model="the book") == content(server)
    assert server.ask("/v1/models/the%20book")["id"] == "the book"
    status, error = server.error(CHAT, {"messages": WHO, "model": "model"})
    assert (status, error["param"]) == (404, "model")
    assert "use 'the book'" in error["message"]


def reply(server: Serving, path: str, body: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the answer, and the header with a clipped number of tokens."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(server.url + path, data, headers)) as response:
        text, clipped = response.read().decode(), response.headers["X-Max-Tokens"]
    return (text if body.get("stream") else json.loads(text)), clipped


@pytest.mark.parametrize("name", slow_except(["max_tokens", "n_predict"]))
def test_more_tokens_than_there_is_room_for_are_clipped(name: str, server: Serving) -> None:
    """With a header that says how many there may be; -1 is all of them."""
    prompt = [5] * 1000
    answer, clipped = reply(server, TEXT, {"prompt": prompt, name: 5000})
    assert (answer["usage"]["completion_tokens"], clipped) == (24, "24")
    answer, clipped = reply(server, TEXT, {"prompt": prompt, name: -1})
    assert (answer["usage"]["completion_tokens"], clipped) == (24, None)
    answer, clipped = reply(server, TEXT, {"prompt": prompt})
    assert (answer["usage"]["completion_tokens"], clipped) == (12, None)
    assert reply(server, TEXT, {"prompt": prompt, name: 99, "stream": True})[1] == "24"
    messages = {"messages": WHO, "max_tokens": 3, "max_completion_tokens": -1}
    assert reply(server, CHAT, messages)[0]["usage"]["total_tokens"] == 1024


def test_the_role_comes_with_the_first_token(server: Serving) -> None:
    """Clients time the prefill by the first chunk."""
    body = {"messages": [{"role": "user", "content": "It was. " * 150}], "stream": True}
    lines = [line for line in reply(server, CHAT, body)[0].splitlines() if line]
    role = next(index for index, line in enumerate(lines) if '"role"' in line)
    assert any("prefill" in line for line in lines[:role])
    assert not any(line.startswith("data") for line in lines[:role])
    assert json.loads(lines[role + 1].removeprefix("data: "))["choices"][0]["delta"]["content"]


def test_a_last_message_is_continued(server: Serving, tokenizer: AutoTokenizer) -> None:
    messages = [*WHO, {"role": "assistant", "content": "It was <|end|> the"}]
    rendered = "<|user|>Who?<|end|>\n<|assistant|>"
    begun = tokenizer("It was <|end|> the", add_special_tokens=False, split_special_tokens=True)
    before = tokenizer(rendered, add_special_tokens=False).input_ids
    prompt = [*before, *begun.input_ids]
    answer = server.ask(TEXT, {"prompt": prompt, "max_tokens": 8})
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    body = {"messages": messages, "max_tokens": 8, "return_token_ids": True, **fields}
    found = server.ask(CHAT, body)
    assert found["prompt_token_ids"] == prompt
    assert found["choices"][0]["message"]["content"] == answer["choices"][0]["text"]
    assert server.ask("/tokenize", {"messages": messages, **fields})["tokens"] == prompt


def test_variables_reach_the_template(server: Serving) -> None:
    """Also the names of participants."""
    plain, glad, high, named = (
        server.ask("/tokenize", {"messages": [{**WHO[0], **own}], **fields})["tokens"]
        for own, fields in (
            ({}, {}),
            ({}, {"chat_template_kwargs": {"mood": "glad, on 1 May"}}),
            ({}, {"reasoning_effort": "high"}),
            ({"name": "Ahab"}, {}),
        )
    )
    detokenized = [
        server.ask("/detokenize", {"tokens": tokens})["prompt"]
        for tokens in (plain, glad, high, named)
    ]
    ends = ("", "glad, on 1 May", "high", "")
    assert detokenized[:3] == [detokenized[0] + end for end in ends[:3]]
    assert detokenized[3] == detokenized[0].replace("<|user|>", "<|user|>Ahab: ")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_ids_of_tokens(path: str, server: Serving, tokenizer: AutoTokenizer) -> None:
    body = {"return_token_ids": True, "max_tokens": 8}
    body |= {"messages": WHO} if path == CHAT else {"prompt": "Who?"}
    answer = server.ask(path, body)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert tokenizer.decode(choice["token_ids"]) == text
    prompt = (answer if path == CHAT else choice)["prompt_token_ids"]
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    lines = reply(server, path, {**body, "stream": True})[0].splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]
    first = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt
    stopped = server.ask(path, {**body, "stop": text[len(text) // 2 :][:3]})["choices"][0]
    ids = stopped["token_ids"]
    assert 0 < len(ids) < len(streamed)
    assert ids == streamed[: len(ids)]
    # tokens without text of their own are not lost
    hidden = server.ask(path, {**body, "stop": text[:1]})["choices"][0]
    assert hidden["token_ids"] == streamed[:1]


def test_tokens_and_their_text(server: Serving, tokenizer: AutoTokenizer) -> None:
    text = "It was <|end|> the best"
    plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    found = server.ask("/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == [*tokenizer("", add_special_tokens=True).input_ids, *plain]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    without = {"prompt": text, "add_special_tokens": False}
    for body in ({"content": text}, without):  # llama.cpp's, and vLLM's
        assert server.ask("/tokenize", body)["tokens"] == plain
    assert server.ask("/detokenize", {"tokens": plain})["prompt"] == text
    messages = server.ask("/tokenize", {"model": "the book", "messages": WHO})
    usage = server.ask(CHAT, {"messages": WHO, "max_tokens": 1})["usage"]
    assert messages["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", b"{}", "send one of prompt, content and messages"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "send one of"),
        ("/tokenize", {"prompt": "It was " * 100_000}, "Shorten it"),
        ("/tokenize", {"prompt": "\U0001f600" * 8_000}, "Shorten it"),
        ("/tokenize", {"messages": WHO, "add_special_tokens": True}, "not supported with messages"),
        ("/tokenize", {"prompt": "a", "reasoning_effort": "low"}, "not supported without messages"),
        ("/tokenize", {"prompt": "a", "speed": 1}, "speed is not supported"),
        ("/detokenize", {"tokens": [99_999]}, "outside the model's vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "token ids"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, "is not available here"),
    ],
)
def test_invalid_conversions(path: str, body: object, message: str, server: Serving) -> None:
    status, error = server.error(path, body)
    assert 400 <= status < 500
    assert message in error["message"]


def test_the_api_is_described(server: Serving) -> None:
    description = server.ask("/openapi.json")
    schemas = description["components"]["schemas"]
    jsonschema.Draft202012Validator.check_schema({"$defs": schemas})
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description))
    assert set(references) == set(schemas)
    assert set(description["paths"]) == {
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{name}",
        "/tokenize",
        "/detokenize",
        "/documents",
        "/documents/{id}",
    }
    body = description["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    schema = {**body["schema"], "components": description["components"]}
    jsonschema.validate({"messages": WHO, "max_tokens": 3, "stop": "a"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"messages": [{"role": "critic"}]}, schema)


def headers_for(server: Serving, method: str, **more: str) -> tuple[int, dict[str, str]]:
    headers = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    request = Request(f"{server.url}/health", headers=headers, method=method)
    try:
        with urlopen(request) as response:
            found = response.status, response.headers
    except HTTPError as error:
        found = error.code, error.headers
    return found[0], {name.lower(): value for name, value in found[1].items()}


def test_penalties_of_the_server_count(model: tuple[str, ...], tmp_path: Path) -> None:
    with serving(tmp_path / "run", *model, "--repetition-penalty", "1.3") as server:
        answers = [content(server, repeat_penalty=1), content(server, repetition_penalty=1)]
        assert answers[0] == answers[1] != content(server)
        status, error = server.error(CHAT, {"messages": WHO, "repeat_last_n": 64})
        assert (status, error["param"]) == (400, "repeat_last_n")


def test_pages_of_allowed_origins_may_ask(server: Serving) -> None:
    private = {"Access_Control_Request_Private_Network": "true"}
    status, allowed = headers_for(server, "OPTIONS", Origin=PAGE, **private)
    assert status == 200
    assert allowed["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed["access-control-allow-headers"]
    status, asked = headers_for(server, "GET", Origin=PAGE)
    assert status == 200
    assert asked["access-control-expose-headers"].lower() == "x-max-tokens, retry-after"
    for method, code in (("OPTIONS", 400), ("GET", 200)):
        status, evil = headers_for(server, method, Origin="http://evil.example")
        assert status == code
        assert "access-control-allow-origin" not in evil
    assert headers_for(server, "GET", Origin=PAGE, Host="evil.example")[0] == 403


def test_all_origins_can_be_allowed(model: tuple[str, ...], tmp_path: Path) -> None:
    with serving(tmp_path / "run", *model, "--allow-origin", "*") as server:
        assert "any page that a browser here opens may use the server" in server.log
        assert headers_for(server, "GET", Origin=PAGE)[1]["access-control-allow-origin"] == "*"
        assert server.status(CHAT, {"messages": WHO, "model": model[1], "max_tokens": 1}) == 200


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--allow-origin", "localhost"), "--allow-origin localhost: name a page's origin"),
        (("--allow-origin", "https://*.example"), "name a page's origin"),
        (("--served-model-name", ""), "--served-model-name must have 1 to 200 printable"),
    ],
)
def test_refused_options(
    options: tuple[str, str], line: str, model: tuple[str, ...], tmp_path: Path
) -> None:
    assert line in refused(forked(tmp_path, "serve", *model, *options))
