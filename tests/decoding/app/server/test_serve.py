"""`serve`, by its clients: the official one, and those that break off or send what is wrong."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("openai")
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.app.server.worker.prompts import Prompts
from decoding.app.server.worker.token_texts import TokenTexts
from decoding.speculation.sampling import Sampling
from support.chat_model import STORY
from support.commands import TARGET, Finished, forked, refused, wait_for
from support.serving import SLOW, Serving, serving
from support.slow import slow_except

WHO = [{"role": "user", "content": "Who?"}]
KEY = "a-key-that-nobody-guesses"


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server") / "run"
    with serving(folder, *model, "--max-body", "2") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(model: tuple[str, ...]) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(model[1])


def test_a_client_gets_what_the_command_line_writes(
    server: Serving, model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    """And of a conversation only what is new is read."""
    written = forked(tmp_path, "generate", "--chat", "--prompt", "Who?", *model)
    client = server.client()
    answer = client.chat.completions.create(model=server.model, messages=WHO)
    said = answer.choices[0].message.content
    assert f"{said}\n" == written.out
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    streamed = client.chat.completions.create(
        model=server.model,
        messages=WHO,
        stream=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = streamed
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == "length"
    tokens = last.usage.prompt_tokens
    assert (tokens, last.usage.completion_tokens) == (answer.usage.prompt_tokens, 12)
    assert last.usage.prompt_tokens_details.cached_tokens == tokens - 1
    assert last.tierforce["layers"] == {"device": 6, "split": 0, "host": 0}
    # the next question goes on behind it, and what was said is not read again
    talk = [*WHO, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    more = client.chat.completions.create(model=server.model, messages=talk, max_tokens=3)
    assert more.usage.prompt_tokens_details.cached_tokens >= tokens
    assert [each.id for each in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).max_model_len == 131_072


def test_a_text_is_continued(server: Serving, tokenizer: AutoTokenizer) -> None:
    client = server.client()
    prompt = STORY[:300]
    ask = partial(client.completions.create, model=server.model, max_tokens=20)
    whole = ask(prompt=prompt).choices[0]
    tokens = Prompts(tokenizer, 131_072).of_text(prompt)
    assert ask(prompt=tokens).choices[0].text == whole.text
    assert ask(prompt=[prompt]).choices[0].text == whole.text
    # up to a text that ends it, which begins in one token and ends in another
    middle = len(whole.text) // 2
    stop = whole.text[middle - 3 : middle + 3]
    cut = ask(prompt=prompt, stop=["never said", stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    pieces = [each.choices[0].text for each in ask(prompt=prompt, stop=stop, stream=True)]
    assert "".join(pieces) == cut.text
    # sampled: the seed is told, and can be given
    sampled = ask(prompt=prompt, temperature=1.0, top_p=0.9, seed=7)
    assert sampled.tierforce["seed"] == 7
    seeds = {ask(prompt=prompt, temperature=1.0).tierforce["seed"] for _ in range(2)}
    assert len(seeds) == 2
    # clients send any number of 64 bits
    for seed, same in ((-1, 2**63 - 1), (-(2**63), 0)):
        assert ask(prompt=prompt, temperature=1.0, seed=seed).tierforce["seed"] == same


def test_what_changes_nothing_is_taken(server: Serving) -> None:
    options = {"include_usage": None, "include_obfuscation": False}
    body = spoken("user", [part(), part()], name="me")
    assert server.status(CHAT, {**body, "stream": True, "stream_options": options}) == 200
    assert server.status(CHAT, b"\xef\xbb\xbf" + json.dumps(body).encode()) == 200


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probabilities_are_those_of_the_model(
    temperature: float, server: Serving, tokenizer: AutoTokenizer
) -> None:
    """Whatever was drafted, each token's are those behind all the tokens before it."""
    client = server.client()
    prompt = Prompts(tokenizer, 131_072).of_text(STORY[:500])
    answer = client.completions.create(
        model=server.model,
        prompt=prompt,
        max_tokens=24,
        temperature=temperature,
        top_p=0.9,
        logprobs=3,
        seed=7,  # of other texts, some have a token at the very edge of top-p
    )
    said, told = answer.choices[0].text, answer.choices[0].logprobs
    assert "".join(told.tokens) == said
    new = [ids[0] for ids in (tokenizer(each).input_ids[-1:] for each in told.tokens)]
    reference = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    laws = logits.log_softmax(-1)
    own = laws.gather(1, torch.tensor(new)[:, None]).flatten()
    assert torch.allclose(torch.tensor(told.token_logprobs), own, atol=1e-4)
    law = Sampling(temperature, top_p=0.9).probs(logits).gather(1, torch.tensor(new)[:, None])
    assert torch.allclose(torch.tensor(told.sampled_logprobs), law.log().flatten(), atol=1e-4)
    for top, row in zip(told.top_logprobs, laws, strict=True):
        best = sorted(top.values(), reverse=True)
        assert torch.allclose(torch.tensor(best), row.topk(3).values, atol=1e-4)
    for at, token in zip(told.text_offset, told.tokens, strict=True):
        assert said[at:].startswith(token)
    chat = client.chat.completions.create(
        model=server.model, messages=WHO, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert "".join(each.token for each in content) == chat.choices[0].message.content
    assert all(len(each.top_logprobs) == 2 for each in content)
    assert bytes(content[0].bytes).decode() == content[0].token


@pytest.mark.parametrize("clients", slow_except([15, 50]))
def test_many_clients_at_once(clients: int, server: Serving) -> None:
    def ask(number: int) -> str:
        client = server.client()
        words = [{"role": "user", "content": f"What is {number % 5}?"}]
        if number % 2:
            answer = client.chat.completions.create(model=server.model, messages=words)
            return answer.choices[0].message.content
        stream = client.chat.completions.create(model=server.model, messages=words, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in stream)

    with ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(ask, range(clients)))
    assert all(answers)
    for number in range(5):
        assert len({answers[each] for each in range(number, clients, 5)}) == 1


def chat(**said: object) -> dict[str, object]:
    return {"model": "model", "messages": WHO, **said}


def spoken(role: str, content: object, **said: object) -> dict[str, object]:
    return chat(messages=[{"role": role, "content": content, **said}])


def streamed(**options: object) -> dict[str, object]:
    return chat(stream=True, stream_options=options)


def part(**said: object) -> dict[str, object]:
    return {"type": "text", "text": "x", **said}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HALF = "\ud83d"
BAD = {
    "no JSON": (CHAT, b'{"model": "model", "messages": [', 400, "not JSON"),
    "no text": (CHAT, b"\xff\xfe\x00", 400, "body"),
    "no object": (CHAT, b"[1, 2]", 400, "dict"),
    "nested": (CHAT, b"[" * 100_000, 400, "body"),
    "no messages": (CHAT, {"model": "model"}, 400, "messages: Field required"),
    "no message": (CHAT, chat(messages=[]), 400, "messages"),
    "a picture": (CHAT, spoken("user", [{"type": "image"}]), 400, "Input should be 'text'"),
    "a tool's": (CHAT, spoken("tool", "x"), 400, "role"),
    "half a character": (CHAT, spoken("user", "\ud83d"), 400, "half a character"),
    "half a name": (CHAT, chat(**{HALF: 1}), 400, "half a character"),
    "half a name in a text": (TEXT, {"prompt": "a", HALF: None}, 400, "half a character"),
    "half a name in a message": (CHAT, spoken("user", "x", **{HALF: 1}), 400, "half a character"),
    "half a name in options": (CHAT, streamed(**{HALF: 1}), 400, "half a character"),
    "half a name in a part": (CHAT, spoken("user", [part(**{HALF: 1})]), 400, "half a character"),
    "half a model": (CHAT, chat(model=HALF), 400, "half a character"),
    "half of what is ignored": (CHAT, chat(user=[{"a": HALF}]), 400, "half a character"),
    "an option": (CHAT, streamed(include_usage=True, often=1), 400, "often is not supported"),
    "a field of a part": (CHAT, spoken("user", [part(cached=True)]), 400, "cached is not"),
    "a field of a message": (CHAT, spoken("user", "x", tool_calls=[1]), 400, "tool_calls is not"),
    "a line": (CHAT, chat(**{"a\nb": 1}), 400, "'a\\nb' is not supported"),
    "a long name": (CHAT, chat(**{"a" * 1_000_000: 1}), 400, "aaa' is not supported"),
    "a deep value": (CHAT, b'{"user": ' + b"[" * 999 + b"]" * 999 + b"}", 400, "recursion"),
    "a wide value": (CHAT, chat(metadata=[1] * 300_000), 400, "more than 231,072 JSON values"),
    "a long number": (CHAT, b'{"seed": ' + b"1" * 5000 + b"}", 400, "out of range"),
    "a great number": (CHAT, chat(top_k=10**4000), 400, "top_k"),
    "cold": (CHAT, chat(temperature=-1), 400, "temperature"),
    "no number": (CHAT, chat(temperature=float("nan")), 400, "temperature"),
    "a word": (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    "nothing": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "two": (CHAT, chat(n=2), 400, "n is not supported"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools is not supported"),
    "top alone": (CHAT, chat(top_logprobs=2), 400, "logprobs: true"),
    "seed": (CHAT, chat(seed=2**63), 400, "seed"),
    "lower seed": (CHAT, chat(seed=-(2**63) - 1), 400, "seed"),
    "too much": (CHAT, chat(max_tokens=131_072), 400, "ask for at most 131,0"),
    "too much more": (CHAT, chat(max_completion_tokens=131_072), 400, "max_completion_tokens 131"),
    "another model": (CHAT, chat(model="gpt-4"), 404, "ask for 'model'"),
    "two prompts": (TEXT, {"model": "model", "prompt": ["a", "b"]}, 400, "send one"),
    "no prompt": (TEXT, {"model": "model", "prompt": []}, 400, "empty"),
    "no token": (TEXT, {"model": "model", "prompt": [1, 99_999]}, 400, "vocabulary"),
    "too long": (TEXT, {"model": "model", "prompt": [5] * 131_072}, 400, "send a shorter one"),
    "a field": (TEXT, {"model": "model", "prompt": "a", "min_p": 0.1}, 400, "min_p is not"),
    "no tokens": (TEXT, b'{"model": "model", "prompt": [' + b"1," * 200_000 + b'"x"]}', 400, "ids"),
    "messages": (CHAT, b'{"model": "model", "messages": [' + b"1," * 200_000 + b"2]}", 400, "0:"),
    "stops": (CHAT, chat(stop=["a"] * 17), 400, "stop"),
    "nowhere": ("/v1/nowhere", {}, 404, "Not Found"),
    "not this way": ("/health", chat(), 405, "Not Allowed"),
    "100 MB": (CHAT, b"x" * 100_000_000, 413, "2 MB"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str, server: Serving) -> None:
    path, body, status, said = BAD[name]
    found, error = server.error(path, body)
    assert found == status
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert server.ask("/health")["status"] == "ok"


def test_other_sites_pages_are_refused(server: Serving) -> None:
    assert server.status(CHAT, chat(), **{"Content-Type": "text/plain"}) == 415
    assert server.status("/health", Host="evil.example") == 403
    assert server.status("/health", Host="localhost:1") == 200


def test_a_body_without_a_length_is_limited_too(server: Serving) -> None:
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        connection.sendall(chunk * 40 + b"0\r\n\r\n")
        assert b" 413 " in connection.recv(100)


def test_errors_are_those_that_the_client_knows(server: Serving) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=WHO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=server.model, prompt=[5] * 131_072)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at least") as longer:
        client.completions.create(model=server.model, prompt="a b " * 400_000)
    assert longer.value.code == "context_length_exceeded"


def test_who_goes_away_frees_the_engine(model: tuple[str, ...], tmp_path: Path) -> None:
    """In the middle of an answer, and in the queue; and more than may do not wait there."""
    long = {"model": "model", "prompt": STORY[:200], "max_tokens": 5000}
    with serving(tmp_path, *model, *SLOW, "--queue", "1") as server:
        client = server.client()
        stream = client.completions.create(**long, stream=True)
        next(iter(stream))
        assert server.ask("/health") == {"status": "ok", "running": 1, "waiting": 0}
        second = client.completions.create(**long, stream=True)
        wait_for(lambda: server.ask("/health")["waiting"] == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests wait already"):
            client.completions.create(**long)
        second.close()
        wait_for(lambda: server.ask("/health")["waiting"] == 0)
        stream.close()
        wait_for(lambda: server.ask("/health")["running"] == 0)
        written = server.metric('tierforce_tokens_total{kind="generated"}')
        assert 0 < written < 500
        # without a stream, too
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(**long)
        wait_for(lambda: server.ask("/health")["running"] == 0)
        assert server.metric('tierforce_tokens_total{kind="generated"}') < written + 500
        assert client.completions.create(**{**long, "max_tokens": 2}).choices[0].text


def test_keys(model: tuple[str, ...], tmp_path: Path) -> None:
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
        # what is too large is not even read from those who have none
        assert server.status(CHAT, b"x" * 20_000_000) == 401


def no_fastapi() -> None:
    sys.modules["fastapi"] = None  # type: ignore[assignment]
    for name in [each for each in sys.modules if each.startswith("decoding.app.server.")]:
        del sys.modules[name]


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


def test_what_a_server_cannot_start_with(model: tuple[str, ...], tmp_path: Path) -> None:
    def told(*arguments: str) -> str:
        return refused(forked(tmp_path, "serve", *model, *arguments))

    assert "name a file with keys as --api-key-file" in told("--host", "0.0.0.0")
    assert "cannot be read" in told("--api-key-file", str(tmp_path / "nowhere"))
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_text("# none\n")
    short.write_text("secret\n")
    good = tmp_path / "good"
    good.write_text(KEY)
    good.chmod(0o600)
    assert "contains no key" in told("--api-key-file", str(empty))
    assert "at least 16 characters" in told("--api-key-file", str(short))
    assert "secret" not in told("--api-key-file", str(short))
    assert "no regular file" in told("--api-key-file", str(tmp_path))
    assert "--queue must be at least 1" in told("--queue", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen on 127.0.0.1" in told("--port", port)
        found = told("--host", "nowhere.invalid", "--api-key-file", str(good))
        assert "cannot listen on nowhere.invalid" in found
    few: Finished = forked(tmp_path, "serve", *model, before=few_files)
    assert "--queue 64 needs 1024 open files at a time" in refused(few)
    missing: Finished = forked(tmp_path, "serve", *model, before=no_fastapi)
    assert "pip install 'tierforce[server]'" in refused(missing)


def test_characters_of_several_tokens_come_whole(server: Serving, tokenizer: AutoTokenizer) -> None:
    """In a stream and in probabilities, also where a stop string cuts them."""
    texts = TokenTexts(tokenizer)
    written = "naïve 😀 “café” 鱼"
    tokens = tokenizer(written, add_special_tokens=False).input_ids
    assert b"".join(texts.bytes_of(token) for token in tokens).decode() == written
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
    # with fixed lengths of drafts the seed would do; so each answer is looked at for itself
    for stop in (None, "e", " the"):
        streamed = list(ask(stream=True, stop=stop))
        said = "".join(each.choices[0].delta.content or "" for each in streamed)
        told = [
            law
            for each in streamed
            if each.choices[0].logprobs is not None
            for law in each.choices[0].logprobs.content
        ]
        spelled = b"".join(bytes(law.bytes) for law in told).decode(errors="replace")
        assert spelled.startswith(said)
        if stop is None:
            assert spelled == said
        else:
            assert stop not in said
            assert len(spelled) - len(said) < 20


def test_comments_tell_how_far_it_is(server: Serving) -> None:
    talk = [{"role": "user", "content": STORY}]
    # long enough that its counts are told before it has ended
    body = chat(messages=talk, stream=True, max_tokens=300, temperature=0)
    lines = server.ask(CHAT, body).splitlines()
    told = [json.loads(line[2:]) for line in lines if line.startswith(": {")]
    kinds = {next(iter(each)) for each in told}
    assert {"waiting", "prefill", "counts"} <= kinds
    done = [each["prefill"] for each in told if "prefill" in each]
    assert done[-1][0] == done[-1][1]
