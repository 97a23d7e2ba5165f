"""A draft that borrows from its target, through the engine: the text stays the target's own, and
the memory is counted as it is held.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.ranks import run_ranks
from decoding import GREEDY, Engine, Settings
from offload.errors import TierForceError
from parallel.group import Group
from parallel.loading import Lender, load_model, parameter_bytes
from support.commands import Finished, forked
from support.engines import DEMO, EVERY_LEVEL, Pair
from support.models import borrowing_draft, build_checkpoint
from support.texts import prompt

NEW = 32
READ = 600  # tokens of a prompt
NUMBERS = {
    "device_memory": 1e9,
    "host_memory": 1e9,
    "link_in": 1e9,
    "link_out": 1e9,
    "memory_rate": 1e10,
    "matmul": 1e11,
    "all_reduce_s": 0,
    "all_reduce_rate": 1e9,
    "layer_s": 0,
}
SPLITS = [None, False, True]
MODES = ["hierarchical", "speculative"]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return Pair(DEMO / "target", DEMO / "draft").text("plain", prompt("typing")[:READ], NEW)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the demo target's layers between its embedding and head; there is no tokenizer."""
    folder = tmp_path_factory.mktemp("borrowing") / "draft"
    return borrowing_draft(DEMO / "target", folder, (0, 5), ("embed_tokens", "lm_head"))


def write(group: Group, mode: str, draft: Path, shard: bool | None, tokens: list[int]) -> list[int]:
    settings = Settings(mode=mode, shard_draft=shard, **EVERY_LEVEL)
    engine = Engine.from_pretrained(DEMO / "target", draft, settings, group=group)
    engine.stop_tokens = frozenset()
    runtime = engine.runtime
    assert replace(runtime.needs, rank=None).weight_bytes >= runtime.weight_bytes
    if group.rank == 0 or shard:
        assert runtime.needs.weight_bytes == runtime.weight_bytes
        own = 4 * (2 * 4 * 256 * 256 + 2 * 3 * 256 * 768) // (group.size if shard else 1)
        extra = runtime.weight_bytes - parameter_bytes(runtime.target)
        embedding = 4 * 2048 * 256 if group.size > 1 and not shard else 0
        assert extra == own + embedding + 4 * 5 * 256  # with five norms
    if group.rank:
        engine.follow()
        return []
    text = list(engine.generate(tokens, NEW, GREEDY))
    level = engine.stats.levels[-2 if mode == "hierarchical" else 0]
    assert level.stats.accepted > 0
    engine.close()
    return text


@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_the_targets_own(mode: str, draft: Path, plain: list[int]) -> None:
    assert write(Group(), mode, draft, None, prompt("typing")[:READ]) == plain


@pytest.fixture(scope="module")
def texts(draft: Path) -> list[dict[bool | None, list[int]]]:
    """What each of two ranks wrote with each split: they start once for all."""
    return run_ranks(2, on_a_rank, draft, prompt("typing")[:READ])


def on_a_rank(draft: Path, tokens: list[int]) -> dict[bool | None, list[int]]:
    group = Group.from_environment("cpu")
    return {shard: write(group, "hierarchical", draft, shard, tokens) for shard in SPLITS}


@pytest.mark.parametrize("shard", SPLITS)
def test_on_two_ranks_too(
    shard: bool | None, texts: list[dict[bool | None, list[int]]], plain: list[int]
) -> None:
    assert [each[shard] for each in texts] == [plain, []]


def plan(folder: Path, model: Path, draft: Path | None, *options: str) -> Finished:
    words = ["--model", str(model), *options]
    if draft is not None:
        words += ["--draft", str(draft)]
    return forked(folder, "plan", "--context", "4096", *words)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_plan_counts_what_is_shared_once(gpus: int, tmp_path: Path, draft: Path) -> None:
    """On one GPU the draft's own layers; on two, of which one has the draft, all of it."""
    lender = Lender(load_model(DEMO / "target", Group(gpus - 1, gpus), "float32"), DEMO / "target")
    small = load_model(draft, Group(), "float32", lender=lender)
    hardware = tmp_path / "mine.json"
    hardware.write_text(json.dumps({**NUMBERS, "gpus": gpus}))
    options = ["--dtype", "float32", "--json", "--hardware", str(hardware)]
    done = plan(tmp_path, DEMO / "target", draft, *options)
    assert done.code == 0, done.err
    counted = json.loads(done.out)["memory"]["device in prefill"]["weights"]
    assert counted == parameter_bytes(lender.model, small)


REFUSED = {
    "a target": ("borrows embed_tokens, lm_head from its target, and no model by itself", None),
    "another target": ("its vocab_size is 2048 and the target's is 101", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(
    case: str, tmp_path: Path, draft: Path, checkpoint: Callable[..., Path]
) -> None:
    why, other = REFUSED[case]
    if other is None:
        model, small = draft, None
    else:
        model, small = build_checkpoint(tmp_path / "other"), draft
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).write_bytes((DEMO / "target" / name).read_bytes())
    with pytest.raises(TierForceError, match=why) as error:
        Engine.from_pretrained(model, small, Settings(dtype="float32"), device="cpu")
    assert "\n" not in str(error.value)
    done = plan(tmp_path, model, small)
    assert done.code == 1
    assert why in " ".join(done.err.split())
    assert "Traceback" not in done.err
