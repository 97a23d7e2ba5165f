"""A prompt that is read in passes of another text makes, token for token, the same text; and what
goes wrong with it is no affair of theirs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import GREEDY, Sampling
from decoding.engine.prefill_overlap import Pace
from decoding.engine.request import Request
from decoding.engine.scheduler import Written
from decoding.engine.session import Session
from decoding.engine.session_manager import Sessions
from decoding.planning.memory_plan import device_tiers, early, reading_bytes
from offload.errors import DocumentError
from parallel.model.transformer import Llama
from parallel.ranks.process_group import Group
from support.batches import MODES, SMALL, alone, requests, tokens, written
from support.engines import Pair
from support.models import TINY
from support.ranks import run_ranks

FAR: dict[str, Any] = {"resident_layers": 1, "link": "emulated:50", "prefill_chunk": 16}
SIZES = [(290, 20), (277, 25), (340, 8), (333, 18), (561, 12)]  # each has a prefix on the host
FULL = Sampling(1.0, top_p=1, seed=4)


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return (
        checkpoint(num_hidden_layers=3, max_position_embeddings=4096),
        checkpoint(seed=1, num_hidden_layers=1),
    )


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    return Pair(*folders)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of reading in every pass, however long it waits."""
    monkeypatch.setattr(Pace, "steps", lambda self, nbytes: 3)


def shares(texts: list[Written]) -> list[float]:
    return [text.stats.read_early for text in texts]


@pytest.mark.parametrize("mode", [*MODES])
@pytest.mark.parametrize("at_once", [1, 2])
def test_prompts_read_early_make_the_same_texts(
    mode: str, at_once: int, pair: Pair, steady: None
) -> None:
    asked = requests(FULL, SIZES)
    with pair.engine(mode, **SMALL, **FAR) as engine:
        want = alone(engine, asked)
        texts = written(engine, asked, at_once, reads_early=True)
        assert tokens(texts) == want
        assert len(engine.sessions._arenas) == at_once + 1
        assert not engine.sessions.lockstep.texts
        # who comes first reads for itself, and so do those behind one that is read to its end
        assert shares(texts)[:at_once] == [0.0] * at_once
        assert sum(share > 0 for share in shares(texts)) >= 3 - at_once
        assert max(shares(texts)) <= 1.0
        assert texts[-1].stats.as_dict()["read_early"] == round(shares(texts)[-1], 4)


def test_bytes_over_the_link_are_those_of_texts_alone(pair: Pair, steady: None) -> None:
    asked = requests(GREEDY, SIZES)
    with pair.engine("plain", **FAR) as engine:
        apart = [text.stats.as_dict() for text in written(engine, asked, 1)]
        texts = [text.stats.as_dict() for text in written(engine, asked, 1, reads_early=True)]
    for before, behind in zip(apart, texts, strict=True):
        assert behind["link_bytes_per_token"] == before["link_bytes_per_token"]
        early_in = 0
        if behind["read_early"]:  # its resident layer comes late: there and back
            assert (before["late_layers"], behind["late_layers"]) == (0, 1)
            early_in = (
                behind["traffic"]["target"]["link_in"] - before["traffic"]["target"]["link_in"]
            )
            assert early_in > 0
        assert behind["link_bytes_prefill"] >= before["link_bytes_prefill"] + early_in


def test_where_nothing_waits_nothing_is_read_early(pair: Pair, steady: None) -> None:
    asked = requests(GREEDY, SIZES[:3])
    for place in ({}, {"resident_layers": 0}, {"link": "emulated:50"}):
        with pair.engine("plain", **place) as engine:
            texts = written(engine, asked, 1, reads_early=True)
            assert len(engine.sessions._arenas) == 1
        assert shares(texts) == [0.0] * 3


def test_steps_are_spread_over_a_pass_and_never_read_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are allowed: the end waits for copies, and for the text's turn."""
    monkeypatch.setattr(Pace, "steps", lambda self, nbytes: 1000)
    asked = requests(GREEDY, SIZES)
    with pair.engine("retrieval", **SMALL, **FAR) as engine:
        want = alone(engine, asked)
        texts = written(engine, asked, 1, reads_early=True)
    assert tokens(texts) == want
    assert shares(texts) == [0.0, 1.0, 1.0, 1.0, 1.0]


class Spoilt:
    """An engine whose model knows a token that makes its laws no numbers."""

    def __init__(self, folders: tuple[Path, Path], asked: list[Request]):
        self.pair = Pair(*folders)
        with self.pair.engine("plain", **FAR) as engine:
            self.want = alone(engine, asked)
        used = {token for text in self.want for token in text}
        used |= {token for request in asked for token in request.prompt}
        self.token = next(token for token in range(TINY["vocab_size"]) if token not in used)
        with torch.inference_mode():
            self.pair.target.embed.weight[self.token] = torch.nan


def test_an_early_text_that_fails_leaves_the_others_alone(
    folders: tuple[Path, Path], steady: None
) -> None:
    asked = [
        replace(each, prompt=[token % 80 for token in each.prompt], new=8)
        for each in requests(GREEDY, SIZES)
    ]
    spoilt = Spoilt(folders, asked)
    bad = Request([*asked[0].prompt, spoilt.token], 20, GREEDY)
    empty, too_long = Request([], 5, GREEDY), Request([1] * 4090, 20, GREEDY)
    mixed = [asked[0], bad, asked[1], empty, asked[2], too_long, *asked[3:]]
    with spoilt.pair.engine("plain", **FAR) as engine:
        texts = written(engine, mixed, 1, reads_early=True)
    assert [str(text.error).split(":")[0][:25] for text in texts if text.error is not None] == [
        "the logits that the model",
        "the prompt is empty",
        "4090 prompt tokens and 20",
    ]
    good = [text for text in texts if text.error is None]
    assert tokens(good) == spoilt.want
    assert any(shares(good))


def test_texts_that_wait_and_texts_that_do_not_go_together(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is whole on the device, one too short for a prefix, and one over the link."""
    monkeypatch.setattr(Pace, "steps", lambda self, nbytes: 40)
    deep = checkpoint(num_hidden_layers=24, max_position_embeddings=4096)
    pair = Pair(deep, deep)
    asked = requests(GREEDY, [(40, 30), (1500, 20), (1450, 8)])
    place: dict[str, Any] = {"link": "emulated:50", "prefill_chunk": 64}
    with pair.engine("plain", **place) as engine:
        want = alone(engine, asked)
        wanted, weights = engine.runtime.needs.memory(1500, 20), engine.runtime.weight_bytes
    read, _ = device_tiers(wanted, 0)
    _, decode = device_tiers(wanted, 6)
    limit = weights + sum(read.values()) + 2 * sum(decode.values())
    with pair.engine("plain", **place, device_memory=limit) as engine:
        texts = written(engine, asked, 2, reads_early=True)
        plans = [text.stats.plan for text in texts]
    assert tokens(texts) == want
    resident = [plan.resident_layers for plan in plans if plan is not None]
    assert resident[0] == 24
    assert resident[1] < 24
    assert any(shares(texts))
    with pair.engine("plain", **{**place, "resident_layers": 2}) as engine:
        texts = written(engine, asked, 2, reads_early=True)
    assert tokens(texts) == want
    assert any(shares(texts))


def test_a_text_that_was_read_early_is_gone_when_it_is_over(pair: Pair, steady: None) -> None:
    """Though the texts in whose passes it was read go on."""
    asked = requests(GREEDY, [(300, 90), (310, 5), (320, 5), (330, 5), (340, 5)])
    read, alive = list[weakref.ref[Session]](), list[int]()
    opened = Sessions.open_early

    def watched(sessions: Sessions, *arguments: Any) -> Session | None:
        alive.append(sum(session() is not None for session in read))
        if (session := opened(sessions, *arguments)) is not None:
            read.append(weakref.ref(session))
        return session

    gc.disable()
    try:
        with pair.engine("plain", **FAR) as engine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sessions, "open_early", watched)
            written(engine, asked, 2, reads_early=True)
    finally:
        gc.enable()
    assert len(read) == 3
    assert alive == [0, 1, 1]  # the one before is decoded, and those before that are gone
    assert all(session() is None for session in read)


def test_memory_that_runs_out_while_reading_early_ends_that_text_alone(
    pair: Pair, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(GREEDY, SIZES[:3])
    reading, calls = Llama.reading, list[int]()

    def short(model: Llama, *arguments: Any) -> Iterator[float]:
        calls.append(len(calls))
        if len(calls) == 2:
            yield 0.1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (yield from reading(model, *arguments))

    with pair.engine("plain", **FAR) as engine:
        want = alone(engine, asked)
        monkeypatch.setattr(Llama, "reading", short)
        texts = written(engine, asked, 1, reads_early=True)
        assert not engine.sessions.lockstep.texts
    assert tokens(texts) == want  # there was room for it behind the others
    assert shares(texts)[0] == 0.0
    assert len(calls) == 4


def test_an_error_of_reading_early_that_is_no_text_own_ends_all(pair: Pair, steady: None) -> None:
    def broken(done: int, total: int) -> None:
        raise OSError("no terminal")

    asked = requests(GREEDY, SIZES)
    asked[1] = replace(asked[1], progress=broken)
    with pair.engine("hierarchical", **SMALL, **FAR) as engine:
        with pytest.raises(OSError, match="no terminal"):
            written(engine, asked, 1, reads_early=True)
        assert not engine.sessions.lockstep.texts
        assert tokens(written(engine, asked[:1], 1)) == alone(engine, asked[:1])


def test_giving_up_ends_the_early_text_too(pair: Pair, steady: None) -> None:
    asked = requests(GREEDY, SIZES)
    with pair.engine("retrieval", **SMALL, **FAR) as engine:
        want = alone(engine, asked)
        for _ in engine.write(asked, 1, True):
            assert len(engine.sessions.lockstep.texts) == 1  # the early one
            break
        assert not engine.sessions.lockstep.texts
        assert alone(engine, asked) == want


def test_room_is_left_for_reading_early_and_kept_to(
    checkpoint: Callable[..., Path], steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = checkpoint(num_hidden_layers=24, max_position_embeddings=4096)
    pair, asked = Pair(deep, deep), requests(GREEDY, [(2000, 10)] * 2)
    place: dict[str, Any] = {"link": "emulated:50", "prefill_chunk": 64}
    with pair.engine("plain", **place) as engine:
        want = alone(engine, asked)
        wanted, weights = engine.runtime.needs.memory(2000, 10), engine.runtime.weight_bytes
    read, _ = device_tiers(wanted, 0)
    _, decode = device_tiers(wanted, 1)
    limit = weights + sum(read.values()) + sum(decode.values())
    opened, held = Session.__init__, list[int]()

    def watched(session: Session, *arguments: Any) -> None:
        opened(session, *arguments)
        held.append(sum(text.plan.device_bytes for text in lockstep.texts) + reading(session))

    def reading(session: Session) -> int:
        return reading_bytes(session.runtime.needs.memory(2000, 10), session.plan)

    with pair.engine("plain", **place, device_memory=limit) as engine:
        lockstep = engine.sessions.lockstep
        monkeypatch.setattr(Session, "__init__", watched)
        alone_plan, beside = engine.check(2000, 10), engine.check(2000, 10, reads_early=True)
        assert beside.resident_layers == 1 < alone_plan.resident_layers < 24
        texts = written(engine, asked, 1, reads_early=True)
    assert tokens(texts) == want
    assert [text.stats.read_early > 0 for text in texts] == [False, True]
    late = early(wanted, beside)
    assert [text.stats.plan for text in texts] == [beside, late]
    assert max(held) <= limit - weights
    # a device that is full, or texts that write much more than they read, leave no room
    with pair.engine("plain", **place, device_memory=limit) as engine:
        assert engine.check(300, 1700, reads_early=True) == engine.check(300, 1700)
        texts = written(engine, requests(GREEDY, [(300, 40), (300, 40)]), 1, reads_early=True)
        assert shares(texts) == [0.0, 0.0]


def on_a_rank(folders: tuple[Path, Path]) -> list[list[int]]:
    Pace.steps = lambda self, nbytes: 3  # type: ignore[method-assign]
    pair, texts = Pair(*folders, Group.from_environment("cpu")), list[list[int]]()
    for mode in ("plain", "hierarchical"):
        with pair.engine(mode, **SMALL, **FAR) as engine:
            asked = requests(FULL, SIZES)
            asked.insert(2, Request([], 5, FULL))
            found = list(engine.write(asked, 1, True))
            if pair.group.rank == 0:
                order = {id(request): at for at, request in enumerate(asked)}
                found.sort(key=lambda text: order[id(text.request)])
                assert isinstance(found.pop(2).error, DocumentError)
                assert sum(share > 0 for share in shares(found)) >= 2
                texts += tokens(found)
                engine.close()
    return texts


def test_two_ranks_read_early_as_one_does(folders: tuple[Path, Path], pair: Pair) -> None:
    want: list[list[int]] = []
    for mode in ("plain", "hierarchical"):
        with pair.engine(mode, **SMALL) as engine:
            want += alone(engine, requests(FULL, SIZES))
    found, nothing = run_ranks(2, on_a_rank, folders)
    assert nothing == []
    assert found == want


@pytest.mark.parametrize("guess", [0.4, 1.0, 2.5])
def test_the_pace_fills_what_waits_and_delays_little(guess: float) -> None:
    """Where a pass takes as long as its link or its compute, whatever a step is thought to take."""
    link_s, compute_s, step_s, nbytes = 1.0, 0.2, 0.01, 10**8
    pace, walls, filled = Pace(), list[float](), list[float]()
    assert pace.steps(nbytes) == 0
    pace.read_alone(guess * 100 * step_s, 100)
    for _ in range(40):
        steps = pace.steps(nbytes)
        busy = compute_s + steps * step_s
        walls.append(max(link_s, busy))
        filled.append(steps * step_s / (link_s - compute_s))
        pace.passed(nbytes, steps, walls[-1], max(0.0, link_s - busy))
    assert walls[0] == link_s
    assert sum(walls[20:]) <= 1.05 * 20 * link_s
    assert max(walls[25:]) <= 1.1 * link_s
    assert sum(filled[20:]) >= 0.6 * 20


def test_the_pace_gives_way_where_steps_delay_what_they_do_not_wait_for() -> None:
    """Steps too long for the ring hold up copies: passes wait all the same, and take longer."""
    pace, nbytes = Pace(), 10**8
    pace.read_alone(1.0, 100)
    delays = []
    for _ in range(60):
        steps = pace.steps(nbytes)
        wall = 1.0 + 0.01 * steps
        pace.passed(nbytes, steps, wall, 0.8)
        delays.append(wall - 1.0)
    assert max(delays[1:3]) > 0.3
    assert sum(delays[40:]) / 20 < 0.07


def test_an_engine_reads_early_by_its_own_pace(folders: tuple[Path, Path]) -> None:
    """Over a link that is slow enough, with no step given."""
    asked = requests(GREEDY, [(600, 12)] * 3)
    slow: dict[str, Any] = {**FAR, "link": "emulated:0.002"}
    with Pair(*folders).engine("plain", **slow) as engine:
        want = alone(engine, asked)
        texts = written(engine, asked, 1, reads_early=True)
    assert tokens(texts) == want
    assert all(share > 0 for share in shares(texts)[1:])
