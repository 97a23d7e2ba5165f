"""`tierforce serve` under load: real clients over HTTP, in this process, and the server in another.

- Several clients ask different questions about one document, one after another and together; on
  llama.cpp's server too, if it is given.
- A short request arrives while a long prompt is being read.
- Two questions to each of several documents, with room for the caches of one.
- Many requests, some malformed, some of whose clients leave: the server's memory must stay flat.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
import torch
import typer

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens, tokenizer_of
from bench.speed.conversation import QUESTIONS
from offload.errors import TierForceError
from parallel.formats.locate import find_local, is_gguf

_START_S = 120  # time limit of the server's start
_SHORT = 40  # prompt tokens of a short request
_WARM = 100  # requests until memory must stay flat


@dataclass(frozen=True)
class Answer:
    """What a client received, and when."""

    text: str
    first_s: float  # from the request to the first text
    whole_s: float
    status: int = 200


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[Any], url: str):
        self.process, self._address = process, urlsplit(url)

    def complete(
        self, prompt: Sequence[int], new_tokens: int, leave_after: int | None = None
    ) -> Answer:
        """Return the greedy continuation of a prompt; the client leaves after so many events.

        Raises TierForceError if the server refuses or fails.
        """
        answer = self.post(leave_after, prompt=list(prompt), max_tokens=new_tokens, temperature=0)
        if answer.status != 200:
            raise TierForceError(f"the server refused a request with status {answer.status}")
        return answer

    def post(self, leave_after: int | None = None, **fields: object) -> Answer:
        """Send a completion request, and receive its answer as a stream."""
        body = {"model": self.model, "stream": True, **fields}
        started = time.perf_counter()
        connection = HTTPConnection(self._address.hostname or "", self._address.port)
        text, first_s, events = list[str](), 0.0, 0
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise TierForceError(f"the server failed: {event['error']}")
                piece = event["choices"][0]["text"] if event["choices"] else ""
                first_s = first_s or (time.perf_counter() - started if piece else 0.0)
                text.append(piece)
                events += 1
                if events == leave_after:
                    break
        finally:
            connection.close()
        return Answer("".join(text), first_s, time.perf_counter() - started, response.status)

    @cached_property
    def model(self) -> str:
        """Return the name of its model."""
        connection = HTTPConnection(self._address.hostname or "", self._address.port)
        connection.request("GET", "/v1/models")
        name: str = json.load(connection.getresponse())["data"][0]["id"]
        connection.close()
        return name

    @property
    def memory_mb(self) -> float:
        """Return the server's resident memory."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


@contextmanager
def llama_cpp(program: Path, model: Path, slots: int, context: int) -> Iterator[Server]:
    """Run llama.cpp's server with so many slots of `context` tokens. Raises TierForceError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "--model", str(model), "--port", str(port), "--parallel", str(slots)]
    command += ["--ctx-size", str(slots * context), "--threads", str(torch.get_num_threads())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(10 * _START_S):
            with suppress(OSError):
                connection = HTTPConnection("127.0.0.1", port)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            if process.poll() is not None:
                break
            time.sleep(0.1)
        else:
            raise TierForceError(f"{program} does not answer")
        if process.poll() is not None:
            raise TierForceError(f"{program} did not start: it exited with {process.returncode}")
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def serving(target: str, dtype: str, concurrency: int, *options: str) -> Iterator[Server]:
    """Run a server that answers so many requests at once. Raises TierForceError."""
    command = [sys.executable, "-m", "decoding", "serve", "--model", target, "--port", "0"]
    command += ["--dtype", dtype, "--concurrency", str(concurrency), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines, deadline = list[str](), threading.Timer(_START_S, process.kill)
    deadline.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"listening on (http://\S+)", line):
                break
        else:
            raise TierForceError(f"the server did not start: {''.join(lines[-3:])}")
        deadline.cancel()
        # its log is read, so that it does not have to wait
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Server(process, match[1])
    finally:
        deadline.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait()


def ask_all(
    server: Server, prompts: Sequence[Sequence[int]], new_tokens: int, clients: int
) -> tuple[list[Answer], float]:
    """Send all requests from so many clients; return the answers, and the seconds of all."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, new_tokens), prompts))
    return answers, time.perf_counter() - started


def row(
    what: str,
    concurrency: int,
    answers: Sequence[Answer],
    seconds: float,
    server: str = "TierForce",
) -> Row:
    """Return the row of requests that belong together."""
    say(f"{server}: {what}: {seconds:.1f} s")
    return {
        "server": server,
        "requests": what,
        "concurrency": concurrency,
        "all_s": seconds,
        "first_text_s": statistics.median(answer.first_s for answer in answers),
        "answer_s": statistics.median(answer.whole_s for answer in answers),
    }


def ask_each(
    server: Server,
    documents: Sequence[Sequence[int]],
    question: Sequence[int],
    new_tokens: int,
    what: str,
) -> Row:
    """Ask a question about each document, one after another; return the row of all."""
    prompts = [[*document, *question] for document in documents]
    return row(what, 1, *ask_all(server, prompts, new_tokens, 1))


def peer_rows(
    program: Path, model: Path, prompts: Sequence[Sequence[int]], new_tokens: int, clients: int
) -> list[Row]:
    """Return llama.cpp's rows of the same prompts, one after another and together.

    Its server reuses the longest common prefix of a slot's last prompt, as by default.
    """
    rows, context = [], max(map(len, prompts)) + new_tokens + 1
    for what, slots in (("one after another", 1), ("together", clients)):
        with llama_cpp(program, model, slots, context) as server:
            server.complete(prompts[0][:_SHORT], 4)
            answers, seconds = ask_all(server, prompts, new_tokens, slots)
        rows.append(row(what, slots, answers, seconds, "llama.cpp"))
    return rows


def short_beside_long(
    server: Server, long: Sequence[int], short: Sequence[int], new_tokens: int
) -> tuple[Answer, Answer]:
    """Send a short request 1 s after a long one; return the answers, the short one's first."""
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(server.complete, long, new_tokens)
        time.sleep(1.0)
        quick = pool.submit(server.complete, short, new_tokens)
        return quick.result(), slow.result()


def soak(server: Server, document: Sequence[int], count: int, clients: int) -> Row:
    """Send many short requests, a tenth malformed, a tenth of whose clients leave."""
    memory = dict[int, float]()

    def send(number: int) -> int:
        prompt = document[number % 400 : number % 400 + _SHORT + number % 60]
        if number % 10 == 3:
            status = server.post(prompt=[number, "x"]).status
        else:
            leave_after = 1 if number % 10 == 7 else None
            status = server.complete(prompt, 4 + number % 5, leave_after).status
        memory[number] = server.memory_mb
        return status

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        statuses = list(pool.map(send, range(count)))
    by_number = [memory[number] for number in range(count)]
    # medians of so many requests: what is open varies from one to the next
    early = statistics.median(by_number[_WARM : 2 * _WARM] or by_number)
    last = statistics.median(by_number[-_WARM:])
    return {
        "requests": count,
        "seconds": time.perf_counter() - started,
        "refused": sum(status != 200 for status in statuses),
        "early_mb": early,
        "last_mb": last,
        "most_mb": max(by_number),
        "growth": last / early - 1,
    }


@benchmark(
    "{clients} clients, a document of {context:,} tokens, {new_tokens} new tokens, {dtype}, "
    "greedy, {threads} threads"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    text: opt.Text = None,
    context: opt.Context = 2000,
    long: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 7000,
    clients: Annotated[int, typer.Option(min=2, max=6, help="Number of clients.")] = 4,
    requests: Annotated[int, typer.Option(help="Requests of the soak; 0: none.")] = 1000,
    new_tokens: opt.NewTokens = 64,
    dtype: opt.Dtype = "float32",
    threads: opt.Threads = 0,
    llama_server: Annotated[
        Path | None, typer.Option(help="llama.cpp's llama-server, to compare with.")
    ] = None,
    output: opt.Output = Path("results/serve.json"),
) -> Measurement:
    """Measure a server: several clients at once, a short request beside a long one, a soak."""
    tokenizer = tokenizer_of(target)
    whole = prompt_tokens(tokenizer, long + context, text)
    document, other = whole[:context], whole[context:]
    questions: list[list[int]] = [
        tokenizer(f"\n\nQuestion: {each}\n\nAnswer:", add_special_tokens=False).input_ids
        for each in QUESTIONS[:clients]
    ]
    prompts = [[*document, *question] for question in questions]
    size = min(context, long // clients)
    documents = [other[start * size : (start + 1) * size] for start in range(clients)]
    rows, soaks, ratios = list[Row](), list[Row](), dict[str, object]()
    with serving(target, dtype, 1) as server:
        server.complete(other[:_SHORT], 4)
        alone, alone_s = ask_all(server, prompts, new_tokens, 1)
        rows.append(row("one after another", 1, alone, alone_s))
        rows.append(ask_each(server, documents, questions[0], new_tokens, "one question each"))
        rows.append(ask_each(server, documents, questions[1], new_tokens, "another one each"))
        yield {"rows": rows}
    with serving(target, dtype, 1, "--swap-space", "0") as server:
        ask_each(server, documents, questions[0], new_tokens, "one question each")
        what = "another one each, nothing swapped out"
        rows.append(ask_each(server, documents, questions[1], new_tokens, what))
        again, lost = (row["first_text_s"] for row in rows[-2:])
        ratios["time to another answer's first text, over that with nothing swapped out"] = (
            again / lost
        )
        yield {"rows": rows, "ratios": ratios}
    with serving(target, dtype, clients) as server:
        server.complete(other[:_SHORT], 4)
        together, together_s = ask_all(server, prompts, new_tokens, clients)
        rows.append(row("together", clients, together, together_s))
        ratios["time of all answers together, over one after another"] = together_s / alone_s
        same = [one.text == two.text for one, two in zip(alone, together, strict=True)]
        ratios["answers with the same text"] = f"{sum(same)} of {len(same)}"
        yield {"rows": rows, "ratios": ratios}
        if llama_server is not None:
            file = find_local(target)
            if file is None or not is_gguf(file):
                raise TierForceError(f"llama.cpp reads GGUF files only, and {target} is none")
            rows += peer_rows(llama_server, file, prompts, new_tokens, clients)
            ratios["the same on llama.cpp's server"] = rows[-1]["all_s"] / rows[-2]["all_s"]
            yield {"rows": rows, "ratios": ratios}
        quick, slow = short_beside_long(server, other, document[:_SHORT], 8)
        rows.append(row("a short one, 1 s after a long one", clients, [quick], quick.whole_s))
        rows.append(row("the long one", clients, [slow], slow.whole_s))
        yield {"rows": rows, "ratios": ratios}
        if requests:
            soaks.append(soak(server, document, requests, clients))
            yield {"rows": rows, "ratios": ratios, "soak": soaks}
