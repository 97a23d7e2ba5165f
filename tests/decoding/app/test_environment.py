"""System limits, and environment variables left by a launcher."""

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


def _limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))


def test_open_file_limit_for_ranks_is_an_error(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *GENERATE, "--gpus", "2", before=_limit_open_files))
    assert "--gpus 2 needs 80 open files at a time, and `ulimit -Hn` allows 20" in line


def test_soft_limit_on_open_files_is_raised() -> None:
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
def test_exceeded_system_limit_is_named(error: Exception, words: str | None) -> None:
    line = exceeded_limit(error)
    assert line is None if words is None else line is not None and words in line


def _remove_temporary_folder() -> None:
    import tempfile

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    tempfile.tempdir = None
    tempfile._get_default_tempdir = none  # type: ignore[attr-defined]


def test_missing_temporary_folder_is_a_one_line_error(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *GENERATE, "--gpus", "2", before=_remove_temporary_folder))
    assert "set TMPDIR" in line


class _LauncherVariables:
    """The variables of a rank whose peers are missing, and a shorter timeout."""

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
def test_waiting_rank_warns_with_address_and_variables_to_unset(
    rank: int, launched: bool, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    others = {"TORCHELASTIC_RUN_ID": "another"} if launched else {}
    finished = forked(tmp_path, *GENERATE, before=_LauncherVariables(rank, port, **others))
    assert finished.code == 1
    first = finished.err.splitlines()[0]
    assert first.startswith(f"warning: waiting for the other ranks at 127.0.0.1:{port}")
    names = "MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID."
    assert (
        f"unset RANK, WORLD_SIZE, {names if launched else 'MASTER_ADDR and MASTER_PORT.'}" in first
    )


def _set_launcher_variable() -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "another"


def test_gpus_must_match_launched_ranks(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *GENERATE, "--gpus", "2", before=_set_launcher_variable))
    assert "has started 1 rank: leave --gpus out, or unset TORCHELASTIC_RUN_ID" in line


def test_hard_limit_on_open_files_raises_tierforce_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(TierForceError, match="needs 30 open files at a time"):
        require_open_files(30, "it")
