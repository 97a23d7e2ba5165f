"""`python -m bench NAME`: benchmarks by short names, and documents that record the command."""

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
import typer

from bench.__main__ import COMMANDS, main
from bench.harness.experiment import Measurement, benchmark, environment
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup

ROOT = Path(__file__).parents[2]


def test_without_a_name_benchmarks_are_listed_and_not_imported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(sys.modules)
    main([])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(len(line.split()) > 3 for line in lines)
    assert max(map(len, lines)) <= 80
    assert set(sys.modules) == before
    assert all(find_spec(module) for module, _ in COMMANDS.values())


def test_unknown_name_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["decoding"])
    out, err = capsys.readouterr()
    assert exited.value.code == 2
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


def test_environment_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("bench.__main__"))
    monkeypatch.setattr(sys, "argv", ["bench/__main__.py", "grid", "--repeats", "3"])
    assert environment()["command"] == "python -m bench grid --repeats 3"


def test_documents_name_files_without_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, saved = tmp_path / "book.txt", tmp_path / "saved.json"
    text.write_text("It was the best of times.")

    @benchmark("after {context} tokens, {threads} threads")
    def measure(
        text: Path | None, model: Path, output: Path = saved, context: int = 64
    ) -> Measurement:
        yield {"rows": [{"ms_per_token": 1.5}], "ratios": {"one, times another": 2.0}}

    arguments = ["--text", str(text), f"--output={saved}", "--link", "emulated:0.5"]
    monkeypatch.setattr(sys, "argv", ["bench/__main__.py", "grid", *arguments])
    measure(text, model=tmp_path / "target")
    document = json.loads(saved.read_text())
    digest = hashlib.sha256(text.read_bytes()).hexdigest()[:12]
    assert document["rows"] == [{"ms_per_token": 1.5}]
    assert document["settings"] == {
        "text": "book.txt",
        "model": "target",
        "output": "saved.json",
        "context": 64,
        "text_sha256": digest,
    }
    command = document["environment"]["command"]
    assert command.endswith("grid --text book.txt --output=saved.json --link emulated:0.5")
    out = capsys.readouterr().out
    assert "after 64 tokens, 1 threads" in out
    assert "one, times another: 2" in out.splitlines()
    measure(None, ROOT / "demo/target")
    settings = json.loads(saved.read_text())["settings"]
    assert (settings["text"], settings["model"]) == ("pydoc_data.topics", "demo/target")


def test_rows_before_an_error_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @benchmark("a title")
    def measure(name: str, output: Path = tmp_path / "{name}.json") -> Measurement:
        yield {"rows": [{"tokens": 7}]}
        if name == "interrupted":
            raise KeyboardInterrupt
        raise TierForceError("no more memory.")

    measure("interrupted")
    assert "finished rows are kept" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        measure("failing")
    out, err = capsys.readouterr()
    assert "tokens" in out
    assert err == "no more memory.\n"
    for name in ("interrupted", "failing"):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert rows == [{"tokens": 7}]


def test_threads_are_set_and_restored(tmp_path: Path) -> None:
    """Loading an engine does not change the given number."""
    cores, threads_seen = os.sched_getaffinity(0), list[int]()

    @benchmark("")
    def measure(threads: int, output: Path = tmp_path / "x.json") -> Measurement:
        TensorParallelGroup.from_environment("cpu")
        threads_seen.append(torch.get_num_threads())
        yield {}

    torch.set_num_threads(2)
    measure(1)
    measure(0)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert threads_seen == [1, 2]
    assert os.sched_getaffinity(0) == cores
