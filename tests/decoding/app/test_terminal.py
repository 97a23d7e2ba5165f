"""What cannot be written to standard output is told, once, and names of no file are none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from decoding.app.files import check_writable
from decoding.app.terminal import Output
from offload.errors import TierForceError


def test_what_is_closed_takes_nothing_and_says_so_once() -> None:
    output = Output(None)
    output.flush()
    with pytest.raises(TierForceError, match="standard output cannot be written: it is closed"):
        output.write("text")
    output.write("more")
    output.flush()


def test_what_is_full_says_so_once() -> None:
    output = Output(open("/dev/full", "w"))  # noqa: SIM115
    output.write("text")
    with pytest.raises(TierForceError, match="cannot be written: No space left on device"):
        output.flush()
    output.write("more")
    output.flush()


def test_characters_that_the_encoding_lacks_are_spelt_out() -> None:
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, encoding="ascii"))
    output.write("né 😀")
    output.flush()
    assert raw.getvalue() == b"n\\xe9 \\U0001f600"


def test_a_name_with_a_nul_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(TierForceError, match="is no name of a file"):
        check_writable("/save", tmp_path / "a\0b")
