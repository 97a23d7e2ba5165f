"""`serve`, used by OpenAI's client, and by clients that disconnect or send invalid requests."""

from __future__ import annotations

import json
import re
import resource
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import jsonschema
import pytest

pytest.importorskip("openai")
import openai
import torch
from pydantic import BaseModel
from pydantic import Field as PydanticField
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.app.server.worker.prompts import Prompts
from decoding.app.server.worker.token_bytes import TokenBytes
from decoding.speculation.sampling import Sampling
from support.chat_model import STORY
from support.commands import TARGET, Finished, forked, refused, wait_for
from support.serving import SLOW, Serving, serving
from support.slow import slow_except

WHO = [{"role": "user", "content": "Who?"}]
KEY = "a-key-that-is-hard-to-guess"


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server") / "run"
    with serving(folder, *model, "--max-body", "2") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(model: tuple[str, ...]) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(model[1])


def test_the_server_and_the_command_line_generate_the_same_text(
    server: Serving, model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    """Only the new part of a conversation is prefilled."""
    generated = forked(tmp_path, "generate", "--chat", "--prompt", "Who?", *model)
    client = server.client()
    answer = client.chat.completions.create(model=server.model, messages=WHO)
    content = answer.choices[0].message.content
    assert f"{content}\n" == generated.out
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model=server.model,
        messages=WHO,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    tokens = last.usage.prompt_tokens
    assert (tokens, last.usage.completion_tokens) == (answer.usage.prompt_tokens, 12)
    assert last.usage.prompt_tokens_details.cached_tokens == tokens - 1
    assert last.tierforce["layers"] == {"device": 6, "split": 0, "host": 0}
    # the next question continues the conversation, whose KV is reused
    messages = [
        *WHO,
        {"role": "assistant", "content": content},
        {"role": "user", "content": "Why?"},
    ]
    second = client.chat.completions.create(model=server.model, messages=messages, max_tokens=3)
    assert second.usage.prompt_tokens_details.cached_tokens >= tokens
    assert [card.id for card in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).max_model_len == 131_072


def test_a_prompt_is_continued(server: Serving, tokenizer: AutoTokenizer) -> None:
    client = server.client()
    prompt = STORY[:300]
    ask = partial(client.completions.create, model=server.model, max_tokens=20)
    whole = ask(prompt=prompt).choices[0]
    tokens = Prompts(tokenizer, 131_072, 2048, set()).tokenize_text(prompt)
    assert ask(prompt=tokens).choices[0].text == whole.text
    assert ask(prompt=[prompt]).choices[0].text == whole.text
    # a stop string that begins in one token and ends in another
    middle = len(whole.text) // 2
    stop = whole.text[middle - 3 : middle + 3]
    cut = ask(prompt=prompt, stop=["never generated", stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    usage = ask(prompt=prompt, stop=stop).usage
    assert 0 < usage.completion_tokens < 20  # those after the stop string do not count
    chunks = [chunk.choices[0].text for chunk in ask(prompt=prompt, stop=stop, stream=True)]
    assert "".join(chunks) == cut.text
    # the seed of a sampled answer is reported, and can be chosen
    sampled = ask(prompt=prompt, temperature=1.0, top_p=0.9, seed=7)
    assert sampled.tierforce["seed"] == 7
    seeds = {ask(prompt=prompt, temperature=1.0).tierforce["seed"] for _ in range(2)}
    assert len(seeds) == 2
    # any 64-bit seed is accepted
    for seed, expected in ((-2, 2**63 - 2), (-(2**63), 0)):
        assert ask(prompt=prompt, temperature=1.0, seed=seed).tierforce["seed"] == expected


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def json_schema(schema: object = SCHEMA, **fields: object) -> dict[str, object]:
    """Return OpenAI's field that asks for an answer under a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def test_an_answer_matches_the_format_that_is_asked_for(server: Serving) -> None:
    client = server.client()
    ask = partial(client.chat.completions.create, model=server.model, messages=WHO, max_tokens=400)
    answer = ask(response_format=json_schema(strict=True), temperature=1.0, logprobs=True).choices[
        0
    ]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert all(each.model_extra["sampled_logprob"] <= 0 for each in answer.logprobs.content)
    stream = ask(response_format=json_schema(), stream=True, temperature=1.0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    jsonschema.validate(json.loads(text), SCHEMA)
    for form, pattern in (
        ({"regex": "[0-9]{3}(-[a-z]{2})?"}, "[0-9]{3}(-[a-z]{2})?"),
        ({"choice": ["yes", 'no "way"']}, 'yes|no "way"'),
        ({"grammar": 'start: "a" /b{3}/'}, "abbb"),
        ({"json": json.dumps({"enum": [5]})}, "5"),
    ):
        found = ask(extra_body={"structured_outputs": form}).choices[0].message.content
        assert re.fullmatch(pattern, found), (form, found)
    text = client.completions.create(
        model=server.model,
        prompt="class",
        max_tokens=9,
        extra_body={"response_format": {"type": "json_object"}},
    )
    assert text.choices[0].text.startswith("{")
    short = partial(ask, temperature=0, max_tokens=40)
    plain = short(response_format={"type": "text"}).choices[0].message.content
    assert plain == short().choices[0].message.content


class House(BaseModel):
    rooms: Literal[1, 2, 3]
    owner: str | None = PydanticField(max_length=5)
    kinds: list[Literal["stone", "wood"]] = PydanticField(max_length=2)


def test_typed_answers_of_the_client_are_parsed(server: Serving) -> None:
    answer = server.client().chat.completions.parse(
        model=server.model, messages=WHO, max_tokens=400, response_format=House, temperature=1.0
    )
    house = answer.choices[0].message.parsed
    assert isinstance(house, House)


def test_penalties_and_bias_change_the_answer(server: Serving, tokenizer: AutoTokenizer) -> None:
    client = server.client()

    def answer(**options: object) -> str:
        return (
            client.completions.create(
                model=server.model,
                prompt="a a a a a a a a a a",
                max_tokens=12,
                temperature=0,
                extra_body=options,
            )
            .choices[0]
            .text
        )

    plain = answer()
    neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}}
    assert answer(**neutral, frequency_penalty=0.0) == plain
    assert answer(repetition_penalty=5.0) != plain
    assert answer(presence_penalty=2, frequency_penalty=2) != plain
    assert answer(logit_bias={"100": 100}) == tokenizer.decode([100] * 12)


def test_fields_without_effect_are_accepted(server: Serving) -> None:
    options = {"include_usage": None, "include_obfuscation": False}
    body = with_message("user", [part(), part()], name="me")
    assert server.status(CHAT, {**body, "stream": True, "stream_options": options}) == 200
    assert server.status(CHAT, b"\xef\xbb\xbf" + json.dumps(body).encode()) == 200


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_match_the_reference_model(
    temperature: float, server: Serving, tokenizer: AutoTokenizer
) -> None:
    """Drafts do not affect them: each token's are conditioned on all the tokens before it."""
    client = server.client()
    prompt = Prompts(tokenizer, 131_072, 2048, set()).tokenize_text(STORY[:500])
    answer = client.completions.create(
        model=server.model,
        prompt=prompt,
        max_tokens=24,
        temperature=temperature,
        top_p=0.9,
        logprobs=3,
        seed=7,  # with other seeds, some answers have a token at the very edge of top-p
    )
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == text
    new = [tokenizer(token).input_ids[-1] for token in logprobs.tokens]
    reference = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    own = expected.gather(1, torch.tensor(new)[:, None]).flatten()
    assert torch.allclose(torch.tensor(logprobs.token_logprobs), own, atol=1e-4)
    probs = Sampling(temperature, top_p=0.9).probs(logits)
    sampled = probs.gather(1, torch.tensor(new)[:, None]).log().flatten()
    assert torch.allclose(torch.tensor(logprobs.sampled_logprobs), sampled, atol=1e-4)
    for top, row in zip(logprobs.top_logprobs, expected, strict=True):
        best = sorted(top.values(), reverse=True)[:3]  # and the token's own, if it is another
        assert torch.allclose(torch.tensor(best), row.topk(3).values, atol=1e-4)
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert text[offset:].startswith(token)
    chat = client.chat.completions.create(
        model=server.model, messages=WHO, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert "".join(each.token for each in content) == chat.choices[0].message.content
    assert all(len(each.top_logprobs) == 2 for each in content)
    assert bytes(content[0].bytes).decode() == content[0].token


@pytest.mark.parametrize("clients", slow_except([15, 50]))
def test_concurrent_clients(clients: int, server: Serving) -> None:
    def ask(number: int) -> str:
        client = server.client()
        messages = [{"role": "user", "content": f"What is {number % 5}?"}]
        if number % 2:
            answer = client.chat.completions.create(model=server.model, messages=messages)
            return answer.choices[0].message.content
        stream = client.chat.completions.create(model=server.model, messages=messages, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in stream)

    with ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(ask, range(clients)))
    assert all(answers)
    for number in range(5):
        assert len({answers[each] for each in range(number, clients, 5)}) == 1


def chat(**fields: object) -> dict[str, object]:
    return {"model": "model", "messages": WHO, **fields}


def with_message(role: str, content: object, **fields: object) -> dict[str, object]:
    return chat(messages=[{"role": role, "content": content, **fields}])


def stream_options(**options: object) -> dict[str, object]:
    return chat(stream=True, stream_options=options)


def part(**fields: object) -> dict[str, object]:
    return {"type": "text", "text": "x", **fields}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SURROGATE = "\ud83d"  # half of a surrogate pair
BAD = {
    "not JSON": (CHAT, b'{"model": "model", "messages": [', 400, "not JSON"),
    "not UTF-8": (CHAT, b"\xff\xfe\x00", 400, "body"),
    "not an object": (CHAT, b"[1, 2]", 400, "dict"),
    "nested": (CHAT, b"[" * 100_000, 400, "body"),
    "no messages": (CHAT, {"model": "model"}, 400, "messages: Field required"),
    "empty messages": (CHAT, chat(messages=[]), 400, "messages"),
    "a picture": (CHAT, with_message("user", [{"type": "image"}]), 400, "Input should be 'text'"),
    "another role": (CHAT, with_message("tools", "x"), 400, "role"),
    "surrogate": (CHAT, with_message("user", "\ud83d"), 400, "lone surrogate"),
    "surrogate in a name": (CHAT, chat(**{SURROGATE: 1}), 400, "lone surrogate"),
    "surrogate in a completion": (TEXT, {"prompt": "a", SURROGATE: None}, 400, "lone surrogate"),
    "surrogate in a message": (
        CHAT,
        with_message("user", "x", **{SURROGATE: 1}),
        400,
        "lone surrogate",
    ),
    "surrogate in an option": (CHAT, stream_options(**{SURROGATE: 1}), 400, "lone surrogate"),
    "surrogate in a part": (
        CHAT,
        with_message("user", [part(**{SURROGATE: 1})]),
        400,
        "lone surrogate",
    ),
    "surrogate in the model": (CHAT, chat(model=SURROGATE), 400, "lone surrogate"),
    "surrogate in an ignored field": (CHAT, chat(user=[{"a": SURROGATE}]), 400, "lone surrogate"),
    "unknown option": (
        CHAT,
        stream_options(include_usage=True, often=1),
        400,
        "often is not supported",
    ),
    "unknown field of a part": (
        CHAT,
        with_message("user", [part(cached=True)]),
        400,
        "cached is not",
    ),
    "tool calls": (CHAT, with_message("user", "x", tool_calls=[1]), 400, "tool_calls.0: "),
    "newline in a name": (CHAT, chat(**{"a\nb": 1}), 400, "'a\\nb' is not supported"),
    "long name": (CHAT, chat(**{"a" * 1_000_000: 1}), 400, "aaa' is not supported"),
    "nested value": (CHAT, b'{"user": ' + b"[" * 999 + b"]" * 999 + b"}", 400, "recursion"),
    "many values": (CHAT, chat(metadata=[1] * 300_000), 400, "more than 231,072 JSON values"),
    "long number": (CHAT, b'{"seed": ' + b"1" * 5000 + b"}", 400, "out of range"),
    "great number": (CHAT, chat(top_k=10**4000), 400, "top_k"),
    "negative temperature": (CHAT, chat(temperature=-1), 400, "temperature"),
    "NaN": (CHAT, chat(temperature=float("nan")), 400, "temperature"),
    "word as a number": (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    "zero tokens": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "two answers": (CHAT, chat(n=2), 400, "n is not supported"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function: "),
    "format": (CHAT, chat(response_format={"type": "xml"}), 400, "response_format: type must be"),
    "format without a schema": (
        CHAT,
        chat(response_format={"type": "json_schema"}),
        400,
        "response_format: json_schema must be an object with a schema",
    ),
    "unsupported schema": (
        CHAT,
        chat(response_format=json_schema({"not": {}})),
        400,
        "response_format: the JSON schema is invalid, or has what is not supported: Unimplemented",
    ),
    "large schema": (CHAT, chat(response_format=json_schema({"enum": ["x" * 2**20]})), 400, "more"),
    "field of a format": (
        CHAT,
        chat(response_format={"type": "json_object", "sc": 1}),
        400,
        "'sc' is not supported",
    ),
    "two grammars": (
        CHAT,
        chat(response_format=json_schema(), structured_outputs={"regex": "a"}),
        400,
        "structured_outputs: send this or response_format",
    ),
    "two forms": (CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "found 2"),
    "deep schema": (
        CHAT,
        chat(structured_outputs={"json": "[" * 200_000}),
        400,
        "structured_outputs: the string of a schema is not JSON",
    ),
    "chain of references": (
        CHAT,
        chat(
            response_format=json_schema(
                {
                    "$ref": "#/$defs/a0",
                    "$defs": {f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(5_000)},
                }
            )
        ),
        400,
        "response_format: the JSON schema is invalid",
    ),
    "slow schema": (
        CHAT,
        chat(response_format=json_schema({"type": "integer", "multipleOf": 1000003})),
        400,
        "takes more than",
    ),
    "GBNF": (CHAT, chat(structured_outputs={"grammar": 'root ::= "a"'}), 400, "GBNF is not"),
    "type of a format": (CHAT, chat(response_format={"type": ["text"]}), 400, "type must be"),
    "impossible schema": (
        CHAT,
        chat(response_format={"type": "json_object", "schema": False}),
        400,
        "schema is false",
    ),
    "special token": (
        CHAT,
        chat(structured_outputs={"grammar": "start: <|think|>"}),
        400,
        "special tokens are not supported",
    ),
    "vLLM's old field": (CHAT, chat(guided_json={}), 400, "use response_format, or structured"),
    "empty choice": (CHAT, chat(structured_outputs={"choice": []}), 400, "1 to 10,000 strings"),
    "broken regex": (
        CHAT,
        chat(structured_outputs={"regex": "(a"}),
        400,
        "structured_outputs: the",
    ),
    "penalty": (CHAT, chat(frequency_penalty=3), 400, "frequency_penalty"),
    "repetition penalty": (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    "biased word": (CHAT, chat(logit_bias={"a": 1}), 400, "'a' must be a token id"),
    "great bias": (CHAT, chat(logit_bias={"1": 101}), 400, "from -100 to 100"),
    "biased token": (CHAT, chat(logit_bias={"99999": 1}), 400, "outside the model's vocabulary"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), 400, "logprobs: true"),
    "large seed": (CHAT, chat(seed=2**63), 400, "seed"),
    "small seed": (CHAT, chat(seed=-(2**63) - 1), 400, "seed"),
    "fewer than all tokens": (CHAT, chat(max_completion_tokens=-2), 400, "max_completion_tokens"),
    "another model": (CHAT, chat(model="gpt-4"), 404, "use 'model'"),
    "empty prompt": (TEXT, {"model": "model", "prompt": []}, 400, "empty"),
    "unknown token": (TEXT, {"model": "model", "prompt": [1, 99_999]}, 400, "vocabulary"),
    "long prompt": (TEXT, {"model": "model", "prompt": [5] * 131_072}, 400, "Send a shorter one"),
    "unknown field": (TEXT, {"model": "model", "prompt": "a", "min_q": 0.1}, 400, "min_q is not"),
    "invalid tokens": (
        TEXT,
        b'{"model": "model", "prompt": [' + b"1," * 200_000 + b'"x"]}',
        400,
        "ids",
    ),
    "invalid messages": (
        CHAT,
        b'{"model": "model", "messages": [' + b"1," * 200_000 + b"2]}",
        400,
        "0:",
    ),
    "many stop strings": (CHAT, chat(stop=["a"] * 17), 400, "stop"),
    "unknown route": ("/v1/nowhere", {}, 404, "Not Found"),
    "wrong method": ("/health", chat(), 405, "Not Allowed"),
    "large body": (CHAT, b"x" * 100_000_000, 413, "2 MB"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_requests_are_refused(name: str, server: Serving) -> None:
    path, body, status, message = BAD[name]
    actual, error = server.error(path, body)
    assert actual == status
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert server.ask("/health")["status"] == "ok"


def test_requests_from_pages_of_other_sites_are_refused(server: Serving) -> None:
    assert server.status(CHAT, chat(), **{"Content-Type": "text/plain"}) == 415
    assert server.status("/health", Host="evil.example") == 403
    assert server.status("/health", Host="localhost:1") == 200


def test_a_chunked_body_is_limited(server: Serving) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        connection.sendall(chunk * 40 + b"0\r\n\r\n")
        assert b" 413 " in connection.recv(100)


def test_errors_have_the_types_of_the_official_client(server: Serving) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=WHO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tokens:
        client.completions.create(model=server.model, prompt=[5] * 131_072)
    assert tokens.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at least") as text:
        client.completions.create(model=server.model, prompt="a b " * 400_000)
    assert text.value.code == "context_length_exceeded"


def test_a_disconnect_aborts_the_request(model: tuple[str, ...], tmp_path: Path) -> None:
    """During the answer, and in the queue, whose limit holds."""
    long = {"model": "model", "prompt": STORY[:200], "max_tokens": 5000}
    one = ("--concurrency", "1")
    with serving(tmp_path, *model, *SLOW, "--queue", "1", *one) as server:
        client = server.client()
        stream = client.completions.create(**long, stream=True)
        next(iter(stream))
        assert server.ask("/health") == {"status": "ok", "running": 1, "waiting": 0}
        second = client.completions.create(**long, stream=True)
        wait_for(lambda: server.ask("/health")["waiting"] == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting"):
            client.completions.create(**long)
        second.close()
        wait_for(lambda: server.ask("/health")["waiting"] == 0)
        stream.close()
        wait_for(lambda: server.ask("/health")["running"] == 0)
        generated = server.metric('tierforce_tokens_total{kind="generated"}')
        assert 0 < generated < 500
        # the same without a stream
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(**long)
        wait_for(lambda: server.ask("/health")["running"] == 0)
        assert server.metric('tierforce_tokens_total{kind="generated"}') < generated + 500
        assert client.completions.create(**{**long, "max_tokens": 2}).choices[0].text


@pytest.mark.slow
def test_several_requests_at_once(model: tuple[str, ...], tmp_path: Path) -> None:
    """Their answers are those of one after another; one of them disconnects."""
    prompts = [STORY[:1500] + f" {name} answered:" for name in ("Ann", "Ben", "Cleo")]
    slow = ("--link", "emulated:0.1", "--gpu-kv-layers", "0", "--mode", "plain")
    options = ("--concurrency", "4", "--dtype", "float32", "--max-new-tokens", "12", *slow)
    with serving(tmp_path, *model, *options) as server:
        client = server.client()
        ask = partial(client.completions.create, model="model", temperature=0)
        aborted = ask(prompt="Once", max_tokens=5000, stream=True)
        next(iter(aborted))
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(ask, prompt=prompt) for prompt in prompts]
            wait_for(lambda: server.ask("/health")["running"] == 4)
            aborted.close()
            contents = [answer.result().choices[0].text for answer in answers]
        wait_for(lambda: server.ask("/health") == {"status": "ok", "running": 0, "waiting": 0})
        cached = [each.result().usage.prompt_tokens_details.cached_tokens for each in answers]
        assert sum(each > 0 for each in cached) == 2
        assert server.metric('tierforce_prefix_hits_total{where="memory"}') == 2
        assert server.metric('tierforce_sequence_bytes{tier="device"}') > 0
        assert server.log.count("aborted") == 1
        alone = [ask(prompt=prompt).choices[0].text for prompt in prompts]
    assert contents == alone
    assert len(set(contents)) > 1


def test_conversations_go_on_from_host_memory(model: tuple[str, ...], tmp_path: Path) -> None:
    """With room for the caches of one, two take turns."""
    prompts = [STORY[:1500], STORY[1500:3000]]
    options = ("--concurrency", "1", "--dtype", "float32", "--mode", "plain")
    swapped = 'tierforce_sequence_bytes{tier="swapped"}'
    contents = []
    for swap_space in ("1", "0"):
        with serving(tmp_path, *model, *options, "--swap-space", swap_space) as server:
            ask = partial(
                server.client().completions.create, model="model", temperature=0, max_tokens=9
            )
            answers = [ask(prompt=prompt) for prompt in prompts]
            answers += [ask(prompt=f"{prompt} Ann answered:") for prompt in prompts]
            assert (server.metric(swapped) > 0) == (swap_space == "1")
        cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        assert [each > 0 for each in cached] == [False, False, *[swap_space == "1"] * 2]
        contents.append([answer.choices[0].text for answer in answers])
    assert contents[0] == contents[1]


def test_a_request_needs_a_key(model: tuple[str, ...], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\nanother-long-enough-key\n{KEY}\n")
    keys.chmod(0o644)
    with serving(tmp_path, *model, "--api-key-file", str(keys), "--host", "0.0.0.0") as server:
        assert "chmod 600" in server.log
        port = urlsplit(server.url).port
        server.url = f"http://127.0.0.1:{port}"
        assert server.ask("/health")["status"] == "ok"
        assert server.status("/metrics") == 401
        for key in ("none", KEY[:-1], f"{KEY}x", "\u00e9"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                server.client(key).models.list()
        with pytest.raises(openai.AuthenticationError) as wrong:
            server.client("wrong").chat.completions.create(model="model", messages=WHO)
        assert wrong.value.code == "invalid_api_key"
        client = server.client(KEY)
        assert client.chat.completions.create(model="model", messages=WHO).choices
        # without a key, a body is not received, whatever its size
        assert server.status(CHAT, b"x" * 20_000_000) == 401


def without_fastapi() -> None:
    sys.modules["fastapi"] = None  # type: ignore[assignment]
    for name in [module for module in sys.modules if module.startswith("decoding.app.server.")]:
        del sys.modules[name]


def limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


def test_a_server_does_not_start_with_invalid_options(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    def error_of(*arguments: str) -> str:
        return refused(forked(tmp_path, "serve", *model, *arguments))

    assert "set --api-key-file to a file with keys" in error_of("--host", "0.0.0.0")
    assert "cannot be read" in error_of("--api-key-file", str(tmp_path / "nowhere"))
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_text("# none\n")
    short.write_text("secret\n")
    good = tmp_path / "good"
    good.write_text(KEY)
    good.chmod(0o600)
    assert "contains no key" in error_of("--api-key-file", str(empty))
    assert "at least 16 characters" in error_of("--api-key-file", str(short))
    assert "secret" not in error_of("--api-key-file", str(short))
    assert "not a regular file" in error_of("--api-key-file", str(tmp_path))
    assert "--queue must be at least 1" in error_of("--queue", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen on 127.0.0.1" in error_of("--port", port)
        message = error_of("--host", "nowhere.invalid", "--api-key-file", str(good))
        assert "cannot listen on nowhere.invalid" in message
    limited: Finished = forked(tmp_path, "serve", *model, before=limit_open_files)
    assert "--queue 64 needs 1024 open files at a time" in refused(limited)
    missing: Finished = forked(tmp_path, "serve", *model, before=without_fastapi)
    assert "pip install 'tierforce[server]'" in refused(missing)


def test_characters_of_several_tokens_are_not_split(
    server: Serving, tokenizer: AutoTokenizer
) -> None:
    """In the stream and in its log-probabilities, also with a stop string."""
    token_bytes = TokenBytes(tokenizer)
    text = "naïve 😀 “café” 鱼"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(token_bytes.bytes_of(token) for token in tokens).decode() == text
    client = server.client()
    ask = partial(
        client.chat.completions.create,
        model=server.model,
        messages=WHO,
        temperature=2.0,
        seed=11,
        max_tokens=80,
        logprobs=True,
    )
    # draft lengths adapt, so answers differ despite the seed: each is checked by itself
    for stop in (None, "e", " the"):
        chunks = list(ask(stream=True, stop=stop))
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        logprobs = [
            token
            for chunk in chunks
            if chunk.choices[0].logprobs is not None
            for token in chunk.choices[0].logprobs.content
        ]
        decoded = b"".join(bytes(token.bytes) for token in logprobs).decode(errors="replace")
        assert decoded.startswith(content)
        if stop is None:
            assert decoded == content
        else:
            assert stop not in content
            assert len(decoded) - len(content) < 20


def test_comments_report_progress(server: Serving) -> None:
    messages = [{"role": "user", "content": STORY}]
    # long enough for a report of its counts before its end
    body = chat(messages=messages, stream=True, max_tokens=300, temperature=0)
    lines = server.ask(CHAT, body).splitlines()
    updates = [json.loads(line[2:]) for line in lines if line.startswith(": {")]
    kinds = {next(iter(update)) for update in updates}
    assert {"waiting", "prefill", "counts"} <= kinds
    done = [update["prefill"] for update in updates if "prefill" in update]
    assert done[-1][0] == done[-1][1]
