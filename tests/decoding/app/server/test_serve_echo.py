"""Completions of several prompts, and prompts that are echoed with their log-probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("openai")
import torch
from fastapi import Request
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.app.server.formats.replies import CompletionResponseBuilder
from decoding.app.server.http.delivery import Delivery
from decoding.app.server.http.parsing import _within_logprobs
from decoding.app.server.worker import limits
from decoding.app.server.worker.echo import _offsets, echo
from decoding.app.server.worker.jobs import (
    Failed,
    Finished,
    GenerationParams,
    ProgressUpdate,
    QueuedRequest,
    QueueFull,
    RequestQueue,
    TextDelta,
)
from decoding.app.server.worker.prompts import Prompts
from decoding.speculation.sampling import Sampling
from parallel.model.prompt_logprobs import PromptLogprobs
from support.chat_model import STORY
from support.commands import TARGET
from support.serving import Serving, serving

TEXT, CONTEXT = "/v1/completions", 1024
PROMPTS = [STORY[:300], "It was", STORY[100:200], "Call me", "The end of the whale"]


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server") / "run"
    options = ("--context", str(CONTEXT), "--temperature", "0", "--concurrency", "2")
    with serving(folder, *model, *options, "--queue", "3", "--max-new-tokens", "8") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def expected() -> Callable[[list[int]], Tensor]:
    """Return transformers' log-probabilities (T, V) of tokens (T,)."""
    reference = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)

    def logprobs(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return logprobs


def tokens_of(tokenizer: AutoTokenizer, text: str) -> list[int]:
    return Prompts(tokenizer, CONTEXT, 2048, set()).tokenize_text(text)


def ask(server: Serving, **body: object) -> dict[str, Any]:
    return cast(dict[str, Any], server.ask(TEXT, body))


def chunks_of(server: Serving, **body: object) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    lines = server.ask(TEXT, {"stream": True, **body}).split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def merged(chunks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the choices that chunks make up."""
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": None} for _ in range(count)]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = choices[choice["index"]]
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"].setdefault(name, []).extend(values)
    return choices


def test_several_prompts_get_the_answers_of_each(server: Serving, tokenizer: AutoTokenizer) -> None:
    """More than the queue has places for: the others follow."""
    alone = [ask(server, prompt=prompt) for prompt in PROMPTS * 3]
    ids = [tokens_of(tokenizer, prompt) for prompt in PROMPTS * 3]
    for prompts in (PROMPTS * 3, ids):
        answer = ask(server, prompt=prompts, seed=2**63 - 2)
        assert [choice["index"] for choice in answer["choices"]] == list(range(15))
        for choice, own in zip(answer["choices"], alone, strict=True):
            assert choice["text"] == own["choices"][0]["text"]
            assert choice["finish_reason"] == own["choices"][0]["finish_reason"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == sum(each["usage"][name] for each in alone)
        seeds = [each["seed"] for each in answer["tierforce"]]
        assert seeds == [2**63 - 2, 2**63 - 1, *range(13)]
    (one,) = ask(server, prompt=[PROMPTS[0]], seed=5)["choices"]
    assert one["text"] == alone[0]["choices"][0]["text"]


def test_several_prompts_are_streamed(server: Serving, tokenizer: AutoTokenizer) -> None:
    body = {"prompt": PROMPTS, "logprobs": 1, "return_token_ids": True}
    whole = ask(server, **body)
    *chunks, last = chunks_of(server, **body, stream_options={"include_usage": True})
    choices = merged(chunks, len(PROMPTS))
    for own, choice, prompt in zip(choices, whole["choices"], PROMPTS, strict=True):
        assert (own["text"], own["finish_reason"]) == (choice["text"], choice["finish_reason"])
        assert own["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
        assert choice["prompt_token_ids"] == tokens_of(tokenizer, prompt)
    firsts = [each["choices"][0] for each in chunks if "prompt_token_ids" in each["choices"][0]]
    assert {each["index"]: each["prompt_token_ids"] for each in firsts} == {
        each["index"]: each["prompt_token_ids"] for each in whole["choices"]
    }
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len(last["tierforce"]) == len(PROMPTS)
    lines = server.ask(TEXT, {"stream": True, **body}).splitlines()
    progress = [json.loads(line[2:]) for line in lines if line.startswith(": {")]
    assert {each["index"] for each in progress} == set(range(len(PROMPTS)))


@pytest.mark.parametrize("new", [0, 1, 6])
@pytest.mark.parametrize("is_text", [True, False])
def test_echoed_log_probabilities(
    new: int,
    is_text: bool,
    server: Serving,
    tokenizer: AutoTokenizer,
    expected: Callable[[list[int]], Tensor],
) -> None:
    ids = [tokens_of(tokenizer, prompt) for prompt in PROMPTS]
    body = {"echo": True, "logprobs": 3, "max_tokens": new, "return_token_ids": True}
    answer = ask(server, prompt=PROMPTS if is_text else ids, **body)
    streamed = merged(chunks_of(server, prompt=PROMPTS if is_text else ids, **body), len(ids))
    for choice, stream, prompt, own in zip(answer["choices"], streamed, PROMPTS, ids, strict=True):
        logprobs, all_tokens = choice["logprobs"], own + choice["token_ids"]
        assert choice["text"].startswith(prompt if is_text else tokenizer.decode(own))
        assert len(choice["token_ids"]) == new
        if not new:
            assert choice["text"] == (prompt if is_text else tokenizer.decode(own))
        assert choice["finish_reason"] == "length"
        assert (stream["text"], stream["finish_reason"]) == (choice["text"], "length")
        assert stream["logprobs"]["text_offset"] == logprobs["text_offset"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token)
        rows = expected(all_tokens)[:-1]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        following = rows.gather(1, torch.tensor(all_tokens[1:])[:, None]).flatten()
        found = torch.tensor(logprobs["token_logprobs"][1:])
        assert torch.allclose(found, following, atol=1e-4, rtol=0)
        for top, row, value in zip(logprobs["top_logprobs"][1:], rows, following, strict=True):
            best = sorted(top.values(), reverse=True)
            assert torch.allclose(torch.tensor(best[:3]), row.topk(3).values, atol=1e-4)
            assert min(abs(each - value) for each in best) < 1e-4
        sampled = logprobs["sampled_logprobs"]
        assert sampled[: len(own)] == [None] * len(own)
        assert sampled[len(own) :] == [0.0] * new  # greedy


def test_log_likelihoods_as_evaluation_harnesses_read_them(
    server: Serving, tokenizer: AutoTokenizer, expected: Callable[[list[int]], Tensor]
) -> None:
    """lm-eval, `LocalCompletionsAPI.parse_logprobs`: a context, and a continuation to score."""
    cases = [(tokens_of(tokenizer, text[:-20]), text[-20:]) for text in PROMPTS[:3:2]]
    cases += [(tokens, tokenizer.decode(expected(tokens)[-1:].argmax(-1))) for tokens, _ in cases]
    prompts = [context + tokenizer(text).input_ids for context, text in cases]
    body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = ask(server, prompt=prompts, **body)["choices"]
    for choice, tokens, (context, _) in zip(choices, prompts, cases, strict=True):
        own = choice["logprobs"]["token_logprobs"][len(context) : -1]
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        rows = expected(tokens)[len(context) - 1 : -1]
        following = torch.tensor(tokens[len(context) :])
        likelihood = rows.gather(1, following[:, None]).sum().item()
        assert sum(own) == pytest.approx(likelihood, abs=1e-3)
        is_greedy = all(value == max(each.values()) for value, each in zip(own, top, strict=True))
        assert is_greedy == bool((rows.argmax(-1) == following).all())
    assert is_greedy


def test_an_echo_alone(server: Serving) -> None:
    for body in ({}, {"logprobs": None}):
        answer = ask(server, prompt=PROMPTS[1], echo=True, max_tokens=4, **body)
        (choice,) = answer["choices"]
        alone = ask(server, prompt=PROMPTS[1], max_tokens=4)["choices"][0]["text"]
        assert choice["text"] == PROMPTS[1] + alone
        assert choice["logprobs"] is None
    (choice,) = ask(server, prompt=PROMPTS[1], echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPTS[1], None)
    (choice,) = ask(server, prompt=PROMPTS[1], echo=True, max_tokens=0, logprobs=0)["choices"]
    tops = choice["logprobs"]["top_logprobs"]
    assert tops[0] is None
    assert [len(each) for each in tops[1:]] == [1] * (len(tops) - 1)


def test_a_prompt_as_long_as_the_context(server: Serving) -> None:
    body = {"prompt": [5] * CONTEXT, "echo": True, "logprobs": 0}
    (choice,) = ask(server, **body, max_tokens=0)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == CONTEXT
    status, error = server.error(TEXT, {**body, "max_tokens": 1})
    assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ["a", [1, 99_999]]}, "prompt", "prompt[1]: prompt has token ids outside"),
        ({"prompt": ["a", "b", []]}, "prompt", "prompt[2]: the prompt is empty"),
        ({"prompt": ["a", "b " * 2000]}, "prompt", "prompt[1]: "),
        ({"prompt": ["a", 5]}, "prompt", "send a string or a list of token ids"),
        ({"prompt": [["a"]]}, "prompt", "send a list of token ids"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts in one request: send at most 128"),
        ({"prompt": [[1] * 1000] * 102}, None, "JSON values: send fewer"),
        ({"max_tokens": 0}, "max_tokens", "0 requires echo: true"),
        ({"max_tokens": -2}, "max_tokens", "send 0 or more, or -1"),
        ({"n_predict": 0, "echo": True}, "n_predict", "send 1 or more"),
        ({"echo": 1}, "echo", "valid boolean"),
        (
            {"echo": True, "logprobs": 20, "prompt": [[1] * 700] * 70},
            "logprobs",
            "49,000 tokens are too many to echo with the top 20 of each: send at most 14,285",
        ),
        ({"suffix": "b"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str | None, message: str, server: Serving) -> None:
    status, error = server.error(TEXT, {"prompt": "a", **fields})
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_prompt_has_its_answer_alone_with_the_next_seed(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    options = ("--context", "512", "--deterministic", "--max-new-tokens", "12")
    with serving(tmp_path / "run", *model, *options) as server:
        sampled = {"temperature": 1.0, "top_p": 1.0}
        both = ask(server, prompt=["It was"] * 2, seed=7, **sampled)["choices"]
        for seed, choice in zip((7, 8), both, strict=True):
            alone = ask(server, prompt="It was", seed=seed, **sampled)["choices"][0]
            assert choice["text"] == alone["text"]
        assert both[0]["text"] != both[1]["text"]
        scored = {"echo": True, "logprobs": 2, "max_tokens": 0}
        alone = ask(server, prompt=PROMPTS[0], **scored)["choices"][0]["logprobs"]
        for choice in ask(server, prompt=[PROMPTS[0]] * 2, **scored)["choices"]:
            assert choice["logprobs"] == alone


# -- the parts of an echo --------------------------------------------------------------------------


def test_parts_of_an_echo(tokenizer: AutoTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of several tokens are not divided."""
    prompts, text = Prompts(tokenizer, CONTEXT, 2048, set()), "na\u00efve \u6f22\u5b57 \U0001f642!"
    tokens = prompts.tokenize_text(text)
    scores = torch.randn(len(tokens) - 1, generator=torch.Generator().manual_seed(0))
    top = torch.arange(2 * len(scores)).view(-1, 2)
    logprobs = PromptLogprobs(scores, top.float(), top.int())
    for sent in (text, None):
        params = GenerationParams(cast(Any, tokens), 1, Sampling(), has_echo=True, text=sent)
        monkeypatch.setattr(limits, "ECHOED_TOKENS", 1000)
        (whole,) = echo(prompts, params, logprobs)
        assert whole.text == text
        for count in (1, 2, 3):
            monkeypatch.setattr(limits, "ECHOED_TOKENS", count)
            parts = list(echo(prompts, params, logprobs))
            assert TextDelta.joined(parts) == TextDelta.joined([whole])
            assert max(len(part.logprobs) for part in parts) == count
            for part in parts:
                assert "\ufffd" not in part.text
        offsets, named = zip(*whole.logprobs, strict=True)
        assert b"".join(each.token for each in named).decode() == text
        assert offsets[0] == 0
        assert offsets[-1] == len(text) - 1
        assert [each.logprob for each in named] == [None, *scores.tolist()]
        assert [[value for _, value in each.top] for each in named[1:]] == top.float().tolist()


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        ([b"<s>", b" The", b" cat"], "The cat", [0, 0, 3, 7]),
        ([b"<s>", b" The", b" cat"], "<s>The cat", [0, 2, 6, 10]),
        ([b"a", b"\xc3", b"\xa4", b"", b"b"], "a\u00e4b", [0, 1, 1, 2, 2, 3]),
        ([b"\xa4", b"a"], "\ufffda", [0, 1, 2]),
        ([b"a"], "abc", [2, 3]),
    ],
)
def test_offsets_of_tokens(names: list[bytes], text: str, expected: list[int]) -> None:
    """Text and tokens end alike."""
    assert _offsets(names, len(text)) == expected


# -- the queue and the delivery, without an engine -------------------------------------------------

PARAMS = GenerationParams(cast(Any, [1]), 1, Sampling())
COUNTS = {"prompt_tokens": 1, "new_tokens": 1, "reused_tokens": 0, "loaded_tokens": 0}


def test_a_request_takes_its_share_of_the_queue() -> None:
    async def run() -> None:
        queue = RequestQueue(limit=3, concurrency=2)
        batch, other = QueuedRequest.batch([PARAMS] * 5), QueuedRequest.batch([PARAMS])
        queue.put(batch)
        queue.put(other)
        assert queue.waiting == 3
        order = list[QueuedRequest]()
        while queue.waiting:
            taken = queue.take(wait=False)
            assert taken
            order += taken
            for each in taken:
                queue.finish(each)
        assert order == [*batch[:2], *other, *batch[2:]]

    asyncio.run(run())


def test_a_request_fits_what_is_left_of_the_queue() -> None:
    async def run() -> None:
        queue = RequestQueue(limit=1, concurrency=2)
        first, second = QueuedRequest.batch([PARAMS] * 2), QueuedRequest.batch([PARAMS] * 3)
        queue.put(first)
        queue.put(second)
        with pytest.raises(QueueFull):
            queue.put(QueuedRequest.batch([PARAMS]))
        queue.take()
        for each in first:
            queue.finish(each)
        for each in second:  # one after another, in its one place
            assert queue.take() == [each]
            queue.finish(each)
        assert queue.take(wait=False) == []

    asyncio.run(run())


def test_a_closed_queue_fails_what_would_follow() -> None:
    async def run() -> None:
        queue = RequestQueue(limit=1)
        batch = QueuedRequest.batch([PARAMS] * 2)
        queue.put(batch)
        queue.take()
        queue.close(Failed(503, "closing"))
        queue.finish(batch[0])
        assert batch[1].is_over
        other = QueuedRequest.batch([PARAMS] * 2)
        queue.put(other)
        assert other[0].is_over

    asyncio.run(run())


class _Client:
    """A request whose client may be gone."""

    def __init__(self, is_gone: bool = False):
        self.is_gone = is_gone

    async def is_disconnected(self) -> bool:
        return self.is_gone


def deliver(queue: RequestQueue, batch: list[QueuedRequest]) -> Delivery:
    builder, prompts = CompletionResponseBuilder("model"), cast(Prompts, None)
    return Delivery(batch, builder, queue, prompts, asyncio.Semaphore(1))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_failure_of_one_prompt_is_that_of_all(is_streamed: bool) -> None:
    async def run() -> None:
        queue = RequestQueue(limit=4, concurrency=2)
        batch = QueuedRequest.batch([PARAMS] * 4)
        queue.put(batch)
        queue.take()
        batch[0].send(TextDelta("a"))
        batch[0].send(Finished("stop", COUNTS))
        batch[1].send(ProgressUpdate({"counts": COUNTS}))
        batch[1].fail(Failed(503, "no memory"))
        delivery = deliver(queue, batch)
        if is_streamed:
            events = [each async for each in delivery.stream(with_usage=True)]
            assert "no memory" in str(events[-1].data)
        else:
            response = await delivery.whole(cast(Request, _Client()))
            assert response.status_code == 503
            assert "no memory" in bytes(response.body).decode()
        assert all(each.is_over for each in batch)
        queue.finish(batch[0])
        assert queue.waiting == 0

    asyncio.run(run())


def test_a_disconnect_cancels_all_prompts() -> None:
    async def run() -> None:
        queue = RequestQueue(limit=4, concurrency=2)
        batch = QueuedRequest.batch([PARAMS] * 4)
        queue.put(batch)
        response = await deliver(queue, batch).whole(cast(Request, _Client(is_gone=True)))
        assert response.status_code == 499
        assert all(each.is_over for each in batch)
        assert queue.waiting == 0

    asyncio.run(run())


def test_log_probabilities_are_limited_in_all() -> None:
    """Of answers as well as of prompts."""
    params = replace(PARAMS, max_new_tokens=5000, top_logprobs=20)
    few, many = (_within_logprobs([params] * count) for count in (1, 100))
    assert few == [params]
    room = limits.LOGPROBS // 21 // 100
    assert many == [replace(params, max_new_tokens=room, is_clipped=True)] * 100
    echoing = replace(params, has_echo=True, prompt=PARAMS.prompt[:1] * 12_000)
    (own,) = _within_logprobs([echoing])
    assert own.max_new_tokens == limits.LOGPROBS // 21 - 12_000
    plain = replace(params, top_logprobs=None)
    assert _within_logprobs([plain] * 100) == [plain] * 100
