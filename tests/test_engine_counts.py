"""What an engine counts is what happened: tokens, passes, and every byte over the link."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from engines import Pair
from models import random_tokens

from decoding import Engine, Sampling

PROMPT = random_tokens(90).tolist()
MODES = ["plain", "retrieval", "speculative", "hierarchical"]
SMALL = {"budget": 32, "chunk_size": 4, "window": 12, "sinks": 2, "draft_length": 5}
TAIL = 256
LINKS = ["view", "emulated:50"]


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Pair:
    return Pair(checkpoint(max_position_embeddings=4096), checkpoint(seed=1, num_hidden_layers=1))


def token_bytes(engine: Engine) -> int:
    """KV of one token in one layer of the target."""
    return engine.models.target.config.kv_layout(1, engine.models.dtype).layer_token_bytes


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("resident", range(4))
@pytest.mark.parametrize("new", [2, 30, TAIL + 1, TAIL + 2, 2 * TAIL + 60])
def test_plain_decoding_streams_the_host_prefix_once_a_token(link: str, resident: int, new: int, pair: Pair) -> None:
    with pair.engine("plain", link=link, resident_layers=resident) as engine:
        assert engine.models.tail == TAIL
        assert len(list(engine.generate(PROMPT, new))) == new
        written = [index // TAIL * TAIL for index in range(new - 1)]  # by the pass for each token but the first, in whole tails
        streamed = sum(len(PROMPT) + flushed for flushed in written)
        assert engine.stats.link_bytes_per_token == (3 - resident) * token_bytes(engine) * streamed / (new - 1)
        traffic = engine.stats.traffic["target"]
        assert traffic.link_in == (3 - resident) * token_bytes(engine) * streamed
        assert engine.stats.prefill_link_out == (3 - resident) * token_bytes(engine) * len(PROMPT)
        assert traffic.link_out - engine.stats.prefill_link_out == (3 - resident) * token_bytes(engine) * written[-1]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("mode", MODES)
def test_only_the_target_uses_the_link_and_once_a_pass(mode: str, link: str, pair: Pair) -> None:
    with pair.engine(mode, link=link, resident_layers=1, **SMALL) as engine:
        list(engine.generate(PROMPT, 60, Sampling(1.0)))
        passes = engine.stats.levels[0].stats.passes
        per_pass = 2 * token_bytes(engine) * len(PROMPT)
        assert engine.stats.traffic["target"].link_in == passes * per_pass
        assert engine.stats.link_bytes_per_token == passes * per_pass / 59
        assert all(each.link_in == each.link_out == 0 for name, each in engine.stats.traffic.items() if name != "target")


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_fits_the_device_leaves_the_link_alone(mode: str, pair: Pair) -> None:
    with pair.engine(mode, **SMALL) as engine:
        list(engine.generate(PROMPT, 40))
        assert engine.stats.plan is not None
        assert engine.stats.plan.resident_layers == 3
        assert engine.stats.link_bytes_per_token == engine.stats.prefill_link_out == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_levels_account_for_every_token(mode: str, pair: Pair) -> None:
    with pair.engine(mode, **SMALL) as engine:
        text = list(engine.generate(PROMPT, 70, Sampling(1.0)))
        stats, levels = engine.stats, engine.stats.levels
        top = levels[0].stats
        assert stats.new_tokens == len(text) == 70
        assert top.produced == 69  # the first token is prefill's
        assert stats.tokens_per_verification == 69 / top.passes
        for above, below in pairwise(levels):
            assert above.stats.produced == above.stats.passes + above.stats.accepted
            assert above.stats.proposed == below.stats.produced
            assert stats.acceptance[above.name] == above.stats.accepted / above.stats.proposed
        assert levels[-1].stats.passes == levels[-1].stats.produced
        names = {"hierarchical": ["target", "retrieval", "draft"], "retrieval": ["target", "retrieval"]}
        assert [level.name for level in levels] == names.get(mode, ["target", "draft"] if mode == "speculative" else ["target"])
        assert set(stats.acceptance) == {level.name for level in levels[:-1]}


@pytest.mark.parametrize("mode", ["speculative", "hierarchical"])
def test_a_draft_that_is_the_target_is_always_right(mode: str, checkpoint: Callable[..., Path]) -> None:
    # with a window and a budget that hold the whole text: any cache out of step would cost acceptance
    folder = checkpoint(max_position_embeddings=4096)
    with Pair(folder, folder).engine(mode, budget=100, window=300, draft_length=6, inner_length=3) as engine:
        list(engine.generate(PROMPT, 200, Sampling(1.0)))
        assert list(engine.stats.acceptance.values()) == [1.0] * (len(engine.stats.levels) - 1)
        assert engine.stats.levels[0].stats.proposed > 150


def test_counts_start_anew_with_each_text(pair: Pair) -> None:
    with pair.engine("hierarchical", **SMALL) as engine:
        list(engine.generate(PROMPT, 30))
        first = engine.stats.as_dict()
        list(engine.generate(PROMPT, 30))
        second = engine.stats.as_dict()
    clocks = {"time_to_first_token_s", "decode_s", "ms_per_token"}
    assert {key: value for key, value in first.items() if key not in clocks} == {
        key: value for key, value in second.items() if key not in clocks
    }
