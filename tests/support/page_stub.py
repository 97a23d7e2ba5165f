"""A stand-in for the chat page's server: a test writes its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from decoding.app.server.http.page import PAGE, POLICY

_PATIENCE_S = 15
_PING_S = 0.05  # interval of comments, which detect that the page is gone
COUNTS = {
    "seed": 7,
    "mode": "offload",
    "prompt_tokens": 90,
    "new_tokens": 2,
    "reused_tokens": 40,
    "discarded_tokens": 0,
    "loaded_tokens": 20,
    "time_to_first_token_s": 1.5,
    "ms_per_token": 20.0,
    "tokens_per_verification": 2.5,
    "acceptance": None,
    "link_bytes": 12_000_000,
    "link_bytes_per_token": None,
    "layers": {"device": 2, "split": 1, "host": 3},
    "ranks": 1,
}


class Chat:
    """A chat completion that the page has requested, and the stream that answers it."""

    def __init__(self, body: dict[str, Any]):
        self.body = body
        self.parts: Queue[bytes | None] = Queue()
        self.is_closed = threading.Event()  # set once the page has closed the stream

    @property
    def contents(self) -> list[str]:
        """Return the contents of the messages."""
        return [message["content"] for message in self.body["messages"]]

    def comment(self, **data: Any) -> None:
        """Send progress."""
        self.parts.put(f": {json.dumps(data)}\n\n".encode())

    def text(self, content: str) -> None:
        """Send a part of the answer."""
        self._chunk(choices=[{"delta": {"content": content}, "finish_reason": None}])

    def finish(self, content: str = "", reason: str = "stop", **counts: Any) -> None:
        """Send the rest of the answer and its end."""
        if content:
            self.text(content)
        self._chunk(choices=[{"delta": {}, "finish_reason": reason}])
        self._chunk(choices=[], tierforce={**COUNTS, **counts})
        self.parts.put(b"data: [DONE]\n\n")
        self.parts.put(None)

    def fail(self, message: str) -> None:
        """Send an error instead of the rest of the answer."""
        self._chunk(error={"message": message, "type": "server_error"})
        self.parts.put(None)

    def _chunk(self, **fields: Any) -> None:
        self.parts.put(f"data: {json.dumps(fields)}\n\n".encode())


class Stub:
    """A server with one token per word."""

    def __init__(self) -> None:
        self.model, self.context, self.created = "stub", 4096, 1
        self.key: str | None = None
        self.is_proxy = False  # it is gone, and a proxy answers
        self.kept: dict[str, dict[str, Any]] = {}  # documents on disk, by id
        self.chats: Queue[Chat] = Queue()
        self.refusals: Queue[tuple[int, str]] = Queue()  # status and message of the next requests
        self.can_open = threading.Event()  # whether documents are answered
        self.can_open.set()
        self._port = 0
        self.start()

    def start(self) -> None:
        """Listen, again on the same port after `stop`."""
        stub = self

        class Handler(_Handler):
            server_stub = stub

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def chat(self) -> Chat:
        """Return the next chat completion that the page requests."""
        return self.chats.get(timeout=_PATIENCE_S)

    def read_documents(self) -> Chat:
        """Answer the request that reads the documents, and return it."""
        chat = self.chat()
        assert chat.body["max_tokens"] == 1
        chat.finish("x", "length")
        return chat


class _Handler(BaseHTTPRequestHandler):
    server_stub: Stub

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        stub, path = self.server_stub, urlsplit(self.path).path
        if path == "/":
            self._send(PAGE.encode(), "text/html; charset=utf-8", POLICY)
        elif stub.is_proxy:
            self._send(b"Bad Gateway", "text/plain", {}, 502)
        elif path == "/health":
            self._json({"status": "ok"})
        elif self._is_allowed():
            if path == "/v1/models":
                card = {"id": stub.model, "max_model_len": stub.context, "created": stub.created}
                self._json({"data": [card]})
            elif path == "/documents":
                without_text = [{**each, "text": None} for each in stub.kept.values()]
                self._json({"data": without_text})
            else:
                self._json(stub.kept[unquote(path.removeprefix("/documents/"))])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = urlsplit(self.path)
        if self.server_stub.is_proxy:
            self._send(b"Bad Gateway", "text/plain", {}, 502)
            return
        if not self._is_allowed():
            return
        if url.path == "/documents":
            self._document(parse_qs(url.query)["name"][0], body.decode())
        elif url.path == "/tokenize":
            self._json({"count": len(json.loads(body)["content"].split())})
        else:
            self._chat(Chat(json.loads(body)))

    def _is_allowed(self) -> bool:
        stub = self.server_stub
        if stub.key and self.headers["Authorization"] != f"Bearer {stub.key}":
            self._error(401, "send one of the server's keys.")
            return False
        return True

    def _document(self, name: str, text: str) -> None:
        self.server_stub.can_open.wait(_PATIENCE_S)
        if name.endswith(".broken"):
            self._error(400, f"{name}: the file is damaged.")
            return
        notes = ["page 3 has no text."] if name.endswith(".pdf") else []
        fields = {"tokens": len(text.split()), "characters": len(text), "notes": notes}
        self._json({"name": name, "text": text, **fields})

    def _chat(self, chat: Chat) -> None:
        try:
            status, message = self.server_stub.refusals.get_nowait()
        except Empty:
            self.server_stub.chats.put(chat)
        else:
            self._error(status, message)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            while (part := self._next_part(chat)) is not None:
                self.wfile.write(part)
        except OSError:
            chat.is_closed.set()

    def _next_part(self, chat: Chat) -> bytes | None:
        try:
            return chat.parts.get(timeout=_PING_S)
        except Empty:
            return b": ping\n\n"

    def _error(self, status: int, message: str) -> None:
        self._json({"error": {"message": message, "type": "invalid_request_error"}}, status)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", {}, status)

    def _send(self, body: bytes, kind: str, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        length = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in {**length, **headers}.items():
            self.send_header(name, value)
        with suppress(OSError):  # the page is gone
            self.end_headers()
            self.wfile.write(body)


@contextmanager
def stub_server() -> Iterator[Stub]:
    """Run a stub, and stop it on exit."""
    stub = Stub()
    try:
        yield stub
    finally:
        stub.stop()
