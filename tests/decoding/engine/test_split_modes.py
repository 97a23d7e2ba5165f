"""Split modes draft against high bytes, with the target's exact logits and little streaming."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.decode_loop import PrefilledPrompt
from decoding import GREEDY, Engine, Sampling, Settings
from decoding.engine.session import SequenceState
from decoding.planning.memory_plan import device_breakdown
from decoding.planning.request_spec import RequestSpec
from offload.errors import TierForceError
from offload.memory.host_arena import HostArena
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

MODES = ["split", "split-retrieval", "split-speculative", "split-hierarchical"]
PROMPT = prompt("argparse")[:700]
NEW = 40


def make_engine(mode: str, group: TensorParallelGroup | None = None, **options: Any) -> Engine:
    """Return an engine of the demo pair that uses all levels after a few hundred tokens."""
    settings = Settings(
        mode=mode,
        **{
            "dtype": "bfloat16",
            "retrieval_budget": 200,
            "num_draft_tokens": 8,
            "num_inner_draft_tokens": 3,
            "link": "emulated:50",
            "gpu_kv_layers": 1,
            **options,
        },
    )
    draft = DEMO / "draft" if "speculative" in mode or "hierarchical" in mode else None
    engine = Engine.from_pretrained(DEMO / "target", draft, settings, group=group)
    engine.scheduler.stop_tokens = frozenset()
    return engine


@pytest.mark.parametrize("length", slow_except([900, 2700]))
def test_logits_equal_those_without_split_layers_bitwise(length: int) -> None:
    """In forwards of several widths up to this length, with any number of tokens accepted."""
    rng = random.Random(0)
    engine = make_engine("split", link="view")
    runtime, tokens = engine.runtime, torch.tensor((3 * prompt("argparse"))[:length])
    session = SequenceState(runtime, tokens[:300].tolist(), length - 300)
    target = RequestSpec(runtime.requirements, 300, length - 300).target
    spec = replace(target, compressed=False).with_placement(1)
    specs = [
        spec,
        spec.with_placement(1, 0, 5),
        replace(spec, compressed=True).with_placement(1, 0, 2),
    ]
    caches = [
        TieredCache(
            spec, runtime.link, session.target.rotary, HostArena(runtime.link, runtime.dtype)
        )
        for spec in specs
    ]
    with torch.inference_mode():
        for cache in caches:
            with Prefill(cache, 300) as prefill:
                runtime.target.prefill(tokens[:300], prefill, 256)
        while caches[0].length + 65 < length:
            rows, start = rng.choice((1, 7, 33, 65, 65)), caches[0].length
            part = tokens[start : start + rows]
            expected, *split_logits = (runtime.target(part, cache, rows) for cache in caches)
            assert all(torch.equal(expected, logits) for logits in split_logits)
            accepted = rng.randint(1, rows)
            for cache in caches:
                cache.advance(accepted)
    sizes = [cache.shape.host_bytes for cache in caches]
    assert sizes[1] < sizes[2] < sizes[0]
    engine.close()


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
@pytest.mark.parametrize("split", slow_except([None, 2]))
def test_drafts_against_high_bytes_are_nearly_always_accepted(mode: str, split: int | None) -> None:
    engine = make_engine(mode, split_kv_layers=split)
    assert len(list(engine.generate(PROMPT, NEW, GREEDY))) == NEW
    stats = engine.stats
    names = [level.name for level in stats.levels]
    assert names[:2] == ["target", "split"]
    assert ("retrieval" in names) == ("retrieval" in mode or "hierarchical" in mode)
    assert ("draft" in names) == ("speculative" in mode or "hierarchical" in mode)
    accepted = stats.acceptance["target"]
    assert accepted is not None
    assert accepted > (0.8 if split is None else 0.5)
    assert stats.plan is not None
    assert stats.plan.memory.split_layers == (5 if split is None else 2)
    # 4 of 16 bits are streamed in split layers, 12 in the others
    forwards = stats.levels[0].stats.forwards
    layout = engine.runtime.requirements.layout
    streamed = stats.traffic["target"].link_in - stats.prefill_link_in
    bits = 5 * 4 if split is None else 2 * 4 + 3 * 12
    assert streamed <= forwards * layout.bytes(len(PROMPT) + NEW, 1) * bits / 16
    assert streamed >= forwards * layout.bytes(len(PROMPT) - 128, 1) * bits / 16
    engine.close()


def test_deferred_split_layers_do_not_change_the_output() -> None:
    """The memory has room for all high bytes, but not while it holds the prompt's hidden states."""
    outputs, plans = [], []
    room: int | None = None
    for _ in range(2):
        engine = make_engine("split", prefill_chunk=2000, device_memory=room)
        outputs.append(list(engine.generate(PROMPT, NEW, Sampling(0.8, top_p=1, seed=3))))
        stats, needs = engine.stats, engine.runtime.requirements
        assert stats.plan is not None
        plans.append(stats.plan.memory)
        deferred_bytes = stats.plan.prompt_spec.deferred_bytes(len(PROMPT))
        # all tokens of on-device layers are loaded, and those before the boundary of split layers
        assert 0.8 * deferred_bytes <= stats.prefill_link_in <= deferred_bytes
        phases = device_breakdown(stats.plan.spec.memory, 1, 6, 5)
        room = needs.weight_bytes + max(sum(tiers.values()) for tiers in phases)
        engine.close()
    early, deferred = plans
    assert (early.deferred_layers, early.split_layers) == (0, 5)
    assert deferred.deferred_layers > deferred.resident_layers == 1
    assert deferred.split_layers == 5
    assert outputs[0] == outputs[1]


def generate_on_rank(mode: str, folder: Path) -> None:
    group = TensorParallelGroup.from_environment("cpu")
    engine = make_engine(mode, group, split_kv_layers=3)
    if group.rank:
        engine.run_worker()
        return
    tokens = list(engine.generate(PROMPT, NEW, GREEDY))
    stats = engine.stats
    assert len(tokens) == NEW
    accepted = stats.acceptance["target"]
    assert accepted is not None
    assert accepted > 0.6
    engine.close()
    (folder / mode).touch()


@pytest.mark.slow
def test_two_ranks_draft_against_the_high_bytes_of_their_heads(tmp_path: Path) -> None:
    run_ranks(2, generate_on_rank, "split-hierarchical", tmp_path)
    assert (tmp_path / "split-hierarchical").exists()


def test_32_bit_kv_cannot_be_split() -> None:
    with pytest.raises(TierForceError, match="needs elements of 16 bits, found float32"):
        make_engine("split", dtype="float32")
    with pytest.raises(TierForceError, match="`compress_offload` saves nothing with float32"):
        make_engine("plain", dtype="float32", compress_offload=True)


def test_more_split_layers_than_the_model_has_raise() -> None:
    with pytest.raises(TierForceError, match="`split_kv_layers` 9: the model has 6 layers"):
        make_engine("split", split_kv_layers=9)
    with pytest.raises(TierForceError, match="`gpu_kv_layers` 4 and `split_kv_layers` 3: the"):
        make_engine("split", gpu_kv_layers=4, split_kv_layers=3)
    with pytest.raises(TierForceError, match="needs a split mode"):
        Settings(mode="hierarchical", split_kv_layers=3)


@pytest.mark.parametrize("mode", slow_except(["split", "split-retrieval", "split-speculative"]))
def test_selected_keys_are_read_in_split_layers(mode: str) -> None:
    attended = {}  # bytes of a forward
    for budget in (0, 64):
        engine = make_engine(mode, split_budget=budget)
        list(engine.generate(PROMPT, NEW, Sampling(1.0, top_p=1, seed=1)))
        stats = engine.stats
        assert stats.as_dict()["split_budget"] == budget
        forwards = next(each for each in stats.levels if each.name == "split").stats.forwards
        attended[budget] = stats.traffic["split"].attended / forwards
        layout = engine.runtime.requirements.layout
        engine.close()
    added = 5 * layout.bytes(64, 1) / 8  # five split layers
    assert attended[64] - attended[0] == pytest.approx(added, rel=0.2)


def test_budgets_of_split_layers_are_checked() -> None:
    with pytest.raises(TierForceError, match="`split_budget` 64 needs a split mode: use `mode` sp"):
        Settings(mode="retrieval", split_budget=64)
    with pytest.raises(TierForceError, match="`split_budget` 4 is less than one chunk of 8"):
        Settings(mode="split", split_budget=4)
    assert Settings(split_budget=0).split_budget == 0


@pytest.mark.parametrize("split", slow_except([5, 2], 1))
@pytest.mark.slow
def test_a_prefilled_sequence_can_be_decoded_twice(split: int) -> None:
    """High bytes, outliers, selected keys and other layers' retrieval cache are restored."""
    options = {"split_kv_layers": split, "split_budget": 64}
    engine = make_engine("split", num_draft_tokens=5, **options)
    session = SequenceState(engine.runtime, PROMPT, 70)
    prefilled = PrefilledPrompt(session)
    first, again = (prefilled.run(Sampling(1.0, top_p=1, seed=1)) for _ in range(2))
    assert first.tokens == again.tokens > 60
    assert first.tokens_per_verification == again.tokens_per_verification
    engine.close()
