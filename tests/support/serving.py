"""A server in its own process, and clients of it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("openai")
from openai import OpenAI

from support.commands import PATIENCE, Finished, Fork

# a slow link, which every token waits for
SLOW = ("--link", "emulated:0.01", "--gpu-kv-layers", "0", "--mode", "plain")


class Serving:
    """A running server."""

    def __init__(self, folder: Path, *arguments: str, before: Callable[[], None] | None = None):
        """`before` is called first in the server's process."""
        self.job = Fork(folder, "serve", *arguments, "--port", "0", before=before)
        self.job.wait_for(lambda: "listening on" in self.log)
        match = re.search(r"listening on (http://\S+)", self.log)
        assert match is not None
        self.url = match[1]
        self.model = self.ask("/v1/models")["data"][0]["id"] if self.is_open else ""

    @property
    def log(self) -> str:
        path = self.job.folder / "err"
        return path.read_text() if path.exists() else ""

    @property
    def is_open(self) -> bool:
        """Return whether no API key is required."""
        return self.status("/v1/models") == 200

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        """Return the response, parsed JSON or text; raise HTTPError."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
        all_headers = {"Content-Type": "application/json", **headers}
        with urlopen(Request(self.url + path, data, all_headers), timeout=PATIENCE) as reply:
            text = reply.read().decode()
            return json.loads(text) if "json" in reply.headers["Content-Type"] else text

    def status(self, path: str, body: Any = None, **headers: str) -> int:
        """Return the status code of the response."""
        return self.error(path, body, **headers)[0]

    def error(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """Return the status code of the response, and its error object; {} without an error."""
        try:
            self.ask(path, body, **headers)
        except HTTPError as error:
            return error.code, json.loads(error.read())["error"]
        return 200, {}

    def metric(self, name: str) -> float:
        """Return the value of a metric of /metrics; 0 if it is not there."""
        match = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("/metrics"), re.MULTILINE)
        return float(match[1]) if match else 0.0

    def end(self, number: signal.Signals = signal.SIGTERM) -> Finished:
        self.job.send_signal(number)
        return self.job.finish()


@contextmanager
def serving(
    folder: Path, *arguments: str, before: Callable[[], None] | None = None
) -> Iterator[Serving]:
    """Run a server, and end it on exit if it is still running."""
    server = Serving(folder, *arguments, before=before)
    try:
        yield server
    finally:
        if not server.job.has_ended():
            server.end()
