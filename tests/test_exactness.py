"""Whatever is proposed, the text is the target's: every policy, with and without summaries, adaptive lengths, lookup, split
drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import DEMO, Pair
from ranks import run_ranks
from test_greedy import prompt

from offload import POLICIES
from parallel import Group, load_model

NEW = 96
LINKED = {"link": "emulated:50", "resident_layers": 1}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[int]:
    return pair.text("plain", prompt("typing"), NEW)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("summaries", [0, None, 16])
@pytest.mark.parametrize("mode", ["retrieval", "hierarchical"])
def test_every_policy_writes_the_target_own_text(
    policy: str, summaries: int | None, mode: str, pair: Pair, plain: list[int]
) -> None:
    choices: dict[str, Any] = {"policy": policy, "summary_size": summaries, "chunk_size": 4}
    assert pair.text(mode, prompt("typing"), NEW, budget=300, **choices, **LINKED) == plain


@pytest.mark.parametrize("mode", ["retrieval", "speculative", "hierarchical"])
@pytest.mark.parametrize("lookup", [0, 1, 3])
@pytest.mark.parametrize("lengths", [{}, {"draft_length": 3, "inner_length": 1}, {"draft_length": 30, "inner_length": 6}])
def test_every_proposer_and_length_write_the_target_own_text(
    mode: str, lookup: int, lengths: dict[str, int], pair: Pair, plain: list[int]
) -> None:
    with pair.engine(mode, lookup=lookup, budget=300, refresh=9, **lengths, **LINKED) as engine:
        assert list(engine.generate(prompt("typing"), NEW)) == plain
        names = [level.name for level in engine.stats.levels]
        assert ("lookup" in names) == (lookup > 0)
        assert all(length is not None for length in engine.stats.draft_lengths.values())


def test_prompt_lookup_alone_speculates(plain: list[int]) -> None:
    choices: dict[str, Any] = {"lookup": 2, **LINKED}
    alone = Pair(DEMO / "target", DEMO / "draft")
    alone.draft = None
    with alone.engine("speculative", **choices) as engine:
        assert list(engine.generate(prompt("typing"), NEW)) == plain
        assert [level.name for level in engine.stats.levels] == ["target", "lookup"]
        assert engine.stats.tokens_per_verification > 1


def split_draft(tokens: list[int], choices: dict[str, Any]) -> tuple[list[int], int]:
    """The text, and the draft's KV heads on this rank."""
    group = Group.from_environment("cpu")
    pair = Pair(DEMO / "target", DEMO / "draft", group)
    pair.draft = load_model(Path(DEMO / "draft"), group, "float32")
    with pair.engine(choices.pop("mode"), **choices) as engine:
        if group.rank:
            engine.follow()
            return [], pair.draft.config.kv_heads // pair.draft.group.size
        text = list(engine.generate(tokens, NEW))
        engine.close()
        return text, pair.draft.config.kv_heads // pair.draft.group.size


@pytest.mark.parametrize("mode", ["speculative", "hierarchical"])
def test_a_draft_split_over_two_ranks_writes_the_same(mode: str, plain: list[int]) -> None:
    choices: dict[str, Any] = {"mode": mode, "budget": 300, "lookup": 3, "draft_length": 9, **LINKED}
    (text, heads), (nothing, _) = run_ranks(2, split_draft, prompt("typing"), choices)
    assert (text, heads, nothing) == (plain, 1, [])
