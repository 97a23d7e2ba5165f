"""A draft model may be padded to a larger or smaller vocabulary than the target: with one
tokenizer, the output stays that of the target.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoding import GREEDY, Engine, Settings
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, EVERY_LEVEL, Pair, lead
from support.padded_drafts import draft_of
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

VOCAB, FEWER, MORE = 2048, 700, 2112
NEW = 20
PROMPT_TOKENS = 400


def rename(folder: Path, token: int, name: str) -> Path:
    """Rename a token of the tokenizer, or add one after the last."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    names = {at: word for word, at in words.items()}
    if token in names:
        old = names[token]
        del words[old]
        words[name] = token
        merges = content["model"]["merges"]
        # merges with the old word on either side would be invalid
        valid = [pair for pair in merges if old not in (*pair, "".join(pair))]
        content["model"]["merges"] = valid
    else:
        content["added_tokens"].append({**content["added_tokens"][1], "id": token, "content": name})
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def expected() -> list[int]:
    pair = Pair(DEMO / "target", DEMO / "draft")
    return pair.generate("plain", prompt("typing")[:PROMPT_TOKENS], NEW)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "smaller": draft_of(FEWER, folder / "fewer"),
        "larger": draft_of(MORE, folder / "more"),
        "added token": rename(draft_of(VOCAB, folder / "added"), VOCAB, "<pad>"),
        "larger, added token": rename(draft_of(MORE, folder / "both"), VOCAB, "<pad>"),
    }


@pytest.mark.parametrize("mode", slow_except(["hierarchical", "speculative"]))
@pytest.mark.parametrize("kind", ["smaller", "larger", "added token", "larger, added token"])
def test_output_is_that_of_the_target_alone(
    mode: str, kind: str, drafts: dict[str, Path], expected: list[int]
) -> None:
    assert max(prompt("typing")[:PROMPT_TOKENS]) >= FEWER  # a token that the smaller draft lacks
    settings = Settings(mode=mode, **EVERY_LEVEL)
    engine = Engine.from_pretrained(
        DEMO / "target", drafts[kind], settings, group=TensorParallelGroup()
    )
    engine.scheduler.stop_tokens = frozenset()
    assert list(engine.generate(prompt("typing")[:PROMPT_TOKENS], NEW, GREEDY)) == expected
    draft = engine.stats.levels[-2 if mode == "hierarchical" else 0]
    assert draft.stats.accepted > 0
    engine.close()


def generate_on_rank(drafts: list[Path], tokens: list[int]) -> list[list[int]]:
    """Return the output of a rank with each draft, sharded over the ranks."""
    group = TensorParallelGroup.from_environment("cpu")
    settings = Settings(mode="hierarchical", shard_draft=True, **EVERY_LEVEL)
    outputs = []
    for draft in drafts:
        engine = Engine.from_pretrained(DEMO / "target", draft, settings, group=group)
        engine.scheduler.stop_tokens = frozenset()
        assert engine.runtime.draft is not None
        assert engine.runtime.draft.group.size == 2
        outputs += lead(engine, lambda first: list(first.generate(tokens, NEW, GREEDY)))
    return outputs


@pytest.mark.slow
def test_output_with_a_sharded_padded_draft_is_that_of_the_target_alone(
    drafts: dict[str, Path], expected: list[int]
) -> None:
    folders = [drafts["smaller"], drafts["larger"]]
    assert run_ranks(2, generate_on_rank, folders, prompt("typing")[:PROMPT_TOKENS]) == [
        [expected, expected],
        [],
    ]


@pytest.mark.parametrize("vocab", [VOCAB, FEWER, MORE])
def test_the_error_for_another_tokenizer_names_the_first_difference(
    vocab: int, tmp_path: Path
) -> None:
    draft = rename(rename(draft_of(vocab, tmp_path / "draft"), 650, "other"), 500, "another")
    with pytest.raises(TierForceError, match=r"token 500 is 'another' for the draft and '.*' for"):
        Engine.from_pretrained(
            DEMO / "target", draft, Settings(dtype="float32"), group=TensorParallelGroup()
        )


def test_a_difference_past_the_smaller_vocabulary_is_ignored(tmp_path: Path) -> None:
    draft = rename(draft_of(FEWER, tmp_path / "draft"), FEWER, "another")
    engine = Engine.from_pretrained(
        DEMO / "target", draft, Settings(dtype="float32"), group=TensorParallelGroup()
    )
    engine.close()
