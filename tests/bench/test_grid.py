"""A grid times each combination once, under settings that make sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.speed.grid import AUTO, grid, grouped, law_of, parse, possible, settings_of, turned
from decoding import Settings
from decoding.config.defaults import MAX_DRAFT
from decoding.models.runtime import Runtime
from offload.errors import TierForceError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup as Ranks
from support.engines import DEMO


def test_every_combination_stands_once() -> None:
    varied = parse(["mode=plain,retrieval", "num-draft-tokens=auto,8", "link=view,emulated:1"])
    points = grid(varied)
    plain = [point for point in points if point["mode"] == "plain"]
    assert plain == [{"mode": "plain", "link": link} for link in ("view", "emulated:1")]
    assert len(points) == 2 + 4
    assert len({tuple(point.items()) for point in points}) == len(points)


def test_a_mode_has_the_settings_that_it_uses() -> None:
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


def test_what_needs_a_draft_model_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    points = grid(parse(["mode=plain,hierarchical,speculative"]))
    assert possible(Settings(), points, True) == points
    assert possible(Settings(), points, False) == [{"mode": "plain"}]
    said = capsys.readouterr().err
    assert said.count("left out: ") == 2
    with pytest.raises(TierForceError, match="give --draft"):
        possible(Settings(), points[1:], False)
    looked_up = {"mode": "speculative", "prompt_lookup_ngram": "3"}
    assert possible(Settings(), [looked_up], False) == [looked_up]


@pytest.mark.parametrize(
    ("words", "sizes", "learns"),
    [
        (["retrieval_budget=512,1024", "num_draft_tokens=auto,8"], [2, 2], [True, True]),
        (
            ["retrieval_budget=512", "num_draft_tokens=4,8", "num_inner_draft_tokens=2"],
            [2],
            [False],
        ),
        # an engine of its own each, under its own lengths
        (["num_draft_tokens=auto,8"], [1, 1], [True, True]),
    ],
)
def test_a_prefill_is_shared_where_only_lengths_differ(
    words: list[str], sizes: list[int], learns: list[bool]
) -> None:
    model = load_model(DEMO / "target", Ranks(), "float32")
    base = Settings(mode="retrieval", link="view")
    groups = grouped(Runtime.create(model, None, "retrieval", base), base, grid(parse(words)))
    assert [len(group.points) for group in groups] == sizes
    assert [group.learns for group in groups] == learns
    for group in groups:
        settings = group.sessions.runtime.settings
        own = [point.varied["num_draft_tokens"] for point in group.points]
        if settings.retrieval_budget is None:
            assert own == [str(settings.num_draft_tokens or AUTO)]
        else:
            assert settings.num_draft_tokens == MAX_DRAFT


def test_words_become_the_values_of_settings() -> None:
    words = {"mode": "plain", "retrieval_budget": "512", "num_draft_tokens": "auto", "graphs": "no"}
    made = settings_of(Settings(num_draft_tokens=4), words)
    assert made == Settings(mode="plain", retrieval_budget=512, num_draft_tokens=None, graphs=False)


@pytest.mark.parametrize(
    "word", ["nothing=1", "retrieval_budget", "retrieval_budget=", "dtype=float32", "rope=yarn:4"]
)
def test_what_is_no_setting_of_a_text_is_refused(word: str) -> None:
    with pytest.raises(TierForceError, match=r"give NAME=VALUE,VALUE\. Names are mode, "):
        parse([word])


@pytest.mark.parametrize(
    ("name", "word"), [("retrieval_budget", "many"), ("graphs", "1"), ("selection_interval", "")]
)
def test_what_is_no_value_is_refused(name: str, word: str) -> None:
    with pytest.raises(TierForceError, match=f"--vary {name}={word}: {word} is not a value"):
        settings_of(Settings(), {name: word})


def test_each_text_begins_with_another_point() -> None:
    assert [turned([1, 2, 3], turn)[0] for turn in range(4)] == [1, 2, 3, 1]


def test_codes_are_part_of_the_law_and_whole_layers_are_not() -> None:
    """How many layers have codes decides how often proposals stand."""
    whole = Settings(mode="retrieval", gpu_kv_layers=2, split_kv_layers=0)
    assert law_of(whole) == law_of(replace(whole, gpu_kv_layers=4, link="view"))
    coded = Settings(mode="split-retrieval", gpu_kv_layers=2, split_kv_layers=3)
    assert law_of(coded) == law_of(replace(coded, link="view"))
    assert law_of(coded) != law_of(replace(coded, split_kv_layers=4))
    assert law_of(coded) != law_of(replace(coded, gpu_kv_layers=3))
