"""What an engine counts is what happened: tokens, passes, and every byte over the link."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from psutil import Process

import decoding.planning.fit
import decoding.planning.memory_requirements
from decoding import GREEDY, Engine, Sampling
from decoding.config.defaults import SELECTION_INTERVAL_ON_DEVICE
from decoding.engine.session import SequenceState
from decoding.planning.memory_plan import MemoryPlan, MemoryRequirements, plan_memory
from offload.retrieval.selection import POLICIES
from offload.tiered.cache import TieredCache
from support.engines import MODES, SMALL, Pair
from support.models import random_tokens
from support.slow import slow_except

PROMPT = random_tokens(90).tolist()
BLOCK = 256
SHORT_BLOCK = 32  # takes fewer passes to fill
LINKS = ["view", "emulated:50"]


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Pair:
    return Pair(checkpoint(max_position_embeddings=4096), checkpoint(seed=1, num_hidden_layers=1))


def token_bytes(engine: Engine) -> int:
    """KV of one token in one layer of the target."""
    return engine.runtime.target.config.kv_layout(1, engine.runtime.dtype).layer_token_bytes


class Passes:
    """What every pass of a target streams, by the tokens it starts from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lengths: list[int] = []
        self._before: list[int] = []  # bytes over the link when each pass began
        self._cache: TieredCache | None = None
        begin = TieredCache.begin_forward

        def noted(cache: TieredCache, rows: int) -> None:
            self._cache = cache
            self.lengths.append(cache.length)
            self._before.append(cache.traffic.link_in)
            begin(cache, rows)

        monkeypatch.setattr(TieredCache, "begin_forward", noted)

    def streamed(self) -> list[int]:
        assert self._cache is not None
        return [
            after - before
            for before, after in pairwise([*self._before, self._cache.traffic.link_in])
        ]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


def boundary(engine: Engine, length: int, new: int) -> int:
    """Tokens of prefix that a pass from `length` tokens streams."""
    recent, block = engine.runtime.requirements.recent(len(PROMPT), new)
    return max(0, length - recent) // block * block


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("resident", slow_except(range(4), 0, 1))
@pytest.mark.parametrize("new", [2, 8, SHORT_BLOCK - 19, SHORT_BLOCK - 18, 2 * SHORT_BLOCK + 7])
def test_plain_decoding_streams_the_host_prefix_once_a_token(
    link: str, resident: int, new: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair.engine("plain", link=link, gpu_kv_layers=resident) as engine:
        assert engine.runtime.requirements.recent(20, new) == (0, BLOCK)
        monkeypatch.setattr(decoding.planning.memory_requirements, "BOUNDARY_BLOCK", SHORT_BLOCK)
        assert len(list(engine.generate(PROMPT[:20], new, GREEDY))) == new
        # by the pass for each token but the first
        written = [(20 + index) // SHORT_BLOCK * SHORT_BLOCK for index in range(new - 1)]
        streamed = sum(written)
        assert (streamed > 0) == (new > SHORT_BLOCK - 20 + 1)
        assert engine.stats.link_bytes_per_token == (3 - resident) * token_bytes(
            engine
        ) * streamed / (new - 1)
        traffic = engine.stats.traffic["target"]
        assert traffic.link_in == (3 - resident) * token_bytes(engine) * streamed
        # a prompt of less than a block stays on the device
        assert engine.stats.prefill_link_out == 0
        assert traffic.link_out == (3 - resident) * token_bytes(engine) * written[-1]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("mode", MODES)
def test_only_the_target_uses_the_link_and_once_a_pass(
    mode: str, link: str, pair: Pair, passes: Passes
) -> None:
    prompt = PROMPT * 3  # past the block of the modes that have one of 256
    with pair.engine(mode, link=link, gpu_kv_layers=1, **SMALL) as engine:
        list(engine.generate(prompt, 60, Sampling(1.0, top_p=1)))
        wanted = [
            2 * token_bytes(engine) * boundary(engine, length, 60) for length in passes.lengths
        ]
        assert passes.streamed() == wanted
        assert len(wanted) == engine.stats.levels[0].stats.forwards
        assert engine.stats.link_bytes_per_token == sum(wanted) / 59 > 0
        out = engine.stats.traffic["target"].link_out
        assert engine.stats.prefill_link_out == 2 * token_bytes(engine) * boundary(
            engine, len(prompt), 60
        )
        assert out == wanted[-1]  # every token of the prefix left once
        assert all(
            each.link_in == each.link_out == 0
            for name, each in engine.stats.traffic.items()
            if name != "target"
        )


@pytest.mark.parametrize("mode", ["retrieval", "hierarchical"])
def test_no_choice_costs_a_byte_over_the_link(mode: str, pair: Pair, passes: Passes) -> None:
    """A pass from so many tokens streams the same, whatever follows the target and however often it
    chooses.
    """
    by_length: dict[int, set[int]] = {}
    for policy, refresh in [*product(POLICIES, (1,)), ("attention", 20)]:
        choices = {"policy": policy, "selection_interval": refresh, **SMALL}
        with pair.engine(mode, gpu_kv_layers=1, **choices) as engine:
            assert engine.runtime.requirements.recent(len(PROMPT), 40) == (4, 8)
            passes.lengths, passes._before = [], []
            list(engine.generate(PROMPT, 40, Sampling(1.0, top_p=1)))
            for length, streamed in zip(passes.lengths, passes.streamed(), strict=True):
                by_length.setdefault(length, set()).add(streamed)
            assert engine.stats.retrieval is not None
            assert (engine.stats.retrieval.selector.selections == 1) == (policy == "static")
    assert by_length == {
        length: {2 * token_bytes(engine) * boundary(engine, length, 40)} for length in by_length
    }
    assert len(by_length) > 20


@pytest.mark.parametrize(
    ("link", "resident", "often"),
    [("emulated:50", 0, True), ("emulated:50", 3, False), ("view", 0, False)],
)
def test_where_a_choice_costs_compute_it_comes_seldom(
    link: str, resident: int, often: bool, pair: Pair
) -> None:
    with pair.engine("retrieval", link=link, gpu_kv_layers=resident) as engine:
        cache = SequenceState(engine.runtime, PROMPT, 60).retrieval
        assert cache is not None
        assert cache.selector.min_interval == (1 if often else SELECTION_INTERVAL_ON_DEVICE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("new", [5, 300])
def test_the_plan_asks_for_what_the_session_allocates(
    policy: str, new: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MemoryRequirements] = []

    def noted(needs: MemoryRequirements, *arguments: object) -> MemoryPlan:
        asked.append(needs)
        return plan_memory(needs, *arguments)

    monkeypatch.setattr(decoding.planning.fit, "plan_memory", noted)
    with pair.engine("hierarchical", gpu_kv_layers=1, policy=policy, **SMALL) as engine:
        next(engine.generate(PROMPT, new, Sampling(1.0, top_p=1)))
        layout = engine.runtime.target.config.kv_layout(1, engine.runtime.dtype)
        levels, middle = engine.stats.levels, engine.stats.retrieval
        target = levels[0].cache
        needs, fixed = (
            asked[-1],
            [level.cache.device_bytes for level in levels if level.name == "draft"],
        )
        assert target.device_bytes == layout.bytes(len(PROMPT) + new, 1) + layout.bytes(
            needs.target.tail, 2
        )
        assert [needs.draft] == fixed
        shape, traits = middle.shape, POLICIES[policy].spec
        choosing = shape.scratch_bytes(
            layout, traits.query_rows * 2
        )  # of 4 query heads to 2 KV heads
        choosing += traits.state_bytes(layout, shape.context, shape.chunk)
        assert needs.retrieval == middle.device_bytes + choosing
        held = target.device_bytes + needs.retrieval + needs.draft + needs.tables
        # in the larger phase
        assert engine.stats.plan.device_bytes == held + max(needs.hidden, needs.forwards)


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_fits_the_device_leaves_the_link_alone(mode: str, pair: Pair) -> None:
    with pair.engine(mode, **SMALL) as engine:
        list(engine.generate(PROMPT, 40, GREEDY))
        assert engine.stats.plan is not None
        assert engine.stats.plan.resident_layers == 3
        assert engine.stats.link_bytes_per_token == engine.stats.prefill_link_out == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_levels_account_for_every_token(mode: str, pair: Pair) -> None:
    with pair.engine(mode, prompt_lookup_ngram=0, **SMALL) as engine:  # every level a model
        text = list(engine.generate(PROMPT, 70, Sampling(1.0, top_p=1)))
        stats, levels = engine.stats, engine.stats.levels
        top = levels[0].stats
        assert stats.new_tokens == len(text) == 70
        assert top.produced == 69  # the first token is prefill's
        assert stats.tokens_per_verification == 69 / top.forwards
        for above, below in pairwise(levels):
            assert above.stats.produced == above.stats.forwards + above.stats.accepted
            assert above.stats.proposed == below.stats.produced
            assert stats.acceptance[above.name] == above.stats.accepted / above.stats.proposed
        assert levels[-1].stats.forwards == levels[-1].stats.produced
        names = {
            "hierarchical": ["target", "retrieval", "draft"],
            "retrieval": ["target", "retrieval"],
        }
        assert [level.name for level in levels] == names.get(
            mode, ["target", "draft"] if mode == "speculative" else ["target"]
        )
        assert set(stats.acceptance) == {level.name for level in levels[:-1]}


@pytest.mark.parametrize("mode", ["speculative", "hierarchical"])
def test_a_draft_that_is_the_target_is_always_right(
    mode: str, checkpoint: Callable[..., Path]
) -> None:
    # with a window and a budget that hold the whole text: any cache out of step would cost
    # acceptance
    folder = checkpoint(max_position_embeddings=4096)
    with Pair(folder, folder).engine(
        mode, retrieval_budget=300, window=300, num_draft_tokens=6, num_inner_draft_tokens=3
    ) as engine:
        list(engine.generate(PROMPT, 200, Sampling(1.0, top_p=1)))
        assert list(engine.stats.acceptance.values()) == [1.0] * (len(engine.stats.levels) - 1)
        assert engine.stats.levels[0].stats.proposed > 150


def test_counts_start_anew_with_each_text(pair: Pair) -> None:
    with pair.engine("hierarchical", **SMALL) as engine:
        held = Process().memory_info().rss
        torch.ones(1 << 30, dtype=torch.uint8)  # a peak before the text
        list(engine.generate(PROMPT, 30, GREEDY))
        first = engine.stats.as_dict()
        list(engine.generate(PROMPT, 30, GREEDY))
        second = engine.stats.as_dict()
    # of this process, for here it is the device
    for peaks in (first.pop("peak_memory_bytes"), second.pop("peak_memory_bytes")):
        assert all(held // 2 < peaks[phase] < held + (1 << 29) for phase in ("prefill", "decoding"))
    clocks = {"time_to_first_token_s", "decode_s", "ms_per_token"}
    assert {key: value for key, value in first.items() if key not in clocks} == {
        key: value for key, value in second.items() if key not in clocks
    }
