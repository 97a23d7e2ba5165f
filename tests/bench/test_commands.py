"""`python -m bench NAME`: benchmarks by short names, and records that say so."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.__main__ import COMMANDS, main
from bench.harness.record import benchmark, environment, prepare, save
from parallel.ranks.process_group import Group

ROOT = Path(__file__).parents[2]


def test_alone_it_lists_all_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    main([])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(len(line.split()) > 3 for line in lines)
    assert max(map(len, lines)) <= 80
    assert set(sys.modules) == before
    assert all(find_spec(module) for module, _ in COMMANDS.values())


def test_a_name_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["decoding"])
    out, err = capsys.readouterr()
    assert leaving.value.code == 2
    assert not out
    assert err.startswith("python -m bench: decoding is not a benchmark")
    assert err.count("\n") == 1


def test_help_names_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "report", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m bench report" in done.stdout


def test_records_say_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("bench.__main__"))
    monkeypatch.setattr(sys, "argv", ["bench/__main__.py", "grid", "--repeats", "3"])
    assert environment()["command"] == "python -m bench grid --repeats 3"


def test_what_is_kept_names_files_and_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, kept = tmp_path / "book.txt", tmp_path / "kept.json"
    text.write_text("It was the best of times.")

    @benchmark
    def measure(text: Path | None, model: Path, context: int = 64) -> None:
        save(kept, {"rows": []}, quiet=True)

    arguments = ["--text", str(text), f"--output={kept}", "--link", "emulated:0.5"]
    monkeypatch.setattr(sys, "argv", ["bench/__main__.py", "grid", *arguments])
    measure(text, model=tmp_path / "target")
    document = json.loads(kept.read_text())
    digest = hashlib.sha256(text.read_bytes()).hexdigest()[:12]
    assert document["settings"] == {
        "text": "book.txt",
        "model": "target",
        "context": 64,
        "text_sha256": digest,
    }
    command = document["environment"]["command"]
    assert command.endswith("grid --text book.txt --output=kept.json --link emulated:0.5")
    measure(None, tmp_path)
    assert json.loads(kept.read_text())["settings"]["text"] == "pydoc_data.topics"


def test_threads_are_those_asked_for_also_where_an_engine_is_loaded(tmp_path: Path) -> None:
    """And they are what they were once the benchmark is done."""
    cores, seen = os.sched_getaffinity(0), list[int]()

    @benchmark
    def measure(threads: int) -> None:
        prepare(threads)
        Group.from_environment("cpu")
        seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    measure(1)
    measure(0)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert seen == [1, 2]
    assert os.sched_getaffinity(0) == cores
