"""Turns of a conversation are what they would be behind one long prompt."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import decoding.engine.conversation
import decoding.engine.session
import offload.tiered.cache
from decoding import GREEDY, Engine, Sampling
from decoding.engine.request import Request
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from offload.layout import ceil_div
from parallel.ranks.process_group import TensorParallelGroup
from support import batches
from support.engines import MODES, PLACES, Folders, Pair
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
# behind the answer: less than a pass takes, more than one, and more than is computed at once
TURNS = [random_tokens(count, seed=count).tolist() for count in (1, 20, 200)]
# where the text before is left, and what comes there in place of what followed
RETURNS = [(330, 9), (310, 150), (299, 1), (70, 40), (0, 80)]
Asked = list[tuple[list[int], list[int]]]  # prompts, and what was written behind them


@pytest.fixture(scope="module")
def by_plain_decoding(models: Pair) -> Iterator[Callable[[Asked], list[list[int]]]]:
    """What plain decoding writes behind each prompt, greedily and as much: each text once."""
    written: dict[tuple[int, ...], list[int]] = {}
    with models.engine("plain") as engine:

        def wanted(asked: Asked) -> list[list[int]]:
            texts = []
            for prompt, text in asked:
                key = (len(text), *prompt)
                if key not in written:
                    written[key] = list(engine.generate(prompt, len(text), GREEDY))
                texts.append(written[key])
            return texts

        yield wanted


def talk(
    engine: Engine, sampling: Sampling = GREEDY, returns: Sequence[tuple[int, int]] = RETURNS
) -> Asked:
    """Turn after turn, and then from places inside the text."""
    found: Asked = []
    prompt = PROMPT
    with engine.conversation(room=1000):
        for turn in [*TURNS, []]:
            answer = list(engine.generate(prompt, NEW, sampling))
            found.append((prompt, answer))
            prompt = [*prompt, *answer, *turn]
        for kept, count in returns:
            prompt = [*prompt[:kept], *random_tokens(count, seed=kept + 7).tolist()]
            found.append((prompt, list(engine.generate(prompt, NEW, sampling))))
    return found


def alone(engine: Engine, asked: Asked, sampling: Sampling = GREEDY) -> list[list[int]]:
    return [list(engine.generate(prompt, NEW, sampling)) for prompt, _ in asked]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("link", "resident"), slow_except(PLACES, 2))
def test_turns_are_those_of_one_long_prompt(
    mode: str,
    link: str,
    resident: int,
    models: Pair,
    by_plain_decoding: Callable[[Asked], list[list[int]]],
) -> None:
    choices = {**SMALL, "link": link, "gpu_kv_layers": resident}
    with models.engine(mode, **choices) as engine:
        asked = talk(engine)
    texts = [answer for _, answer in asked]
    assert all(len(text) == NEW for text in texts)
    assert texts == by_plain_decoding(asked)


@pytest.mark.parametrize(
    "mode", slow_except(["split", "split-retrieval", "split-hierarchical"], -1)
)
def test_so_are_nearly_all_in_16_bits(mode: str, folders: Folders) -> None:
    """Passes of other widths round otherwise: at near-ties texts part."""
    models = Pair(*folders, dtype="bfloat16")
    with models.engine(mode, link="emulated:50", split_kv_layers=1, **SMALL) as engine:
        asked = talk(engine)
    with models.engine("plain") as engine:
        wanted = alone(engine, asked)
    same = [answer == want for (_, answer), want in zip(asked, wanted, strict=True)]
    assert sum(same) >= 0.7 * len(same)


def test_packed_layers_change_nothing(folders: Folders) -> None:
    models = Pair(*folders, dtype="bfloat16")
    choices = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 0}
    with models.engine("plain", compress_offload=True, **choices) as engine:
        found = talk(engine)
    with models.engine("plain", compress_offload=False, **choices) as engine:
        assert talk(engine) == found


def test_a_sampled_turn_is_that_of_one_long_prompt(models: Pair) -> None:
    sampling = Sampling(1.0, top_p=1, seed=5)
    with models.engine("plain", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
        asked = talk(engine, sampling)
        assert [answer for _, answer in asked] == alone(engine, asked, sampling)


def test_what_a_turn_has_in_common_is_not_read_again(models: Pair) -> None:
    with (
        models.engine("plain", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine,
        engine.conversation(room=1000),
    ):
        answer = list(engine.generate(PROMPT, NEW, GREEDY))
        assert engine.stats.reused_tokens == 0
        first = engine.stats
        prompt = [*PROMPT, *answer, *TURNS[1]]
        list(engine.generate(prompt, NEW, GREEDY))
        # the last token was never read
        assert engine.stats.reused_tokens == len(PROMPT) + NEW - 1
        (session,) = engine.sessions.executor.sequences
        assert engine.stats.prefill_link_in == session.target.shape.streamed_bytes(256)
        assert first.as_dict()["traffic"]["target"]["link_in"] > 0
        assert first.new_tokens == engine.stats.new_tokens == NEW
        list(engine.generate([*PROMPT[:100], 5], NEW, GREEDY))
        assert engine.stats.reused_tokens == 100
        held = session.target.length
        list(engine.generate([7, *PROMPT], NEW, GREEDY))
        assert engine.stats.reused_tokens == 0
        assert engine.stats.discarded_tokens >= held - 1 > 100


def test_a_text_may_be_given_up_and_gone_on_with(models: Pair) -> None:
    for mode in MODES:
        with models.engine(mode, link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
            with engine.conversation():
                for count in (1, 4, 7):
                    begun = list(islice(engine.generate(PROMPT, 50, GREEDY), count))
                prompt = [*PROMPT, *begun, *TURNS[1]]
                answer = list(engine.generate(prompt, NEW, GREEDY))
                assert engine.stats.reused_tokens >= len(PROMPT)
            assert answer == list(engine.generate(prompt, NEW, GREEDY))


def test_a_stop_token_inside_a_round_ends_a_turn(models: Pair) -> None:
    for mode in MODES:
        with models.engine(mode, **SMALL) as engine:
            text = list(engine.generate(PROMPT, NEW, GREEDY))
        stop = text[5]
        short = text[: text.index(stop)]
        with models.engine(mode, stop=[stop], **SMALL) as engine:
            with engine.conversation():
                assert list(engine.generate(PROMPT, NEW, GREEDY)) == short
                prompt = [*PROMPT, *short, *TURNS[1]]
                answer = list(engine.generate(prompt, NEW, GREEDY))
                assert engine.stats.reused_tokens == len(PROMPT) + len(short)
            assert answer == list(engine.generate(prompt, NEW, GREEDY))


@pytest.mark.parametrize("mode", slow_except([*MODES, "split-hierarchical"], 0, 3))
@pytest.mark.parametrize("link", slow_except(["emulated:50", "view"]))
def test_a_text_that_outgrows_its_caches_gets_larger_ones(
    mode: str,
    link: str,
    models: Pair,
    folders: Folders,
    by_plain_decoding: Callable[[Asked], list[list[int]]],
) -> None:
    split = "split" in mode
    if split:
        models = Pair(*folders, dtype="bfloat16")
    choices = {**SMALL, "link": link, "gpu_kv_layers": 0 if split else 1}
    asked: Asked = []
    with models.engine(mode, **choices) as engine, engine.conversation(room=40):
        prompt = PROMPT
        for turn in [TURNS[2], [3], TURNS[1], []]:
            asked.append((prompt, list(engine.generate(prompt, NEW, GREEDY))))
            capacity = engine.sessions.executor.sequences[0].capacity
            assert capacity >= len(prompt) + NEW
            prompt = [*prompt, *asked[-1][1], *turn]
            if len(asked) > 1:
                assert engine.stats.reused_tokens >= len(asked[-2][0])
        # more new tokens than were planned for behind a shorter prompt
        asked.append((PROMPT, list(engine.generate(PROMPT, 60, GREEDY))))
        assert engine.stats.reused_tokens == len(PROMPT) - 1
    if split:
        with models.engine("plain") as engine:
            wanted = [list(engine.generate(prompt, len(text), GREEDY)) for prompt, text in asked]
    else:
        wanted = by_plain_decoding(asked)
    same = [text == want for (_, text), want in zip(asked, wanted, strict=True)]
    assert sum(same) >= (3 if split else len(same))  # at near-ties texts in 16 bits part


def test_the_old_caches_go_before_memory_is_planned_for_larger_ones(models: Pair) -> None:
    with models.engine("hierarchical", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
        plan, seen = type(engine.runtime).plan, list[int]()

        def planned(runtime: Any, prompt: int, new: int) -> Any:
            seen.append(new)
            assert before() is None
            if len(seen) == 1:  # what is enough for this turn alone is taken
                raise InsufficientMemoryError("no room")
            return plan(runtime, prompt, new)

        with engine.conversation(room=40):
            answer = list(engine.generate(PROMPT, NEW, GREEDY))
            before = weakref.ref(engine.sessions.executor.sequences[0].target)
            prompt = [*PROMPT, *answer, *TURNS[2]]
            with patch.object(decoding.engine.session.Runtime, "plan", planned):
                found = list(engine.generate(prompt, NEW, GREEDY))
            assert engine.stats.reused_tokens > len(PROMPT)
        assert seen == [NEW + 40, NEW]
        assert found == list(engine.generate(prompt, NEW, GREEDY))


def test_where_memory_does_not_do_for_larger_caches_a_text_is_read_anew(models: Pair) -> None:
    with models.engine("hierarchical", link="emulated:50", gpu_kv_layers=1, **SMALL) as engine:
        prompt = [*PROMPT, *TURNS[2]]
        wanted = list(engine.generate(prompt, NEW, GREEDY))
        with engine.conversation(room=40):
            list(engine.generate(PROMPT, NEW, GREEDY))
            with patch.object(
                offload.tiered.cache, "allocate", side_effect=InsufficientMemoryError("no room")
            ):
                assert list(engine.generate(prompt, NEW, GREEDY)) == wanted
            assert engine.stats.reused_tokens == 0
            list(engine.generate(PROMPT, NEW, GREEDY))
            plan = type(engine.runtime).plan
            engine._conversation._token_s = 1e9  # reuse pays, however slow this machine is now
            with patch.object(decoding.engine.session.Runtime, "plan", refusing(plan, times=2)):
                assert list(engine.generate([*prompt, *prompt], NEW, GREEDY))
            assert engine.stats.reused_tokens == 0
            assert list(engine.generate(prompt, NEW, GREEDY)) == wanted


def refusing(plan: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Return what refuses so often, and plans then."""

    def refuse(*arguments: Any) -> Any:
        nonlocal times
        times -= 1
        if times >= 0:
            raise InsufficientMemoryError("no room")
        return plan(*arguments)

    return refuse


def test_angles_that_go_by_the_length_of_a_prompt_are_read_anew(
    checkpoint: Callable[..., Path],
) -> None:
    parameters = rope("dynamic", factor=4.0)
    folder = checkpoint(max_position_embeddings=310, rope_parameters=parameters)
    models = Pair(folder, folder)
    with models.engine("plain", **SMALL) as engine:
        with engine.conversation():
            answer = list(engine.generate(PROMPT, 5, GREEDY))
            prompt = [*PROMPT, *answer, *TURNS[1]]
            found = list(engine.generate(prompt, NEW, GREEDY))
            assert engine.stats.reused_tokens == 0
        assert found == list(engine.generate(prompt, NEW, GREEDY))


def test_angles_that_go_by_all_that_may_follow_are_those_of_the_text_alone(
    checkpoint: Callable[..., Path],
) -> None:
    """Room for later turns does not make a text a long one."""
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
            found = list(engine.generate(longer, NEW, GREEDY))
            assert engine.stats.reused_tokens == 0
        asked = [(PROMPT, first), ([*PROMPT, *first, 7], again), (longer, found)]
        assert [answer for _, answer in asked] == alone(engine, asked)


@pytest.mark.parametrize("policy", slow_except(["static", "attention"], 1))
def test_a_long_turn_leaves_the_retrieval_cache_as_one_long_prompt_does(
    policy: str, models: Pair
) -> None:
    choices = {**SMALL, "policy": policy, "link": "emulated:50", "gpu_kv_layers": 1}
    prompt = [*PROMPT, *TURNS[2], *TURNS[1]]
    with models.engine("retrieval", **choices) as engine:
        wanted = list(engine.generate(prompt, NEW, GREEDY))
        accepted = engine.stats.acceptance
        with engine.conversation(room=250):
            list(engine.generate(PROMPT, NEW, GREEDY))
            (session,) = engine.sessions.executor.sequences
            session.extend_chunk = 50
            with patch.object(engine._conversation, "_token_s", 1e9):
                assert list(engine.generate(prompt, NEW, GREEDY)) == wanted
            assert engine.stats.reused_tokens == len(PROMPT)
            assert engine.stats.acceptance == accepted
            # the one selection behind a turn has room for as much as was planned for
            more = list(engine.generate([*PROMPT, 5], 120, GREEDY))
        assert more == list(engine.generate([*PROMPT, 5], 120, GREEDY))


def test_memory_that_does_not_do_for_later_turns_does_for_this_one(models: Pair) -> None:
    with models.engine("plain", **SMALL) as engine:
        opened = engine.sessions.open
        asked: list[int] = []

        def short(prompt: Sequence[int], new: int, **more: Any) -> Any:
            asked.append(new)
            if new > 100:
                raise InsufficientMemoryError("no room")
            return opened(prompt, new, **more)

        with patch.object(engine.sessions, "open", short), engine.conversation(room=500):
            first = list(engine.generate(PROMPT, NEW, GREEDY))
        assert asked == [NEW + 500, NEW]
        assert first == list(engine.generate(PROMPT, NEW, GREEDY))


def test_an_error_ends_a_text_and_not_the_conversation(models: Pair) -> None:
    with models.engine("plain", **SMALL) as engine, engine.conversation():
        answer = list(engine.generate(PROMPT, NEW, GREEDY))
        with pytest.raises(InvalidRequestError):
            next(engine.generate([], NEW, GREEDY))
        list(engine.generate([*PROMPT, *answer, 4], NEW, GREEDY))
        assert engine.stats.reused_tokens > 300  # what is refused touches nothing
        with (
            patch.object(
                decoding.engine.conversation.Generation,
                "round",
                side_effect=InsufficientMemoryError("gone"),
            ),
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
            with pytest.raises(TierForceError, match="in a conversation"):
                next(engine.generate_batch([Request(PROMPT, NEW, GREEDY)], 2))
            text = engine.generate(PROMPT, NEW, GREEDY)
            next(text)
            with pytest.raises(TierForceError, match="one text at a time"):
                next(engine.generate(PROMPT, NEW, GREEDY))
            text.close()
        assert not engine.sessions.executor.sequences
        assert len(list(engine.generate(PROMPT, NEW, GREEDY))) == NEW


@pytest.mark.parametrize("mode", slow_except(["hierarchical", "plain"]))
def test_two_ranks_talk_as_one_does(mode: str, folders: Folders, models: Pair) -> None:
    found = run_ranks(2, on_a_rank, folders, mode)[0]
    with models.engine("plain") as engine:
        assert [answer for _, answer in found["talk"]] == alone(engine, found["talk"])
        assert found["given up"] == list(engine.generate([*PROMPT, 5, 6], NEW, GREEDY))
        if mode == "hierarchical":
            assert found["parts"] == list(engine.generate([*PROMPT, *TURNS[2]], NEW, GREEDY))


def on_a_rank(folders: Folders, mode: str) -> dict[str, Any]:
    group = TensorParallelGroup.from_environment("cpu")
    models = Pair(*folders, group)
    found: dict[str, Any] = {}
    choices = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 1}
    with models.engine(mode, **choices) as engine:
        if group.rank:
            with pytest.raises(TierForceError, match="rank 0 leads"):
                engine.conversation().__enter__()
            engine.run_worker()
        else:
            found["talk"] = talk(engine, returns=RETURNS[1:3])
            with engine.conversation():
                list(islice(engine.generate(PROMPT, 40, GREEDY), 7))
                found["given up"] = list(engine.generate([*PROMPT, 5, 6], NEW, GREEDY))
            engine.close()
    if mode == "plain":
        return found
    with (
        patch.object(decoding.engine.session, "extend_chunk", lambda *_: 70 + group.rank),
        models.engine("hierarchical", **choices) as engine,
    ):
        if group.rank:
            engine.run_worker()
            return found
        with engine.conversation(room=100):  # for more there have to be larger caches
            list(engine.generate(PROMPT, NEW, GREEDY))
            (session,) = engine.sessions.executor.sequences
            assert session.extend_chunk == 70  # what the rank with the least memory can do
            engine._conversation._token_s = 1e9
            found["parts"] = list(engine.generate([*PROMPT, *TURNS[2]], NEW, GREEDY))
            assert engine.stats.reused_tokens == len(PROMPT)
        engine.close()
    return found


def test_memory_bounds_what_is_read_at_once(models: Pair) -> None:
    """And where that would be slower than reading all of it, it is read anew."""
    choices = {**SMALL, "link": "emulated:50", "gpu_kv_layers": 1}
    prompt = [*PROMPT, *TURNS[2]]
    with models.engine("hierarchical", **choices) as engine:
        wanted = list(engine.generate(prompt, NEW, GREEDY))
        with engine.conversation(room=1000):
            list(engine.generate(PROMPT, NEW, GREEDY))
            (session,) = engine.sessions.executor.sequences
            assert session.extend_chunk >= session.max_tokens
            for tokens in (7, 64, 150):
                session.extend_chunk = tokens
                list(engine.generate([*PROMPT, 5], NEW, GREEDY))
                read = patch.object(session, "_prefill_chunk", wraps=session._prefill_chunk)
                with patch.object(engine._conversation, "_token_s", 1e9), read as parts:
                    assert list(engine.generate(prompt, NEW, GREEDY)) == wanted
                assert parts.call_count == ceil_div(len(TURNS[2]), tokens)
                assert engine.stats.reused_tokens == len(PROMPT)
            list(engine.generate([*PROMPT, 5], NEW, GREEDY))
            with patch.object(engine._conversation, "_token_s", 0.0):
                assert list(engine.generate(prompt, NEW, GREEDY)) == wanted
            assert engine.stats.reused_tokens == 0
