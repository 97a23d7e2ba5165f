"""Background saving during later turns, cancellation, killed processes, and two ranks."""

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
from decoding.prefix_cache.writer import BackgroundWriter, files_of, load_saved
from offload.errors import InvalidRequestError
from offload.layout import OBSERVED_ROWS
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import KVFile
from parallel.ranks.process_group import TensorParallelGroup
from support import batches
from support.engines import Folders, Pair
from support.keeping import (
    CASES,
    NEW,
    PROMPT,
    SMALL,
    collect_warnings,
    prompts_in,
)
from support.models import random_tokens
from support.ranks import PRELOAD, run_ranks
from support.slow import slow_except


@contextmanager
def slow_writes(seconds: float) -> Iterator[None]:
    """Delay the write of each layer."""
    write = KVFile.write

    def write_slowly(self: KVFile, *args: Any) -> list[int]:
        time.sleep(seconds)
        return write(self, *args)

    with patch.object(KVFile, "write", write_slowly):
        yield


TURNS = [[1], [2] * 50, random_tokens(500, seed=3).tolist()]
OTHER = [*PROMPT[:500], *TURNS[1]]


@pytest.fixture(scope="module")
def expected_turns(models: Pair) -> list[list[int]]:
    """What plain decoding generates in each of TURNS, and after OTHER."""
    with models.engine("plain") as engine:
        return take_turns(engine)[0]


def take_turns(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """Return the outputs in each of TURNS and after OTHER, and the whole sequence of TURNS."""
    sequence, outputs = PROMPT, list[list[int]]()
    for turn in TURNS:
        sequence = [*sequence, *turn]
        outputs.append(list(engine.generate(sequence, NEW, GREEDY)))
        sequence = [*sequence, *outputs[-1]]
    outputs.append(list(engine.generate(OTHER, NEW, GREEDY)))
    return outputs, sequence


@pytest.mark.parametrize(("mode", "link", "resident"), slow_except(CASES, -1))
def test_turns_continue_during_saving(
    mode: str,
    link: str,
    resident: int,
    models: Pair,
    cache_folder: str,
    expected_turns: list[list[int]],
) -> None:
    """Later turns outgrow the caches, and the last one branches off inside what is being saved."""
    options = {**SMALL, "link": link, "gpu_kv_layers": resident}
    with (
        slow_writes(0.05),
        models.engine(mode, **options, prompt_cache=cache_folder) as engine,
        engine.conversation(room=100),
    ):
        outputs, sequence = take_turns(engine)
    assert outputs == expected_turns
    # the last turn's prompt has replaced the first one's
    prompts = sorted((each.tokens().tolist() for each in prompts_in(cache_folder)), key=len)
    assert prompts == [OTHER, sequence[:-NEW]]
    assert all(is_intact(each, models) for each in prompts_in(cache_folder))
    with models.engine(mode, **options, prompt_cache=cache_folder) as engine:
        assert list(engine.generate(sequence[:-NEW], NEW, GREEDY)) == expected_turns[2]
        assert engine.stats.loaded_tokens == len(sequence) - NEW - OBSERVED_ROWS


def test_the_prompt_of_a_closed_request_is_saved(models: Pair, cache_folder: str) -> None:
    with slow_writes(0.02), models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        assert list(islice(engine.generate(PROMPT, NEW, GREEDY), 1))
    assert len(prompts_in(cache_folder)) == 1


def test_prompts_of_concurrent_requests_are_saved(models: Pair, cache_folder: str) -> None:
    prompts = [[*random_tokens(400, seed=seed).tolist(), 7] for seed in range(3)]
    options = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 0}
    with models.engine("retrieval", **options) as engine:
        expected = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]
    for turn in range(2):
        with models.engine("retrieval", **options, prompt_cache=cache_folder) as engine:
            requests = [Request(prompt, NEW, GREEDY) for prompt in prompts]
            completions = batches.run_batch(engine, requests, 2)
            assert batches.tokens(completions) == expected
            assert all(bool(each.stats.loaded_tokens) == bool(turn) for each in completions)
    assert len(prompts_in(cache_folder)) == 3


def is_intact(prompt: CachedPrompt, models: Pair) -> bool:
    """Return whether a cached prompt has all its tokens. Raises CorruptCacheError for its KV."""
    layout, tokens = models.target.config.kv_layout(1, torch.float32), prompt.manifest.tokens
    files = files_of(prompt.folder, 0, layout, tokens, prompt.digest())
    for _, blocks in load_saved(prompt.folder, 0, files, tokens):
        assert list(blocks)
    return len(prompt.tokens()) == tokens


def save_forever(folders: Folders, cache_folder: str, seed: int) -> None:
    models = Pair(*folders)
    with models.engine(
        "plain", **SMALL, prompt_cache=cache_folder, prompt_cache_limit=2_000_000
    ) as engine:
        for number in count(1000 * seed):
            list(engine.generate(random_tokens(400, seed=number).tolist(), 2, GREEDY))


@pytest.mark.parametrize("kills", slow_except([3, 20]))
def test_a_kill_leaves_no_corrupt_prompts(
    kills: int, folders: Folders, models: Pair, cache_folder: str
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    rng = random.Random(0)
    unfinished, published = 0, 0
    for seed in range(kills + 20):
        if seed >= kills and published:  # on a busy machine more are needed
            break
        process = context.Process(
            target=save_forever, args=(folders, cache_folder, seed), daemon=True
        )
        process.start()
        while not (Path(cache_folder).exists() and list(Path(cache_folder).glob(".writing-*"))):
            time.sleep(0.005)
            assert process.is_alive()
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.join()
        unfinished += bool(list(Path(cache_folder).glob(".writing-*")))
        for each in PromptCache(Path(cache_folder)).prompts():
            assert is_intact(each, models)
        prompts = prompts_in(cache_folder)
        assert all(is_intact(each, models) for each in prompts)
        published += len(prompts)
        assert not list(Path(cache_folder).glob(".writing-*"))
        assert not list(Path(cache_folder).glob(".dropped-*"))
    assert unfinished or kills < 20  # some were killed while they wrote
    assert published
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        list(engine.generate(prompts_in(cache_folder)[-1].tokens().tolist(), NEW, GREEDY))
        assert engine.stats.loaded_tokens


def test_prompts_with_nan_logits_are_not_saved(models: Pair, cache_folder: str) -> None:
    weight = models.target.embed.weight.values
    with models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine:
        original = weight.data.clone()
        weight.data[PROMPT[-1]] = float("nan")
        with pytest.raises(InvalidRequestError):
            list(engine.generate(PROMPT, NEW, GREEDY))
        weight.data.copy_(original)
        assert not prompts_in(cache_folder)
        list(engine.generate(PROMPT, NEW, GREEDY))
        assert len(prompts_in(cache_folder)) == 1


@pytest.mark.parametrize("shared", [len(PROMPT), len(PROMPT) // 2])
def test_a_turn_that_outgrows_its_caches_cancels_saving_what_it_contains(
    shared: int, models: Pair, cache_folder: str
) -> None:
    """The turn is saved in place of it; a prompt that it does not contain is saved first."""
    turn = [*PROMPT[:shared], *random_tokens(300, seed=8).tolist()]
    cancelled, cancel = list[int](), BackgroundWriter.cancel

    def count(writer: BackgroundWriter) -> None:
        cancelled.append(writer.tokens)
        cancel(writer)

    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        patch.object(BackgroundWriter, "cancel", count),
    ):
        with engine.conversation(room=8), slow_writes(0.1):
            list(engine.generate(PROMPT, NEW, GREEDY))
            (kept,) = engine.scheduler.caches.kept
            kept.token_s = 1e9  # reuse pays
            list(engine.generate(turn, NEW, GREEDY))
            assert engine.stats.reused_tokens >= shared - OBSERVED_ROWS
        lengths = [each.manifest.tokens for each in prompts_in(cache_folder)]
    if shared == len(PROMPT):
        assert (cancelled, lengths) == ([len(PROMPT)], [len(turn)])
    else:
        assert (cancelled, set(lengths)) == ([], {len(PROMPT), len(turn)})


def test_an_interrupt_cancels_saving(models: Pair, cache_folder: str) -> None:
    """The writer no longer reads memory that the next request reuses."""
    with models.engine("plain", **SMALL) as engine:
        expected = list(engine.generate(PROMPT, NEW, GREEDY))
    join, interrupts = Thread.join, iter([True])

    def join_or_interrupt(thread: Thread, timeout: float | None = None) -> None:
        if thread.name == "prompt-cache-writer" and next(interrupts, False):
            raise KeyboardInterrupt
        join(thread, timeout)

    with (
        models.engine("plain", **SMALL, prompt_cache=cache_folder) as engine,
        collect_warnings(engine) as lines,
    ):
        with (
            slow_writes(0.1),
            patch.object(Thread, "join", join_or_interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            list(engine.generate(PROMPT, NEW, GREEDY))
        assert not [each for each in threading.enumerate() if each.name == "prompt-cache-writer"]
        assert not prompts_in(cache_folder)
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        assert not lines
    assert len(prompts_in(cache_folder)) == 1


def inject_fault(fault: str, rank: int, cache_folder: str) -> Any:
    """Cause a fault in the folder at once, or return a context that causes one on rank 1."""
    (prompt,) = prompts_in(cache_folder) if rank == 0 and fault in ("damage", "gone") else (None,)
    if prompt is not None and fault == "damage":
        (prompt.folder / "rank-1-layer-0.kv").write_bytes(b"")
    if prompt is not None and fault == "gone":
        shutil.rmtree(cache_folder)
    if fault == "disk" and rank:
        return patch.object(KVFile, "write", side_effect=OSError(errno.ENOSPC, "full"))
    if fault == "memory" and rank:
        return patch.object(TieredCache, "host_readers", side_effect=MemoryError())
    return nullcontext()


# outputs of three requests, and for each the loaded tokens and the number of warnings
Report = tuple[list[list[int]], list[Any]]


def report_on_rank(folders: Folders, cache_folders: dict[str, str]) -> dict[str, Report]:
    """Return the report of each fault, in a folder of its own."""
    models = Pair(*folders, TensorParallelGroup.from_environment("cpu"))
    return {fault: run_requests(models, folder, fault) for fault, folder in cache_folders.items()}


def run_requests(models: Pair, cache_folder: str, fault: str) -> Report:
    """Run three requests on new engines, with a fault before the first or the second."""
    rank, outputs, loaded = models.group.rank, list[list[int]](), list[Any]()
    options = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 1, "prompt_cache": cache_folder}
    first = 0 if fault in ("disk", "memory") else 1
    for turn in range(3):
        with (
            models.engine("hierarchical", **options) as engine,
            collect_warnings(engine) as lines,
            inject_fault(fault, rank, cache_folder) if turn == first else nullcontext(),
        ):
            if rank:
                engine.run_worker()
                continue
            outputs.append(list(engine.generate([*PROMPT, turn], NEW, GREEDY)))
            loaded.append((engine.stats.loaded_tokens, len(lines)))
            engine.close()
            loaded[-1] = (loaded[-1][0], len(lines))
    return outputs, loaded


TOKENS = len(PROMPT) + 1 - OBSERVED_ROWS
LOADED = {
    "damage": [(0, 0), (0, 1), (TOKENS, 0)],
    "memory": [(0, 1), (0, 0), (TOKENS, 0)],
    "nothing": [(0, 0), (TOKENS, 0), (TOKENS, 0)],
    "gone": [(0, 0), (0, 1), (0, 0)],
    "disk": [(0, 1), (0, 0), (TOKENS, 0)],
}
STARTS = [("damage", "memory"), ("nothing", "gone", "disk")]  # faults that share a start of ranks


@pytest.fixture(scope="module")
def reports(
    folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Report, str]]:
    """A function that returns the report of a fault, and the prompt cache's folder."""

    @cache
    def start(faults: tuple[str, ...]) -> dict[str, tuple[Report, str]]:
        root = tmp_path_factory.mktemp("two-ranks")
        cache_folders = {fault: str(root / fault) for fault in faults}
        results, _ = run_ranks(2, report_on_rank, folders, cache_folders)
        return {fault: (results[fault], cache_folders[fault]) for fault in faults}

    return lambda fault: next(start(faults)[fault] for faults in STARTS if fault in faults)


@pytest.fixture(scope="module")
def expected_outputs(models: Pair) -> list[list[int]]:
    with models.engine("plain", **SMALL) as engine:
        return [list(engine.generate([*PROMPT, turn], NEW, GREEDY)) for turn in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", LOADED)
def test_faults_on_two_ranks(
    fault: str,
    reports: Callable[[str], tuple[Report, str]],
    expected_outputs: list[list[int]],
) -> None:
    (outputs, loaded), cache_folder = reports(fault)
    assert outputs == expected_outputs
    assert loaded == LOADED[fault]
    (prompt,) = prompts_in(cache_folder)
    assert prompt.manifest.ranks == 2
    assert {each.name for each in prompt.folder.iterdir()} == {
        "manifest.json",
        "tokens.bin",
        *(f"rank-{rank}.json" for rank in range(2)),
        *(f"rank-{rank}-layer-{layer}.kv" for rank in range(2) for layer in range(3)),
    }
