"""`--help` in narrow terminals."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from support.commands import forked
from support.slow import slow_except

COMMANDS = ["", "summarize", "plan", "serve", "prompt-cache", "prompt-cache drop"]


def set_columns(width: int) -> None:
    os.environ["COLUMNS"] = f"{width}"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", slow_except([30, 40, 79]))
def test_help_is_readable_in_narrow_terminals(command: str, width: int, tmp_path: Path) -> None:
    """Nothing is cut, and a text has nearly the whole width."""
    wide = forked(tmp_path, *command.split(), "--help")
    assert "╭─ Options ─" in wide.out
    done = forked(tmp_path, *command.split(), "--help", before=partial(set_columns, width))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "╭" not in done.out
    assert all(len(line) <= width for line in lines if " " in line.strip())
    assert max(len(line) - len(line.lstrip()) for line in lines) == 6
    options = {word.strip(",") for word in wide.out.split() if word.startswith("--")}
    assert len(options) > 1 or not command
    assert all(option in done.out for option in options)
    words = " ".join(done.out.split())
    assert ("Exit codes: 0 success" in words) == ("Exit codes: 0 success" in wide.out)
    if command == "summarize":
        assert "Instruction for each document. [default: Summarize the text above.]" in words
        assert "the job resumes. [required]" in words
    if not command:
        assert "Commands: summarize Summarise documents, or answer questions about" in words
