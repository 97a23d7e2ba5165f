"""Output equals the target's for every policy, adaptive lengths, lookup and sharded drafts."""

from __future__ import annotations

from typing import Any

import pytest

import decoding.planning.requirements
from decoding import GREEDY, Engine, Settings
from offload.retrieval.selection import POLICIES
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, Pair
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

PROMPT, NEW = prompt("typing")[:700], 32
OFFLOADED = {"link": "emulated:50", "gpu_kv_layers": 1}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[int]:
    return pair.generate("plain", PROMPT, NEW)


POLICY_CASES = [(policy, mode) for policy in POLICIES for mode in ("retrieval", "hierarchical")]


@pytest.mark.parametrize(("policy", "mode"), slow_except(POLICY_CASES, 0, -1))
def test_every_policy_generates_the_target_output(
    policy: str, mode: str, pair: Pair, plain: list[int]
) -> None:
    options: dict[str, Any] = {"policy": policy, "chunk_size": 4}
    assert pair.generate(mode, PROMPT, NEW, retrieval_budget=300, **options, **OFFLOADED) == plain


LENGTHS = [
    {},
    {"num_draft_tokens": 3, "num_inner_draft_tokens": 1},
    {"num_draft_tokens": 30, "num_inner_draft_tokens": 6},
]


@pytest.mark.parametrize(
    ("mode", "ngram", "lengths"),
    slow_except(
        [  # every pair of mode, n-gram and lengths
            (mode, ngram, LENGTHS[(row + column) % 3])
            for row, mode in enumerate(["retrieval", "speculative", "hierarchical"])
            for column, ngram in enumerate([0, 1, 3])
        ],
        *(0, 4, 8),  # every mode, n-gram and lengths
    ),
)
def test_every_proposer_and_length_generates_the_target_output(
    mode: str, ngram: int, lengths: dict[str, int], pair: Pair, plain: list[int]
) -> None:
    with pair.engine(
        mode,
        prompt_lookup_ngram=ngram,
        retrieval_budget=300,
        selection_interval=9,
        **lengths,
        **OFFLOADED,
    ) as engine:
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == plain
        names = [level.name for level in engine.stats.levels]
        assert ("prompt_lookup" in names) == (ngram > 0)
        assert all(length is not None for length in engine.stats.num_draft_tokens.values())


def test_prompt_lookup_without_a_draft_model(plain: list[int]) -> None:
    options: dict[str, Any] = {"prompt_lookup_ngram": 2, **OFFLOADED}
    target_only = Pair(DEMO / "target", DEMO / "draft")
    target_only.draft = None
    with target_only.engine("speculative", **options) as engine:
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == plain
        assert [level.name for level in engine.stats.levels] == ["target", "prompt_lookup"]
        assert engine.stats.tokens_per_verification > 1


Report = tuple[list[int], int]
Case = tuple[str, bool | None, int]  # mode, `shard_draft`, bytes from which a draft is sharded
# cases, and the number of ranks that the draft on each rank runs on; 0 without a draft
SHARDED: list[tuple[Case, tuple[int, int]]] = [
    (("hierarchical", True, 1 << 40), (2, 2)),
    (("hierarchical", None, 1), (2, 2)),  # any draft is large enough
    (("speculative", None, 1), (2, 2)),
    (("speculative", False, 1), (1, 0)),
    (("hierarchical", None, 1 << 40), (1, 0)),
]


# two ranks share one core: a shorter prompt, and an output of more than two rounds
SHORT, FEW = 320, 12


@pytest.fixture(scope="module")
def reports() -> list[list[Report]]:
    """The reports of each of two ranks, which start once for all cases."""
    return run_ranks(2, report_on_rank, PROMPT[:SHORT], [case for case, _ in SHARDED])


def report_on_rank(tokens: list[int], cases: list[Case]) -> list[Report]:
    group = TensorParallelGroup.from_environment("cpu")
    return [generate_sharded(group, tokens, *case) for case in cases]


def generate_sharded(
    group: TensorParallelGroup, tokens: list[int], mode: str, shard: bool | None, threshold: int
) -> Report:
    """Return the output, and the number of ranks that the draft runs on; 0 without a draft."""
    decoding.planning.requirements.SPLIT_DRAFT_BYTES = threshold
    options: dict[str, Any] = {
        "prompt_lookup_ngram": 3,
        "num_draft_tokens": 9,
        "shard_draft": shard,
        **OFFLOADED,
    }
    settings = Settings(mode=mode, dtype="float32", retrieval_budget=300, **options)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.scheduler.stop_tokens = frozenset()
    draft = engine.runtime.draft
    assert engine.runtime.requirements.weight_bytes == engine.runtime.weight_bytes
    if group.rank:
        engine.run_worker()
        return [], draft.group.size if draft else 0
    output = list(engine.generate(tokens, FEW, GREEDY))
    engine.close()
    return output, draft.group.size if draft else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case) for case in SHARDED], ids=lambda case: str(case[0])
)
def test_a_large_draft_is_sharded(
    case: tuple[Case, tuple[int, int]], reports: list[list[Report]], pair: Pair
) -> None:
    index, ranks = SHARDED.index(case), case[1]
    (output, first), (worker_output, second) = (report[index] for report in reports)
    assert output == pair.generate("plain", PROMPT[:SHORT], FEW)
    assert worker_output == []
    assert (first, second) == ranks
