"""What a command finds around it: limits of the system, and variables that a launcher has left."""

from __future__ import annotations

import errno
import os
import resource
import socket
from datetime import timedelta
from pathlib import Path

import pytest

import parallel.ranks.process_group
from offload.errors import TierForceError, exceeded_limit
from parallel.ranks.launch import require_open_files
from support.commands import MODELS, forked, refused
from support.slow import slow_except

GENERATE = ("generate", *MODELS, "--prompt", "It was", "--max-new-tokens", "2")


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))


def test_too_few_open_files_for_several_ranks_are_told_with_the_limit(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *GENERATE, "--gpus", "2", before=_few_files))
    assert "--gpus 2 needs 80 open files at a time, and `ulimit -Hn` allows 20" in line


def test_a_soft_limit_on_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, before[1]))
        require_open_files(40, "it")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (50, before[1])
        require_open_files(60, "it")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (60, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "`ulimit -n` allows"),
        (RuntimeError("bind failed. code: -24, message: too many open files"), "`ulimit -n`"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "`ulimit -u`"),
        (RuntimeError("can't start new thread"), "`ulimit -u`"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []"), "TMPDIR"),
        (OSError(errno.ENOSPC, "No space left on device", "logs"), "the disk for logs: free some"),
        (OSError(errno.ENOENT, "No such file or directory"), None),
        (ValueError("1"), None),
    ],
)
def test_a_limit_of_the_system_is_named(error: Exception, words: str | None) -> None:
    line = exceeded_limit(error)
    assert line is None if words is None else line is not None and words in line


def _no_folder() -> None:
    import tempfile

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    tempfile.tempdir = None
    tempfile._get_default_tempdir = none  # type: ignore[attr-defined]


def test_no_folder_for_temporary_files_is_one_line(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *GENERATE, "--gpus", "2", before=_no_folder))
    assert "set TMPDIR" in line


class _LeftOver:
    """The variables of a rank whose others are not there, and less patience."""

    def __init__(self, rank: int, port: int, **others: str):
        self.variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **others,
        }

    def __call__(self) -> None:
        os.environ.update(self.variables)
        parallel.ranks.process_group._WARN_AFTER_S = 0.0
        parallel.ranks.process_group.RENDEZVOUS_TIMEOUT = timedelta(seconds=0.3)


@pytest.mark.parametrize(
    ("rank", "launched"), slow_except([(0, False), (1, False), (0, True)], 0, 2)
)
def test_a_rank_says_whom_it_waits_for_and_what_to_unset(
    rank: int, launched: bool, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    others = {"TORCHELASTIC_RUN_ID": "another"} if launched else {}
    finished = forked(tmp_path, *GENERATE, before=_LeftOver(rank, port, **others))
    assert finished.code == 1
    first = finished.err.splitlines()[0]
    assert first.startswith(f"warning: waiting for the other ranks at 127.0.0.1:{port}")
    names = "MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID."
    assert (
        f"unset RANK, WORLD_SIZE, {names if launched else 'MASTER_ADDR and MASTER_PORT.'}" in first
    )


def _left_over_launcher() -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "another"


def test_another_number_of_ranks_than_the_launchers_is_refused(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *GENERATE, "--gpus", "2", before=_left_over_launcher))
    assert "has started 1 rank: leave --gpus out, or unset TORCHELASTIC_RUN_ID" in line


def test_a_limit_that_is_too_low_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(TierForceError, match="needs 30 open files at a time"):
        require_open_files(30, "it")
