"""Requests that share a document, to models that keep what they go on from every few tokens."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoTokenizer

from bench.harness.decode_loop import run_together
from decoding import GREEDY
from decoding.app.interactive.chat_session import Chat
from decoding.engine.request import Request
from support import batches
from support.batches import SERVING, serving
from support.engines import DEMO, Pair
from support.models import random_tokens

NEW, STEP = 12, 300
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DOCUMENT = random_tokens(700, seed=1).tolist()
QUESTIONS = [[*DOCUMENT, *random_tokens(100 + count, seed=count).tolist()] for count in range(2, 5)]


def keep_every(models: Pair, step: int) -> None:
    """Let the target keep its windows, or its recurrent states, at multiples of the step."""
    config = models.target.config
    assert (config.sliding_window is None) != (config.recurrent is None)
    if config.sliding_window is not None:
        config = replace(config, sliding_window=replace(config.sliding_window, step=step))
    if config.recurrent is not None:
        config = replace(config, recurrent=replace(config.recurrent, step=step))
    models.target.config = config


def alone(models: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers of plain decoding, one after another."""
    with models.engine("plain") as engine:
        return [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]


def check_questions(models: Pair, mode: str) -> None:
    """Ask questions to one document at once: those after the first read little of it."""
    requests = [Request(prompt, NEW, GREEDY) for prompt in QUESTIONS]
    with serving(models, mode, 4, link="emulated:50") as engine:
        states = run_together(engine, requests)
        # up to the last multiple of the step within the document
        assert [state.stats.reused_tokens for state in states] == [0, 600, 600]
        again = run_together(engine, requests[:1])
    assert [state.tokens for state in states] == alone(models, QUESTIONS)
    assert again[0].tokens == states[0].tokens


def check_announced(models: Pair, mode: str, concurrency: int) -> list[int]:
    """Ask questions to two documents, in a batch whose requests say that others follow.

    Returns how many tokens of each were reused.
    """
    other = [[*DOCUMENT[350:], *question[len(DOCUMENT) :]] for question in QUESTIONS[:2]]
    prompts = [*QUESTIONS, [*DOCUMENT, *random_tokens(97, seed=97).tolist()], *other]
    groups = [(10, len(DOCUMENT))] * 3 + [(None, 0), (10, len(DOCUMENT) - 350), (None, 0)]
    requests = [
        Request(prompt, NEW, GREEDY, room=room, shared=shared)
        for prompt, (room, shared) in zip(prompts, groups, strict=True)
    ]
    with models.engine(mode, **{**SERVING, "link": "emulated:50"}) as engine:
        states = batches.run_batch(engine, requests, concurrency)
        assert not engine.sessions.executor.sequences
    assert batches.tokens(states) == alone(models, prompts)
    return [state.stats.reused_tokens for state in states]


def check_stored(models: Pair, mode: str, folder: str) -> list[tuple[int, int]]:
    """Store a document, and ask questions about it that replace each other in a conversation.

    Returns how many tokens of each were reused, and how many loaded.
    """
    options = {**SERVING, "link": "emulated:50", "prompt_cache": folder}
    shared, found = len(DOCUMENT) - 8, list[tuple[int, int]]()
    with models.engine(mode, **options) as engine:
        batches.run_batch(engine, [Request(DOCUMENT, 1, GREEDY, shared=shared)], 1)
    with models.engine(mode, **options) as engine, engine.conversation(room=500):
        for prompt, answer in zip(QUESTIONS, alone(models, QUESTIONS), strict=True):
            request = Request(prompt, NEW, GREEDY, shared=shared)
            (state,) = run_together(engine, [request])
            assert state.tokens == answer
            found.append((state.stats.reused_tokens, state.stats.loaded_tokens))
    return found


def check_chat(models: Pair) -> list[int]:
    """Ask a chat about a document, and start over; return how many tokens each turn reused."""
    reused = list[int]()
    with models.engine("plain", **SERVING) as engine:
        tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
        tokenizer.chat_template = TURNS
        engine.tokenizer = tokenizer
        chat = Chat(engine, 80, GREEDY, document="It was the best of times. " * 120)
        with engine.conversation():
            for _ in range(3):
                "".join(chat.ask("What was it, and when, and why?"))
                reused.append(engine.stats.prompt_tokens - engine.stats.reused_tokens)
                chat.clear()
    return reused


def check_turns(models: Pair, mode: str) -> list[int]:
    """Extend and replace a conversation; return how many tokens each turn reused."""
    prompts, reused = [QUESTIONS[0]], []
    options = {**SERVING, "link": "emulated:50"}
    with models.engine(mode, **options) as engine, engine.conversation(room=2000):
        for common, count in [(None, 30), (None, 250), (900, 40), (650, 400), (None, 5), (0, 50)]:
            answer = list(engine.generate(prompts[-1], NEW, GREEDY))
            reused.append(engine.stats.reused_tokens)
            turn = random_tokens(count, seed=count).tolist()
            known = [*prompts[-1], *answer]
            prompts.append([*known[: len(known) if common is None else common], *turn])
            if engine.scheduler.caches.kept:
                engine.scheduler.caches.kept[0].token_s = 1e9  # reuse pays
        last = list(engine.generate(prompts[-1], NEW, GREEDY))
    answers = alone(models, prompts)
    assert last == answers[-1]
    for prompt, answer, following in zip(prompts, answers, prompts[1:], strict=False):
        if following[: len(prompt)] == prompt and len(following) > len(prompt) + NEW:
            assert following[len(prompt) :][:NEW] == answer
    assert reused[0] == 0
    assert reused[1] >= len(QUESTIONS[0])  # goes on at the end
    assert reused[3] == 900  # a multiple of the step
    return reused


def check_prompt_cache(models: Pair, mode: str, folder: str) -> list[int]:
    """Save the first question, and ask all; return how many tokens each loaded."""
    options = {**SERVING, "link": "emulated:50", "prompt_cache": folder}
    expected = alone(models, QUESTIONS)
    first = Request(QUESTIONS[0], NEW, GREEDY, shared=len(DOCUMENT) - 80)
    with models.engine(mode, **options) as engine:
        assert batches.tokens(batches.run_batch(engine, [first], 1)) == expected[:1]
    loaded = []
    for prompt, answer in zip(QUESTIONS, expected, strict=True):
        with models.engine(mode, **options) as engine:
            assert list(engine.generate(prompt, NEW, GREEDY)) == answer
            loaded.append(engine.stats.loaded_tokens)
    return loaded


def check_swapped_out(models: Pair) -> tuple[int, list[int]]:
    """Go on with a conversation that another one has replaced, and branch off it.

    Returns the tokens of the turn, and how many that and the branch reused.
    """
    prompts, reused = [QUESTIONS[0], random_tokens(650, seed=9).tolist()], []
    with serving(models, "retrieval", 1, swap_space=None) as engine:
        states = [run_together(engine, [Request(each, NEW, GREEDY)])[0] for each in prompts]
        turn = [*prompts[0], *states[0].tokens, 5]
        branch = [*prompts[0][:640], *random_tokens(60, seed=3).tolist()]
        for prompt in (turn, branch):
            (state,) = run_together(engine, [Request(prompt, NEW, GREEDY)])
            reused.append(state.stats.reused_tokens)
            assert [state.tokens] == alone(models, [prompt])
    return len(turn), reused


def check_batches(models: Pair) -> None:
    """Run requests of several sizes together, and one after another."""
    requests = batches.requests(GREEDY, [(90, 20), (400, 12), (33, 30)])
    with models.engine("hierarchical", **batches.SMALL) as engine:
        together = batches.tokens(batches.run_batch(engine, requests, 3))
    with models.engine("plain") as engine:
        assert together == batches.run_alone(engine, requests)
