"""Only regular files are read, and only up to a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload import regular_files
from offload.regular_files import (
    UnsuitableFileError,
    bounded_lines,
    open_regular,
    read_regular,
)
from support.irregular import IRREGULAR


@pytest.mark.parametrize("kind", IRREGULAR)
def test_opening_an_irregular_file_fails_without_blocking(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    IRREGULAR[kind](path)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(UnsuitableFileError, match="not a regular file"):
            open_regular(path, flags)


def test_reading_a_file_above_the_limit_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    for limit in (0, 4):
        with pytest.raises(UnsuitableFileError, match=f"more than {limit} bytes"):
            read_regular(path, limit)
    os.truncate(path, 1 << 40)  # a sparse file takes no disk
    with pytest.raises(UnsuitableFileError, match="more than 1,000 bytes"):
        read_regular(path, 1000)
    # its reported size is 0 bytes
    with pytest.raises(UnsuitableFileError, match="more than 10 bytes"):
        read_regular(Path("/proc/self/status"), 10)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 5)


def test_long_lines_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "_BLOCK", 3)
    path = tmp_path / "file"
    path.write_bytes(b"ab\n\n12345\n1234567890\nc\n1234567")
    with open_regular(path) as file:
        assert list(bounded_lines(file, 4)) == [
            (0, b"ab\n"),
            (3, b"\n"),
            (4, b"12345"),
            (10, b"12345"),
            (21, b"c\n"),
            (23, b"12345"),
        ]
