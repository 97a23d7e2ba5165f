"""Short passes in fixed shapes give what others give, wherever the text stands; and no recording is trusted blindly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from driving import BLOCK, CAPACITY, LAYOUT, QKV, RECENT, first, forward, joined, pair, prefill, speculate, text
from engines import DEMO, Pair
from links import CPU, make_test_link
from models import random_tokens
from reference import random_rotary
from test_greedy import prompt
from torch import Tensor

from bench.ranks import run_ranks
from decoding import Engine, Settings
from offload import POLICIES, FixedPass, RetrievalShape, SlotCache, StreamingCache
from parallel import Group, Llama, Replay, load_model

DRAFT = 6
SHAPE = RetrievalShape(48, 4, 16, RECENT, BLOCK, CAPACITY, DRAFT + 1, CAPACITY)


class Fixed:
    """The fixed passes of a cache, one for each number of rows, for as long as the cache lives."""

    def __init__(self, cache: SlotCache):
        self.cache = cache
        self.passes: dict[int, FixedPass] = {}

    def forward(self, tokens: list[QKV]) -> Tensor:
        rows = len(tokens[0][0])
        fixed = self.passes.setdefault(rows, FixedPass(self.cache, rows))
        fixed.place()
        fixed.begin(rows)
        return torch.stack([fixed.attend(layer, *qkv, fixed.length) for layer, qkv in enumerate(tokens)])


def same(cache: SlotCache, fixed: Fixed, tokens: list[QKV], wanted: Tensor) -> None:
    """Right after a pass as it is: the fixed pass gives the same, and leaves the same behind."""
    left = [[None if x is None else x.clone() for x in cache.buffers(layer)] for layer in range(LAYOUT.layers)]
    torch.testing.assert_close(fixed.forward(tokens), wanted, atol=1e-5, rtol=1e-5)
    for layer, kept in enumerate(left):
        for found, was in zip(cache.buffers(layer), kept, strict=True):
            if found is not None:
                torch.testing.assert_close(found, was, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("chunk", "summary"), [(1, 0), (4, 0), (4, 16), (4, 7)])
@pytest.mark.parametrize("start", [5, 40, 70])  # no prefix, within the budget, past it
def test_on_a_retrieval_cache(start: int, chunk: int, summary: int, policy: str) -> None:
    shape, rng = replace(SHAPE, chunk=chunk, summary=summary), random.Random(start)
    target, middle = pair(make_test_link("view"), 2, shape, policy)
    fixed, story = Fixed(middle), text(start)
    prefill(target, story, 32)

    def check(known: list[QKV], out: Tensor) -> None:
        tokens = [tuple(x[-out.shape[1] :] for x in qkv) for qkv in known]
        same(middle, fixed, tokens, out)

    for _ in range(12):
        story, _ = speculate(target, middle, story, DRAFT, rng, check)
    assert target.boundary > start
    assert set(fixed.passes) == {1, 2, 3}


def test_weights_of_summaries_go_with_the_summaries() -> None:
    shape = replace(SHAPE, budget=64)
    target, middle = pair(make_test_link("view"), 2, shape)
    fixed = Fixed(middle)
    prefill(target, text(60), 32)
    forward(target, text(7))  # 67 tokens are too many: some are summarised
    assert middle._summaries
    target.advance(1)
    forward(target, text(1))  # 62 are not
    assert not middle._summaries
    tokens = text(2)
    same(middle, fixed, tokens, forward(middle, tokens))


def test_on_a_streaming_cache_that_slides_and_takes_back() -> None:
    cache = StreamingCache(LAYOUT, 3, 16, 8, random_rotary(LAYOUT, 27), CPU)
    fixed, rng = Fixed(cache), random.Random(0)
    while cache.length < 100:
        tokens = text(rng.randint(1, 5))
        same(cache, fixed, tokens, forward(cache, tokens))
        cache.advance(len(tokens[0][0]))
        cache.crop(cache.length - rng.randint(0, 1))
    assert cache._dropped > 27


def test_a_pass_past_the_buffer_is_refused() -> None:
    target, middle = pair(make_test_link("view"), 2, replace(SHAPE, fresh=0, rows=1))
    prefill(target, text(70), 32)
    room = middle.slots - middle.place(middle.length)[0]
    Fixed(middle).forward(text(room))
    with pytest.raises(ValueError, match=f"do not fit a buffer of {middle.slots}"):
        Fixed(middle).forward(text(room + 1))


def test_a_rewound_cache_keeps_its_addresses() -> None:
    target, middle = pair(make_test_link("view"), 2, SHAPE)
    prefill(target, text(70), 32)
    fixed, tokens, state = Fixed(middle), text(2), middle.snapshot()
    wanted = fixed.forward(tokens)
    fixed.forward(joined(text(1), first(tokens, 1)))
    middle.restore(state)
    assert torch.equal(fixed.forward(tokens), wanted)


class Recorder(Group):
    """A group whose recordings do what a test says."""

    def __init__(self, again: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]):
        super().__init__()
        self.again = again

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return self.again(function)


def wrong(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: function() * 1.5


def impossible(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def not_a_number(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: function() * torch.nan


@pytest.fixture(scope="module")
def draft() -> Llama:
    return load_model(DEMO / "draft", Group(), "float32")


def streaming(model: Llama) -> StreamingCache:
    layout = model.config.kv_layout(1, torch.float32)
    return StreamingCache(layout, 4, 64, 64, model.config.rotary(132, 132, torch.float32, CPU), CPU)


@pytest.mark.parametrize(
    ("record", "state"), [(lambda run: run, "recorded"), (wrong, "refused"), (impossible, "refused"), (not_a_number, "refused")]
)
def test_what_is_recorded_is_compared_first(record: Any, state: str, draft: Llama) -> None:
    replay, cache, plain = Replay(Recorder(record), True), streaming(draft), streaming(draft)
    for seed in range(12):
        tokens = random_tokens(1 + seed % 2, seed=seed)
        found, wanted = replay(draft, tokens, cache, 1), draft(tokens, plain, 1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        cache.advance(len(tokens))
        plain.advance(len(tokens))
    counts = {"recorded": 0, "refused": 0, state: 2}  # passes of one token, and of two
    assert replay.counts == counts


def test_logits_outlive_the_next_pass(draft: Llama) -> None:
    replay, cache = Replay(Group(), True), streaming(draft)
    outs = [replay(draft, random_tokens(1, seed=seed), cache, 1) for seed in range(6)]
    kept = [out.clone() for out in outs]
    replay(draft, random_tokens(1, seed=9), cache, 1)
    assert all(torch.equal(*pair) for pair in zip(outs, kept, strict=True))
    assert not torch.equal(outs[-1], outs[-2])


def test_long_passes_and_targets_go_as_they_are(draft: Llama) -> None:
    replay, cache = Replay(Recorder(impossible), True), streaming(draft)
    for _ in range(4):
        replay(draft, random_tokens(19), cache, 1)
    assert replay.counts == {"recorded": 0, "refused": 0}


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize("mode", ["retrieval", "speculative", "hierarchical"])
@pytest.mark.parametrize("budget", [300, 4096])
def test_greedy_text_is_the_same(mode: str, budget: int, demo: Pair) -> None:
    wanted = demo.text("plain", prompt("typing"), 64)
    choices: dict[str, Any] = {"budget": budget, "link": "emulated:4", "resident_layers": 1, "device_memory": 1 << 30}
    with demo.engine(mode, graphs=True, **choices) as engine:
        assert list(engine.generate(prompt("typing"), 64)) == wanted
        kinds = engine.stats.as_dict()["fixed_shapes"]
        assert kinds["recorded"] > 0
        assert kinds["refused"] == 0
    with demo.engine(mode, graphs=False, **choices) as engine:
        assert list(engine.generate(prompt("typing"), 64)) == wanted
        assert engine.stats.as_dict()["fixed_shapes"] is None


def on_a_rank(tokens: list[int]) -> tuple[list[int], bool, bool | None]:
    group = Group.from_environment("cpu")
    settings = Settings(dtype="float32", budget=300, graphs=True)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.stop_tokens = frozenset()
    if group.rank:
        engine.follow()
        return [], group.records(), None
    found = list(engine.generate(tokens, 64))
    engine.close()
    assert engine.stats.replay is not None
    return found, group.records(), engine.stats.replay.counts["recorded"] > 0


def test_over_two_ranks(demo: Pair) -> None:
    wanted = demo.text("plain", prompt("typing"), 64)
    (found, possible, recorded), (nothing, too, _) = run_ranks(2, on_a_rank, prompt("typing"))
    assert (found, nothing, recorded) == (wanted, [], True)
    assert possible is too is False  # a CPU records nothing


def test_by_default_a_cpu_does_without() -> None:
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", Settings(budget=300))
    assert engine.models.settings.graphs is False
    engine.close()
