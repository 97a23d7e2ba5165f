"""The output file survives whatever happens to the job, and no other file is harmed by being named
as one.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import decoding.app.batch.records
from decoding.app.batch.records import Records
from offload.errors import TierForceError
from support.commands import records


def record(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "summary": f"Of {name}.", "versions": {}, **more}


def failure(name: str) -> dict[str, Any]:
    return {"id": name, "error": "empty", "kind": "InvalidRequestError", "versions": {}}


def written(path: Path, *content: dict[str, Any]) -> Path:
    with Records(path) as output:
        for one in content:
            output.append(one)
    return path


def test_records_are_lines_of_json_and_finished_ones_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    odd = record("line\nbreak ü \ud800", summary="„Ja“ 🥊\n\u2028")
    with Records(path) as output:
        for one in (record("a"), failure("b"), odd):
            output.append(one)
        assert output.finished.keys() == {"a", "line\nbreak ü \ud800"}
    assert records(path) == [record("a"), failure("b"), odd]
    assert "„Ja“ 🥊" in path.read_text(encoding="utf-8")  # for people too


def test_a_later_job_goes_on_and_takes_failed_documents_again(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", record("a"), failure("b"), record("c"))
    with Records(path) as output:
        assert output.finished.keys() == {"a", "c"}
        output.append(record("b"))
    assert records(path) == [record("a"), record("c"), record("b")]
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_is_on_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "out.jsonl", []
    sync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: (sync(file), synced.append((os.fstat(file).st_ino, path.read_bytes()))),
    )
    with Records(path) as output:
        assert synced == [(tmp_path.stat().st_ino, b"")]  # the new file's name
        output.append(record("a"))
        assert synced[1:] == [(path.stat().st_ino, path.read_bytes())]
        assert b"Of a." in synced[1][1]


def test_a_record_that_was_cut_off_anywhere_is_repaired(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", record("a"), record("b"))
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        with Records(path) as output:
            assert output.finished.keys() == {"a"}
            output.append(record("b"))
        assert path.read_bytes() == whole


def test_a_record_that_lacks_nothing_but_its_newline_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", record("a"), record("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with Records(path) as output:
        assert output.finished.keys() == {"a", "b"}
    assert path.read_bytes() == whole


def test_a_crash_during_the_repair_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "out.jsonl", record("a"), failure("b"))
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Records(path)
    assert path.read_bytes() == before
    monkeypatch.undo()
    with Records(path) as output:
        assert output.finished.keys() == {"a"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_repair_keeps_the_mode_and_the_link_to_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", record("a"), failure("b"))
    path.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    Records(link).close()
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert records(path) == [record("a")]


def test_a_second_job_is_refused_while_one_holds_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", record("a"), failure("b"))
    with Records(path) as output:  # which repairs the file: the lock is on the new one
        with pytest.raises(TierForceError, match="written by another job"):
            Records(path)
        output.append(record("c"))
    with Records(path) as output:
        assert output.finished.keys() == {"a", "c"}


@pytest.mark.parametrize(
    "content",
    [
        "Dear all,\n",
        "Dear all, no newline",
        '{"id": "a", "text": "a line of input"}\n',
        '{"id": "a", "text": "the only line of input, without a newline"}',
        '{"error": "a line of somebody\'s log"}\n',
        '{"id": "a", "error": "another log"}\n',
        '{"id": "a", "summary": "Of a.", "versions": {}}\n\n{"id": "b"}\n',
        '["id", "summary", "versions"]\n',
        "7\n",
        "\0\0a\n",
        '{"id": "a", "summary": "Of a.", "versions": {}, "texts_at_once": 1}\n',
    ],
)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(TierForceError, match="choose another file"):
        Records(path)
    assert path.read_text() == content


@pytest.mark.parametrize("left", ["\0" * 4096, "\n", "\0" * 100 + "\n\n", "\r\n"])
def test_what_a_power_loss_leaves_of_a_line_is_no_record(left: str, tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", record("a"))
    with path.open("a") as file:
        file.write(left)
    with Records(path) as output:
        assert output.finished.keys() == {"a"}
        output.append(record("b"))
    assert records(path) == [record("a"), record("b")]
    path.write_text(left)  # of the first
    with Records(path) as output:
        output.append(record("b"))
    assert records(path) == [record("b")]


def test_what_the_disk_does_not_take_is_told_and_can_be_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Records(path) as output:
        output.append(record("a"))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TierForceError, match="No space left on device"):
            output.append(record("b"))
        assert output.finished.keys() == {"a"}
    monkeypatch.undo()
    with Records(path) as output:
        assert "a" in output.finished


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierForceError, match="Is a directory"):
        Records(tmp_path)
    with pytest.raises(TierForceError, match="No such file or directory"):
        Records(tmp_path / "missing" / "out.jsonl")


def test_a_pipe_and_a_device_without_end_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(TierForceError, match="pipe or a device"):
            Records(path)


def test_a_job_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Records(path).close()
    assert not path.exists()
    path.touch()
    Records(path).close()
    assert path.exists()  # it was there before


def test_a_file_of_any_size_is_read_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    with Records(path) as output:
        output.append(record("a"))
    one = path.read_bytes()
    # as long as it was, though not as it was
    path.write_bytes(one + b"\n" + one[:-1])
    with Records(path) as output:
        assert output.finished.keys() == {"a"}
    assert path.read_bytes() == one + one
    monkeypatch.setattr(decoding.app.batch.records, "MAX_BYTES", len(one))
    for size, content in ((1 << 40, one), (1 << 40, b""), (0, b"[" * 100_000)):
        path.write_bytes(content)
        if size:
            os.truncate(path, size)  # which takes no disk
        with pytest.raises(TierForceError, match="is not a summary record"):
            Records(path)
        assert path.stat().st_size == (size or len(content))
