"""Shutdown of a server, and what is stored by then; on one rank and on two."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("openai")
import openai

from decoding.prefix_cache.store import PromptCache
from support.chat_model import STORY
from support.commands import PATIENCE, Finished, wait_for
from support.serving import SLOW, Serving, serving
from support.slow import slow_except

QUESTION = [{"role": "user", "content": STORY * 2 + "\n\nWho?"}]
LONG = {"model": "model", "prompt": STORY[:200], "max_tokens": 5000}


def shut_down(server: Serving, number: signal.Signals) -> Finished:
    finished = server.end(number)
    assert finished.code == 128 + number, finished.err
    assert f"{number.name}: shutting down" in finished.err
    return finished


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_the_prompt_is_stored_on_shutdown(
    ranks: tuple[str, ...], model: tuple[str, ...], tmp_path: Path
) -> None:
    """SIGTERM aborts the answer in progress but no write, and queued requests get an error."""
    cache = tmp_path / "cache"
    command = (*model, *ranks, "--concurrency", "1", "--prompt-cache", str(cache))
    command = (*command, "--max-new-tokens", "5000")
    errors: list[str] = []

    def wait_in_queue(server: Serving) -> None:
        with pytest.raises(openai.InternalServerError) as error:
            server.client().completions.create(**LONG)
        errors.append(error.value.message)

    with serving(tmp_path, *command) as server:
        stream = server.client().chat.completions.create(
            model="model", messages=QUESTION, stream=True, max_tokens=5000
        )
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
        queued = threading.Thread(target=wait_in_queue, args=(server,))
        queued.start()
        wait_for(lambda: server.ask("/health")["waiting"] == 1)
        finished = shut_down(server, signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        queued.join()
    assert "shutting down" in errors[0]
    assert "aborted" in finished.err
    assert "It was the best of times" in PromptCache(cache).prompts()[0].manifest.name
    # the next server loads it
    with serving(tmp_path, *command) as server:
        answer = server.client().chat.completions.create(
            model="model", messages=QUESTION, max_tokens=3
        )
        tokens = answer.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens > tokens - 100
        assert answer.tierforce["loaded_tokens"] > 0
        assert answer.tierforce["ranks"] == (2 if ranks else 1)
        shut_down(server, signal.SIGINT)


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))], 1))
@pytest.mark.slow
def test_a_disconnect_aborts_the_prefill(
    ranks: tuple[str, ...], model: tuple[str, ...], tmp_path: Path
) -> None:
    """It ends after the current layer, on all ranks, and the next request is answered."""
    long = [{"role": "user", "content": STORY * 4}]
    with serving(tmp_path, *model, *SLOW, *ranks) as server:
        client = server.client()
        expected = client.completions.create(**{**LONG, "max_tokens": 8}).choices[0].text
        # returned before there is a chunk: the first one comes with the first token
        stream = client.chat.completions.create(model="model", messages=long, stream=True)
        wait_for(lambda: server.ask("/health")["running"] == 1)
        stream.close()
        wait_for(lambda: "aborted during prefill" in server.log)
        again = client.completions.create(**{**LONG, "max_tokens": 8}).choices[0].text
        assert again == expected
        shut_down(server, signal.SIGTERM)


def test_a_lost_rank_ends_the_server(model: tuple[str, ...], tmp_path: Path) -> None:
    """The log names it, and the client in progress receives an error."""
    with serving(tmp_path, *model, *SLOW, "--gpus", "2") as server:
        stream = iter(server.client().completions.create(**LONG, stream=True))
        next(stream)
        rank = server.job.rank(1)
        assert rank is not None
        rank.kill()
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            list(stream)
        finished = server.job.finish()
    assert finished.code > 0
    assert "rank 1 was killed by SIGKILL" in finished.err or "another rank ended" in finished.err
    assert "Start the server again." in finished.err
    assert "records" not in finished.err


def delay_shutdown() -> None:
    from decoding.app.server.worker.answering import EngineWorker

    run = EngineWorker.run

    def run_and_wait(worker: EngineWorker) -> None:
        run(worker)
        time.sleep(PATIENCE)

    EngineWorker.run = run_and_wait  # type: ignore[method-assign]


@pytest.mark.parametrize("number", slow_except([signal.SIGINT, signal.SIGTERM], 1))
@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(
    number: signal.Signals, model: tuple[str, ...], tmp_path: Path
) -> None:
    """During a slow shutdown; two equal signals within a second count as one."""
    with serving(tmp_path, *model, before=delay_shutdown) as server:
        server.job.send_signal(number)
        server.job.wait_for(lambda: ": shutting down" in server.log)
        server.job.send_signal(number)
        time.sleep(1.1)
        assert not server.job.has_ended()
        server.job.send_signal(number)
        finished = server.job.finish()
    assert finished.code == 128 + number
    assert f"interrupted ({number.name}" in finished.err
