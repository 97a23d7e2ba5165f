"""Conversations that make room for others stay in host memory, and go on from there."""

from __future__ import annotations

import weakref
from functools import partial
from unittest.mock import patch

import pytest

import decoding.engine.session_manager
import decoding.engine.swap_space
import offload.tiered.kv_file
from bench.harness.decode_loop import run_together
from decoding import GREEDY, Engine
from decoding.engine.request import Request, RequestState, Status
from offload.errors import InsufficientMemoryError
from offload.layout import OBSERVED_ROWS
from parallel.ranks.process_group import TensorParallelGroup
from support import batches
from support.engines import MODES, PLACEMENTS, Folders, Pair
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

NEW = 12
PLENTY = 10**9
serving = partial(batches.serving, swap_space=PLENTY)
PROMPTS = [random_tokens(count, seed=count).tolist() for count in (400, 350, 300)]
QUESTIONS = [random_tokens(20, seed=seed).tolist() for seed in (7, 8, 9)]


def ask(engine: Engine, *prompts: list[int], new: int = NEW) -> list[RequestState]:
    return run_together(engine, [Request(prompt, new, GREEDY) for prompt in prompts])


def talk(engine: Engine) -> tuple[list[RequestState], list[int]]:
    """Begin conversations one after another, and go on with each; return the reused tokens."""
    states = [state for prompt in PROMPTS for state in ask(engine, prompt)]
    for first, question in zip(list(states), QUESTIONS, strict=True):
        states += ask(engine, [*first.request.prompt, *first.tokens, *question])
    return states, [state.stats.reused_tokens for state in states]


def run(engine: Engine) -> None:
    while engine.scheduler.is_busy:
        engine.scheduler.step()


def kv_bytes(models: Pair, tokens: int) -> int:
    layout = models.target.config.kv_layout(1, models.target.embed.weight.dtype)
    return layout.bytes(tokens)


def expected(models: Pair, states: list[RequestState]) -> list[list[int]]:
    with models.engine("plain") as engine:
        return batches.run_alone(engine, [state.request for state in states])


def tokens(states: list[RequestState]) -> list[list[int]]:
    return [state.tokens for state in states]


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize(("link", "resident"), slow_except(PLACEMENTS, 2))
@pytest.mark.parametrize("concurrency", slow_except([1, 2], 1))
def test_conversations_go_on_from_host_memory(
    mode: str, link: str, resident: int, concurrency: int, models: Pair
) -> None:
    with serving(models, mode, concurrency, link=link, gpu_kv_layers=resident) as engine:
        states, reused = talk(engine)
        assert len(engine.sessions.memory.swapped) == 3 - concurrency
    assert reused[:3] == [0, 0, 0]
    assert min(reused[3:]) >= 300
    assert tokens(states) == expected(models, states)


def test_split_layers_go_on_from_host_memory(folders: Folders) -> None:
    models = Pair(*folders, dtype="bfloat16")
    options = {"link": "emulated:50", "gpu_kv_layers": 0, "split_kv_layers": 2}
    with serving(models, "split-retrieval", 1, **options) as engine:
        states, reused = talk(engine)
    assert min(reused[3:]) >= 300
    pairs = zip(tokens(states), expected(models, states), strict=True)
    assert sum(ours == alone for ours, alone in pairs) >= 5  # near-ties in 16 bits may differ


def test_without_swap_space_the_conversation_is_lost(models: Pair) -> None:
    with serving(models, "retrieval", 1, swap_space=0) as engine:
        states, reused = talk(engine)
    assert reused == [0] * 6
    assert tokens(states) == expected(models, states)


def test_the_oldest_makes_room_in_host_memory(models: Pair) -> None:
    limit = kv_bytes(models, len(PROMPTS[0]) + NEW)  # two of them are more
    with serving(models, "retrieval", 1, swap_space=limit) as engine:
        for prompt in PROMPTS:
            ask(engine, prompt)
        (second,) = engine.sessions.memory.swapped
        assert second.target.length == 361
        assert ask(engine, [*PROMPTS[0], 5])[0].stats.reused_tokens == 0
        assert [each.target.length for each in engine.sessions.memory.swapped] == [311]
        assert second.target.nbytes == 0
        assert engine.sessions.memory.swapped_bytes <= limit
    with serving(models, "retrieval", 1, swap_space=limit // 2) as engine:
        ask(engine, PROMPTS[0])
        ask(engine, PROMPTS[1])
        assert not engine.sessions.memory.swapped


def test_by_default_half_of_the_free_memory_is_used(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = kv_bytes(models, len(PROMPTS[0]) + NEW - 1)
    for available, count in ((2 * nbytes, 1), (2 * nbytes - 1, 0)):
        monkeypatch.setattr(
            decoding.engine.swap_space, "host_available", lambda free=available: free
        )
        with serving(models, "plain", 1, swap_space=None) as engine:
            ask(engine, PROMPTS[0])
            ask(engine, PROMPTS[1])
            assert len(engine.sessions.memory.swapped) == count


def test_what_another_sequence_holds_is_not_swapped_out(models: Pair) -> None:
    """Of two conversations with one beginning, the longer one suffices."""
    with serving(models, "retrieval", 2) as engine:
        (first,) = ask(engine, PROMPTS[0])
        ask(engine, [*PROMPTS[0], *first.tokens, *QUESTIONS[0]], PROMPTS[0][:390])
        assert len(engine.scheduler.caches.kept) == 2
        ask(engine, PROMPTS[1])
        ask(engine, PROMPTS[2])
        (swapped,) = engine.sessions.memory.swapped
        assert swapped.target.length > len(PROMPTS[0]) + NEW


def test_others_get_tokens_while_a_conversation_is_swapped_out_and_back(models: Pair) -> None:
    options = {"link": "emulated:50", "gpu_kv_layers": 1}
    with serving(models, "plain", 2, **options) as engine:
        scheduler, caches = engine.scheduler, engine.scheduler.caches
        (first,) = ask(engine, PROMPTS[0])
        ask(engine, PROMPTS[1])
        running = scheduler.add(Request(PROMPTS[2], 200, GREEDY))
        while len(running.tokens) < 2:  # the first conversation makes room
            scheduler.step()
        turn = [*PROMPTS[0], *first.tokens, *QUESTIONS[0]]
        back = scheduler.add(Request(turn, NEW, GREEDY))
        counts: dict[str, set[int]] = {"out": set(), "back": set()}
        while back.status is not Status.RUNNING:
            scheduler.step()
            if caches._swaps:
                counts["out"].add(len(running.tokens))
            elif back.sequence is not None and back.sequence.caches.copied is not None:
                counts["back"].add(len(running.tokens))
        assert min(map(len, counts.values())) > 1
        while scheduler.is_busy:
            scheduler.step()
        assert back.stats.reused_tokens == len(turn) - OBSERVED_ROWS
    assert tokens([running, back]) == expected(models, [running, back])


@pytest.mark.parametrize("other", [random_tokens(300, seed=90).tolist(), PROMPTS[0][:300]])
def test_the_beginning_of_the_next_request_is_not_closed_for_another(
    other: list[int], models: Pair
) -> None:
    """Nor is what was used last."""
    limit = kv_bytes(models, len(PROMPTS[0]) + len(PROMPTS[1]) + 2 * NEW)
    with serving(models, "plain", 1, swap_space=limit) as engine:
        (first,) = ask(engine, PROMPTS[0])
        ask(engine, PROMPTS[1])
        (state,) = ask(engine, [*PROMPTS[0][:300], *QUESTIONS[0]])
        assert state.stats.reused_tokens == 300 + len(QUESTIONS[0]) - OBSERVED_ROWS
        ask(engine, other)
        (turn,) = ask(engine, [*PROMPTS[0], *first.tokens, 5])
        assert turn.stats.reused_tokens == len(PROMPTS[0]) + NEW + 1 - OBSERVED_ROWS


def test_two_that_are_swapped_out_together_stay_within_the_limit(models: Pair) -> None:
    limit, largest = kv_bytes(models, 420), 0
    with serving(models, "plain", 2, swap_space=limit) as engine:
        ask(engine, PROMPTS[0])
        ask(engine, PROMPTS[1])
        for seed in (90, 91):
            request = Request(random_tokens(300, seed=seed).tolist(), NEW, GREEDY)
            engine.scheduler.add(request)
        while engine.scheduler.is_busy:
            engine.scheduler.step()
            largest = max(largest, engine.sessions.memory.swapped_bytes)
    assert 0 < largest <= limit


@pytest.mark.parametrize("swap_space", [0, 100])
def test_what_outgrew_its_caches_is_not_kept_beyond_the_limit(
    swap_space: int, models: Pair
) -> None:
    with serving(models, "plain", 1, swap_space=kv_bytes(models, 1) * swap_space) as engine:
        ask(engine, PROMPTS[0])
        engine.scheduler.caches.kept[0].token_s = 1e9  # reuse pays
        prompt = [*PROMPTS[0][:330], *random_tokens(500, seed=5).tolist()]
        state = engine.scheduler.add(Request(prompt, NEW, GREEDY))
        engine.scheduler.step()
        assert [each.target.length for each in engine.sessions.memory.swapped] == [330]
        run(engine)
        assert state.stats.reused_tokens == 330
        assert not engine.sessions.memory.swapped
    assert tokens([state]) == expected(models, [state])


def test_a_short_beginning_is_not_copied_to_larger_caches(models: Pair) -> None:
    with serving(models, "plain", 1) as engine:
        ask(engine, PROMPTS[0][:250])
        engine.scheduler.caches.kept[0].token_s = 1e9  # reuse would pay
        prompt = [*PROMPTS[0][:250], *random_tokens(300, seed=5).tolist()]
        state = engine.scheduler.add(Request(prompt, NEW, GREEDY))
        engine.scheduler.step()
        assert not engine.sessions.memory.swapped
        run(engine)
        assert state.stats.reused_tokens == 0
        assert state.stats.discarded_tokens == 250 + NEW - 1


def test_a_cancelled_turn_that_outgrew_its_caches_is_the_last_used(models: Pair) -> None:
    with serving(models, "plain", 2) as engine:
        ask(engine, PROMPTS[1])
        (first,) = ask(engine, PROMPTS[0])
        turn = [*PROMPTS[0], *first.tokens, *random_tokens(100, seed=2).tolist()]
        state = engine.scheduler.add(Request(turn, NEW, GREEDY))
        engine.scheduler.step()
        assert engine.scheduler.caches._swaps
        engine.scheduler.abort(state)
        lengths = [len(each.tokens) for each in engine.scheduler.caches.kept]
        assert lengths == [len(PROMPTS[1]) + NEW, len(PROMPTS[0]) + NEW]


def test_deterministic_conversations_are_not_swapped_out(models: Pair) -> None:
    """No later turn could reuse their KV."""
    with serving(models, "plain", 1, deterministic=True, prefill_chunk=None) as engine:
        ask(engine, PROMPTS[0])
        ask(engine, PROMPTS[1])
        assert not engine.sessions.memory.swapped


def test_a_turn_waits_for_the_copy_that_it_goes_on_from(models: Pair) -> None:
    with serving(models, "plain", 3) as engine:
        scheduler = engine.scheduler
        first, *_ = (ask(engine, prompt)[0] for prompt in PROMPTS)
        other = scheduler.add(Request(random_tokens(300, seed=90).tolist(), NEW, GREEDY))
        scheduler.step()
        assert scheduler.caches._swaps
        turn = scheduler.add(Request([*PROMPTS[0], *first.tokens, 5], NEW, GREEDY))
        scheduler.step()
        assert turn.status is Status.WAITING
        run(engine)
        assert turn.stats.reused_tokens == len(PROMPTS[0]) + NEW + 1 - OBSERVED_ROWS
    assert tokens([other, turn]) == expected(models, [other, turn])


def test_a_cancelled_request_leaves_the_conversation_in_its_caches(models: Pair) -> None:
    with serving(models, "plain", 1) as engine:
        scheduler = engine.scheduler
        (first,) = ask(engine, PROMPTS[0])
        other = scheduler.add(Request(PROMPTS[1], NEW, GREEDY))
        scheduler.step()
        assert scheduler.caches._swaps
        scheduler.abort(other)
        assert not engine.sessions.memory.swapped
        (turn,) = ask(engine, [*PROMPTS[0], *first.tokens, 5])
        assert turn.stats.reused_tokens == len(PROMPTS[0]) + NEW - 1


def test_a_conversation_is_lost_if_the_memory_is_gone(models: Pair) -> None:
    no_room = InsufficientMemoryError("no room")
    with serving(models, "plain", 1) as engine:
        ask(engine, PROMPTS[0])
        with patch.object(offload.tiered.kv_file, "allocate", side_effect=no_room):
            (other,) = ask(engine, PROMPTS[1])
        assert not engine.sessions.memory.swapped
        (again,) = ask(engine, PROMPTS[0])
        assert again.stats.reused_tokens == 0
    assert tokens([other, again]) == expected(models, [other, again])


@pytest.mark.parametrize("too_little", [False, True])
def test_requests_have_priority_over_what_is_swapped_out(
    too_little: bool, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory counts as free; the oldest go first, and the prompt's own beginning last."""
    with serving(models, "plain", 1) as engine:
        answers = [state.tokens for prompt in PROMPTS for state in ask(engine, prompt)]
        turn = [*PROMPTS[0], *answers[0], *QUESTIONS[0]]
        _, second = engine.sessions.memory.swapped
        plan = engine.plan(len(turn), NEW + 100).memory
        free = plan.device_bytes + plan.host_bytes - second.target.nbytes
        free -= PLENTY if too_little else 0
        # the third one is swapped out when the first one comes back, and the second one is older
        monkeypatch.setattr(decoding.engine.session_manager, "host_available", lambda: free)
        (state,) = ask(engine, turn)
        swapped = [each.target.length for each in engine.sessions.memory.swapped]
        third = len(PROMPTS[2]) + NEW - 1
        assert swapped == ([] if too_little else [third])
        assert state.stats.reused_tokens == (0 if too_little else len(turn) - OBSERVED_ROWS)
    assert tokens([state]) == expected(models, [state])


def test_a_swap_in_progress_is_not_closed_for_another_request(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(models, "plain", 2) as engine:
        scheduler = engine.scheduler
        ask(engine, PROMPTS[0])
        ask(engine, PROMPTS[1])
        requests = [Request(random_tokens(300, seed=seed).tolist(), NEW, GREEDY) for seed in (8, 9)]
        states = [scheduler.add(request) for request in requests]
        scheduler.step()
        assert len(scheduler.caches._swaps) == 2
        monkeypatch.setattr(decoding.engine.session_manager, "host_available", lambda: 0)
        run(engine)
    assert tokens(states) == expected(models, states)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ends", ["closed", "continued"])
def test_a_copy_is_finished_before_its_source_changes(
    ends: str, fails: bool, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"link": "emulated:50", "gpu_kv_layers": 1}
    with serving(models, "retrieval", 3, swap_space=0, **options) as engine:
        scheduler = engine.scheduler
        long = random_tokens(900, seed=3).tolist()
        ask(engine, long)
        # it shares less than half: it is copied
        copying = scheduler.add(Request([*long[:300], *PROMPTS[0]], NEW, GREEDY))
        scheduler.step()
        assert copying.sequence is not None
        source = copying.sequence.caches.copied
        assert source is not None
        if fails:
            monkeypatch.setattr(
                "offload.prefill.layer_major.Prefill.load_blocks",
                lambda *_: (_ for _ in ()).throw(InsufficientMemoryError("no room")),
            )
        if ends == "closed":
            cache = weakref.ref(scheduler.caches.kept[0].caches.target)
            del source
            engine.sessions.close(scheduler.caches.kept.pop().caches)
            assert cache() is None
        else:
            kept = scheduler.caches.kept[0]
            engine.sessions.extend(kept.caches, [*long[:100], 5], 100)
            engine.sessions.executor.prefill(kept.caches, whole_layer=True)
        assert copying.sequence.caches.copied is None
        monkeypatch.undo()
        while scheduler.is_busy:
            scheduler.step()
        assert copying.runs_alone == fails  # tried again
    assert tokens([copying]) == expected(models, [copying])


@pytest.mark.slow
def test_two_ranks_equal_one(folders: Folders, models: Pair) -> None:
    tokens, reused = run_ranks(2, talk_on_rank, folders)[0]
    with models.engine("plain") as engine:
        alone = batches.run_alone(engine, [Request(prompt, NEW, GREEDY) for prompt in PROMPTS])
        turns = [
            Request([*prompt, *answer, *question], NEW, GREEDY)
            for prompt, answer, question in zip(PROMPTS, alone, QUESTIONS, strict=True)
        ]
        alone += batches.run_alone(engine, turns)
    assert tokens == alone
    assert min(reused[3:]) >= 300


def talk_on_rank(folders: Folders) -> tuple[list[list[int]], list[int]]:
    models = Pair(*folders, TensorParallelGroup.from_environment("cpu"))
    with serving(models, "hierarchical", 1, link="emulated:50", gpu_kv_layers=1) as engine:
        if engine.group.rank:
            return [], []
        states, reused = talk(engine)
    engine.close()
    return tokens(states), reused
