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
import typer

from bench.__main__ import COMMANDS, main
from bench.harness.experiment import Measurement, benchmark, environment
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, kept = tmp_path / "book.txt", tmp_path / "kept.json"
    text.write_text("It was the best of times.")

    @benchmark("behind {context} tokens, {threads} threads")
    def measure(
        text: Path | None, model: Path, output: Path = kept, context: int = 64
    ) -> Measurement:
        yield {"rows": [{"ms_per_token": 1.5}], "ratios": {"one, times another": 2.0}}

    arguments = ["--text", str(text), f"--output={kept}", "--link", "emulated:0.5"]
    monkeypatch.setattr(sys, "argv", ["bench/__main__.py", "grid", *arguments])
    measure(text, model=tmp_path / "target")
    document = json.loads(kept.read_text())
    digest = hashlib.sha256(text.read_bytes()).hexdigest()[:12]
    assert document["rows"] == [{"ms_per_token": 1.5}]
    assert document["settings"] == {
        "text": "book.txt",
        "model": "target",
        "output": "kept.json",
        "context": 64,
        "text_sha256": digest,
    }
    command = document["environment"]["command"]
    assert command.endswith("grid --text book.txt --output=kept.json --link emulated:0.5")
    out = capsys.readouterr().out
    assert "behind 64 tokens, 1 threads" in out
    assert "one, times another: 2" in out.splitlines()
    measure(None, ROOT / "demo/target")
    settings = json.loads(kept.read_text())["settings"]
    assert (settings["text"], settings["model"]) == ("pydoc_data.topics", "demo/target")


def test_what_was_measured_before_an_error_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_threads_are_those_asked_for_also_where_an_engine_is_loaded(tmp_path: Path) -> None:
    """And they are what they were once the benchmark is done."""
    cores, seen = os.sched_getaffinity(0), list[int]()

    @benchmark("")
    def measure(threads: int, output: Path = tmp_path / "x.json") -> Measurement:
        TensorParallelGroup.from_environment("cpu")
        seen.append(torch.get_num_threads())
        yield {}

    torch.set_num_threads(2)
    measure(1)
    measure(0)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert seen == [1, 2]
    assert os.sched_getaffinity(0) == cores
