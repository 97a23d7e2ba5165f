"""A grid times each combination once, under settings that make sense."""

from __future__ import annotations

import pytest

from bench.speed.grid import grid, parse, settings_of, turned
from decoding import Settings
from offload.errors import TierForceError


def test_every_combination_stands_once() -> None:
    varied = parse(["mode=plain,retrieval", "draft-length=auto,8", "link=view,emulated:1"])
    points = grid(varied)
    plain = [point for point in points if point["mode"] == "plain"]
    assert plain == [{"mode": "plain", "link": link} for link in ("view", "emulated:1")]
    assert len(points) == 2 + 4
    assert len({tuple(point.items()) for point in points}) == len(points)


def test_words_become_the_values_of_settings() -> None:
    words = {"mode": "plain", "budget": "512", "draft_length": "auto", "graphs": "no"}
    made = settings_of(Settings(draft_length=4), words)
    assert made == Settings(mode="plain", budget=512, draft_length=None, graphs=False)


@pytest.mark.parametrize("word", ["nothing=1", "budget", "budget=", "dtype=float32", "rope=yarn:4"])
def test_what_is_no_setting_of_a_text_is_refused(word: str) -> None:
    with pytest.raises(TierForceError, match=r"give NAME=VALUE,VALUE\. Names are mode, "):
        parse([word])


@pytest.mark.parametrize(("name", "word"), [("budget", "many"), ("graphs", "1"), ("refresh", "")])
def test_what_is_no_value_is_refused(name: str, word: str) -> None:
    with pytest.raises(TierForceError, match=f"--vary {name}={word}: {word} is not a value"):
        settings_of(Settings(), {name: word})


def test_each_text_begins_with_another_point() -> None:
    assert [turned([1, 2, 3], turn)[0] for turn in range(4)] == [1, 2, 3, 1]
