"""A draft may have more or fewer rows of vocabulary than the target, as long as they share a
tokenizer: the text stays the target's own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding import GREEDY, Engine, Settings
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, EVERY_LEVEL, Pair, lead
from support.ranks import run_ranks
from support.slow import slow_except
from support.texts import prompt

VOCAB, FEWER, MORE = 2048, 700, 2112
NEW = 20
READ = 400  # tokens of a prompt


def draft_of(rows: int, folder: Path) -> Path:
    """Copy the demo draft with so many rows; those it has more would be its favourites."""
    shutil.copytree(DEMO / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.embed_tokens.weight"][:rows]
    louder = 8 * weight[: rows - len(weight)]
    tensors["model.embed_tokens.weight"] = torch.cat((weight, louder))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rename(folder: Path, token: int, name: str) -> Path:
    """Give a token of the tokenizer another name, or add one behind the last."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    known = {at: word for word, at in words.items()}
    if token in known:
        old = known[token]
        del words[old]
        words[name] = token
        merges = content["model"]["merges"]
        # a merge that makes the old word or starts from it cannot be kept
        kept = [pair for pair in merges if old not in (*pair, "".join(pair))]
        content["model"]["merges"] = kept
    else:
        content["added_tokens"].append({**content["added_tokens"][1], "id": token, "content": name})
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def plain() -> list[int]:
    pair = Pair(DEMO / "target", DEMO / "draft")
    return pair.generate("plain", prompt("typing")[:READ], NEW)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "fewer rows": draft_of(FEWER, folder / "fewer"),
        "more rows": draft_of(MORE, folder / "more"),
        "a token more": rename(draft_of(VOCAB, folder / "added"), VOCAB, "<pad>"),
        "rows and a token more": rename(draft_of(MORE, folder / "both"), VOCAB, "<pad>"),
    }


@pytest.mark.parametrize("mode", slow_except(["hierarchical", "speculative"]))
@pytest.mark.parametrize(
    "kind", ["fewer rows", "more rows", "a token more", "rows and a token more"]
)
def test_the_text_is_the_target_own(
    mode: str, kind: str, drafts: dict[str, Path], plain: list[int]
) -> None:
    assert max(prompt("typing")[:READ]) >= FEWER  # the draft is to read what it lacks
    settings = Settings(mode=mode, **EVERY_LEVEL)
    engine = Engine.from_pretrained(
        DEMO / "target", drafts[kind], settings, group=TensorParallelGroup()
    )
    engine.stop_tokens = frozenset()
    assert list(engine.generate(prompt("typing")[:READ], NEW, GREEDY)) == plain
    draft = engine.stats.levels[-2 if mode == "hierarchical" else 0]
    assert draft.stats.accepted > 0
    engine.close()


def split(drafts: list[Path], tokens: list[int]) -> list[list[int]]:
    """What a rank writes with each draft, split over the ranks."""
    group = TensorParallelGroup.from_environment("cpu")
    settings = Settings(mode="hierarchical", shard_draft=True, **EVERY_LEVEL)
    texts = []
    for draft in drafts:
        engine = Engine.from_pretrained(DEMO / "target", draft, settings, group=group)
        engine.stop_tokens = frozenset()
        assert engine.runtime.draft is not None
        assert engine.runtime.draft.group.size == 2
        texts += lead(engine, lambda first: list(first.generate(tokens, NEW, GREEDY)))
    return texts


@pytest.mark.slow
def test_a_split_draft_of_other_rows_writes_the_same(
    drafts: dict[str, Path], plain: list[int]
) -> None:
    kinds = [drafts["fewer rows"], drafts["more rows"]]
    assert run_ranks(2, split, kinds, prompt("typing")[:READ]) == [[plain, plain], []]


@pytest.mark.parametrize("rows", [VOCAB, FEWER, MORE])
def test_another_tokenizer_is_refused_and_the_first_difference_named(
    rows: int, tmp_path: Path
) -> None:
    draft = rename(rename(draft_of(rows, tmp_path / "draft"), 650, "other"), 500, "another")
    with pytest.raises(TierForceError, match=r"token 500 is 'another' for the draft and '.*' for"):
        Engine.from_pretrained(
            DEMO / "target", draft, Settings(dtype="float32"), group=TensorParallelGroup()
        )


def test_a_difference_behind_the_rows_both_have_does_not_count(tmp_path: Path) -> None:
    draft = rename(draft_of(FEWER, tmp_path / "draft"), FEWER, "another")
    engine = Engine.from_pretrained(
        DEMO / "target", draft, Settings(dtype="float32"), group=TensorParallelGroup()
    )
    engine.close()
