"""A target's multi-token-prediction block drafts by default, where it fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import GREEDY, Engine, Settings
from decoding.app.options import Common
from decoding.app.terminal.messages import sanity_warnings, startup_line
from decoding.planning.planner import fitting_requirements
from decoding.planning.requirements import Requirements, weight_bytes
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig, predictor_config
from parallel.errors import CheckpointError
from parallel.model.prediction import PredictionBlock
from support.commands import DRAFT, TARGET, forked
from support.models import edit_weights, random_tokens
from support.predictors import with_predictor

PROMPT = random_tokens(200).tolist()
CONTEXT = 1024


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = ModelConfig.from_name(str(TARGET)).vocab
    plain = checkpoint(family="qwen3_5_text", vocab_size=vocab, max_position_embeddings=4096)
    folder = with_predictor(plain, tmp_path_factory.mktemp("models") / "target")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, folder / file)
    return folder


@contextmanager
def engine_of(folder: Path, draft: Path | None = None, **settings: Any) -> Iterator[Engine]:
    options = Settings(**{"dtype": "float32", "context": CONTEXT, **settings})
    with closing(Engine.from_pretrained(folder, draft, settings=options, device="cpu")) as engine:
        yield engine


def test_the_block_drafts_by_default(folder: Path) -> None:
    expected = None
    for settings, mode in [
        ({"mode": "plain"}, "plain"),
        ({}, "hierarchical"),
        ({"mode": "speculative"}, "speculative"),
        ({"mode": "retrieval"}, "retrieval"),
    ]:
        with engine_of(folder, **settings) as engine:
            runtime = engine.runtime
            assert runtime.mode == mode
            drafts = mode in ("hierarchical", "speculative")
            assert isinstance(runtime.draft, PredictionBlock) == drafts
            assert ("prediction block drafts" in startup_line(engine, 100, None)) == drafts
            tokens = list(engine.generate(PROMPT, 20, GREEDY))
            expected = expected or tokens
            assert tokens == expected
            config = runtime.target.config
            whole = weight_bytes(config, 1, torch.float32)
            block = weight_bytes(predictor_config(config), 1, torch.float32)
            assert runtime.weight_bytes == whole + drafts * block
    with engine_of(folder, DRAFT) as engine:  # a draft that is given comes first
        assert engine.runtime.draft is not None
        assert not engine.runtime.draft.config.is_predictor


def test_settings_of_an_engine_can_leave_the_block_out(folder: Path) -> None:
    with engine_of(folder) as engine:
        runtime = engine.runtime.with_settings(Settings(mode="retrieval", dtype="float32"))
        with closing(Engine(runtime, engine.tokenizer, frozenset())) as other:
            assert list(other.generate(PROMPT, 20, GREEDY)) == list(
                engine.generate(PROMPT, 20, GREEDY)
            )


def test_the_block_is_left_out_where_only_so_the_context_fits(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "context": CONTEXT, "link": "emulated:50"}
    config = ModelConfig.from_name(str(folder))
    modes = "hierarchical", Settings(**options), torch.float32, 1, 1
    needs = Requirements(config, predictor_config(config), *modes, copies=True)
    sizes = range(5_000_000, 60_000_000, 50_000)
    fitting = [fitting_requirements(needs, 512, 512, size, 1.0) for size in sizes]
    left_out = [each.draft is None for each in fitting]
    # nothing fits, then only without the block, then with it
    assert [key for key, _ in groupby(left_out)] == [False, True, False]
    assert {each.mode for each in fitting} == {"hierarchical", "retrieval"}
    for index, draft in ((left_out.index(True), None), (len(sizes) - 1, PredictionBlock)):
        with engine_of(folder, **options, device_memory=sizes[index]) as engine:
            assert isinstance(engine.runtime.draft, draft or type(None))
            common = Common(str(folder), settings=Settings(), sampling=GREEDY)
            warnings = [line for line in sanity_warnings(engine, common) if "prediction" in line]
            assert len(warnings) == (draft is None)
            assert len(list(engine.generate(random_tokens(512).tolist(), 20, GREEDY))) == 20
    fixed = replace(needs, settings=replace(needs.settings, mode="hierarchical"))
    assert fitting_requirements(fixed, 512, 512, sizes[left_out.index(True)], 1.0) == fixed


def test_plan_says_what_drafts(folder: Path, tmp_path: Path) -> None:
    for options, mode, has_note in (
        ([], "hierarchical", True),
        (["--draft", str(DRAFT)], "hierarchical", False),
    ):
        done = forked(tmp_path, "plan", "--model", str(folder), *options, "--json")
        assert done.code == 0, done.err
        row = json.loads(done.out)
        assert row["job"]["mode"] == mode
        assert any("own multi-token-prediction block" in each for each in row["notes"]) == has_note


def test_a_broken_block_can_be_left_out(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    edit_weights(broken, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight .+ `mode` retrieval leaves the"):
        Engine.from_pretrained(broken, settings=Settings(dtype="float32"), device="cpu")
    with engine_of(broken, mode="retrieval") as engine:
        assert len(list(engine.generate(PROMPT, 5, GREEDY))) == 5


def test_a_model_without_a_block_still_needs_a_draft() -> None:
    with pytest.raises(TierForceError, match="`mode` hierarchical needs a draft model"):
        Engine.from_pretrained(TARGET, settings=Settings(mode="hierarchical"), device="cpu")
