"""Options are said once: checks, command line and docs/options.md follow from the fields."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from decoding import Engine, Sampling
from decoding.app.commands import generate, summarize
from decoding.app.options import JobOptions, as_flags, option_parameter
from decoding.app.options_page import page
from decoding.config.option import MAIN, PYTHON, option_of, options_of
from decoding.config.settings import Settings
from decoding.engine.chat import Chat
from offload.errors import TierForceError

PAGE = Path(__file__).parents[3] / "docs/options.md"


def test_the_page_is_what_the_code_says() -> None:
    """`python -m decoding.app.options_page > docs/options.md` makes it anew."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("kind", [Settings, Sampling])
def test_every_field_says_what_it_means(kind: type) -> None:
    assert [each.name for each in fields(kind)] == list(options_of(kind))
    for name, each in options_of(kind).items():
        said = option_of(each)
        assert said.help.endswith("."), name
        assert each.default is not None or said.default, name


def test_the_command_line_has_every_setting_that_is_not_for_python_alone() -> None:
    taken = set(inspect.signature(summarize).parameters)
    for kind in (Settings, Sampling):
        for name, each in options_of(kind).items():
            assert (name in taken) == (option_of(each).group != PYTHON), name


def test_ten_options_come_first() -> None:
    panels = [
        each.annotation.__metadata__[0].rich_help_panel
        for each in inspect.signature(summarize).parameters.values()
    ]
    assert panels.count(MAIN) == 10


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"retrieval_budget": 0}, "`retrieval_budget` must be at least 1, found 0"),
        ({"retrieval_budget": 10.5}, "`retrieval_budget` must be a whole number, found 10.5"),
        ({"retrieval_budget": "1024"}, "`retrieval_budget` must be a whole number, found '1024'"),
        ({"chunk_size": True}, "`chunk_size` must be a whole number, found True"),
        ({"chunk_size": None}, "`chunk_size` must be a whole number, found None"),
        ({"prompt_lookup_ngram": -1}, r"`prompt_lookup_ngram` must be 0 \(off\) or more, found -1"),
        ({"gpu_kv_layers": -1}, "`gpu_kv_layers` must be 0 or more"),
        ({"num_draft_tokens": 513}, "`num_draft_tokens` must be at most 512"),
        ({"policy": "best"}, "`policy` best is not known: use attention, static"),
        ({"mode": 3}, "`mode` must be a string"),
        ({"graphs": 1}, "`graphs` must be true or false"),
        ({"link": "pcie"}, "`link` pcie is not known: use auto"),
        ({"link": "emulated:1e-6"}, "`link` emulated:1e-6 is not known: use auto"),
        ({"rope": "linear:4"}, "`rope` linear:4 is not known: use yarn:FACTOR"),
        ({"retrieval_budget": 4}, "`retrieval_budget` 4 is less than one chunk of 8 tokens"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused_by_name(choice: Any, words: str) -> None:
    with pytest.raises(TierForceError, match=words):
        Settings(**choice)


@pytest.mark.parametrize("choice", [{"temperature": "hot"}, {"temperature": float("nan")}])
def test_so_is_a_sampling_that_makes_none(choice: Any) -> None:
    with pytest.raises(TierForceError, match="`temperature` must be"):
        Sampling(**choice)


def test_messages_name_flags_on_the_command_line() -> None:
    said = "`num_draft_tokens` 8 is larger than `retrieval_budget` 4: give `no_such`, `two words` or `A`."
    assert as_flags(said) == (
        "--num-draft-tokens 8 is larger than --retrieval-budget 4: give --no-such, `two words` or `A`."
    )


def test_help_says_what_holds_by_default() -> None:
    info = option_parameter(Settings, "prompt_lookup_ngram")
    assert info.help.endswith("0 is off. Default: 3 without a draft model, else off.")
    assert info.metavar == "TOKENS"


def test_python_starts_where_the_command_line_does() -> None:
    for call in (Engine.generate, Engine.stream, Chat):
        default = inspect.signature(call).parameters["max_new_tokens"].default
        assert default == options_of(JobOptions)["max_new_tokens"].default
    for name, each in options_of(Sampling).items():
        assert inspect.signature(generate).parameters[name].default == each.default
