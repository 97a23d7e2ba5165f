"""How a server ends, and what of it stays; alone and on two ranks."""

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


def ended(server: Serving, number: signal.Signals) -> Finished:
    finished = server.end(number)
    assert finished.code == 128 + number, finished.err
    assert f"{number.name}: ending" in finished.err
    return finished


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_what_was_read_is_on_disk_when_it_ends(
    ranks: tuple[str, ...], model: tuple[str, ...], tmp_path: Path
) -> None:
    """SIGTERM ends the answer that is under way at once, and no writing; who waits is told."""
    kept = tmp_path / "kept"
    command = (*model, *ranks, "--prompt-cache", str(kept), "--max-new-tokens", "5000")
    failed: list[str] = []

    def wait_in_queue(server: Serving) -> None:
        with pytest.raises(openai.InternalServerError) as error:
            server.client().completions.create(**LONG)
        failed.append(error.value.message)

    with serving(tmp_path, *command) as server:
        stream = server.client().chat.completions.create(
            model="model", messages=QUESTION, stream=True, max_tokens=5000
        )
        pieces = iter(stream)
        for _ in range(3):
            next(pieces)
        waiting = threading.Thread(target=wait_in_queue, args=(server,))
        waiting.start()
        wait_for(lambda: server.ask("/health")["waiting"] == 1)
        finished = ended(server, signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shut down"):
            list(pieces)
        waiting.join()
    assert "shut down" in failed[0]
    assert "given up" in finished.err
    assert "It was the best of times" in PromptCache(kept).prompts()[0].manifest.name
    # as the next one finds
    with serving(tmp_path, *command) as server:
        answer = server.client().chat.completions.create(
            model="model", messages=QUESTION, max_tokens=3
        )
        tokens = answer.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens > tokens - 100
        assert answer.tierforce["loaded_tokens"] > 0
        assert answer.tierforce["ranks"] == (2 if ranks else 1)
        ended(server, signal.SIGINT)


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))], 1))
@pytest.mark.slow
def test_who_goes_away_while_a_prompt_is_read(
    ranks: tuple[str, ...], model: tuple[str, ...], tmp_path: Path
) -> None:
    """Reading ends with the layer that is being read, on all ranks, and the next is answered."""
    long = [{"role": "user", "content": STORY * 4}]
    with serving(tmp_path, *model, *SLOW, *ranks) as server:
        client = server.client()
        expected = client.completions.create(**{**LONG, "max_tokens": 8}).choices[0].text
        stream = client.chat.completions.create(model="model", messages=long, stream=True)
        next(iter(stream))
        wait_for(lambda: server.ask("/health")["running"] == 1)
        stream.close()
        wait_for(lambda: "given up while its prompt was read" in server.log)
        again = client.completions.create(**{**LONG, "max_tokens": 8}).choices[0].text
        assert again == expected
        ended(server, signal.SIGTERM)


def test_a_lost_rank_ends_it(model: tuple[str, ...], tmp_path: Path) -> None:
    """With a line that says so, and an error for who is being answered."""
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


def never_ending() -> None:
    from decoding.app.server.worker.answering import EngineWorker

    run = EngineWorker.run

    def run_on(answering: EngineWorker) -> None:
        run(answering)
        time.sleep(PATIENCE)

    EngineWorker.run = run_on  # type: ignore[method-assign]


@pytest.mark.parametrize("number", slow_except([signal.SIGINT, signal.SIGTERM], 1))
@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(
    number: signal.Signals, model: tuple[str, ...], tmp_path: Path
) -> None:
    """Where ending takes its time; the same signal twice in a moment is one."""
    with serving(tmp_path, *model, before=never_ending) as server:
        server.job.send_signal(number)
        server.job.wait_for(lambda: ": ending" in server.log)
        server.job.send_signal(number)
        time.sleep(1.1)
        assert not server.job.has_ended()
        server.job.send_signal(number)
        finished = server.job.finish()
    assert finished.code == 128 + number
    assert f"interrupted ({number.name}" in finished.err
