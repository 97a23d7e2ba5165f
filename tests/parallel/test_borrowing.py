"""A draft that borrows is the draft with copies of what it borrows, and holds none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.harness.ranks import run_ranks
from parallel.config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.group import Group
from parallel.loading import Lender, load_model, parameter_bytes
from parallel.sizes import lent_parameters, parameter_count
from support.gguf import convert
from support.loading import all_logits
from support.models import (
    OUTER,
    borrowing_draft,
    completed_draft,
    random_tokens,
    reference_logits,
)

TOKENS = random_tokens(40)
TARGETS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "granite": {"family": "granite"},
}
BORROWS = [OUTER, ("embed_tokens", "lm_head"), ("embed_tokens",)]
Checkpoints = Callable[..., Path]
every_way = pytest.mark.parametrize("borrows", BORROWS, ids="-".join)
every_target = pytest.mark.parametrize("name", TARGETS)


def lender_of(path: Path, group: Group) -> Lender:
    return Lender(load_model(path, group, "float32"), path)


@every_way
@every_target
def test_logits_are_those_of_transformers(
    checkpoint: Checkpoints, tmp_path: Path, name: str, borrows: tuple[str, ...]
) -> None:
    target = checkpoint(**TARGETS[name])
    draft = borrowing_draft(target, tmp_path / "draft", borrows=borrows)
    whole = completed_draft(target, draft, tmp_path / "whole")
    lender = lender_of(target, Group())
    model = load_model(draft, Group(), "float32", lender=lender)
    torch.testing.assert_close(
        all_logits(model, TOKENS), reference_logits(whole, TOKENS), atol=1e-4, rtol=1e-4
    )
    # and what is borrowed is the target's own memory, no copy of it
    for part, module in model.outer_parts().items():
        lent = lender.model.outer_parts()[part].weight.data_ptr()
        assert (module.weight.data_ptr() == lent) == (part in borrows)


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_gguf_file_it_borrows_the_same(
    checkpoint: Checkpoints, tmp_path: Path, tied: bool
) -> None:
    target = checkpoint(tie_word_embeddings=tied)
    draft = borrowing_draft(target, tmp_path / "draft")
    lender = lender_of(convert(target, tmp_path / "model.gguf"), Group())
    model = load_model(draft, Group(), "float32", lender=lender)
    whole = completed_draft(target, draft, tmp_path / "whole")
    torch.testing.assert_close(
        all_logits(model, TOKENS), reference_logits(whole, TOKENS), atol=1e-4, rtol=1e-4
    )
    part = Lender(load_model(lender.path, Group(0, 2), "float32"), lender.path)
    again = load_model(draft, Group(), "float32", lender=part)  # whole beside a part: read again
    assert torch.equal(again.embed.weight, model.embed.weight)
    assert torch.equal(again.head.weight, model.head.weight)


def on_a_rank(target: Path, draft: Path) -> tuple[Tensor, Tensor]:
    """Return the logits of a draft that is split as its target, and of one that is whole."""
    group = Group.from_environment("cpu")
    lender = lender_of(target, group)
    split = load_model(draft, group, "float32", lender=lender)
    for part, module in split.outer_parts().items():
        assert module.weight is lender.model.outer_parts()[part].weight
    whole = load_model(draft, Group(), "float32", lender=lender)
    assert whole.embed.weight.data_ptr() != lender.model.embed.weight.data_ptr()
    assert whole.norm.weight is lender.model.norm.weight
    return all_logits(split, TOKENS), all_logits(whole, TOKENS)


@pytest.mark.parametrize("tied", [False, True])
def test_beside_a_target_on_two_ranks(checkpoint: Checkpoints, tmp_path: Path, tied: bool) -> None:
    target = checkpoint(tie_word_embeddings=tied)
    draft = borrowing_draft(target, tmp_path / "draft")
    whole = completed_draft(target, draft, tmp_path / "whole")
    wanted = reference_logits(whole, TOKENS)
    for logits in run_ranks(2, on_a_rank, target, draft):
        for each in logits:
            torch.testing.assert_close(each, wanted, atol=1e-4, rtol=1e-4)


@every_way
@every_target
def test_shared_bytes_count_once(
    checkpoint: Checkpoints, tmp_path: Path, name: str, borrows: tuple[str, ...]
) -> None:
    target = checkpoint(**TARGETS[name])
    draft = borrowing_draft(target, tmp_path / "draft", borrows=borrows)
    config = ModelConfig.find(str(draft))
    for ranks, draft_ranks in ((1, 1), (2, 2), (2, 1)):
        lender = lender_of(target, Group(ranks - 1, ranks))
        own = Group(draft_ranks - 1, draft_ranks)
        model = load_model(draft, own, "float32", lender=lender)
        held = parameter_bytes(lender.model, model) - parameter_bytes(lender.model)
        count = parameter_count(config, draft_ranks) - lent_parameters(config, draft_ranks, ranks)
        assert held == 4 * count
    assert lent_parameters(config, 1, 1) > lent_parameters(config, 1, 2)


def test_both_ways_to_read_a_config_say_what_it_borrows(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for tied in (False, True):
        target = checkpoint(tie_word_embeddings=tied)
        folder = borrowing_draft(target, tmp_path / str(tied), borrows=("embed_tokens",))
        config = ModelConfig.find(str(folder))
        assert config == ModelConfig.from_pretrained(folder)
        # what is tied is one tensor
        assert config.borrows == ({"embed_tokens", "lm_head"} if tied else {"embed_tokens"})
    assert ModelConfig.find(str(target)).borrows == frozenset()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"borrows": ["head"]}, r"must be a list of embed_tokens, lm_head, norm, found \['head'\]"),
        ({"borrows": "embed_tokens"}, "must be a list of embed_tokens"),
        ({"borrows": [["norm"]]}, "must be a list of embed_tokens"),
        ({"borrows": ["norm"]}, "is norm without embed_tokens"),
        ({"lends": []}, '"tierforce" must be an object with "borrows" and nothing else'),
        (["embed_tokens"], '"tierforce" must be an object'),
    ],
)
def test_what_is_not_known_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, said: Any, why: str
) -> None:
    folder = borrowing_draft(checkpoint(), tmp_path / "draft")
    change(folder, tierforce=said)
    for read in (
        lambda: ModelConfig.find(str(folder)),
        lambda: ModelConfig.from_pretrained(folder),
    ):
        with pytest.raises(ConfigError, match=why):
            read()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"vocab_size": 103}, "its vocab_size is 101 and the target's is 103"),
        ({"hidden_size": 48}, "its hidden_size is 32 and the target's is 48"),
        (
            {"tie_word_embeddings": True},
            "its tie_word_embeddings is False and the target's is True",
        ),
    ],
)
def test_another_target_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    draft = borrowing_draft(checkpoint(), tmp_path / "draft")
    with pytest.raises(ConfigError, match=why):
        load_model(draft, Group(), "float32", lender=lender_of(checkpoint(**other), Group()))


def test_without_a_target_it_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    draft = borrowing_draft(checkpoint(), tmp_path / "draft")
    with pytest.raises(ConfigError, match="borrows embed_tokens, lm_head, norm from its target"):
        load_model(draft, Group())


def test_what_is_borrowed_may_not_be_stored(checkpoint: Checkpoints, tmp_path: Path) -> None:
    target = checkpoint()
    draft = borrowing_draft(target, tmp_path / "draft", borrows=("embed_tokens", "lm_head"))
    change(draft, tierforce={"borrows": list(OUTER)})
    with pytest.raises(CheckpointError, match=r"no place in the model .* first model.norm.weight"):
        load_model(draft, Group(), "float32", lender=lender_of(target, Group()))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
