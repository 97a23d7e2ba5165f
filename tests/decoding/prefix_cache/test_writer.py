"""What is kept while turns go on, texts are given up, processes are killed, and ranks share it."""

from __future__ import annotations

import errno
import multiprocessing
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count, islice
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

from decoding import GREEDY, Engine
from decoding.engine.request import Request
from decoding.prefix_cache.store import CachedPrompt, PromptCache
from decoding.prefix_cache.writer import files_of, load_saved
from offload.errors import InvalidRequestError
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVFile
from offload.tiered.prefill import OBSERVED_ROWS
from parallel.ranks.process_group import TensorParallelGroup
from support import batches
from support.engines import Folders, Pair
from support.keeping import (
    NEW,
    PROMPT,
    SMALL,
    CASES,
    prompts_in,
    collect_warnings,
)
from support.models import random_tokens
from support.ranks import PRELOAD, run_ranks
from support.slow import slow_except


@contextmanager
def slow_writes(seconds: float) -> Iterator[None]:
    write = KVFile.write

    def slowly(self: KVFile, *args: Any) -> list[int]:
        time.sleep(seconds)
        return write(self, *args)

    with patch.object(KVFile, "write", slowly):
        yield


TURNS = [[1], [2] * 50, random_tokens(500, seed=3).tolist()]
OTHER = [*PROMPT[:500], *TURNS[1]]


@pytest.fixture(scope="module")
def wanted_of_turns(models: Pair) -> list[list[int]]:
    """What plain decoding writes in each of TURNS, and behind OTHER."""
    with models.engine("plain") as engine:
        return take_turns(engine)[0]


def take_turns(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """Return what is written in each of TURNS and behind OTHER, and all of the text of TURNS."""
    prompt, found = PROMPT, list[list[int]]()
    for turn in TURNS:
        prompt = [*prompt, *turn]
        found.append(list(engine.generate(prompt, NEW, GREEDY)))
        prompt = [*prompt, *found[-1]]
    found.append(list(engine.generate(OTHER, NEW, GREEDY)))
    return found, prompt


@pytest.mark.parametrize(("mode", "link", "resident"), CASES)
def test_turns_go_on_while_the_text_is_written(
    mode: str,
    link: str,
    resident: int,
    models: Pair,
    cache_folder: str,
    wanted_of_turns: list[list[int]],
) -> None:
    """Later turns, a text that outgrows its caches, and another from inside what is written."""
    choices = {**SMALL, "link": link, "gpu_kv_layers": resident}
    wanted = wanted_of_turns
    with (
        slow_writes(0.05),
        models.engine(mode, **choices, prompt_cache=cache_folder) as engine,
        engine.conversation(room=100),
    ):
        found, prompt = take_turns(engine)
    assert found == wanted
    # the first turn's is part of the last one's
    texts = sorted((each.tokens().tolist() for each in prompts_in(cache_folder)), key=len)
    assert texts == [OTHER, prompt[:-NEW]]
    assert all(whole(each, models) for each in prompts_in(cache_folder))
    with models.engine(mode, **choices, prompt_cache=cache_folder) as engine:
        assert list(engine.generate(prompt[:-NEW], NEW, GREEDY)) == wanted[2]
        assert engine.stats.loaded_tokens == len(prompt) - NEW - OBSERVED_ROWS


def test_a_text_given_up_is_kept_all_the_same(models: Pair, cache_folder: str) -> None:
    with slow_writes(0.02), models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        assert list(islice(engine.generate(PROMPT, NEW, GREEDY), 1))
    assert len(prompts_in(cache_folder)) == 1


def test_texts_together_are_kept_too(models: Pair, cache_folder: str) -> None:
    prompts = [[*random_tokens(400, seed=seed).tolist(), 7] for seed in range(3)]
    choices = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 0}
    with models.engine("retrieval", **choices) as engine:
        wanted = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]
    for turn in range(2):
        with models.engine("retrieval", **choices, prompt_cache=cache_folder) as engine:
            asked = [Request(prompt, NEW, GREEDY) for prompt in prompts]
            texts = batches.run_batch(engine, asked, 2)
            assert batches.tokens(texts) == wanted
            assert all(bool(text.stats.loaded_tokens) == bool(turn) for text in texts)
    assert len(prompts_in(cache_folder)) == 3


def whole(prompt: CachedPrompt, models: Pair) -> bool:
    """Read all that is kept of a prompt; raises where it is not what was written."""
    layout, tokens = models.target.config.kv_layout(1, torch.float32), prompt.manifest.tokens
    files = files_of(prompt.folder, 0, layout, tokens, prompt.digest())
    for _, pieces in load_saved(prompt.folder, 0, files, tokens):
        assert list(pieces)
    return len(prompt.tokens()) == tokens


def read_for_ever(folders: Folders, cache_folder: str, seed: int) -> None:
    models = Pair(*folders)
    with models.engine(
        "plain", **SMALL, prompt_cache=cache_folder, prompt_cache_limit=2_000_000
    ) as engine:
        for number in count(1000 * seed):
            list(engine.generate(random_tokens(400, seed=number).tolist(), 2, GREEDY))


@pytest.mark.parametrize("kills", slow_except([3, 20]))
def test_a_kill_leaves_whole_prompts_or_none(
    kills: int, folders: Folders, models: Pair, cache_folder: str
) -> None:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOAD)
    rng, left, seen = random.Random(0), 0, 0
    for seed in range(kills):
        process = forks.Process(
            target=read_for_ever, args=(folders, cache_folder, seed), daemon=True
        )
        process.start()
        while not (Path(cache_folder).exists() and list(Path(cache_folder).glob(".writing-*"))):
            time.sleep(0.005)
            assert process.is_alive()
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.join()
        left += bool(list(Path(cache_folder).glob(".writing-*")))
        for each in PromptCache(Path(cache_folder)).prompts():
            assert whole(each, models)
        prompts = prompts_in(cache_folder)
        assert all(whole(each, models) for each in prompts)
        seen += len(prompts)
        assert not list(Path(cache_folder).glob(".writing-*"))
        assert not list(Path(cache_folder).glob(".dropped-*"))
    assert left or kills < 20  # some were killed while they wrote
    assert seen
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        list(engine.generate(prompts_in(cache_folder)[-1].tokens().tolist(), NEW, GREEDY))
        assert engine.stats.loaded_tokens


def test_what_is_no_number_is_not_kept(models: Pair, cache_folder: str) -> None:
    weight = models.target.embed.weight
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        good = weight.data.clone()
        weight.data[PROMPT[-1]] = float("nan")
        with pytest.raises(InvalidRequestError):
            list(engine.generate(PROMPT, NEW, GREEDY))
        weight.data.copy_(good)
        assert not prompts_in(cache_folder)
        list(engine.generate(PROMPT, NEW, GREEDY))
        assert len(prompts_in(cache_folder)) == 1


def test_an_interrupt_gives_up_what_is_being_written(models: Pair, cache_folder: str) -> None:
    """Nothing reads the memory any more that the next text is given."""
    with models.engine("plain", **SMALL) as engine:
        wanted = list(engine.generate(PROMPT, NEW, GREEDY))
    join, interrupts = Thread.join, iter([True])

    def interrupted(thread: Thread, timeout: float | None = None) -> None:
        if thread.name == "prompt-cache-writer" and next(interrupts, False):
            raise KeyboardInterrupt
        join(thread, timeout)

    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        with (
            slow_writes(0.1),
            patch.object(Thread, "join", interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            list(engine.generate(PROMPT, NEW, GREEDY))
        assert not [each for each in threading.enumerate() if each.name == "prompt-cache-writer"]
        assert not prompts_in(cache_folder)
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        assert not lines
    assert len(prompts_in(cache_folder)) == 1


def harmed(how: str, rank: int, cache_folder: str) -> Any:
    """What goes wrong on rank 1, or in the folder, before the second text."""
    (prompt,) = prompts_in(cache_folder) if rank == 0 and how in ("damage", "gone") else (None,)
    if prompt is not None and how == "damage":
        (prompt.folder / "rank-1-layer-0.kv").write_bytes(b"")
    if prompt is not None and how == "gone":
        shutil.rmtree(cache_folder)
    if how == "disk" and rank:
        return patch.object(KVFile, "write", side_effect=OSError(errno.ENOSPC, "full"))
    if how == "memory" and rank:
        return patch.object(TieredCache, "host_readers", side_effect=MemoryError())
    return nullcontext()


Kept = tuple[list[list[int]], list[Any]]  # what three turns wrote; tokens loaded, lines told


def on_two_ranks(folders: Folders, cache_folder: dict[str, str]) -> dict[str, Kept]:
    """What comes of each that goes wrong, in a folder of its own."""
    models = Pair(*folders, TensorParallelGroup.from_environment("cpu"))
    return {how: three_turns(models, folder, how) for how, folder in cache_folder.items()}


def three_turns(models: Pair, cache_folder: str, how: str) -> Kept:
    rank, found, loaded = models.group.rank, list[list[int]](), list[Any]()
    choices = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 1, "prompt_cache": cache_folder}
    first = 0 if how in ("disk", "memory") else 1
    for turn in range(3):
        with (
            models.engine("hierarchical", **choices) as engine,
            collect_warnings(engine) as lines,
            harmed(how, rank, cache_folder) if turn == first else nullcontext(),
        ):
            if rank:
                engine.run_worker()
                continue
            found.append(list(engine.generate([*PROMPT, turn], NEW, GREEDY)))
            loaded.append((engine.stats.loaded_tokens, len(lines)))
            engine.close()
            loaded[-1] = (loaded[-1][0], len(lines))
    return found, loaded


TOKENS = len(PROMPT) + 1 - OBSERVED_ROWS
LOADED = {
    "damage": [(0, 0), (0, 1), (TOKENS, 0)],
    "memory": [(0, 1), (0, 0), (TOKENS, 0)],
    "nothing": [(0, 0), (TOKENS, 0), (TOKENS, 0)],
    "gone": [(0, 0), (0, 1), (0, 0)],
    "disk": [(0, 1), (0, 0), (TOKENS, 0)],
}
STARTS = [("damage", "memory"), ("nothing", "gone", "disk")]  # the ranks do several at a time


@pytest.fixture(scope="module")
def kept_by_two(
    folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Kept, str]]:
    """What came of something that went wrong, and where the prompt is kept."""

    @cache
    def start(hows: tuple[str, ...]) -> dict[str, tuple[Kept, str]]:
        root = tmp_path_factory.mktemp("two-ranks")
        cache_folder = {how: str(root / how) for how in hows}
        found, _ = run_ranks(2, on_two_ranks, folders, cache_folder)
        return {how: (found[how], cache_folder[how]) for how in hows}

    return lambda how: next(start(hows)[how] for hows in STARTS if how in hows)


@pytest.fixture(scope="module")
def wanted_of_three(models: Pair) -> list[list[int]]:
    with models.engine("plain", **SMALL) as engine:
        return [list(engine.generate([*PROMPT, turn], NEW, GREEDY)) for turn in range(3)]


@pytest.mark.parametrize("how", slow_except(LOADED, 0, 1))
def test_two_ranks_keep_as_one(
    how: str,
    kept_by_two: Callable[[str], tuple[Kept, str]],
    wanted_of_three: list[list[int]],
) -> None:
    (found, loaded), cache_folder = kept_by_two(how)
    assert found == wanted_of_three
    assert loaded == LOADED[how]
    (prompt,) = prompts_in(cache_folder)
    assert prompt.manifest.ranks == 2
    assert {each.name for each in prompt.folder.iterdir()} == {
        "manifest.json",
        "tokens.bin",
        *(f"rank-{rank}.json" for rank in range(2)),
        *(f"rank-{rank}-layer-{layer}.kv" for rank in range(2) for layer in range(3)),
    }
