"""Several sequences in a conversation: prompts that share a beginning, and interleaved prefills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import decoding.engine.request
import decoding.engine.scheduler
from bench.harness.decode_loop import run_together
from decoding import GREEDY, Sampling
from decoding.engine.request import Request, Status
from decoding.text.long_text import rooms_for_later
from offload.errors import InsufficientMemoryError, RequestCancelled, TierForceError
from offload.layout import OBSERVED_ROWS
from parallel.ranks.process_group import TensorParallelGroup
from support import batches
from support.batches import SERVING as SMALL
from support.batches import serving
from support.engines import MODES, PLACEMENTS, Folders, Pair
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

NEW = 12
DOCUMENT = random_tokens(400, seed=1).tolist()
QUESTIONS = [[*DOCUMENT, *random_tokens(20 + count, seed=count).tolist()] for count in range(2, 6)]
# a few tokens are left for what observes the prompt
REUSED = [0, *(min(len(DOCUMENT), len(each) - OBSERVED_ROWS) for each in QUESTIONS[1:])]
OTHER = random_tokens(300, seed=9).tolist()


def requests(prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> list[Request]:
    return [Request(prompt, NEW, sampling) for prompt in prompts]


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize(("link", "resident"), slow_except(PLACEMENTS, 2))
def test_questions_to_one_document_prefill_it_once(
    mode: str, link: str, resident: int, models: Pair
) -> None:
    with serving(models, mode, 5, link=link, gpu_kv_layers=resident) as engine:
        states = run_together(engine, requests([*QUESTIONS, OTHER]))
        assert [state.stats.reused_tokens for state in states] == [*REUSED, 0]
        again = run_together(engine, requests(QUESTIONS))
        assert min(state.stats.reused_tokens for state in again) >= len(DOCUMENT) - OBSERVED_ROWS
    with models.engine("plain") as engine:
        expected = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in [*QUESTIONS, OTHER]]
    assert [state.tokens for state in states] == expected
    assert [state.tokens for state in again] == expected[:4]


@pytest.mark.parametrize("concurrency", slow_except([1, 3], 1))
@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_batch_keeps_the_caches_of_prompts_that_others_begin_like(
    mode: str, concurrency: int, models: Pair
) -> None:
    prompts = [*QUESTIONS, OTHER, [*OTHER, 1, 2, 3] * 2]
    rooms = [*rooms_for_later(list(map(len, QUESTIONS))), 310, None]
    batch = [
        Request(prompt, NEW, GREEDY, room=room) for prompt, room in zip(prompts, rooms, strict=True)
    ]
    with models.engine(mode, **SMALL) as engine:
        opened = patch.object(engine.sessions, "open", wraps=engine.sessions.open)
        with opened as open_sequence:
            states = batches.run_batch(engine, batch, concurrency)
        assert not engine.sessions.executor.sequences
        reused = [state.stats.reused_tokens for state in states]
        assert (reused[0], reused[len(REUSED)]) == (0, 0)
        # some continue in the caches of an earlier one, others copy them
        pairs = zip(reused[1:], REUSED[1:], strict=False)
        assert all(copied <= count <= len(DOCUMENT) for count, copied in pairs)
        assert reused[-1] >= len(OTHER) - OBSERVED_ROWS
        if concurrency == 1:  # caches for the first one have room for all that follow
            assert open_sequence.call_count == 2
        expected = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]
        assert engine.stats.reused_tokens == 0
    assert batches.tokens(states) == expected


def test_a_copied_prefix_in_split_layers(folders: Folders) -> None:
    models = Pair(*folders, dtype="bfloat16")
    options = {"link": "emulated:50", "gpu_kv_layers": 0, "split_kv_layers": 2}
    with serving(models, "split-retrieval", 4, **options) as engine:
        states = run_together(engine, requests(QUESTIONS))
        assert [state.stats.reused_tokens for state in states] == REUSED
    with models.engine("plain") as engine:
        expected = [list(engine.generate(prompt, NEW, GREEDY)) for prompt in QUESTIONS]
    matches = [state.tokens == alone for state, alone in zip(states, expected, strict=True)]
    assert sum(matches) >= 3  # answers in 16 bits may diverge at near-ties


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_a_prefix_is_not_copied_during_a_prefill(mode: str, models: Pair) -> None:
    """The layers that it has not reached yet hold their KV elsewhere than the others."""
    with serving(models, mode, 3, link="emulated:50", gpu_kv_layers=1) as engine:
        scheduler = engine.scheduler
        (first,) = run_together(engine, requests([DOCUMENT]))
        turn = [*DOCUMENT, *first.tokens, *random_tokens(500, seed=7).tolist()]
        engine.scheduler.caches.kept[0].token_s = 1e9  # reuse pays
        slow = scheduler.add(Request(turn, NEW, GREEDY))
        scheduler.step()
        while slow.missing > 400:
            scheduler.step()
        again = scheduler.add(Request([*turn[:450], *OTHER], NEW, GREEDY))
        while scheduler.is_busy:
            scheduler.step()
        assert slow.stats.reused_tokens >= len(DOCUMENT)
    with models.engine("plain") as engine:
        expected = batches.run_alone(engine, [slow.request, again.request])
    assert [slow.tokens, again.tokens] == expected


def test_the_conversation_used_longest_ago_makes_room(models: Pair) -> None:
    prompts = [random_tokens(300, seed=seed).tolist() for seed in range(3)]
    with serving(models, "retrieval", 2) as engine:
        turns = [[*prompts[0]], [*prompts[1]]]
        for turn in turns:
            turn += run_together(engine, requests([turn]))[0].tokens
        # the first one is continued, so the second one has to go
        (state,) = run_together(engine, requests([[*turns[0], 5]]))
        assert state.stats.reused_tokens == len(turns[0]) - 1
        (state,) = run_together(engine, requests([prompts[2]]))
        assert state.stats.reused_tokens == 0
        (state,) = run_together(engine, requests([[*turns[0], 6]]))
        assert state.stats.reused_tokens >= len(turns[0]) - 1
        (state,) = run_together(engine, requests([[*turns[1], 6]]))
        assert state.stats.reused_tokens == 0


def test_a_conversation_is_not_cut_down_to_a_short_common_prefix(models: Pair) -> None:
    """Where there is room, the prefix is copied."""
    long = random_tokens(900, seed=3).tolist()
    with serving(models, "retrieval", 2) as engine:
        (first,) = run_together(engine, requests([long]))
        (state,) = run_together(engine, requests([[*long[:300], *OTHER]]))
        assert state.stats.reused_tokens == 300
        assert state.stats.discarded_tokens == 0
        (state,) = run_together(engine, requests([[*long, *first.tokens, 5]]))
        assert state.stats.reused_tokens == len(long) + NEW - 1


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_forwards_and_prefills_take_turns(mode: str, models: Pair) -> None:
    """While a long prompt is prefilled, others get tokens, and a short prompt overtakes it."""
    long, short = random_tokens(1600, seed=3).tolist(), random_tokens(40, seed=4).tolist()
    batch = [Request(OTHER, 60, GREEDY), Request(long, NEW, GREEDY), Request(short, NEW, GREEDY)]
    with serving(models, mode, 3) as engine:
        scheduler = engine.scheduler
        running = scheduler.add(batch[0])
        while not running.tokens:
            scheduler.step()
        slow = scheduler.add(batch[1])
        before = len(running.tokens)
        while len(running.tokens) == before:
            scheduler.step()
        assert slow.status is Status.PREFILLING
        quick, missing = scheduler.add(batch[2]), slow.missing
        while not quick.tokens:
            scheduler.step()
        assert slow.status is Status.PREFILLING
        assert 0 < slow.missing <= missing
        while scheduler.is_busy:
            scheduler.step()
    with models.engine("plain") as engine:
        expected = batches.run_alone(engine, batch)
    assert [running.tokens, slow.tokens, quick.tokens] == expected


def test_a_short_request_does_not_wait_for_a_long_prompt_with_the_same_beginning(
    models: Pair,
) -> None:
    long = random_tokens(1600, seed=3).tolist()
    with serving(models, "plain", 2) as engine:
        slow = engine.scheduler.add(Request(long, NEW, GREEDY))
        engine.scheduler.step()
        quick = engine.scheduler.add(Request([*long[:300], 5], NEW, GREEDY))
        while not quick.tokens:
            engine.scheduler.step()
        assert slow.status is Status.PREFILLING
        while engine.scheduler.is_busy:
            engine.scheduler.step()


def test_the_oldest_prefill_goes_on_while_shorter_ones_arrive(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.engine.scheduler, "_MAX_WAIT_S", 0.01)
    long, arrivals = random_tokens(600, seed=3).tolist(), 0
    with serving(models, "plain", 2) as engine:
        slow = engine.scheduler.add(Request(long, NEW, GREEDY))
        engine.scheduler.step()
        while not slow.tokens:
            if len(engine.scheduler.step()) and not any(engine.scheduler._waiting):
                prompt = random_tokens(30, seed=arrivals).tolist()
                engine.scheduler.add(Request(prompt, 1, GREEDY))
                arrivals += 1
            assert arrivals < 500
        for state in list(engine.scheduler._waiting):
            engine.scheduler.abort(state)


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_a_cancelled_request_does_not_affect_others(mode: str, models: Pair) -> None:
    """Cancelled while it waits, is prefilled, and runs."""
    batch = requests([OTHER, *QUESTIONS])
    is_cancelled = False
    with serving(models, mode, 3) as engine:
        scheduler = engine.scheduler
        cancelled = replace(batch[1], is_cancelled=lambda: is_cancelled)
        states = [scheduler.add(request) for request in (batch[0], cancelled, *batch[2:])]
        while states[1].status is not Status.PREFILLING:
            scheduler.step()
        scheduler.abort(states[4])  # waits
        is_cancelled = True
        while not states[1].is_finished:
            scheduler.step()
        assert isinstance(states[1].error, RequestCancelled)
        while len(states[2].tokens) < 3:
            scheduler.step()
        scheduler.abort(states[2])
        taken = list(states[2].tokens)
        assert states[2].is_finished
        while scheduler.is_busy:
            scheduler.step()
        assert states[4].tokens == []
    with models.engine("plain") as engine:
        expected = batches.run_alone(engine, batch)
    assert states[0].tokens == expected[0]
    assert taken == expected[2][: len(taken)]
    assert states[3].tokens == expected[3]


def test_a_failed_request_does_not_affect_others(models: Pair) -> None:
    with serving(models, "hierarchical", 2) as engine:
        states = [engine.scheduler.add(each) for each in requests([OTHER, [], [1] * 4090])]
        while engine.scheduler.is_busy:
            engine.scheduler.step()
        assert [state.error is None for state in states] == [True, False, False]
        assert len(states[0].tokens) == NEW


def test_what_a_copied_prompt_misses_decreases(models: Pair) -> None:
    long = random_tokens(900, seed=3).tolist()
    with serving(models, "plain", 3, link="emulated:50", gpu_kv_layers=1) as engine:
        run_together(engine, requests([long]))
        state = engine.scheduler.add(Request([*long[:400], *OTHER[:40]], NEW, GREEDY))
        missing = [state.missing]
        while state.status is not Status.RUNNING:
            engine.scheduler.step()
            missing.append(state.missing)
        assert state.stats.reused_tokens == 400
    assert missing == sorted(missing, reverse=True)


@pytest.fixture
def deep(checkpoint: Callable[..., Path]) -> Pair:
    folder = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    return Pair(folder, folder)


def room_for(models: Pair, tokens: int, count: int = 1) -> dict[str, Any]:
    """Return options with device memory for so many sequences, all of whose KV is on the device."""
    with models.engine("plain", **SMALL, device_memory=10**9) as engine:
        sequence = engine.plan(tokens, NEW + 100).memory.device_bytes
        limit = engine.runtime.weight_bytes + count * sequence
    return {"device_memory": limit, "gpu_kv_layers": 8}


def test_a_sequence_that_ran_alone_is_closed_before_others_are_opened(deep: Pair) -> None:
    long = random_tokens(2000, seed=3).tolist()
    prompts = [random_tokens(400, seed=50 + count).tolist() for count in range(3)]
    options, planned = room_for(deep, 2000), 0
    with serving(deep, "plain", 3, swap_space=10**9, **options) as engine:
        (alone,) = run_together(engine, requests([long]))
        assert alone.runs_alone
        available = engine.sessions.memory.whole.device
        states = [engine.scheduler.add(request) for request in requests(prompts)]
        while engine.scheduler.is_busy:
            engine.scheduler.step()
            planned = max(planned, sum(plan.device_bytes for plan in engine.sessions.plans()))
        assert planned <= available
        assert [state.stats.concurrency for state in states] == [3, 3, 3]
        (turn,) = run_together(engine, requests([[*long, *alone.tokens, 5]]))
        assert turn.stats.reused_tokens == len(long) + NEW + 1 - OBSERVED_ROWS


def test_a_request_that_runs_alone_swaps_out_others(deep: Pair) -> None:
    long = random_tokens(2000, seed=3).tolist()
    with serving(deep, "plain", 3, swap_space=10**9, **room_for(deep, 2000)) as engine:
        (first,) = run_together(engine, requests([OTHER]))
        (alone,) = run_together(engine, requests([long]))
        assert alone.runs_alone
        (turn,) = run_together(engine, requests([[*OTHER, *first.tokens, 5]]))
        assert turn.stats.reused_tokens == len(OTHER) + NEW + 1 - OBSERVED_ROWS


def test_a_request_that_cannot_fit_fails_at_once(deep: Pair) -> None:
    with serving(deep, "plain", 3, **room_for(deep, 1000)) as engine:
        scheduler = engine.scheduler
        running = scheduler.add(Request(OTHER[:60], 60, GREEDY))
        while len(running.tokens) < 2:
            scheduler.step()
        large = scheduler.add(Request(random_tokens(2000, seed=3).tolist(), NEW, GREEDY))
        small = scheduler.add(Request(OTHER[:40], 3, GREEDY))
        while not small.tokens:
            scheduler.step()
        assert isinstance(large.error, InsufficientMemoryError)
        assert len(running.tokens) < 60
        while scheduler.is_busy:
            scheduler.step()


def test_a_part_of_a_large_sequence_does_not_run_alone(deep: Pair) -> None:
    long = random_tokens(2000, seed=3).tolist()
    with serving(deep, "plain", 3, **room_for(deep, 1200, 3)) as engine:
        states = run_together(engine, requests([long]))
        states += run_together(engine, requests([[*long[:1050], 5]]))
        assert [state.runs_alone for state in states] == [True, False]


def test_the_engine_counts_a_request_that_was_started_again(deep: Pair) -> None:
    with serving(deep, "plain", 3, **room_for(deep, 2000)) as engine:
        answer = list(engine.generate(random_tokens(2000, seed=3).tolist(), NEW, GREEDY))
        assert engine.stats.new_tokens == len(answer) == NEW


def test_documents_that_run_alone_keep_their_order(deep: Pair) -> None:
    prompts = [random_tokens(1900 + count, seed=count).tolist() for count in range(4)]
    with deep.engine("plain", **SMALL, **room_for(deep, 2000)) as engine:
        states = list(engine.generate_batch(requests(prompts), 3))
    assert [state.request.prompt for state in states] == prompts


@pytest.mark.parametrize("is_first", [True, False])
def test_memory_that_runs_out_before_the_first_token(is_first: bool, models: Pair) -> None:
    """The request runs again, alone; after the first token it fails, since that has been sent."""
    rows, calls, build = list[int](), 0, decoding.engine.request.build_decoder

    def fail_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 and is_first:
            raise InsufficientMemoryError("no room")
        return build(*arguments)

    with (
        serving(models, "plain", 2) as engine,
        patch.object(decoding.engine.request, "build_decoder", fail_once),
    ):
        request = Request(OTHER, NEW, GREEDY, on_logits=lambda logits, _: rows.append(len(logits)))
        state = engine.scheduler.add(request)
        while not state.tokens:
            engine.scheduler.step()
        if not is_first:
            no_room = InsufficientMemoryError("no room")
            with patch.object(engine.sessions.executor, "forward", side_effect=no_room):
                engine.scheduler.step()
        while engine.scheduler.is_busy:
            engine.scheduler.step()
        assert state.runs_alone == is_first
        assert (state.error is None) == is_first
        assert sum(rows) == len(state.tokens)


def test_a_request_too_large_for_its_share_runs_alone(checkpoint: Callable[..., Path]) -> None:
    """Those that come later wait for it; a turn of its conversation continues in its caches."""
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, long = Pair(deep, deep), random_tokens(2000, seed=3).tolist()
    prompts = [OTHER, long, DOCUMENT, OTHER[:250]]
    with models.engine("plain", **SMALL, device_memory=10**9) as engine:
        expected = batches.run_alone(engine, requests(prompts))
        turn = [*long, *expected[1], 5, 6]
        expected += batches.run_alone(engine, requests([turn]))
        last_turn = [*turn, *expected[4], 7]
        expected += batches.run_alone(engine, requests([last_turn]))
        limit = engine.runtime.weight_bytes + engine.plan(2000, NEW + 150).memory.device_bytes
    options = {"device_memory": limit, "gpu_kv_layers": 8}
    with serving(models, "plain", 3, **options) as engine:
        scheduler, order = engine.scheduler, list[int]()
        states = [scheduler.add(request) for request in requests(prompts)]
        while scheduler.is_busy:
            order += [states.index(state) for state in scheduler.step() if state.is_finished]
        more = run_together(engine, requests([OTHER, turn]))
        assert [state.stats.concurrency for state in more] == [1, 1]
        (last,) = run_together(engine, requests([last_turn]))
    assert [state.stats.concurrency for state in states] == [1, 1, 2, 2]
    assert order[:2] == [0, 1]
    assert more[1].stats.reused_tokens == 0  # two others have taken its memory since
    assert last.stats.reused_tokens == len(turn) + NEW - 1
    assert [state.tokens for state in [*states, more[1], last]] == expected


def test_deterministic_requests_are_not_concurrent(models: Pair) -> None:
    with (
        pytest.raises(TierForceError, match="cannot be combined with `deterministic`"),
        serving(models, "plain", 2, deterministic=True),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hierarchical", "plain"])
def test_two_ranks_equal_one(mode: str, folders: Folders, models: Pair) -> None:
    tokens, reused = run_ranks(2, answer_on_rank, folders, mode)[0]
    with models.engine("plain") as engine:
        expected = batches.run_alone(engine, requests([*QUESTIONS, OTHER]))
        more = [*OTHER, *expected[4]]
        expected += batches.run_alone(engine, requests([[*more, 5], [*more, *OTHER[:50]]]))
    assert tokens == expected
    assert reused[:5] == [*REUSED, 0]


def answer_on_rank(folders: Folders, mode: str) -> tuple[list[list[int]], list[int]]:
    models = Pair(*folders, TensorParallelGroup.from_environment("cpu"))
    options = {"link": "emulated:50", "gpu_kv_layers": 1}
    with serving(models, mode, 5, **options) as engine:
        if engine.group.rank:
            return [], []
        states = run_together(engine, requests([*QUESTIONS, OTHER]))
        # two that go on from the same answer: one in its caches, one in a copy
        more = [*states[4].request.prompt, *states[4].tokens]
        again = run_together(engine, requests([[*more, 5], [*more, *OTHER[:50]]]))
        assert min(each.stats.reused_tokens for each in again) >= len(more) - OBSERVED_ROWS
        states += again
    engine.close()
    return [each.tokens for each in states], [each.stats.reused_tokens for each in states]
