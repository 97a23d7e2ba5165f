"""`serve`: the engine on this thread, and the server on another."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from decoding.app.batch.job import model_name
from decoding.app.options import Common
from decoding.app.server.http.connections import Connection, ConnectionLimits, HttpServer
from decoding.app.server.http.guards import RequestGuard
from decoding.app.server.http.parsing import ServedModel
from decoding.app.server.http.routes import Server
from decoding.app.server.options import ServeOptions, is_local, read_keys
from decoding.app.server.worker import limits
from decoding.app.server.worker.answering import EngineWorker
from decoding.app.server.worker.jobs import Failed, RequestQueue
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.prompts import Prompts
from decoding.app.terminal.messages import say_what_fits
from decoding.app.terminal.signals import DOUBLE_INTERRUPT_S, Interrupts
from decoding.app.terminal.streams import say, silence_transformers, warn
from decoding.engine.engine import Engine
from offload.errors import TierForceError, one_line
from parallel.ranks.launch import answer_signals, require_open_files
from parallel.ranks.process_group import TensorParallelGroup

_CLOSING = Failed(503, "the server is being shut down.")
_LOST = Failed(503, "the engine was lost; the server is being shut down.")
_LAST_REPLIES_S = 5  # that clients are given to hear of the end
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def run(
    common: Common, options: ServeOptions, key_file: Path | None, interrupts: Interrupts
) -> None:
    """Answer requests until a signal ends it; all ranks call it.

    Raises TierForceError for what keeps it from it, and SystemExit with the signal's exit code.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    listening: socket.socket | None = None
    connections = ConnectionLimits.for_queue(options.queue)
    keys: list[str] = []
    with group.sync_errors():
        if group.rank == 0:
            # before the models are loaded, which takes a while
            keys = _keys(options, key_file)
            require_open_files(connections.open_files, f"`queue` {options.queue}")
            listening = _bound(options)
    engine = Engine.from_pretrained(common.model, common.draft, common.settings, group=group)
    say_what_fits(engine, None, common)
    if listening is None:
        engine.run_worker()  # until rank 0 has done what it was told to end with
        return
    queue = RequestQueue(options.queue)
    ending = _Ending(queue)
    for number in (signal.SIGINT, signal.SIGTERM):
        interrupts.answers[number] = partial(ending.told, number)
    answer_signals(signal.SIGINT, signal.SIGTERM)
    served = ServedModel(
        model_name(common.model),
        common.model,
        engine.context,
        engine.runtime.target.config.vocab,
        common.sampling,
        common.max_new_tokens,
    )
    metrics, prompts = Metrics(queue), Prompts(engine.tokenizer, engine.context)
    server = Server(queue, prompts, metrics, served, options.max_body * 10**6)
    hosts = None if keys else [*_LOCAL_NAMES, _as_host(options.host)]
    with _listening(
        RequestGuard(server.app(), hosts, keys, metrics), listening, queue, connections
    ):
        say(f"listening on http://{_as_host(options.host)}:{listening.getsockname()[1]}")
        try:
            EngineWorker(engine, queue, metrics).run()
        finally:
            queue.close(_LOST)  # unless it was told to end
        engine.close()
    raise SystemExit(ending.code)


class _Ending:
    """What signals do: the first lets the server end, and another the process."""

    def __init__(self, queue: RequestQueue):
        self._queue = queue
        self._first: float | None = None
        self.code = 1

    def told(self, number: signal.Signals) -> bool:
        """Take a signal; return whether to go on. Called on the thread that waits for signals."""
        now = time.monotonic()
        if self._first is None:
            self._first, self.code = now, 128 + number
            say(f"{number.name}: ending, once what is being kept is on disk")
            self._queue.close(_CLOSING)
            return True
        return now - self._first < DOUBLE_INTERRUPT_S


@contextmanager
def _listening(
    app: ASGIApp, at: socket.socket, queue: RequestQueue, at_most: ConnectionLimits
) -> Iterator[None]:
    """Serve on a thread of its own. Raises TierForceError where that does not start."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    # whatever else is installed: the connections are bounded by ours alone
    protocol = partial(Connection, at_most=at_most.momentary)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=cast(Any, protocol),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        backlog=limits.BACKLOG,
        timeout_keep_alive=limits.IDLE_S,
        timeout_graceful_shutdown=_LAST_REPLIES_S,
    )
    server, trouble = HttpServer(config, at_most), list[str]()

    def serve() -> None:
        try:
            server.run(sockets=[at])
        except Exception as error:
            trouble.append(one_line(error))
        finally:
            queue.close(_CLOSING)  # nobody could ask any more

    thread = Thread(target=serve, name="server", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    if not server.started:
        raise TierForceError(f"the server does not start: {(trouble or ['it has ended'])[0]}.")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_LAST_REPLIES_S + 1)


def _keys(options: ServeOptions, path: Path | None) -> list[str]:
    """Return the keys that clients need. Raises TierForceError where anybody could come without."""
    if path is not None:
        keys = read_keys(path)
        if path.stat().st_mode & 0o077:
            warn(f"other users of this machine can read {path}: chmod 600 {path}")
        return keys
    if not is_local(options.host):
        raise TierForceError(
            f"`host` {options.host} can be reached from other machines: name a file with keys as "
            "`api_key_file`, one on each line, which clients then have to send."
        )
    return []


def _bound(options: ServeOptions) -> socket.socket:
    """Return a socket at the address. Raises TierForceError where it cannot be had."""
    where = f"{_as_host(options.host)}:{options.port}"
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # or another server could still have the port; who comes early waits
    except OSError as error:
        raise TierForceError(
            f"cannot listen on {where}: {error.strerror}. Use another `port` or `host`."
        ) from error
    return bound


def _as_host(host: str) -> str:
    """Return an address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
