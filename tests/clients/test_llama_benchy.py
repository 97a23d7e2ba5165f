"""llama-benchy, which measures prefill and decoding through the chat interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support.clients import MARKS, run_client
from support.commands import DEMO, TARGET
from support.serving import Serving

pytestmark = MARKS
PROMPT, ANSWER, RUNS = 64, 8, 2


@pytest.fixture
def books() -> Iterator[str]:
    """The address of the books: llama-benchy takes its prompts from a file on the web."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(DEMO / "books"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        Thread(target=web.serve_forever).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def test_a_benchmark_counts_the_tokens_of_the_server(
    server: Serving, books: str, home: Path
) -> None:
    path = home / "results.json"
    counted = 'tierforce_tokens_total{kind="generated"}'
    before = server.metric(counted)
    run_client(
        "newest",
        "llama-benchy",
        *("--base-url", f"{server.url}/v1", "--model", server.model, "--tokenizer", str(TARGET)),
        *("--book-url", f"{books}/moby-dick-1.txt", "--latency-mode", "none"),
        *("--pp", str(PROMPT), "--tg", str(ANSWER), "--runs", str(RUNS), "--depth", "0", "32"),
        *("--concurrency", "1", "2", "--enable-prefix-caching"),
        *("--no-warmup", "--no-adapt-prompt", "--format", "json"),
        # The model writes any text, and cannot say what the capital of France is.
        *("--skip-coherence", "--exit-on-first-fail", "--save-result", str(path)),
        home=home,
    )
    found = json.loads(path.read_text())
    benchmarks = found["benchmarks"]
    kinds = {
        (each["concurrency"], each["context_size"], each["is_context_prefill_phase"])
        for each in benchmarks
    }
    depths = [(0, False), (32, True), (32, False)]
    assert kinds == {(clients, *depth) for clients in (1, 2) for depth in depths}
    requests = 0
    for each in benchmarks:
        size = each["concurrency"] * RUNS
        for name in ("pp_req_throughput", "tg_req_throughput", "ttfr"):
            assert len(each[name]["values"]) == size
            assert min(each[name]["values"]) > 0
        requests += size
    assert server.metric(counted) - before == requests * ANSWER
