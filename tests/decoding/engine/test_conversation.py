"""Turns of a conversation equal what follows one long prompt."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import offload.tiered.kv_file
from decoding import GREEDY, Engine, Sampling
from decoding.engine.request import Request, RequestState
from decoding.planning.plan import Memory, Plan
from decoding.planning.request_spec import RequestSpec
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from offload.layout import OBSERVED_ROWS, ceil_div
from parallel.ranks.process_group import TensorParallelGroup
from support import batches
from support.engines import MODES, PLACEMENTS, Folders, Pair
from support.models import long_rope, random_tokens, rope
from support.ranks import run_ranks
from support.slow import slow_except

NEW = 12
SMALL: dict[str, Any] = {
    **batches.SMALL,
    "selection_interval": None,
    "prompt_lookup_ngram": None,
    "prefill_chunk": 64,
}
PROMPT = random_tokens(300, seed=1).tolist()
# tokens after an answer: within one forward, in several, and more than one prefill chunk
TURNS = [random_tokens(count, seed=count).tolist() for count in (1, 20, 200)]
# lengths of the common prefix with the previous prompt, and numbers of tokens after it
BRANCHES = [(330, 9), (310, 150), (299, 1), (70, 40), (0, 80)]
Turns = list[tuple[list[int], list[int]]]  # prompts and their answers


@pytest.fixture(scope="module")
def by_plain_decoding(models: Pair) -> Iterator[Callable[[Turns], list[list[int]]]]:
    """A function that returns greedy plain answers of the same lengths, each computed once."""
    answers: dict[tuple[int, ...], list[int]] = {}
    with models.engine("plain") as engine:

        def generate(turns: Turns) -> list[list[int]]:
            expected = []
            for prompt, answer in turns:
                key = (len(answer), *prompt)
                if key not in answers:
                    answers[key] = list(engine.generate(prompt, len(answer), GREEDY))
                expected.append(answers[key])
            return expected

        yield generate


def talk(
    engine: Engine, sampling: Sampling = GREEDY, branches: Sequence[tuple[int, int]] = BRANCHES
) -> Turns:
    """Return turns that each extend the previous one, then turns that branch off inside it."""
    turns: Turns = []
    prompt = PROMPT
    with engine.conversation(room=1000):
        for turn in [*TURNS, []]:
            answer = list(engine.generate(prompt, NEW, sampling))
            turns.append((prompt, answer))
            prompt = [*prompt, *answer, *turn]
        for common, count in branches:
            prompt = [*prompt[:common], *random_tokens(count, seed=common + 7).tolist()]
            turns.append((prompt, list(engine.generate(prompt, NEW, sampling))))
    return turns


def reuse_pays(engine: Engine, pays: bool = True) -> None:
    """Let prefill seem so slow, or fast, that the caches are reused, or not, whatever it takes."""
    (kept,) = engine.scheduler.caches.kept
    kept.token_s = 1e9 if pays else 0.0


def answer_alone(engine: Engine, turns: Turns, sampling: Sampling = GREEDY) -> list[list[int]]:
    """Return the answers to the turns' prompts when each is a request of its own."""
    return [list(engine.generate(prompt, NEW, sampling)) for prompt, _ in turns]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("link", "resident"), slow_except(PLACEMENTS, 2))
def test_turns_equal_one_long_prompt(
    mode: str,
    link: str,
    resident: int,
    models: Pair,
    by_plain_decoding: Callable[[Turns], list[list[int]]],
) -> None:
    options = {**SMALL, "link": link, "gpu_kv_layers": resident}
    with models.engine(mode, **options) as engine:
        turns = talk(engine)
    answers = [answer for _, answer in turns]
    assert all(len(answer) == NEW for answer in answers)
    assert answers == by_plain_decoding(turns)


@pytest.mark.parametrize(
    "mode", slow_except(["split", "split-retrieval", "split-hierarchical"], -1)
)
def test_turns_nearly_all_equal_one_long_prompt_in_16_bits(mode: str, folders: Folders) -> None:
    """Forwards of other widths round differently, so answers may diverge at near-ties."""
    models = Pair(*folders, dtype="bfloat16")
    with models.engine(mode, link="emulated:50", split_kv_layers=1, **SMALL) as engine:
        turns = talk(engine)
    with models.engine("plain") as engine:
        expected = answer_alone(engine, turns)
    matches = [answer == alone for (_, answer), alone in zip(turns, expected, strict=True)]
    assert sum(matches) >= 0.7 * len(matches)


def test_compressed_offload_does_not_change_turns(folders: Folders) -> None:
    models = Pair(*folders, dtype="bfloat16")
    options = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 0}
    with models.engine("plain", compress_offload=True, **options) as engine:
        turns = talk(engine)
    with models.engine("plain", compress_offload=False, **options) as engine:
        assert talk(engine) == turns


def test_sampled_turns_equal_one_long_prompt(models: Pair) -> None:
    sampling = Sampling(1.0, top_p=1, seed=5)
    with models.engine("plain", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
        turns = talk(engine, sampling)
        assert [answer for _, answer in turns] == answer_alone(engine, turns, sampling)


def test_a_common_prefix_is_not_prefilled_again(models: Pair) -> None:
    with (
        models.engine("plain", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine,
        engine.conversation(room=1000),
    ):
        answer = list(engine.generate(PROMPT, NEW, GREEDY))
        assert engine.stats.reused_tokens == 0
        first = engine.stats
        prompt = [*PROMPT, *answer, *TURNS[1]]
        list(engine.generate(prompt, NEW, GREEDY))
        # no forward has processed the last token
        assert engine.stats.reused_tokens == len(PROMPT) + NEW - 1
        (session,) = engine.sessions.executor.sequences
        assert engine.stats.prefill_link_in == session.target.shape.streamed_bytes(256)
        assert first.as_dict()["traffic"]["target"]["link_in"] > 0
        assert first.new_tokens == engine.stats.new_tokens == NEW
        list(engine.generate([*PROMPT[:100], 5], NEW, GREEDY))
        assert engine.stats.reused_tokens == 100
        cached = session.target.length
        list(engine.generate([7, *PROMPT], NEW, GREEDY))
        assert engine.stats.reused_tokens == 0
        assert engine.stats.discarded_tokens >= cached - 1 > 100


def test_a_closed_answer_can_be_continued(models: Pair) -> None:
    for mode in MODES:
        with models.engine(mode, link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
            with engine.conversation():
                for count in (1, 4, 7):
                    partial = list(islice(engine.generate(PROMPT, 50, GREEDY), count))
                prompt = [*PROMPT, *partial, *TURNS[1]]
                answer = list(engine.generate(prompt, NEW, GREEDY))
                assert engine.stats.reused_tokens >= len(PROMPT)
            assert answer == list(engine.generate(prompt, NEW, GREEDY))


def test_a_stop_token_inside_a_round_ends_a_turn(models: Pair) -> None:
    for mode in MODES:
        with models.engine(mode, **SMALL) as engine:
            tokens = list(engine.generate(PROMPT, NEW, GREEDY))
        stop = tokens[5]
        short = tokens[: tokens.index(stop)]
        with models.engine(mode, stop=[stop], **SMALL) as engine:
            with engine.conversation():
                assert list(engine.generate(PROMPT, NEW, GREEDY)) == short
                prompt = [*PROMPT, *short, *TURNS[1]]
                answer = list(engine.generate(prompt, NEW, GREEDY))
                assert engine.stats.reused_tokens == len(PROMPT) + len(short)
            assert answer == list(engine.generate(prompt, NEW, GREEDY))


@pytest.mark.parametrize("mode", slow_except([*MODES, "split-hierarchical"], 0, 3))
@pytest.mark.parametrize("link", slow_except(["emulated:50", "view"]))
def test_a_sequence_that_outgrows_its_caches_gets_larger_ones(
    mode: str,
    link: str,
    models: Pair,
    folders: Folders,
    by_plain_decoding: Callable[[Turns], list[list[int]]],
) -> None:
    split = "split" in mode
    if split:
        models = Pair(*folders, dtype="bfloat16")
    options = {**SMALL, "link": link, "gpu_kv_layers": 0 if split else 1}
    turns: Turns = []
    with models.engine(mode, **options) as engine, engine.conversation(room=40):
        prompt = PROMPT
        for turn in [TURNS[2], [3], TURNS[1], []]:
            turns.append((prompt, list(engine.generate(prompt, NEW, GREEDY))))
            capacity = engine.sessions.executor.sequences[0].capacity
            assert capacity >= len(prompt) + NEW
            prompt = [*prompt, *turns[-1][1], *turn]
            if len(turns) > 1:
                assert engine.stats.reused_tokens >= len(turns[-2][0])
                assert engine.stats.discarded_tokens == 0
        # more new tokens than were planned, after a shorter prompt
        turns.append((PROMPT, list(engine.generate(PROMPT, 60, GREEDY))))
        assert engine.stats.reused_tokens == len(PROMPT) - OBSERVED_ROWS
    if split:
        with models.engine("plain") as engine:
            expected = [
                list(engine.generate(prompt, len(answer), GREEDY)) for prompt, answer in turns
            ]
    else:
        expected = by_plain_decoding(turns)
    matches = [answer == plain for (_, answer), plain in zip(turns, expected, strict=True)]
    # answers in 16 bits may diverge at near-ties
    assert sum(matches) >= (3 if split else len(matches))


def test_old_caches_are_freed_before_larger_ones_are_planned(models: Pair) -> None:
    with models.engine("hierarchical", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
        place, requested = Plan.place, list[int]()

        def place_second(spec: RequestSpec, memory: Memory) -> Plan:
            requested.append(spec.max_new_tokens)
            assert [each() for each in old] == [None] * len(old)
            if len(requested) == 1:  # then room for this turn alone is planned
                raise InsufficientMemoryError("no room")
            return place(spec, memory)

        with engine.conversation(room=40):
            answer = list(engine.generate(PROMPT, NEW, GREEDY))
            old_cache = engine.sessions.executor.sequences[0].target
            resident = next(layer for layer in old_cache.layers if not layer.chunks(1))
            old = [weakref.ref(each) for each in (old_cache, resident, resident._kv)]
            del old_cache, resident
            prompt = [*PROMPT, *answer, *TURNS[2]]
            with patch.object(Plan, "place", place_second):
                result = list(engine.generate(prompt, NEW, GREEDY))
            assert engine.stats.reused_tokens > len(PROMPT)
        assert requested == [NEW + 40, NEW]
        assert result == list(engine.generate(prompt, NEW, GREEDY))


def test_the_whole_prompt_is_prefilled_if_larger_caches_do_not_fit(models: Pair) -> None:
    with models.engine("hierarchical", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
        prompt = [*PROMPT, *TURNS[2]]
        expected = list(engine.generate(prompt, NEW, GREEDY))
        with engine.conversation(room=40):
            list(engine.generate(PROMPT, NEW, GREEDY))
            with patch.object(
                offload.tiered.kv_file, "allocate", side_effect=InsufficientMemoryError("no room")
            ):
                assert list(engine.generate(prompt, NEW, GREEDY)) == expected
            assert engine.stats.reused_tokens == 0
            list(engine.generate(PROMPT, NEW, GREEDY))
            reuse_pays(engine)
            with (
                patch.object(Plan, "place", failing(Plan.place, times=2)),
                pytest.raises(InsufficientMemoryError),
            ):
                list(engine.generate([*prompt, *prompt], NEW, GREEDY))
            # its KV is still in host memory
            assert list(engine.generate(prompt, NEW, GREEDY)) == expected
            assert engine.stats.reused_tokens == len(PROMPT)
            assert not engine.sessions.memory.swapped


def failing(plan: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Return a function that finds no memory some times, and then plans."""

    def fail_or_plan(*arguments: Any) -> Any:
        nonlocal times
        times -= 1
        if times >= 0:
            raise InsufficientMemoryError("no room")
        return plan(*arguments)

    return fail_or_plan


def test_dynamic_ntk_prefills_every_prompt_again(
    checkpoint: Callable[..., Path],
) -> None:
    parameters = rope("dynamic", factor=4.0)
    folder = checkpoint(max_position_embeddings=310, rope_parameters=parameters)
    models = Pair(folder, folder)
    with models.engine("plain", **SMALL) as engine:
        with engine.conversation():
            answer = list(engine.generate(PROMPT, 5, GREEDY))
            prompt = [*PROMPT, *answer, *TURNS[1]]
            result = list(engine.generate(prompt, NEW, GREEDY))
            assert engine.stats.reused_tokens == 0
        assert result == list(engine.generate(prompt, NEW, GREEDY))


def test_longrope_turns_have_the_angles_of_a_request_alone(
    checkpoint: Callable[..., Path],
) -> None:
    """Room for later turns does not select the factors of long sequences."""
    folder = checkpoint(
        "phi3",
        max_position_embeddings=1600,
        original_max_position_embeddings=400,
        rope_parameters=long_rope(8),
    )
    models = Pair(folder, folder)
    with models.engine("plain", **SMALL) as engine:
        with engine.conversation(room=800):
            first = list(engine.generate(PROMPT, NEW, GREEDY))
            again = list(engine.generate([*PROMPT, *first, 7], NEW, GREEDY))
            assert engine.stats.reused_tokens > len(PROMPT)
            longer = [*PROMPT, *first, 7, *again, *TURNS[2]]
            last = list(engine.generate(longer, NEW, GREEDY))
            assert engine.stats.reused_tokens == 0
        turns = [(PROMPT, first), ([*PROMPT, *first, 7], again), (longer, last)]
        assert [answer for _, answer in turns] == answer_alone(engine, turns)


@pytest.mark.parametrize("policy", slow_except(["static", "attention"], 1))
def test_a_long_turn_selects_like_one_long_prompt(policy: str, models: Pair) -> None:
    options = {**SMALL, "policy": policy, "link": "emulated:50", "gpu_kv_layers": 1}
    prompt = [*PROMPT, *TURNS[2], *TURNS[1]]
    with models.engine("retrieval", **options) as engine:
        expected = list(engine.generate(prompt, NEW, GREEDY))
        accepted = engine.stats.acceptance
        with engine.conversation(room=250):
            list(engine.generate(PROMPT, NEW, GREEDY))
            (session,) = engine.sessions.executor.sequences
            session.extend_chunk = 50
            reuse_pays(engine)
            assert list(engine.generate(prompt, NEW, GREEDY)) == expected
            assert engine.stats.reused_tokens == len(PROMPT)
            assert engine.stats.acceptance == accepted
            # the one selection after a turn covers all tokens that were planned for
            longer = list(engine.generate([*PROMPT, 5], 120, GREEDY))
        assert longer == list(engine.generate([*PROMPT, 5], 120, GREEDY))


def test_room_for_later_turns_is_dropped_if_it_does_not_fit(models: Pair) -> None:
    with models.engine("plain", **SMALL) as engine:
        open_sequence = engine.sessions.open
        requested: list[int] = []

        def open_short(prompt: Sequence[int], new: int, *options: Any) -> Any:
            requested.append(new)
            if new > 100:
                raise InsufficientMemoryError("no room")
            return open_sequence(prompt, new, *options)

        with patch.object(engine.sessions, "open", open_short), engine.conversation(room=500):
            first = list(engine.generate(PROMPT, NEW, GREEDY))
        assert requested == [NEW + 500, NEW]
        assert first == list(engine.generate(PROMPT, NEW, GREEDY))


def test_an_error_ends_a_request_and_not_the_conversation(models: Pair) -> None:
    with models.engine("plain", **SMALL) as engine, engine.conversation():
        answer = list(engine.generate(PROMPT, NEW, GREEDY))
        with pytest.raises(InvalidRequestError):
            next(engine.generate([], NEW, GREEDY))
        list(engine.generate([*PROMPT, *answer, 4], NEW, GREEDY))
        assert engine.stats.reused_tokens > 300  # an invalid request leaves the caches unchanged
        with (
            patch.object(RequestState, "feed", side_effect=InsufficientMemoryError("gone")),
            pytest.raises(InsufficientMemoryError),
        ):
            list(engine.generate([*PROMPT, *answer, 4], NEW, GREEDY))
        assert not engine.sessions.executor.sequences
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == answer
        assert engine.stats.reused_tokens == 0


def test_one_conversation_at_a_time(models: Pair) -> None:
    with models.engine("plain", **SMALL) as engine:
        with engine.conversation():
            with pytest.raises(TierForceError, match="one conversation at a time"):
                engine.conversation().__enter__()
            with pytest.raises(TierForceError, match="inside a conversation"):
                next(engine.generate_batch([Request(PROMPT, NEW, GREEDY)], 2))
            tokens = engine.generate(PROMPT, NEW, GREEDY)
            next(tokens)
            with pytest.raises(TierForceError, match="one request at a time"):
                next(engine.generate(PROMPT, NEW, GREEDY))
            tokens.close()
        assert not engine.sessions.executor.sequences
        assert len(list(engine.generate(PROMPT, NEW, GREEDY))) == NEW


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_except(["hierarchical", "plain"]))
def test_turns_on_two_ranks(mode: str, folders: Folders, models: Pair) -> None:
    report = run_ranks(2, talk_on_rank, folders, mode)[0]
    with models.engine("plain") as engine:
        assert [answer for _, answer in report["talk"]] == answer_alone(engine, report["talk"])
        assert report["closed"] == list(engine.generate([*PROMPT, 5, 6], NEW, GREEDY))
        if mode == "hierarchical":
            assert report["parts"] == list(engine.generate([*PROMPT, *TURNS[2]], NEW, GREEDY))


def talk_on_rank(folders: Folders, mode: str) -> dict[str, Any]:
    group = TensorParallelGroup.from_environment("cpu")
    models = Pair(*folders, group)
    report: dict[str, Any] = {}
    options = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 1}
    with models.engine(mode, **options) as engine:
        if group.rank:
            with pytest.raises(TierForceError, match="rank 0 leads"):
                engine.conversation().__enter__()
            engine.run_worker()
        else:
            report["talk"] = talk(engine, branches=BRANCHES[1:3])
            with engine.conversation():
                list(islice(engine.generate(PROMPT, 40, GREEDY), 7))
                report["closed"] = list(engine.generate([*PROMPT, 5, 6], NEW, GREEDY))
            engine.close()
    if mode == "plain":
        return report
    with (
        patch.object(Plan, "extend_chunk", 70 + group.rank),
        models.engine("hierarchical", **options) as engine,
    ):
        if group.rank:
            engine.run_worker()
            return report
        with engine.conversation(room=100):  # the second turn needs larger caches
            list(engine.generate(PROMPT, NEW, GREEDY))
            (session,) = engine.sessions.executor.sequences
            assert session.extend_chunk == 70  # the minimum over the ranks
            reuse_pays(engine)
            report["parts"] = list(engine.generate([*PROMPT, *TURNS[2]], NEW, GREEDY))
            assert engine.stats.reused_tokens == len(PROMPT)
        engine.close()
    return report


def test_memory_bounds_the_chunks_of_a_turn(models: Pair) -> None:
    """If that would be slower than one prefill, the whole prompt is prefilled again."""
    options = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 1}
    prompt = [*PROMPT, *TURNS[2]]
    with models.engine("hierarchical", **options) as engine:
        expected = list(engine.generate(prompt, NEW, GREEDY))
        with engine.conversation(room=1000):
            list(engine.generate(PROMPT, NEW, GREEDY))
            (session,) = engine.sessions.executor.sequences
            assert session.extend_chunk >= session.runtime.requirements.max_forward_tokens
            for tokens in (7, 64, 150):
                session.extend_chunk = tokens
                list(engine.generate([*PROMPT, 5], NEW, GREEDY))
                spy = patch.object(session, "_prefill_chunk", wraps=session._prefill_chunk)
                reuse_pays(engine)
                with spy as prefill_chunk:
                    assert list(engine.generate(prompt, NEW, GREEDY)) == expected
                assert prefill_chunk.call_count == ceil_div(len(TURNS[2]), tokens)
                assert engine.stats.reused_tokens == len(PROMPT)
            list(engine.generate([*PROMPT, 5], NEW, GREEDY))
            reuse_pays(engine, False)
            assert list(engine.generate(prompt, NEW, GREEDY)) == expected
            assert engine.stats.reused_tokens == 0
