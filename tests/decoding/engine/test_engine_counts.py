"""An engine's counts are exact: tokens, forwards, and every byte over the host link."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from psutil import Process

import decoding.planning.plan
import decoding.planning.request_spec
from decoding import GREEDY, Engine, Sampling
from decoding.config.defaults import SELECTION_INTERVAL_ON_DEVICE
from decoding.engine.session import SequenceState
from decoding.planning.memory_plan import MemoryPlan, MemoryRequirements, plan_memory
from decoding.planning.request_spec import RequestSpec
from offload.retrieval.selection import POLICIES
from offload.tiered.cache import TieredCache
from support.engines import MODES, SMALL, Pair
from support.models import random_tokens
from support.slow import slow_except

PROMPT = random_tokens(90).tolist()
BLOCK = 256
SHORT_BLOCK = 32  # filled by fewer forwards
LINKS = ["view", "emulated:50"]


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Pair:
    return Pair(checkpoint(max_position_embeddings=4096), checkpoint(seed=1, num_hidden_layers=1))


def token_bytes(engine: Engine) -> int:
    """Return the KV bytes of one token in one layer of the target."""
    return engine.runtime.target.config.kv_layout(1, engine.runtime.dtype).bytes(1, 1)


class Forwards:
    """Records the cache length and the streamed bytes of each forward of a target."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lengths: list[int] = []
        self._link_in: list[int] = []  # bytes over the link when each forward began
        self._cache: TieredCache | None = None
        begin_forward = TieredCache.begin_forward

        def record(cache: TieredCache, rows: int) -> None:
            self._cache = cache
            self.lengths.append(cache.length)
            self._link_in.append(cache.traffic.link_in)
            begin_forward(cache, rows)

        monkeypatch.setattr(TieredCache, "begin_forward", record)

    def reset(self) -> None:
        self.lengths, self._link_in = [], []

    def streamed(self) -> list[int]:
        assert self._cache is not None
        return [
            after - before
            for before, after in pairwise([*self._link_in, self._cache.traffic.link_in])
        ]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    return Forwards(monkeypatch)


def boundary(engine: Engine, length: int, new: int) -> int:
    """Return the tokens of prefix that a forward after `length` tokens streams."""
    spec = RequestSpec(engine.runtime.requirements, len(PROMPT), new).target
    return max(0, length - spec.recent) // spec.block * spec.block


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("resident", slow_except(range(4), 0, 1))
@pytest.mark.parametrize("new", [2, 8, SHORT_BLOCK - 19, SHORT_BLOCK - 18, 2 * SHORT_BLOCK + 7])
def test_plain_decoding_streams_the_offloaded_prefix_once_per_token(
    link: str, resident: int, new: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair.engine("plain", link=link, gpu_kv_layers=resident) as engine:
        spec = RequestSpec(engine.runtime.requirements, 20, new).target
        assert (spec.recent, spec.block) == (0, BLOCK)
        monkeypatch.setattr(decoding.planning.request_spec, "BOUNDARY_BLOCK", SHORT_BLOCK)
        assert len(list(engine.generate(PROMPT[:20], new, GREEDY))) == new
        # prefix lengths of the forwards for all tokens but the first
        prefixes = [(20 + index) // SHORT_BLOCK * SHORT_BLOCK for index in range(new - 1)]
        streamed = sum(prefixes)
        assert (streamed > 0) == (new > SHORT_BLOCK - 20 + 1)
        assert engine.stats.link_bytes_per_token == (3 - resident) * token_bytes(
            engine
        ) * streamed / (new - 1)
        traffic = engine.stats.traffic["target"]
        assert traffic.link_in == (3 - resident) * token_bytes(engine) * streamed
        # a prompt of less than a block stays on the device
        assert engine.stats.prefill_link_out == 0
        assert traffic.link_out == (3 - resident) * token_bytes(engine) * prefixes[-1]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("mode", MODES)
def test_only_the_target_uses_the_link_once_per_forward(
    mode: str, link: str, pair: Pair, forwards: Forwards
) -> None:
    prompt = PROMPT * 3  # longer than a block also in modes with blocks of 256
    with pair.engine(mode, link=link, gpu_kv_layers=1, **SMALL) as engine:
        list(engine.generate(prompt, 60, Sampling(1.0, top_p=1)))
        expected = [
            2 * token_bytes(engine) * boundary(engine, length, 60) for length in forwards.lengths
        ]
        assert forwards.streamed() == expected
        assert len(expected) == engine.stats.levels[0].stats.forwards
        assert engine.stats.link_bytes_per_token == sum(expected) / 59 > 0
        out = engine.stats.traffic["target"].link_out
        assert engine.stats.prefill_link_out == 2 * token_bytes(engine) * boundary(
            engine, len(prompt), 60
        )
        assert out == expected[-1]  # every token of the prefix is offloaded once
        assert all(
            traffic.link_in == traffic.link_out == 0
            for name, traffic in engine.stats.traffic.items()
            if name != "target"
        )


@pytest.mark.parametrize("mode", slow_except(["retrieval", "hierarchical"], 1))
def test_selections_stream_no_bytes(mode: str, pair: Pair, forwards: Forwards) -> None:
    """Forwards after equally many tokens stream the same for all policies and intervals."""
    by_length: dict[int, set[int]] = {}
    for policy, interval in [*product(POLICIES, (1,)), ("attention", 20)]:
        options = {"policy": policy, "selection_interval": interval, **SMALL}
        with pair.engine(mode, gpu_kv_layers=1, **options) as engine:
            spec = RequestSpec(engine.runtime.requirements, len(PROMPT), 60).target
            assert (spec.recent, spec.block) == (4, 8)
            forwards.reset()
            list(engine.generate(PROMPT, 60, Sampling(1.0, top_p=1)))
            for length, streamed in zip(forwards.lengths, forwards.streamed(), strict=True):
                by_length.setdefault(length, set()).add(streamed)
            assert (engine.stats.selections == 1) == (policy == "static")
    assert by_length == {
        length: {2 * token_bytes(engine) * boundary(engine, length, 60)} for length in by_length
    }
    assert len(by_length) > 20


@pytest.mark.parametrize(
    ("link", "resident", "is_offloaded"),
    [("emulated:50", 0, True), ("emulated:50", 3, False), ("view", 0, False)],
)
def test_selections_are_rarer_without_offloaded_layers(
    link: str, resident: int, is_offloaded: bool, pair: Pair
) -> None:
    with pair.engine("retrieval", link=link, gpu_kv_layers=resident) as engine:
        cache = SequenceState(engine.runtime, PROMPT, 60).retrieval
        assert cache is not None
        expected = 1 if is_offloaded else SELECTION_INTERVAL_ON_DEVICE
        assert cache.selector.min_interval == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("new", [5, 300])
def test_the_plan_requires_what_the_sequence_allocates(
    policy: str, new: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements: list[MemoryRequirements] = []

    def record(needs: MemoryRequirements, *arguments: object) -> MemoryPlan:
        requirements.append(needs)
        return plan_memory(needs, *arguments)

    monkeypatch.setattr(decoding.planning.plan, "plan_memory", record)
    with pair.engine("hierarchical", gpu_kv_layers=1, policy=policy, **SMALL) as engine:
        tokens = engine.generate(PROMPT, new, Sampling(1.0, top_p=1))
        next(tokens)
        layout = engine.runtime.target.config.kv_layout(1, engine.runtime.dtype)
        (sequence,) = engine.sessions.executor.sequences
        levels, retrieval = engine.stats.levels, sequence.retrieval
        target, needs = levels[0].cache, requirements[-1]
        drafts = [level.cache.device_bytes for level in levels if level.name == "draft"]
        assert target.device_bytes == layout.bytes(len(PROMPT) + new, 1) + layout.bytes(
            needs.target.tail, 2
        )
        assert [needs.draft] == drafts
        shape, spec = retrieval.selector.shape, POLICIES[policy].spec
        # 4 query heads for 2 KV heads
        selection = shape.scratch_bytes(layout, spec.query_rows * 2)
        selection += spec.state_bytes(layout, shape.context, shape.chunk)
        assert needs.retrieval == retrieval.device_bytes + selection
        held = target.device_bytes + needs.retrieval + needs.draft + needs.tables
        # the larger of the two phases
        assert engine.stats.plan.memory.device_bytes == held + max(needs.hidden, needs.forwards)
        tokens.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_fits_the_device_does_not_use_the_link(mode: str, pair: Pair) -> None:
    with pair.engine(mode, **SMALL) as engine:
        list(engine.generate(PROMPT, 40, GREEDY))
        assert engine.stats.plan is not None
        assert engine.stats.plan.memory.resident_layers == 3
        assert engine.stats.link_bytes_per_token == engine.stats.prefill_link_out == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_levels_account_for_every_token(mode: str, pair: Pair) -> None:
    with pair.engine(mode, prompt_lookup_ngram=0, **SMALL) as engine:  # every level a model
        tokens = list(engine.generate(PROMPT, 70, Sampling(1.0, top_p=1)))
        stats, levels = engine.stats, engine.stats.levels
        top = levels[0].stats
        assert stats.new_tokens == len(tokens) == 70
        assert top.produced == 69  # the first token belongs to prefill
        assert stats.tokens_per_verification == 69 / top.forwards
        for outer, inner in pairwise(levels):
            assert outer.stats.produced == outer.stats.forwards + outer.stats.accepted
            assert outer.stats.proposed == inner.stats.produced
            assert stats.acceptance[outer.name] == outer.stats.accepted / outer.stats.proposed
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
def test_a_draft_that_is_the_target_is_always_accepted(
    mode: str, checkpoint: Callable[..., Path]
) -> None:
    # window and budget hold the whole sequence: any cache out of sync would cost acceptance
    folder = checkpoint(max_position_embeddings=4096)
    with Pair(folder, folder).engine(
        mode, retrieval_budget=300, window=300, num_draft_tokens=6, num_inner_draft_tokens=3
    ) as engine:
        list(engine.generate(PROMPT, 200, Sampling(1.0, top_p=1)))
        assert list(engine.stats.acceptance.values()) == [1.0] * (len(engine.stats.levels) - 1)
        assert engine.stats.levels[0].stats.proposed > 150


def test_counts_are_per_request(pair: Pair) -> None:
    with pair.engine("hierarchical", **SMALL) as engine:
        held = Process().memory_info().rss
        torch.ones(1 << 30, dtype=torch.uint8)  # a peak before the request
        list(engine.generate(PROMPT, 30, GREEDY))
        first = engine.stats.as_dict()
        list(engine.generate(PROMPT, 30, GREEDY))
        second = engine.stats.as_dict()
    # on a CPU, device memory is that of the process
    for peaks in (first.pop("peak_memory_bytes"), second.pop("peak_memory_bytes")):
        assert all(held // 2 < peaks[phase] < held + (1 << 29) for phase in ("prefill", "decoding"))
    timings = {"time_to_first_token_s", "decode_s", "ms_per_token"}
    assert {key: value for key, value in first.items() if key not in timings} == {
        key: value for key, value in second.items() if key not in timings
    }
