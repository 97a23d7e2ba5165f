"""Concurrent requests generate the same tokens as alone; they share forwards, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import GREEDY, Sampling
from decoding.engine.request import Request, Status
from decoding.engine.session import SequenceState
from decoding.engine.session_manager import SequenceManager
from decoding.planning.plan import Plan
from decoding.planning.planner import Planner
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from parallel.model.layers import VocabParallelEmbedding
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import SMALL, requests, run_alone, run_batch, tokens
from support.engines import MODES, Folders, Pair
from support.models import TINY
from support.ranks import run_ranks
from support.slow import slow_except

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"gpu_kv_layers": 1, "link": "emulated:50"},
    {"gpu_kv_layers": 0},
]
# prompt tokens and new tokens of each request: few and many
SIZES = [(90, 20), (7, 25), (140, 1), (33, 18), (61, 12)]
FULL = Sampling(1.0, top_p=1, seed=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sampling", "placement"),
    slow_except(
        [
            (FULL, PLACEMENTS[0]),
            (GREEDY, PLACEMENTS[1]),
            (FULL, PLACEMENTS[1]),
            (FULL, PLACEMENTS[2]),
        ],
        2,
    ),
    ids=["sampled", "greedy over a link", "sampled over a link", "sampled by views"],
)
def test_concurrent_requests_equal_requests_alone(
    mode: str, sampling: Sampling, placement: dict[str, Any], models: Pair
) -> None:
    batch = requests(sampling, SIZES)
    # the scheduler alone depends on the concurrency: one mode covers several
    is_one = (mode, placement) == ("hierarchical", PLACEMENTS[1])
    with models.engine(mode, **SMALL, **placement) as engine:
        expected = run_alone(engine, batch)
        for concurrency in (1, 2, 3, 9) if is_one else (3,):
            assert tokens(run_batch(engine, batch, concurrency)) == expected
        assert run_alone(engine, batch[:1]) == expected[:1]
    assert [len(output) for output in expected] == [new for _, new in SIZES]
    assert len({token for output in expected for token in output}) > 10


def test_concurrent_requests_with_lookup_and_stop_tokens(models: Pair) -> None:
    batch = requests(FULL, SIZES)
    with models.engine("hierarchical", **{**SMALL, "prompt_lookup_ngram": 1}) as engine:
        expected = run_alone(engine, batch)
        assert tokens(run_batch(engine, batch, 3)) == expected
    stop = expected[0][17]
    with models.engine(
        "hierarchical", stop=[stop], **{**SMALL, "prompt_lookup_ngram": 1}
    ) as engine:
        completions = run_batch(engine, batch, 3)
    for completion, whole in zip(completions, expected, strict=True):
        end = whole.index(stop) if stop in whole else len(whole)
        assert completion.tokens == whole[:end]
        assert completion.stats.finish_reason == ("stop" if stop in whole else "length")


class ForwardCounter:
    """Counts the forwards of each model, and the tokens of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows: dict[int, list[int]] = {}
        steps = Transformer.hidden_state_steps

        def count(model: Transformer, tokens: Tensor, cache: Any) -> Tensor:
            self.rows.setdefault(id(model), []).append(len(tokens))
            return steps(model, tokens, cache)

        monkeypatch.setattr(Transformer, "hidden_state_steps", count)

    def take(self) -> dict[int, list[int]]:
        """Return the counts by model since the last call."""
        rows, self.rows = self.rows, {}
        return rows


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_a_batch_of_one_runs_the_same_forwards(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, counter = requests(FULL, SIZES)[:1], ForwardCounter(monkeypatch)
    with models.engine(mode, **SMALL) as engine:
        run_alone(engine, batch)
        forwards = counter.take()
        run_batch(engine, batch, 4)
        assert counter.take() == forwards
        assert engine.stats.levels[0].stats.forwards <= len(forwards[id(models.target)])


def test_rounds_are_recorded_with_the_requests_that_shared_them(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with those that memory was planned for: their predicted times differ."""
    recorded: list[Plan] = []
    monkeypatch.setattr(Planner, "record", lambda planner, plan, rounds: recorded.append(plan))
    with models.engine("hierarchical", link="view", **SMALL) as engine:
        run_batch(engine, requests(FULL, SIZES)[:1], 4)
        run_batch(engine, requests(FULL, [(90, 20), (80, 20)]), 4)
    assert [plan.concurrency for plan in recorded] == [1, 2, 2]


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_the_first_token_comes_before_any_forward_of_the_target(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = ForwardCounter(monkeypatch)
    with models.engine(mode, **SMALL) as engine:
        first = engine.generate(requests(FULL, SIZES)[0].prompt, 20, FULL)
        next(first)
        assert id(models.target) not in counter.take()  # the prompt's is not counted here
        next(first)
        assert len(counter.take()[id(models.target)]) >= 1
        first.close()


def test_a_request_keeps_its_state_from_its_arrival_to_its_end(models: Pair) -> None:
    seen: list[tuple[Status, Status]] = []
    batch = requests(GREEDY, [(90, 12), (50, 6)])

    def progress(done: int, total: int) -> None:
        seen.append((first.status, second.status))

    with models.engine("hierarchical", **SMALL) as engine:
        scheduler, expected = engine.scheduler, run_alone(engine, batch)
        first = scheduler.add(replace(batch[0], progress=progress))
        second = scheduler.add(batch[1])
        assert (first.status, second.status) == (Status.WAITING, Status.WAITING)
        assert scheduler.is_busy
        for _ in range(models.target.config.layers + 1):
            assert first.tokens == []
            assert scheduler.step() == [first]
        assert set(seen) == {(Status.PREFILLING, Status.WAITING)}
        assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
        assert first.tokens == expected[0][:1]
        assert first.sequence is not None
        while not first.is_finished:
            assert scheduler.step() == [first]
        assert first.sequence is None
        assert not engine.sessions.executor.sequences
        scheduler.abort(second)
        assert not scheduler.is_busy
        assert (second.status, second.tokens, second.error) == (Status.FINISHED, [], None)
        assert first.tokens == expected[0]
        assert run_alone(engine, batch) == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_generator_counts_the_tokens_that_were_taken(mode: str, models: Pair) -> None:
    (request,) = requests(FULL, [(90, 30)])
    with models.engine(mode, **SMALL) as engine:
        expected = run_alone(engine, [request])[0]
        for count in range(1, 9):
            stream = engine.submit(request)
            assert [next(stream) for _ in range(count)] == expected[:count]
            stream.close()
            assert engine.stats.token_ids == expected[:count]
            assert engine.stats.finish_reason is None


def test_plain_decoding_shares_every_forward(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, counter = requests(GREEDY, [(20, 30), (40, 30), (60, 30)]), ForwardCounter(monkeypatch)
    with models.engine("plain") as engine:
        run_batch(engine, batch, 3)
    # the first token belongs to prefill; decoding starts once all three have joined
    assert counter.take() == {id(models.target): [3] * 29}


def test_requests_of_one_length_share_forwards_at_every_level(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, counter = requests(FULL, [(90, 40), (120, 40), (150, 40)]), ForwardCounter(monkeypatch)
    with models.engine("hierarchical", **SMALL) as engine:
        run_alone(engine, batch)
        alone = {model: len(rows) for model, rows in counter.take().items()}
        completions = run_batch(engine, batch, 3)
        shared = {model: len(rows) for model, rows in counter.take().items()}
    assert shared.keys() == alone.keys() == {id(models.target), id(models.draft)}
    for model, forwards in shared.items():
        assert forwards < 0.6 * alone[model]
    assert completions[0].stats.levels[0].name == "target"


def test_a_request_joins_when_another_is_finished(models: Pair) -> None:
    """Never are more open than `concurrency`, and none waits for a whole batch."""
    taken: list[int] = []

    def take() -> Iterable[Request]:
        for index, request in enumerate(requests(GREEDY, [(50, 4), (50, 40), (50, 4), (50, 4)])):
            taken.append(index)
            yield request

    finished: list[tuple[int, list[int]]] = []
    with models.engine("plain") as engine:
        for completion in engine.generate_batch(take(), 2):
            assert len(engine.sessions.executor.sequences) <= 2
            finished.append((completion.request.max_new_tokens, list(taken)))
        assert not engine.sessions.executor.sequences
    assert finished == [(4, [0, 1]), (4, [0, 1, 2]), (4, [0, 1, 2, 3]), (40, [0, 1, 2, 3])]


def test_a_request_may_depend_on_others(models: Pair) -> None:
    """None in its place is not the end of a batch, and does not let others wait."""
    first, second, other = requests(GREEDY, [(50, 4), (60, 4), (70, 20)])
    finished: list[Request] = []

    def take() -> Iterable[Request | None]:
        yield first
        yield other
        while first not in finished:
            yield None
        yield second
        while second not in finished:
            yield None

    with models.engine("plain") as engine:
        for completion in engine.generate_batch(take(), 2):
            finished.append(completion.request)
            assert completion.error is None
    assert finished == [first, second, other]


def test_a_failed_request_does_not_affect_others(folders: Folders) -> None:
    batch = requests(GREEDY, SIZES)
    models = Pair(*folders)
    # the budget holds whole sequences, so that no draft contains the bad token
    options = {**SMALL, "retrieval_budget": 200}
    with models.engine("retrieval", **options) as engine:
        expected = run_alone(engine, batch)
        used = {token for output in expected for token in output} | {
            token for request in batch for token in request.prompt
        }
    bad_token = next(token for token in range(TINY["vocab_size"]) if token not in used)
    with torch.inference_mode():
        models.target.embed.weight.values[bad_token] = torch.nan
    bad = Request([*batch[0].prompt, bad_token], 20, GREEDY)
    empty, too_long = Request([], 5, GREEDY), Request([1] * 4090, 20, GREEDY)
    mixed = [batch[0], bad, batch[1], empty, batch[2], too_long, *batch[3:]]
    with models.engine("retrieval", **options) as engine:
        completions = run_batch(engine, mixed, 3)
        assert run_alone(engine, batch) == expected
    errors = [completion.error for completion in completions if completion.error is not None]
    assert [str(error).split(":")[0][:25] for error in errors] == [
        "NaN in the logits that th",
        "the prompt is empty",
        "4090 prompt tokens and 20",
    ]
    assert all(isinstance(error, InvalidRequestError) for error in errors)
    assert tokens([each for each in completions if each.error is None]) == expected


def test_concurrent_requests_with_nan_logits(folders: Folders) -> None:
    batch = requests(GREEDY, [(9, 30), (7, 25), (12, 40)])
    models = Pair(*folders)
    with models.engine("plain") as engine:
        expected = run_alone(engine, batch)
    prompts = {token for request in batch for token in request.prompt}
    bad_token = next(token for token in expected[0][3:30] if token not in prompts)
    with torch.inference_mode():
        models.target.embed.weight.values[bad_token] = torch.nan
    with models.engine("plain") as engine:
        completions = run_batch(engine, batch, 4)
    for completion, whole in zip(completions, expected, strict=True):
        first = whole.index(bad_token) if bad_token in whole[:-1] else None
        assert (completion.error is None) == (first is None)
        assert completion.tokens == (whole if first is None else whole[: first + 1])
    assert completions[0].error is not None


def test_requests_run_alone_after_memory_ran_out(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = requests(FULL, SIZES)
    with models.engine("retrieval", **SMALL) as engine:
        expected = run_alone(engine, batch)
        steps, failed = Transformer.hidden_state_steps, list[int]()

        def fail_if_long(model: Transformer, tokens: Tensor, cache: Any) -> Tensor:
            if len(tokens) > 9:
                failed.append(len(tokens))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return steps(model, tokens, cache)

        monkeypatch.setattr(Transformer, "hidden_state_steps", fail_if_long)
        completions = run_batch(engine, batch, 4)
        assert tokens(completions) == expected
        assert len(failed) == 1  # the interrupted forward is not retried
        assert sum(completion.stats.concurrency == 1 for completion in completions) >= 4
        monkeypatch.setattr(
            VocabParallelEmbedding, "logits", lambda self, x: (_ for _ in ()).throw(MemoryError())
        )
        completions = run_batch(engine, batch[:2], 2)
        assert [type(completion.error) for completion in completions] == [
            InsufficientMemoryError,
            InsufficientMemoryError,
        ]
        assert not engine.sessions.executor.sequences


def test_an_error_of_the_program_ends_the_batch_and_closes_all_sequences(models: Pair) -> None:
    def fail(done: int, total: int) -> None:
        raise OSError("no terminal")

    batch = requests(FULL, SIZES)
    batch[2] = replace(batch[2], progress=fail)
    with models.engine("hierarchical", **SMALL) as engine:
        with pytest.raises(OSError, match="no terminal"):
            run_batch(engine, batch, 3)
        assert not engine.sessions.executor.sequences
        assert tokens(run_batch(engine, batch[:2], 2)) == run_alone(engine, batch[:2])


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_caches_are_freed_before_another_sequence_is_opened(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[weakref.ref[Any]] = []
    alive: list[int] = []
    open_sequence = SequenceManager.open

    def count_and_open(sessions: SequenceManager, *args: Any, **options: Any) -> SequenceState:
        alive.append(sum(cache() is not None for cache in caches))
        session = open_sequence(sessions, *args, **options)
        caches.extend(weakref.ref(level.cache) for level in session.levels)
        return session

    monkeypatch.setattr(SequenceManager, "open", count_and_open)
    batch = requests(GREEDY, [(50, 4), (50, 40), (50, 4), (50, 4)])
    with models.engine(mode, **SMALL) as engine:
        list(engine.generate(batch[0].prompt, 3, GREEDY))
        for completion in engine.generate_batch(batch, 2):
            assert completion.stats.as_dict()["forwards"]
        levels = len(engine.stats.levels)
    # one sequence is prefilled when the second is opened, and outlasts all others
    assert alive == [0, 0, levels, levels, levels]


def test_closing_a_batch_closes_all_sequences(models: Pair) -> None:
    batch = requests(FULL, SIZES)
    with models.engine("hierarchical", **SMALL) as engine:
        expected = run_alone(engine, batch)
        for _ in engine.generate_batch(batch, 3):
            with pytest.raises(TierForceError, match="one request at a time"):
                next(engine.generate(batch[0].prompt, 5, GREEDY))
            break
        assert not engine.sessions.executor.sequences
        assert run_alone(engine, batch) == expected


def test_memory_is_divided_before_sequences_are_opened(checkpoint: Callable[..., Path]) -> None:
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, batch = Pair(deep, deep), requests(GREEDY, [(1200, 6)] * 4)
    with models.engine("plain", link="emulated:50", device_memory=10**9) as engine:
        expected = run_alone(engine, batch)
        whole, weights = engine.plan(1200, 6), engine.runtime.weight_bytes
    assert whole.memory.resident_layers == 8
    limit = weights + 3 * (whole.memory.device_bytes - 1)
    with models.engine("plain", link="emulated:50", device_memory=limit) as engine:
        assert engine.plan(1200, 6).memory == whole.memory
        completions = run_batch(engine, batch, 3)
        assert tokens(completions) == expected
        for completion in completions:
            assert completion.stats.plan is not None
            plan = completion.stats.plan.memory
            assert 0 < plan.resident_layers < 8
            assert 3 * plan.device_bytes <= limit - weights
        arenas = [slot.arena for slot in engine.sessions.slots._slots]
        assert len(arenas) == 3
        assert all(arena.nbytes for arena in arenas)


def test_a_request_on_the_device_shares_forwards_with_an_offloaded_one(
    checkpoint: Callable[..., Path],
) -> None:
    """The former is too short for an offloaded prefix."""
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, batch = Pair(deep, deep), requests(GREEDY, [(40, 20), (1000, 14), (950, 8)])
    with models.engine("plain", link="emulated:50", device_memory=10**9) as engine:
        expected = run_alone(engine, batch)
        whole, weights = engine.plan(1000, 14), engine.runtime.weight_bytes
    limit = weights + 2 * (whole.memory.device_bytes - 1)
    for options, layers in (({"device_memory": limit}, 8), ({"gpu_kv_layers": 2}, 2)):
        with models.engine("plain", link="emulated:50", **options) as engine:
            completions = run_batch(engine, batch, 2)
        plans = [each.stats.plan for each in completions if each.stats.plan]
        resident = [plan.memory.resident_layers for plan in plans]
        assert resident[0] == layers
        assert resident[1] < 8
        assert tokens(completions) == expected


def test_a_request_too_large_for_its_share_runs_alone(checkpoint: Callable[..., Path]) -> None:
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, batch = Pair(deep, deep), requests(GREEDY, [(100, 20), (2000, 8), (120, 14), (90, 9)])
    with models.engine("plain", device_memory=10**9) as engine:
        expected = run_alone(engine, batch)
        need, weights = engine.plan(2000, 8).memory.device_bytes, engine.runtime.weight_bytes
    options = {"device_memory": weights + need + 1000, "gpu_kv_layers": 8}
    with models.engine("plain", **options) as engine:
        completions = list(engine.generate_batch(batch, 3))
        assert len(engine.sessions.slots._slots) == 1
    assert [completion.stats.concurrency for completion in completions] == [3, 3, 3, 1]
    assert completions[-1].request is batch[1]
    order = {id(request): index for index, request in enumerate(batch)}
    completions.sort(key=lambda completion: order[id(completion.request)])
    assert tokens(completions) == expected


def generate_on_rank(folders: Folders, mode: str) -> list[list[int]]:
    """Return the outputs of a batch with an invalid request, and of one request alone."""
    models, outputs = Pair(*folders, TensorParallelGroup.from_environment("cpu")), list[list[int]]()
    with models.engine(mode, **SMALL, **PLACEMENTS[1]) as engine:
        batch = requests(FULL, SIZES)
        batch.insert(2, Request([], 5, FULL))
        completions = list(engine.generate_batch(batch, 3))
        if models.group.rank == 0:
            order = {id(request): index for index, request in enumerate(batch)}
            completions.sort(key=lambda completion: order[id(completion.request)])
            assert isinstance(completions.pop(2).error, InvalidRequestError)
            outputs += tokens(completions)
            outputs += run_alone(engine, batch[:1])
            engine.close()
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hierarchical", "plain"])
def test_two_ranks_equal_one(mode: str, folders: Folders, models: Pair) -> None:
    with models.engine(mode, **SMALL) as engine:
        expected = run_alone(engine, requests(FULL, SIZES))
    expected.append(expected[0])
    outputs, worker_outputs = run_ranks(2, generate_on_rank, folders, mode)
    assert worker_outputs == []
    assert outputs == expected


@pytest.mark.parametrize(("mode", "graphs"), [("retrieval", False), ("retrieval", True)])
def test_as_many_requests_share_forwards_as_fit(mode: str, graphs: bool, models: Pair) -> None:
    with models.engine(mode, **SMALL, graphs=graphs) as engine:
        assert engine.max_concurrency(100, 20, 5) == 5
