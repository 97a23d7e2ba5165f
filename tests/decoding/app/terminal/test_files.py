"""Irregular and oversized files are an immediate error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decoding.app.batch.job import model_digest
from decoding.app.documents.formats import encodings
from decoding.app.interactive import generate
from decoding.app.interactive.chat import read_conversation
from decoding.app.server.options import read_keys
from decoding.app.terminal.files import check_overwrite
from decoding.planning.hardware_profile import HardwareProfile
from offload.errors import TierForceError
from support.irregular import IRREGULAR

READERS: dict[str, Callable[[Path], object]] = {
    "/load": read_conversation,
    "--hardware": lambda path: HardwareProfile.from_name(str(path)),
    "--stats": lambda path: check_overwrite("--stats", path),
    "--api-key-file": read_keys,
    "--model": lambda path: model_digest(path.parent),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [*IRREGULAR, "terabyte"])
def test_irregular_file_is_a_one_line_error(kind: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if kind == "terabyte":
        path.touch()
        os.truncate(path, 1 << 40)  # sparse: takes no disk space
    else:
        IRREGULAR[kind](path)
    with pytest.raises(TierForceError) as error:
        READERS[reader](path)
    assert "\n" not in str(error.value)


def test_endless_standard_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero", "rb") as zeros:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(zeros))
        for module in (generate, encodings):
            monkeypatch.setattr(module, "MAX_BYTES", 10)
        with pytest.raises(TierForceError, match="more than any context holds"):
            generate._read_prompt(generate.STDIN, 1)
