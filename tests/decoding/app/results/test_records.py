"""The output file survives any end of a job, and other files given as output are left unchanged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import decoding.app.results.record_lines
import decoding.app.results.records
from decoding.app.results.records import Records
from offload.errors import TierForceError
from support.batches import answer
from support.commands import records


def record(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "summary": f"Of {name}.", "versions": {}, **more}


def failure(name: str) -> dict[str, Any]:
    return {"id": name, "error": "empty", "kind": "InvalidRequestError", "versions": {}}


def write_records(path: Path, *content: dict[str, Any]) -> Path:
    with Records(path) as output:
        for item in content:
            output.append(item)
    return path


def test_records_are_json_lines_and_finished_ones_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    odd = record("line\nbreak ü \ud800", summary="„Ja“ 🥊\n\u2028")
    with Records(path) as output:
        for item in (record("a"), failure("b"), odd):
            output.append(item)
        assert output.finished.keys() == {"a", "line\nbreak ü \ud800"}
    assert records(path) == [record("a"), failure("b"), odd]
    assert "„Ja“ 🥊" in path.read_text(encoding="utf-8")  # readable, not escaped


def test_reopening_keeps_finished_and_drops_failed_records(tmp_path: Path) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"), failure("b"), record("c"))
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
        assert synced == [(tmp_path.stat().st_ino, b"")]  # the directory entry
        output.append(record("a"))
        assert synced[1:] == [(path.stat().st_ino, path.read_bytes())]
        assert b"Of a." in synced[1][1]


def test_torn_record_is_dropped(tmp_path: Path) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"), record("b"))
    content = path.read_bytes()
    for end in range(content.index(b"\n") + 1, len(content) - 1):
        path.write_bytes(content[:end])
        with Records(path) as output:
            assert output.finished.keys() == {"a"}
            output.append(record("b"))
        assert path.read_bytes() == content


def test_complete_record_without_newline_is_kept(tmp_path: Path) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"), record("b"))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with Records(path) as output:
        assert output.finished.keys() == {"a", "b"}
    assert path.read_bytes() == content


def test_crash_during_repair_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"), failure("b"))
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Records(path)
    assert path.read_bytes() == before
    monkeypatch.undo()
    with Records(path) as output:
        assert output.finished.keys() == {"a"}
    assert list(tmp_path.iterdir()) == [path]


def test_repair_keeps_file_mode_and_symbolic_link(tmp_path: Path) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"), failure("b"))
    path.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    Records(link).close()
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert records(path) == [record("a")]


def test_locked_file_is_an_error(tmp_path: Path) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"), failure("b"))
    with Records(path) as output:  # repairs the file and locks the new one
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
def test_foreign_file_is_an_error_and_left_unchanged(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(TierForceError, match="choose another file"):
        Records(path)
    assert path.read_text() == content


@pytest.mark.parametrize("padding", ["\0" * 4096, "\n", "\0" * 100 + "\n\n", "\r\n"])
def test_padding_left_by_a_power_loss_is_dropped(padding: str, tmp_path: Path) -> None:
    path = write_records(tmp_path / "out.jsonl", record("a"))
    with path.open("a") as file:
        file.write(padding)
    with Records(path) as output:
        assert output.finished.keys() == {"a"}
        output.append(record("b"))
    assert records(path) == [record("a"), record("b")]
    path.write_text(padding)  # in place of the first record
    with Records(path) as output:
        output.append(record("b"))
    assert records(path) == [record("b")]


def test_full_disk_is_an_error_and_file_can_be_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"

    def raise_disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Records(path) as output:
        output.append(record("a"))
        monkeypatch.setattr(os, "fsync", raise_disk_full)
        with pytest.raises(TierForceError, match="No space left on device"):
            output.append(record("b"))
        assert output.finished.keys() == {"a"}
    monkeypatch.undo()
    with Records(path) as output:
        assert "a" in output.finished


def test_unwritable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierForceError, match="Is a directory"):
        Records(tmp_path)
    with pytest.raises(TierForceError, match="No such file or directory"):
        Records(tmp_path / "missing" / "out.jsonl")


def test_pipe_and_device_are_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(TierForceError, match="pipe or a device"):
            Records(path)


def test_new_file_without_records_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Records(path).close()
    assert not path.exists()
    path.touch()
    Records(path).close()
    assert path.exists()  # it existed before


def test_file_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    with Records(path) as output:
        output.append(record("a"))
    one = path.read_bytes()
    # a blank line in place of the last newline: the size is unchanged
    path.write_bytes(one + b"\n" + one[:-1])
    with Records(path) as output:
        assert output.finished.keys() == {"a"}
    assert path.read_bytes() == one + one
    monkeypatch.setattr(decoding.app.results.record_lines, "MAX_BYTES", len(one))
    for size, content in ((1 << 40, one), (1 << 40, b""), (0, b"[" * 100_000)):
        path.write_bytes(content)
        if size:
            os.truncate(path, size)  # sparse: takes no disk space
        with pytest.raises(TierForceError, match="is not a summary record"):
            Records(path)
        assert path.stat().st_size == (size or len(content))


def test_records_are_sorted_after_those_of_other_documents(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "out.jsonl",
        record("b", seed=1),
        record("old"),
        record("c"),
        record("a"),
        record("b", seed=2),
    )
    path.chmod(0o640)
    with Records(path) as output:
        output.append(failure("d"))
        output.sort(["a", "b", "missing", "c", "d"])
        expected = [record("b", seed=1), record("old"), record("a"), record("b", seed=2)]
        assert records(path) == [*expected, record("c"), failure("d")]
        inode = path.stat().st_ino
        output.sort(["a", "b", "c", "d"])
        assert path.stat().st_ino == inode  # in order already
        with pytest.raises(TierForceError, match="written by another job"):
            Records(path)
        output.append(record("e"))
        assert records(path)[-1] == record("e")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_records_that_cannot_be_sorted_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_records(tmp_path / "out.jsonl", record("b"), record("a"))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Records(path) as output:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(TierForceError, match=r"No space left.*in which their documents"):
                output.sort(["a", "b"])
        assert path.read_bytes() == before
        output.append(record("c"))
    assert path.read_bytes().startswith(before)
    assert list(tmp_path.iterdir()) == [path]


def test_record_that_a_later_run_would_not_read_becomes_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.app.results.records, "MAX_BYTES", 1000)
    path = tmp_path / "out.jsonl"
    with Records(path) as output:
        output.parts.add("1", "b", answer("kept"))
        assert output.append(record("a")) == record("a")
        written = output.append(record("b", answers=["x" * 2000]))
        assert "ask fewer questions at a time" in written["error"]
        assert (written["id"], written["versions"]) == ("b", {})
    with Records(path) as output:
        assert list(output.finished) == ["a"]
        assert output.parts.get("1", "b") is not None
