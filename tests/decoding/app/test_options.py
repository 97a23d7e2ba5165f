"""Options are declared once: checks, command line and docs/options.md follow from the fields."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from decoding import Engine, Sampling
from decoding.app.commands import generate, summarize
from decoding.app.interactive.chat_session import Chat
from decoding.app.options import JobOptions, as_flags, option_parameter
from decoding.app.options_page import page
from decoding.config.option import MAIN, PYTHON, option_of, options_of
from decoding.config.settings import Settings
from offload.errors import TierForceError

PAGE = Path(__file__).parents[3] / "docs/options.md"


def test_options_page_is_current() -> None:
    """`python -m decoding.app.options_page > docs/options.md` regenerates it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("kind", [Settings, Sampling])
def test_every_field_has_help_and_default(kind: type) -> None:
    assert [field.name for field in fields(kind)] == list(options_of(kind))
    for name, field in options_of(kind).items():
        option = option_of(field)
        assert option.help.endswith("."), name
        assert field.default is not None or option.default, name


def test_command_line_has_every_setting_not_limited_to_python() -> None:
    parameters = set(inspect.signature(summarize).parameters)
    for kind in (Settings, Sampling):
        for name, field in options_of(kind).items():
            assert (name in parameters) == (option_of(field).group != PYTHON), name


def test_main_panel_has_ten_options() -> None:
    panels = [
        parameter.annotation.__metadata__[0].rich_help_panel
        for parameter in inspect.signature(summarize).parameters.values()
    ]
    assert panels.count(MAIN) == 10


@pytest.mark.parametrize(
    ("values", "words"),
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
def test_invalid_setting_error_names_the_setting(values: Any, words: str) -> None:
    with pytest.raises(TierForceError, match=words):
        Settings(**values)


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"temperature": float("nan")}])
def test_invalid_sampling_error_names_the_field(values: Any) -> None:
    with pytest.raises(TierForceError, match="`temperature` must be"):
        Sampling(**values)


def test_messages_use_flags_on_the_command_line() -> None:
    message = "`num_draft_tokens` 8 exceeds `retrieval_budget` 4: give `no_such`, `a b` or `A`."
    assert as_flags(message) == (
        "--num-draft-tokens 8 exceeds --retrieval-budget 4: give --no-such, `a b` or `A`."
    )


def test_help_states_the_default() -> None:
    info = option_parameter(Settings, "prompt_lookup_ngram")
    assert info.help.endswith("0 is off. Default: 3 without a draft, else off.")
    assert info.metavar == "TOKENS"


def test_python_and_command_line_have_the_same_defaults() -> None:
    for call in (Engine.generate, Engine.stream, Chat):
        default = inspect.signature(call).parameters["max_new_tokens"].default
        assert default == options_of(JobOptions)["max_new_tokens"].default
    parameters = inspect.signature(generate).parameters
    for name, field in options_of(Sampling).items():
        if option_of(field).group != PYTHON:
            assert parameters[name].default == field.default
