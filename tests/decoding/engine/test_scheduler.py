"""Texts that are written at once are, token for token, what they are alone; they share passes, and
nothing else.
"""

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
from decoding.engine.request import Request
from decoding.engine.session import SequenceState
from decoding.engine.session_manager import SequenceManager
from decoding.planning import fit
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from offload.memory.host_arena import HostArena
from parallel.model.layers import VocabParallelEmbedding
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import SMALL, requests, run_alone, run_batch, tokens
from support.engines import MODES, Folders, Pair
from support.models import TINY
from support.ranks import run_ranks
from support.slow import slow_except

PLACES: list[dict[str, Any]] = [
    {},
    {"gpu_kv_layers": 1, "link": "emulated:50"},
    {"gpu_kv_layers": 0},
]
# prompts of some and of many tokens, texts of one token and of many
SIZES = [(90, 20), (7, 25), (140, 1), (33, 18), (61, 12)]
FULL = Sampling(1.0, top_p=1, seed=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sampling", "place"),
    slow_except([(FULL, PLACES[0]), (GREEDY, PLACES[1]), (FULL, PLACES[1]), (FULL, PLACES[2])], 2),
    ids=["sampled", "greedy over a link", "sampled over a link", "sampled by views"],
)
def test_texts_at_once_are_those_alone(
    mode: str, sampling: Sampling, place: dict[str, Any], models: Pair
) -> None:
    asked = requests(sampling, SIZES)
    with models.engine(mode, **SMALL, **place) as engine:
        want = run_alone(engine, asked)
        # how many go together is the batch's affair, and no level's
        for concurrency in (1, 2, 3, 9) if (mode, place) == ("hierarchical", PLACES[1]) else (3,):
            assert tokens(run_batch(engine, asked, concurrency)) == want
        assert run_alone(engine, asked[:1]) == want[:1]
    assert [len(text) for text in want] == [new for _, new in SIZES]
    assert len({token for text in want for token in text}) > 10


def test_texts_of_lookup_and_of_stop_tokens(models: Pair) -> None:
    asked = requests(FULL, SIZES)
    with models.engine("hierarchical", **{**SMALL, "prompt_lookup_ngram": 1}) as engine:
        want = run_alone(engine, asked)
        assert tokens(run_batch(engine, asked, 3)) == want
    stop = want[0][17]
    with models.engine(
        "hierarchical", stop=[stop], **{**SMALL, "prompt_lookup_ngram": 1}
    ) as engine:
        texts = run_batch(engine, asked, 3)
    for text, whole in zip(texts, want, strict=True):
        place = whole.index(stop) if stop in whole else len(whole)
        assert text.tokens == whole[:place]
        assert text.stats.finish_reason == ("stop" if stop in whole else "length")


class Counting:
    """Counts passes by the model, and the tokens they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows: dict[int, list[int]] = {}
        read = Transformer.hidden_states

        def counted(model: Transformer, tokens: Tensor, cache: Any) -> Tensor:
            self.rows.setdefault(id(model), []).append(len(tokens))
            return read(model, tokens, cache)

        monkeypatch.setattr(Transformer, "hidden_states", counted)

    def take(self) -> dict[int, list[int]]:
        rows, self.rows = self.rows, {}
        return rows


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_one_text_makes_the_passes_it_makes_alone(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, count = requests(FULL, SIZES)[:1], Counting(monkeypatch)
    with models.engine(mode, **SMALL) as engine:
        run_alone(engine, asked)
        passes = count.take()
        run_batch(engine, asked, 4)
        assert count.take() == passes
        assert engine.stats.levels[0].stats.forwards <= len(passes[id(models.target)])


def test_plain_texts_share_every_pass(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, count = requests(GREEDY, [(20, 30), (40, 30), (60, 30)]), Counting(monkeypatch)
    with models.engine("plain") as engine:
        run_batch(engine, asked, 3)
    # the first token of each is prefill's; who comes later is alone for no pass
    assert count.take() == {id(models.target): [3] * 29}


def test_texts_of_one_length_share_at_every_level(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, count = requests(FULL, [(90, 40), (120, 40), (150, 40)]), Counting(monkeypatch)
    with models.engine("hierarchical", **SMALL) as engine:
        run_alone(engine, asked)
        apart = {model: len(rows) for model, rows in count.take().items()}
        texts = run_batch(engine, asked, 3)
        shared = {model: len(rows) for model, rows in count.take().items()}
    assert shared.keys() == apart.keys() == {id(models.target), id(models.draft)}
    for model, passes in shared.items():
        assert passes < 0.6 * apart[model]
    # the target's own passes: as many as the text has that takes most
    assert texts[0].stats.levels[0].name == "target"


def test_a_text_joins_when_another_is_over(models: Pair) -> None:
    """So no more are open at once than were asked for, and none waits for a whole batch."""
    taken: list[int] = []

    def watched() -> Iterable[Request]:
        for index, request in enumerate(requests(GREEDY, [(50, 4), (50, 40), (50, 4), (50, 4)])):
            taken.append(index)
            yield request

    over: list[tuple[int, list[int]]] = []
    with models.engine("plain") as engine:
        for text in engine.generate_batch(watched(), 2):
            assert len(engine.sessions.executor.sequences) <= 2
            over.append((text.request.max_new_tokens, list(taken)))
        assert not engine.sessions.executor.sequences
    assert over == [(4, [0, 1]), (4, [0, 1, 2]), (4, [0, 1, 2, 3]), (40, [0, 1, 2, 3])]


def test_a_text_that_fails_leaves_the_others_alone(folders: Folders) -> None:
    asked = requests(GREEDY, SIZES)
    spoilt = Pair(*folders)
    whole = {**SMALL, "retrieval_budget": 200}  # lest a draft strays onto what is spoilt
    with spoilt.engine("retrieval", **whole) as engine:
        want = run_alone(engine, asked)
        used = {token for text in want for token in text} | {
            token for request in asked for token in request.prompt
        }
    bad_token = next(token for token in range(TINY["vocab_size"]) if token not in used)
    with torch.inference_mode():
        spoilt.target.embed.weight[bad_token] = torch.nan
    bad = Request([*asked[0].prompt, bad_token], 20, GREEDY)
    empty, too_long = Request([], 5, GREEDY), Request([1] * 4090, 20, GREEDY)
    mixed = [asked[0], bad, asked[1], empty, asked[2], too_long, *asked[3:]]
    with spoilt.engine("retrieval", **whole) as engine:
        texts = run_batch(engine, mixed, 3)
        assert run_alone(engine, asked) == want
    errors = [text.error for text in texts if text.error is not None]
    assert [str(error).split(":")[0][:25] for error in errors] == [
        "the logits that the model",
        "the prompt is empty",
        "4090 prompt tokens and 20",
    ]
    assert all(isinstance(error, InvalidRequestError) for error in errors)
    assert tokens([text for text in texts if text.error is None]) == want


def test_texts_that_run_into_nan_amid_others(folders: Folders) -> None:
    asked = requests(GREEDY, [(9, 30), (7, 25), (12, 40)])
    spoilt = Pair(*folders)
    with spoilt.engine("plain") as engine:
        want = run_alone(engine, asked)
    prompts = {token for request in asked for token in request.prompt}
    place = next(place for place in range(3, 30) if want[0][place] not in prompts)
    bad_token = want[0][place]
    with torch.inference_mode():
        spoilt.target.embed.weight[bad_token] = torch.nan
    with spoilt.engine("plain") as engine:
        texts = run_batch(engine, asked, 4)
    for text, whole in zip(texts, want, strict=True):
        first = whole.index(bad_token) if bad_token in whole[:-1] else None
        assert (text.error is None) == (first is None)
        assert text.tokens == (whole if first is None else whole[: first + 1])
    assert texts[0].error is not None


def test_memory_that_runs_out_together_does_alone(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(FULL, SIZES)
    with models.engine("retrieval", **SMALL) as engine:
        want = run_alone(engine, asked)
        read, refused = Transformer.hidden_states, list[int]()

        def short(model: Transformer, tokens: Tensor, cache: Any) -> Tensor:
            if len(tokens) > 9:
                refused.append(len(tokens))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return read(model, tokens, cache)

        monkeypatch.setattr(Transformer, "hidden_states", short)
        texts = run_batch(engine, asked, 4)
        assert tokens(texts) == want
        assert len(refused) == 1  # what it left half made is not gone on with
        assert sum(text.stats.concurrency == 1 for text in texts) >= 4
        monkeypatch.setattr(
            VocabParallelEmbedding, "logits", lambda self, x: (_ for _ in ()).throw(MemoryError())
        )
        texts = run_batch(engine, asked[:2], 2)
        assert [type(text.error) for text in texts] == [
            InsufficientMemoryError,
            InsufficientMemoryError,
        ]
        assert not engine.sessions.executor.sequences


def test_an_error_that_is_not_a_text_own_ends_all_and_leaves_nothing_open(models: Pair) -> None:
    def broken(done: int, total: int) -> None:
        raise OSError("no terminal")

    asked = requests(FULL, SIZES)
    asked[2] = replace(asked[2], progress=broken)
    with models.engine("hierarchical", **SMALL) as engine:
        with pytest.raises(OSError, match="no terminal"):
            run_batch(engine, asked, 3)
        assert not engine.sessions.executor.sequences
        assert tokens(run_batch(engine, asked[:2], 2)) == run_alone(engine, asked[:2])


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_the_caches_of_a_text_are_gone_before_another_is_opened(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[weakref.ref[Any]] = []
    alive: list[int] = []
    opened = SequenceManager.open

    def watched(sessions: SequenceManager, *arguments: Any, **more: Any) -> SequenceState:
        alive.append(sum(cache() is not None for cache in caches))
        session = opened(sessions, *arguments, **more)
        caches.extend(weakref.ref(level.cache) for level in session.levels)
        return session

    monkeypatch.setattr(SequenceManager, "open", watched)
    asked = requests(GREEDY, [(50, 4), (50, 40), (50, 4), (50, 4)])
    with models.engine(mode, **SMALL) as engine:
        list(engine.generate(asked[0].prompt, 3, GREEDY))
        for text in engine.generate_batch(asked, 2):
            assert text.stats.as_dict()["forwards"]
        levels = len(engine.stats.levels)
    # one text has been read when the second is opened, and goes on beside all others
    assert alive == [0, 0, levels, levels, levels]


def test_giving_up_ends_all_texts(models: Pair) -> None:
    asked = requests(FULL, SIZES)
    with models.engine("hierarchical", **SMALL) as engine:
        want = run_alone(engine, asked)
        for _ in engine.generate_batch(asked, 3):
            with pytest.raises(TierForceError, match="one text at a time"):
                next(engine.generate(asked[0].prompt, 5, GREEDY))
            break
        assert not engine.sessions.executor.sequences
        assert run_alone(engine, asked) == want


def test_memory_is_shared_out_before_texts_are_opened(checkpoint: Callable[..., Path]) -> None:
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, asked = Pair(deep, deep), requests(GREEDY, [(1200, 6)] * 4)
    with models.engine("plain", link="emulated:50", device_memory=10**9) as engine:
        want = run_alone(engine, asked)
        whole, weights = engine.plan(1200, 6), engine.runtime.weight_bytes
    assert whole.resident_layers == 8
    limit = weights + 3 * (whole.device_bytes - 1)
    with models.engine("plain", link="emulated:50", device_memory=limit) as engine:
        assert engine.plan(1200, 6) == whole
        texts = run_batch(engine, asked, 3)
        assert tokens(texts) == want
        for text in texts:
            plan = text.stats.plan
            assert plan is not None
            assert 0 < plan.resident_layers < 8
            assert 3 * plan.device_bytes <= limit - weights
        arenas: list[HostArena] = engine.sessions._arenas
        assert len(arenas) == 3
        assert all(arena.nbytes for arena in arenas)


def test_a_text_on_the_device_goes_with_one_over_the_link(checkpoint: Callable[..., Path]) -> None:
    """And with one that is too short for a prefix on the host."""
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, asked = Pair(deep, deep), requests(GREEDY, [(40, 20), (1000, 14), (950, 8)])
    with models.engine("plain", link="emulated:50", device_memory=10**9) as engine:
        want = run_alone(engine, asked)
        whole, weights = engine.plan(1000, 14), engine.runtime.weight_bytes
    limit = weights + 2 * (whole.device_bytes - 1)
    for place, expected in (({"device_memory": limit}, 8), ({"gpu_kv_layers": 2}, 2)):
        with models.engine("plain", link="emulated:50", **place) as engine:
            texts = run_batch(engine, asked, 2)
        resident = [text.stats.plan.resident_layers for text in texts if text.stats.plan]
        assert resident[0] == expected
        assert resident[1] < 8
        assert tokens(texts) == want


def test_a_text_too_large_for_its_share_is_written_alone(checkpoint: Callable[..., Path]) -> None:
    deep = checkpoint(num_hidden_layers=8, max_position_embeddings=4096)
    models, asked = Pair(deep, deep), requests(GREEDY, [(100, 20), (2000, 8), (120, 14), (90, 9)])
    with models.engine("plain", device_memory=10**9) as engine:
        want = run_alone(engine, asked)
        need, weights = engine.plan(2000, 8).device_bytes, engine.runtime.weight_bytes
    choices = {"device_memory": weights + need + 1000, "gpu_kv_layers": 8}
    with models.engine("plain", **choices) as engine:
        texts = list(engine.generate_batch(asked, 3))
        assert len(engine.sessions._arenas) == 1
    assert [text.stats.concurrency for text in texts] == [3, 3, 3, 1]
    assert texts[-1].request is asked[1]
    order = {id(request): at for at, request in enumerate(asked)}
    assert tokens(sorted(texts, key=lambda text: order[id(text.request)])) == want


def on_a_rank(folders: Folders, mode: str) -> list[list[int]]:
    models, texts = Pair(*folders, TensorParallelGroup.from_environment("cpu")), list[list[int]]()
    with models.engine(mode, **SMALL, **PLACES[1]) as engine:
        asked = requests(FULL, SIZES)
        asked.insert(2, Request([], 5, FULL))
        found = list(engine.generate_batch(asked, 3))
        if models.group.rank == 0:
            order = {id(request): at for at, request in enumerate(asked)}
            found.sort(key=lambda text: order[id(text.request)])
            assert isinstance(found.pop(2).error, InvalidRequestError)
            texts += tokens(found)
            texts += run_alone(engine, asked[:1])
            engine.close()
    return texts


@pytest.mark.parametrize("mode", slow_except(["hierarchical", "plain"]))
def test_two_ranks_write_what_one_writes(mode: str, folders: Folders, models: Pair) -> None:
    with models.engine(mode, **SMALL) as engine:
        want = run_alone(engine, requests(FULL, SIZES))
    want.append(want[0])
    found, nothing = run_ranks(2, on_a_rank, folders, mode)
    assert nothing == []
    assert found == want


def test_texts_share_passes_unasked_where_that_pays(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where short passes are recorded, layers as small as these take longer to launch."""
    for mode, graphs, count in (
        ("retrieval", False, 5),
        ("retrieval", True, 1),
        ("plain", True, 5),
    ):
        with models.engine(mode, **SMALL, graphs=graphs) as engine:
            assert engine.max_concurrency(100, 20, 5) == count
    monkeypatch.setattr(fit, "SHARED_LAYER_BYTES", 1000)
    with models.engine("retrieval", **SMALL, graphs=True) as engine:
        assert engine.max_concurrency(100, 20, 5) == 5
