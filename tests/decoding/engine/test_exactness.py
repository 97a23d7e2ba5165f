"""Whatever is proposed, the text is the target's: every policy, adaptive lengths, lookup, split
drafts.
"""

from __future__ import annotations

from typing import Any

import pytest

import decoding.planning.memory_requirements
from decoding import GREEDY, Engine, Settings
from offload.retrieval.selection import POLICIES
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, Pair
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

PROMPT, NEW = prompt("typing")[:700], 32
LINKED = {"link": "emulated:50", "gpu_kv_layers": 1}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[int]:
    return pair.text("plain", PROMPT, NEW)


POLICY_CASES = [(policy, mode) for policy in POLICIES for mode in ("retrieval", "hierarchical")]


@pytest.mark.parametrize(("policy", "mode"), slow_except(POLICY_CASES, 0, -1))
def test_every_policy_writes_the_target_own_text(
    policy: str, mode: str, pair: Pair, plain: list[int]
) -> None:
    choices: dict[str, Any] = {"policy": policy, "chunk_size": 4}
    assert pair.text(mode, PROMPT, NEW, retrieval_budget=300, **choices, **LINKED) == plain


LENGTHS = [
    {},
    {"num_draft_tokens": 3, "num_inner_draft_tokens": 1},
    {"num_draft_tokens": 30, "num_inner_draft_tokens": 6},
]


@pytest.mark.parametrize(
    ("mode", "lookup", "lengths"),
    slow_except(
        [  # every pair of them
            (mode, lookup, LENGTHS[(row + column) % 3])
            for row, mode in enumerate(["retrieval", "speculative", "hierarchical"])
            for column, lookup in enumerate([0, 1, 3])
        ],
        *(0, 4, 8),  # every mode, lookup and length
    ),
)
def test_every_proposer_and_length_write_the_target_own_text(
    mode: str, lookup: int, lengths: dict[str, int], pair: Pair, plain: list[int]
) -> None:
    with pair.engine(
        mode,
        prompt_lookup_ngram=lookup,
        retrieval_budget=300,
        selection_interval=9,
        **lengths,
        **LINKED,
    ) as engine:
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == plain
        names = [level.name for level in engine.stats.levels]
        assert ("prompt_lookup" in names) == (lookup > 0)
        assert all(length is not None for length in engine.stats.num_draft_tokens.values())


def test_prompt_lookup_alone_speculates(plain: list[int]) -> None:
    choices: dict[str, Any] = {"prompt_lookup_ngram": 2, **LINKED}
    alone = Pair(DEMO / "target", DEMO / "draft")
    alone.draft = None
    with alone.engine("speculative", **choices) as engine:
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == plain
        assert [level.name for level in engine.stats.levels] == ["target", "prompt_lookup"]
        assert engine.stats.tokens_per_verification > 1


Report = tuple[list[int], int]
Case = tuple[str, bool | None, int]
# mode, whether a draft is to be split, from how many bytes it is large; and its ranks
SPLIT: list[tuple[Case, tuple[int, int]]] = [
    (("hierarchical", True, 1 << 40), (2, 2)),
    (("hierarchical", None, 1), (2, 2)),  # a draft of a byte is large
    (("speculative", None, 1), (2, 2)),
    (("speculative", False, 1), (1, 0)),
    (("hierarchical", None, 1 << 40), (1, 0)),
]


# two ranks take turns: behind less, and for more than two rounds
SHORT, FEW = 320, 12


@pytest.fixture(scope="module")
def reports() -> list[list[Report]]:
    """What each of two ranks found in each case: they start once for all."""
    return run_ranks(2, on_a_rank, PROMPT[:SHORT], [case for case, _ in SPLIT])


def on_a_rank(tokens: list[int], cases: list[Case]) -> list[Report]:
    group = TensorParallelGroup.from_environment("cpu")
    return [split_draft(group, tokens, *case) for case in cases]


def split_draft(
    group: TensorParallelGroup, tokens: list[int], mode: str, shard: bool | None, large: int
) -> Report:
    """The text, and over how many ranks the draft model is split; 0 where there is none."""
    decoding.planning.memory_requirements.SPLIT_DRAFT_BYTES = large
    choices: dict[str, Any] = {
        "prompt_lookup_ngram": 3,
        "num_draft_tokens": 9,
        "shard_draft": shard,
        **LINKED,
    }
    settings = Settings(mode=mode, dtype="float32", retrieval_budget=300, **choices)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.stop_tokens = frozenset()
    draft = engine.runtime.draft
    assert engine.runtime.requirements.weight_bytes == engine.runtime.weight_bytes
    if group.rank:
        engine.run_worker()
        return [], draft.group.size if draft else 0
    text = list(engine.generate(tokens, FEW, GREEDY))
    engine.close()
    return text, draft.group.size if draft else 0


@pytest.mark.parametrize(
    "case",
    slow_except([pytest.param(case) for case in SPLIT], 0, -1),
    ids=lambda case: str(case[0]),
)
def test_a_large_draft_is_split_over_the_ranks(
    case: tuple[Case, tuple[int, int]], reports: list[list[Report]], pair: Pair
) -> None:
    index, ranks = SPLIT.index(case), case[1]
    (text, first), (nothing, second) = (report[index] for report in reports)
    assert text == pair.text("plain", PROMPT[:SHORT], FEW)
    assert nothing == []
    assert (first, second) == ranks
