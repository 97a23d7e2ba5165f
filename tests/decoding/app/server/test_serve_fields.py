"""Fields that clients of other servers send: taken, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import jsonschema
import pytest

pytest.importorskip("openai")
from transformers import AutoTokenizer

from decoding.app.server.http.neutral_fields import COMPLETION_FIELDS, MESSAGE_FIELDS
from support.chat_model import TEMPLATE
from support.commands import forked, refused
from support.serving import Serving, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WHO = [{"role": "user", "content": "Who?"}]
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def folder(model: tuple[str, ...]) -> Path:
    """Return the model's folder; its template has a variable."""
    path = Path(model[1])
    (path / "chat_template.jinja").write_text(TEMPLATE + "{% if mood %}{{ mood }}{% endif %}")
    return path


@pytest.fixture(scope="module")
def server(
    folder: Path, model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    options = ("--served-model-name", "the book", "--allow-origin", PAGE, "--context", "1024")
    with serving(tmp_path_factory.mktemp("server") / "run", *model, *options) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(folder)


def content(server: Serving, **fields: object) -> str:
    reply = server.ask(CHAT, {"messages": WHO, "max_tokens": 8, **fields})
    return str(reply["choices"][0]["message"]["content"])


def test_neutral_values_change_no_answer(server: Serving) -> None:
    expected = content(server)
    fields = {
        name: "any" if not values else values[0] for name, values in COMPLETION_FIELDS.items()
    }
    assert content(server, **fields) == expected
    more = {"min_p": 0, "repetition_penalty": 1, "top_k": -1, "add_generation_prompt": True}
    assert content(server, **more, chat_template_kwargs={}, reasoning_effort="low") == expected
    for name, values in MESSAGE_FIELDS.items():
        for value in (None, *(("any",) if values is None else values)):
            assert content(server, messages=[{**WHO[0], name: value}]) == expected


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"min_tokens": 5}, "min_tokens", "leave it out, or send 0"),
        ({"mirostat": 2}, "mirostat", "leave it out, or send 0"),
        ({"tools": [{}]}, "tools", "leave it out, or send []"),
        ({"ignore_eos": True}, "ignore_eos", "leave it out, or send false"),
        ({"guided_json": {}}, "guided_json", "use response_format, or structured_outputs"),
        ({"speed": 1}, "speed", "speed is not supported by this server: leave it out."),
        ({"messages": [*WHO, {**WHO[0], "audio": {}}]}, "messages.1.audio", "not supported"),
        ({"stream_options": {"often": 1}}, "stream_options.often", "not supported"),
        ({"reasoning_effort": "great"}, "reasoning_effort", "Input should be"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs", "a must be true, false"),
        ({"chat_template_kwargs": {"a": "<|end|>"}}, "chat_template_kwargs", "a short word"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "cannot be"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "send an object"),
        ({"continue_final_message": True}, None, "a last message of the assistant"),
        ({"add_generation_prompt": False}, None, "add_generation_prompt must be true"),
        ({"model": "model"}, None, ""),
    ],
)
def test_others_are_refused_by_name(
    fields: dict[str, Any], param: str | None, message: str, server: Serving
) -> None:
    status, error = server.error(CHAT, {"messages": WHO, **fields})
    if fields.get("model"):
        assert (status, error["param"]) == (404, "model")
        return
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_the_model_has_a_name_of_ones_own(server: Serving) -> None:
    assert server.model == "the book"
    assert content(server, model="the book") == content(server)
    assert server.ask("/v1/models/the%20book")["id"] == "the book"


def reply(server: Serving, path: str, body: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the answer, and the header with a clipped number of tokens."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(server.url + path, data, headers)) as response:
        text, clipped = response.read().decode(), response.headers["X-Max-Tokens"]
    return (text if body.get("stream") else json.loads(text)), clipped


@pytest.mark.parametrize("name", ["max_tokens", "n_predict"])
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
    answer = server.ask(TEXT, {"prompt": [*before, *begun.input_ids], "max_tokens": 8})
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert content(server, messages=messages, **fields) == answer["choices"][0]["text"]


def test_variables_reach_the_template(server: Serving) -> None:
    usage = [
        server.ask(CHAT, {"messages": WHO, "max_tokens": 1, **fields})["usage"]["prompt_tokens"]
        for fields in ({}, {"chat_template_kwargs": {"mood": "glad"}})
    ]
    assert usage[0] < usage[1]


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
    stopped = {**body, "stop": text[len(text) // 2 :][:3]}
    assert len(server.ask(path, stopped)["choices"][0]["token_ids"]) <= len(streamed)


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
        ("/tokenize", {"prompt": "It was " * 100_000}, "tokens"),
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
    jsonschema.Draft202012Validator.check_schema({"$defs": description["components"]["schemas"]})
    assert set(description["paths"]) == {
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
    }
    body = description["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    schema = {**body["schema"], "components": description["components"]}
    jsonschema.validate({"messages": WHO, "max_tokens": 3, "stop": "a"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"messages": [{"role": "critic"}]}, schema)


def headers_for(server: Serving, origin: str, method: str = "OPTIONS") -> dict[str, str]:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    request = Request(f"{server.url}/health", headers=headers, method=method)
    try:
        with urlopen(request) as response:
            return {name.lower(): value for name, value in response.headers.items()}
    except OSError:
        return {}


def test_pages_of_allowed_origins_may_ask(server: Serving) -> None:
    allowed, asked = headers_for(server, PAGE), headers_for(server, PAGE, "GET")
    assert allowed["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed["access-control-allow-headers"]
    assert asked["access-control-expose-headers"].lower() == "x-max-tokens"
    assert "access-control-allow-origin" not in headers_for(server, "http://evil.example", "GET")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--allow-origin", "localhost"), "--allow-origin localhost: name a page's origin"),
        (("--served-model-name", ""), "--served-model-name must have 1 to 200 printable"),
    ],
)
def test_refused_options(
    options: tuple[str, str], line: str, model: tuple[str, ...], tmp_path: Path
) -> None:
    assert line in refused(forked(tmp_path, "serve", *model, *options))
