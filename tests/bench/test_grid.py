"""A grid has each combination of valid settings once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.speed.grid import (
    AUTO,
    acceptance_settings,
    grid,
    group_by_prefill,
    parse,
    rotated,
    runnable,
    settings_of,
)
from decoding import Settings
from decoding.config.defaults import MAX_DRAFT, MAX_SPLIT_DRAFT
from decoding.models.runtime import Runtime
from offload.errors import TierForceError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup as Ranks
from support.engines import DEMO


def test_grid_has_every_combination_once() -> None:
    varied = parse(["mode=plain,retrieval", "num-draft-tokens=auto,8", "link=view,emulated:1"])
    points = grid(varied)
    plain = [point for point in points if point["mode"] == "plain"]
    assert plain == [{"mode": "plain", "link": link} for link in ("view", "emulated:1")]
    assert len(points) == 2 + 4
    assert len({tuple(point.items()) for point in points}) == len(points)


def test_points_have_only_settings_that_their_mode_uses() -> None:
    words = [
        "mode=plain,speculative,retrieval",
        "retrieval_budget=512,1024",
        "num_inner_draft_tokens=1,2",
    ]
    points = grid(parse([*words, "prompt_lookup_ngram=3", "window=64"]))
    assert points[0] == {"mode": "plain"}
    assert points[1] == {"mode": "speculative", "prompt_lookup_ngram": "3", "window": "64"}
    assert len(points) == 2 + 4
    assert set(points[2]) == {
        "mode",
        "retrieval_budget",
        "num_inner_draft_tokens",
        "prompt_lookup_ngram",
    }


def test_modes_that_need_a_draft_model_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    points = grid(parse(["mode=plain,hierarchical,speculative"]))
    assert runnable(Settings(), points, True) == points
    assert runnable(Settings(), points, False) == [{"mode": "plain"}]
    messages = capsys.readouterr().err
    assert messages.count("skipped: ") == 2
    with pytest.raises(TierForceError, match="give --draft"):
        runnable(Settings(), points[1:], False)
    lookup = {"mode": "speculative", "prompt_lookup_ngram": "3"}
    assert runnable(Settings(), [lookup], False) == [lookup]


@pytest.mark.parametrize(
    ("words", "sizes", "learns"),
    [
        (["retrieval_budget=512,1024", "num_draft_tokens=auto,8"], [2, 2], [True, True]),
        (
            ["retrieval_budget=512", "num_draft_tokens=4,8", "num_inner_draft_tokens=2"],
            [2],
            [False],
        ),
        # an engine per point, with the point's draft lengths
        (["num_draft_tokens=auto,8"], [1, 1], [True, True]),
    ],
)
def test_points_that_differ_only_by_draft_lengths_share_a_prefill(
    words: list[str], sizes: list[int], learns: list[bool]
) -> None:
    model = load_model(DEMO / "target", Ranks(), "float32")
    base = Settings(mode="retrieval", link="view")
    groups = group_by_prefill(
        Runtime.create(model, None, "retrieval", base), base, grid(parse(words))
    )
    assert [len(group.points) for group in groups] == sizes
    assert [group.learns for group in groups] == learns
    for group in groups:
        settings = group.sessions.runtime.settings
        lengths = [point.varied["num_draft_tokens"] for point in group.points]
        if settings.retrieval_budget is None:
            assert lengths == [str(settings.num_draft_tokens or AUTO)]
        else:
            assert settings.num_draft_tokens == MAX_DRAFT


def test_a_shared_prefill_has_room_for_the_longest_draft_of_its_mode() -> None:
    model = load_model(DEMO / "target", Ranks(), "bfloat16")
    base = Settings(link="emulated:50", retrieval_budget=512, split_budget=0)
    points = grid(parse(["mode=retrieval,split-retrieval", "num_draft_tokens=auto,100"]))
    groups = group_by_prefill(Runtime.create(model, None, "retrieval", base), base, points)
    lengths = [group.sessions.runtime.settings.num_draft_tokens for group in groups]
    assert lengths == [100, MAX_SPLIT_DRAFT]
    for group in groups:
        assert len(group.points) == 2
        needs = group.sessions.plan(1000, 100).requirements
        assert needs.max_forward_tokens == group.sessions.executor.max_tokens


def test_words_are_converted_to_settings() -> None:
    words = {"mode": "plain", "retrieval_budget": "512", "num_draft_tokens": "auto", "graphs": "no"}
    settings = settings_of(Settings(num_draft_tokens=4), words)
    assert settings == Settings(
        mode="plain", retrieval_budget=512, num_draft_tokens=None, graphs=False
    )


@pytest.mark.parametrize(
    "word", ["nothing=1", "retrieval_budget", "retrieval_budget=", "dtype=float32", "rope=yarn:4"]
)
def test_unknown_settings_raise(word: str) -> None:
    with pytest.raises(TierForceError, match=r"give NAME=VALUE,VALUE\. Names are mode, "):
        parse([word])


@pytest.mark.parametrize(
    ("name", "word"), [("retrieval_budget", "many"), ("graphs", "1"), ("selection_interval", "")]
)
def test_invalid_values_raise(name: str, word: str) -> None:
    with pytest.raises(TierForceError, match=f"--vary {name}={word}: {word} is not a valid value"):
        settings_of(Settings(), {name: word})


def test_points_rotate_from_prompt_to_prompt() -> None:
    assert [rotated([1, 2, 3], start)[0] for start in range(4)] == [1, 2, 3, 1]


def test_acceptance_depends_on_split_layers_only() -> None:
    """The number of split layers affects acceptance; that of resident layers alone does not."""
    whole = Settings(mode="retrieval", gpu_kv_layers=2, split_kv_layers=0)
    assert acceptance_settings(whole) == acceptance_settings(
        replace(whole, gpu_kv_layers=4, link="view")
    )
    split = Settings(mode="split-retrieval", gpu_kv_layers=2, split_kv_layers=3)
    assert acceptance_settings(split) == acceptance_settings(replace(split, link="view"))
    assert acceptance_settings(split) != acceptance_settings(replace(split, split_kv_layers=4))
    assert acceptance_settings(split) != acceptance_settings(replace(split, gpu_kv_layers=3))
