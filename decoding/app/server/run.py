"""`serve`: the engine runs on this thread, the HTTP server on another."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from decoding.app.batch.job import model_name
from decoding.app.options import Common
from decoding.app.server.http.connections import Connection, ConnectionLimits, HttpServer
from decoding.app.server.http.guards import RequestGuard
from decoding.app.server.http.parsing import ServedModel
from decoding.app.server.http.routes import CLIPPED, Server
from decoding.app.server.options import ServeOptions, is_local, read_keys
from decoding.app.server.worker import limits
from decoding.app.server.worker.answering import EngineWorker
from decoding.app.server.worker.jobs import Failed, RequestQueue
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.prompts import Prompts
from decoding.app.server.worker.stored_documents import StoredDocuments
from decoding.app.terminal.loading import load_engine
from decoding.app.terminal.messages import fitting_concurrency, say_what_fits
from decoding.app.terminal.signals import DOUBLE_INTERRUPT_S, Interrupts
from decoding.app.terminal.streams import say, silence_transformers, warn
from offload.errors import TierForceError, one_line
from parallel.ranks.launch import answer_signals, require_open_files
from parallel.ranks.process_group import TensorParallelGroup

_SHUTTING_DOWN = Failed(503, "the server is shutting down.")
_ENGINE_LOST = Failed(503, "the engine has failed, and the server is shutting down.")
_LAST_RESPONSES_S = 5  # time for clients to receive the last responses
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def run(
    common: Common,
    options: ServeOptions,
    key_file: Path | None,
    origins: Sequence[str],
    interrupts: Interrupts,
) -> None:
    """Answer requests until a signal ends the server; called by all ranks.

    `origins`: those of web pages that may use the server.

    Raises TierForceError if the server cannot start, and SystemExit with the signal's exit code.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    listener: socket.socket | None = None
    connections = ConnectionLimits.for_queue(options.queue)
    keys: list[str] = []
    with group.sync_errors():
        if group.rank == 0:
            # checked before the models are loaded, which takes a while
            keys = _load_keys(options, key_file)
            require_open_files(connections.open_files, f"`queue` {options.queue}")
            listener = _bind(options)
    engine = load_engine(common, group)
    concurrency = options.concurrency or fitting_concurrency(
        engine, engine.context - common.max_new_tokens, common.max_new_tokens
    )
    say_what_fits(engine, None, common, concurrency)
    if listener is None:
        engine.run_worker()  # returns after rank 0 has shut down
        return
    queue = RequestQueue(options.queue, concurrency)
    shutdown = _Shutdown(queue)
    for number in (signal.SIGINT, signal.SIGTERM):
        interrupts.answers[number] = partial(shutdown.on_signal, number)
    answer_signals(signal.SIGINT, signal.SIGTERM)
    served = ServedModel(
        options.served_model_name or model_name(common.model),
        common.model,
        engine.context,
        engine.runtime.target.config.vocab,
        common.sampling,
        common.max_new_tokens,
    )
    metrics = Metrics(queue, engine.sessions)
    stop_tokens = engine.scheduler.stop_tokens
    prompts = Prompts(engine.tokenizer, engine.context, served.vocab, stop_tokens)
    swap_space = None if options.swap_space is None else options.swap_space * 10**9
    stored = StoredDocuments(engine.sessions, prompts, served.context, served.max_new_tokens)
    server = Server(queue, prompts, metrics, served, options.max_body * 10**6, stored)
    hosts = None if keys else [*_LOCAL_NAMES, _url_host(options.host)]
    app: ASGIApp = RequestGuard(server.app(), hosts, keys, metrics)
    if origins:  # around the guard, so that its errors can be read, too
        app = CORSMiddleware(
            app,
            origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[CLIPPED, "Retry-After"],
        )
        if "*" in origins and not keys:
            warn("any page that a browser here opens may use the server: see --api-key-file")
    with _http_thread(app, listener, queue, connections):
        say(f"listening on http://{_url_host(options.host)}:{listener.getsockname()[1]}")
        try:
            EngineWorker(engine, queue, metrics, swap_space).run()
        finally:
            queue.close(_ENGINE_LOST)  # no effect after a shutdown by signal
        engine.close()
    raise SystemExit(shutdown.code)


class _Shutdown:
    """Handles signals: the first shuts the server down, another one ends the process."""

    def __init__(self, queue: RequestQueue):
        self._queue = queue
        self._first: float | None = None
        self.code = 1

    def on_signal(self, number: signal.Signals) -> bool:
        """Handle a signal; return whether the process goes on. Called on the signals' thread."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self.code = 128 + number
            say(f"{number.name}: shutting down after pending writes to the prompt cache")
            self._queue.close(_SHUTTING_DOWN)
            return True
        return now - self._first < DOUBLE_INTERRUPT_S


@contextmanager
def _http_thread(
    app: ASGIApp, listener: socket.socket, queue: RequestQueue, connections: ConnectionLimits
) -> Iterator[None]:
    """Serve HTTP on another thread. Raises TierForceError if the server cannot start."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    # explicit, since uvicorn would choose another protocol by the packages installed
    protocol = partial(Connection, max_connections=connections.hard_limit)
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
        timeout_graceful_shutdown=_LAST_RESPONSES_S,
    )
    server = HttpServer(config, connections)
    errors = list[str]()

    def serve() -> None:
        try:
            server.run(sockets=[listener])
        except Exception as error:
            errors.append(one_line(error))
        finally:
            queue.close(_SHUTTING_DOWN)  # no request can arrive any more

    thread = Thread(target=serve, name="server", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    if not server.started:
        reason = errors[0] if errors else "its thread has ended"
        raise TierForceError(f"the server cannot start: {reason}.")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_LAST_RESPONSES_S + 1)


def _load_keys(options: ServeOptions, path: Path | None) -> list[str]:
    """Return the API keys. Raises TierForceError if other machines could connect without one."""
    if path is not None:
        keys = read_keys(path)
        if path.stat().st_mode & 0o077:
            warn(f"other users of this machine can read {path}: chmod 600 {path}")
        return keys
    if not is_local(options.host):
        raise TierForceError(
            f"`host` {options.host} can be reached from other machines: set `api_key_file` to a "
            "file with keys, one per line; clients must send one of them."
        )
    return []


def _bind(options: ServeOptions) -> socket.socket:
    """Return a listening socket. Raises TierForceError if the address is not available."""
    address = f"{_url_host(options.host)}:{options.port}"
    try:
        infos = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = infos[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        # fails if another server listens, which bind alone may not; early clients wait
        listener.listen()
    except OSError as error:
        raise TierForceError(
            f"cannot listen on {address}: {error.strerror}. Use another `port` or `host`."
        ) from error
    return listener


def _url_host(host: str) -> str:
    """Return a host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host
