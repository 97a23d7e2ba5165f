"""The routes of documents: files read as text, and those in the prompt cache on disk."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any
from urllib import request
from urllib.parse import quote

import pytest

pytest.importorskip("openai")
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message
from transformers import AutoTokenizer

from decoding.app.documents import conversion
from decoding.app.documents.document import Document
from decoding.app.documents.formats import kinds
from decoding.app.server.http import document_routes
from decoding.app.server.http.document_routes import DocumentRoutes
from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.http.receiving import Uploads
from decoding.app.server.worker import limits
from decoding.app.server.worker.prompts import Prompts
from decoding.app.server.worker.uploaded_documents import label_of
from decoding.text.encoding import plain_tokens
from offload.errors import InvalidRequestError
from offload.layout import OBSERVED_ROWS
from support.chat_model import STORY, TEMPLATE, chat_model, story_options
from support.commands import forked, wait_for
from support.document_files import archive, docx, docx_paragraph, epub, pdf
from support.serving import Serving, serving
from support.slow import slow_except

CHAT, DOCUMENTS = "/v1/chat/completions", "/documents"
BYTES = {"Content-Type": "application/octet-stream"}
CONTEXT = 4000
GERMAN = "Ein Mädchen hört die Vögel, müde träumt es schöne Träume über grüne Hügel. " * 4
# special tokens around messages, and a system message of the template's own
SPECIAL = (
    "{% if messages[0].role != 'system' %}<s>system\nBe kind.\n\n</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = ("--context", str(CONTEXT), "--max-body", "1")
    with serving(tmp_path_factory.mktemp("server") / "run", *model, *options) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(model: tuple[str, ...]) -> Any:
    return AutoTokenizer.from_pretrained(model[1])


def send(server: Serving, name: str, content: bytes) -> dict[str, Any]:
    answer = server.ask(f"{DOCUMENTS}?name={quote(name)}", content, **BYTES)
    assert isinstance(answer, dict)
    return answer


def refusal(server: Serving, name: str, content: bytes, **headers: str) -> tuple[int, str]:
    path = f"{DOCUMENTS}?name={quote(name)}"
    status, error = server.error(path, content, **{**BYTES, **headers})
    return status, error.get("message", "")


@pytest.mark.parametrize(
    ("name", "content", "begins"),
    [
        ("a.txt", STORY.encode(), "It was"),
        ("ünï.TXT", "Ünï".encode("utf-16"), "Ünï"),
        ("old.txt", GERMAN.encode("latin-1"), "Ein Mädchen"),
        ("no suffix", b"Call me Ishmael.", "Call me"),
        ("book.epub", epub({"a.xhtml": "<p>Loomings</p>"}), "Loomings"),
        ("book.pdf", pdf([["Call me Ishmael."], []]), "Call me"),
        ("wrongly named.txt", pdf([["Call me Ishmael."]]), "Call me"),
        ("letter.docx", docx(docx_paragraph("Dear Sir")), "Dear"),
        ("page.html", b"<p>A <b>word</b></p>", "A"),
    ],
)
def test_files_are_read_as_on_the_command_line(
    name: str, content: bytes, begins: str, server: Serving, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    expected = Document(name, path).read()
    assert begins in expected.text
    answer = send(server, name, content)
    assert answer == {
        "name": name,
        "text": expected.text,
        "characters": len(expected.text),
        "tokens": len(plain_tokens(tokenizer, expected.text)),
        "notes": [expected.warning] if expected.warning else [],
    }
    assert bool(answer["notes"]) == (name in ("old.txt", "book.pdf"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.pdf", b"%PDF-1.4 nothing"),
        ("broken.epub", b"PK\x03\x04nothing"),
        ("binary.txt", bytes(range(256))),
        ("empty.txt", b""),
        ("pictures.pdf", pdf([[]])),
        ("old.rtf", b"{\\rtf1}"),
        ("old.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_same_line(
    name: str, content: bytes, server: Serving, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError) as expected:
        Document(name, path).read()
    assert refusal(server, name, content) == (400, f"{name}: {expected.value}")


def test_an_archive_has_one_document(server: Serving) -> None:
    one = archive({"folder/a.txt": "Call me Ishmael.", "picture.png": b"png", ".hidden.txt": "-"})
    assert send(server, "one.zip", one)["text"] == "Call me Ishmael."
    for members, found in (({"a.txt": "a", "b.txt": "b"}, "2 documents"), ({}, "no document")):
        status, message = refusal(server, "many.zip", archive(members))
        assert status == 400
        assert message.startswith(f"many.zip: it is an archive with {found}: unpack it")
    status, message = refusal(server, "lines.jsonl", b'{"id": 1, "text": "a"}')
    assert (status, "save one of them as text" in message) == (400, True)


def test_a_name_is_a_label(server: Serving, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    assert send(server, str(secret), b"public") == send(server, "secret.txt", b"public")
    assert send(server, "..", b"public")["name"] == "document"
    assert label_of("C:\\books\\a\x1b[31m\nb\u202e.pdf") == "a[31mb.pdf"
    assert label_of("x" * 500 + ".pdf").endswith("x.pdf")
    assert len(label_of("x" * 500 + ".pdf")) == limits.DOCUMENT_NAME
    assert label_of("") == label_of("a/") == "document"


def test_a_text_is_counted_in_bounded_time(server: Serving) -> None:
    """One of more than twice the context is returned up to where that was certain."""
    text = "".join(f"{number} bottles. " for number in range(50_000))
    assert len(text) < 1_000_000
    answer = send(server, "long.txt", text.encode())
    assert answer["tokens"] > 2 * CONTEXT
    assert answer["characters"] == len(text) > len(answer["text"]) > 2 * CONTEXT
    assert text.startswith(answer["text"])
    (note,) = answer["notes"]
    assert f"only the first {len(answer['text']):,} of {len(text):,} characters" in note


def test_a_long_text_is_counted_in_parts(tokenizer: Any) -> None:
    prompts = Prompts(tokenizer, 1 << 20, 2048, {1})
    text = "".join(f"{number} bottles. " for number in range(30_000))
    tokens, counted = prompts.count(text)
    exact = len(plain_tokens(tokenizer, text))
    assert (counted, exact <= tokens <= exact + 2) == (len(text), True)
    assert prompts.count("") == (0, 0)


def test_bodies_are_limited_and_need_a_preflight(server: Serving) -> None:
    status, message = refusal(server, "a.txt", b"a" * 1_000_001)
    assert (status, "larger than 1 MB" in message) == (413, True)
    for kind in ("text/plain", "application/json", "multipart/form-data", ""):
        status, message = refusal(server, "a.txt", b"a", **{"Content-Type": kind})
        assert status == 415
        assert message.endswith("with the header `Content-Type: application/octet-stream`.")
    # other routes take JSON alone
    assert server.status(CHAT, b"{}", **BYTES) == 415


def test_documents_need_the_key(model: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k" * 32)
    options = ("--api-key-file", str(tmp_path / "keys"))
    with serving(tmp_path / "run", *model, *options) as server:
        for path in (DOCUMENTS, f"{DOCUMENTS}/0123456789ab"):
            assert server.status(path) == 401
        assert refusal(server, "a.txt", b"a")[0] == 401
        key = {"Authorization": f"Bearer {'k' * 32}"}
        assert server.ask(DOCUMENTS, b"a", **BYTES, **key)["text"] == "a"
        assert server.ask(DOCUMENTS, **key) == {"data": []}


def received(*messages: Message) -> Request:
    """Return a request that receives these messages."""
    remaining = list(messages)

    async def receive() -> Message:
        if not remaining:
            await asyncio.Event().wait()
        return remaining.pop(0)

    return Request({"type": "http", "method": "POST", "path": DOCUMENTS, "headers": []}, receive)


async def status_of(answer: Awaitable[Any]) -> int:
    try:
        return int((await answer).status_code)
    except RequestRefused as refused:
        return refused.failed.status


def test_documents_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, files = Event(), list[Any]()

    def read(label: str, file: Any, _: object) -> dict[str, str]:
        files.append(file)
        goes_on.wait()
        return {"text": file.read().decode()}

    monkeypatch.setattr(document_routes, "read_upload", read)
    monkeypatch.setattr(limits, "CONVERSION_WAIT_S", 0.2)
    monkeypatch.setattr(limits, "DOCUMENTS", 3)
    body: Message = {"type": "http.request", "body": b"text", "more_body": False}

    async def run() -> None:
        routes = DocumentRoutes(None, Uploads(1000), None)  # type: ignore[arg-type]

        def ask() -> asyncio.Task[int]:
            return asyncio.create_task(status_of(routes.convert(received(body))))

        tasks = [ask(), ask()]
        while len(files) < 2:
            await asyncio.sleep(0.01)
        waiting = ask()
        while routes._pending < 3:
            await asyncio.sleep(0.01)
        assert await ask() == 503  # more than may wait
        assert await waiting == 503  # longer than it may
        assert not any(file.closed for file in files)
        goes_on.set()
        assert await asyncio.gather(*tasks) == [200, 200]
        assert await ask() == 200
        assert len(files) == 3
        assert all(file.closed for file in files)
        with pytest.raises(ClientDisconnect):
            await routes.convert(received({"type": "http.disconnect"}))
        assert routes._pending == 0

    asyncio.run(run())


def test_clients_that_are_gone_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while their documents are read, nor while they wait."""
    started = list[str]()

    def read(label: str, file: Any, _: object) -> dict[str, Any]:
        started.append(label)
        with suppress(InvalidRequestError):
            conversion.convert(file, kinds.HTML)  # until it is cancelled
        return {}

    monkeypatch.setattr(document_routes, "read_upload", read)
    endless = ["-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(conversion, "module_arguments", lambda _: endless)
    body: Message = {"type": "http.request", "body": b"text"}

    async def run() -> None:
        routes = DocumentRoutes(None, Uploads(1000), None)  # type: ignore[arg-type]
        gone = asyncio.Event()

        def ask() -> asyncio.Task[int]:
            return asyncio.create_task(status_of(routes.convert(leaving(body, gone))))

        tasks = [ask() for _ in range(limits.DOCUMENTS)]
        while len(started) < limits.CONCURRENT_CONVERSIONS:
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait(tasks)
        assert routes._pending == 0
        assert len(started) == limits.CONCURRENT_CONVERSIONS
        waiting = [task for task in tasks if task.exception() is not None]
        assert len(waiting) == limits.DOCUMENTS - limits.CONCURRENT_CONVERSIONS
        assert all(isinstance(task.exception(), ClientDisconnect) for task in waiting)

    asyncio.run(run())


def leaving(body: Message, gone: asyncio.Event) -> Request:
    """Return a request whose client leaves, after its body, once `gone` is set."""
    messages = [body]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


def test_searches_of_clients_that_are_gone_are_left_out() -> None:
    async def run() -> None:
        routes = DocumentRoutes(None, Uploads(1000), None)  # type: ignore[arg-type]
        gone = asyncio.Event()
        await routes._searching.acquire()
        own = leaving({"type": "http.request", "body": b""}, gone)
        tasks = [asyncio.create_task(routes._search(own, list)) for _ in range(limits.SEARCHES)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused):
            await routes._search(own, list)
        gone.set()
        await own.body()
        routes._searching.release()
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), ClientDisconnect) for task in tasks)
        assert await routes._search(leaving({"type": "http.request"}, asyncio.Event()), list) == []

    asyncio.run(run())


def _read_forever() -> None:
    """Replace the reading of a document, in the server's process."""

    def read(label: str, file: Any, _: object) -> dict[str, Any]:
        print("reading", file=sys.stderr, flush=True)
        Event().wait()
        return {}

    document_routes.read_upload = read


def test_a_document_that_is_read_does_not_keep_the_server(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    with serving(tmp_path / "run", *model, before=_read_forever) as server:
        path, data = f"{server.url}{DOCUMENTS}", b"text"
        with pytest.raises(OSError, match="timed out"):
            request.urlopen(request.Request(path, data, BYTES), timeout=0.5)
        assert "reading" in server.log
        assert server.ask("/health")["status"] == "ok"
        assert server.end().code == 128 + signal.SIGTERM


def documents(server: Serving) -> list[dict[str, Any]]:
    answer = server.ask(DOCUMENTS)["data"]
    assert isinstance(answer, list)
    return answer


def cached_tokens(server: Serving, *contents: str, system: str | None = None) -> int:
    messages = [{"role": "user", "content": each} for each in contents]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    usage = server.ask(CHAT, {"messages": messages, "max_tokens": 2})["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def stored(cache: Path) -> int:
    """Return the number of prompts on disk."""
    return len([each for each in cache.iterdir() if not each.name.startswith(".")])


@pytest.mark.parametrize("template", slow_except([TEMPLATE, SPECIAL]))
def test_stored_documents_are_continued(template: str, tmp_path: Path) -> None:
    model, cache = chat_model(tmp_path / "model"), tmp_path / "kept"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    options = (*model, "--prompt-cache", str(cache))
    forked(tmp_path, "prefill", *options, *story_options(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with serving(tmp_path / "run", *options, "--context", "3000", "--swap-space", "0") as server:
        (prefilled,) = documents(server)
        tokens = len(plain_tokens(tokenizer, STORY))
        assert prefilled["name"] == "story.txt"
        assert abs(prefilled["tokens"] - tokens) <= 1
        assert server.ask(f"{DOCUMENTS}/{prefilled['id']}") == {**prefilled, "text": STORY}
        assert cached_tokens(server, f"{STORY}\n\nWho?") >= tokens - OBSERVED_ROWS
        # two conversations that differ in their questions, as the server stores them
        other = "</s><|end|>\n\nCall me Ishmael.\n\n" + "Some years ago, never mind how long. " * 30
        for number, question in enumerate(("Who was that? " * 90, "Why did he go there? " * 90), 2):
            assert cached_tokens(server, f"{other}\n\n{question}") < len(other)
            wait_for(lambda number=number: stored(cache) == number)
        listed = documents(server)
        assert listed[1:] == [prefilled]
        assert server.ask(f"{DOCUMENTS}/{listed[0]['id']}")["text"] == other
        # one that does not begin like a conversation of the page
        cached_tokens(server, "Who? " * 400, system="Be brief.")
        wait_for(lambda: stored(cache) == 4)
        assert documents(server) == listed
        # one that is damaged
        path = cache / prefilled["id"] / "tokens.bin"
        os.truncate(path, path.stat().st_size - 1)
        assert documents(server) == listed[:1]
        for id in (prefilled["id"], "0" * 12, "..%2Fkept"):
            assert server.status(f"{DOCUMENTS}/{id}") == 404
    with serving(tmp_path / "again", *options, "--context", "3000") as server:
        text = server.ask(f"{DOCUMENTS}/{listed[0]['id']}")["text"]
        tokens = len(plain_tokens(tokenizer, text))
        assert cached_tokens(server, f"{text}\n\nWhither?") >= tokens - OBSERVED_ROWS
        (document,) = documents(server)  # in the prompt that was loaded
        assert server.ask(f"{DOCUMENTS}/{document['id']}")["text"] == text


def test_a_message_without_a_question_is_a_document(model: tuple[str, ...], tmp_path: Path) -> None:
    cache = tmp_path / "kept"
    options = (*model, "--prompt-cache", str(cache), "--context", "3000")
    with serving(tmp_path / "run", *options) as server:
        cached_tokens(server, STORY)
        wait_for(lambda: stored(cache) == 1)
        (document,) = documents(server)
        assert server.ask(f"{DOCUMENTS}/{document['id']}")["text"] == STORY
