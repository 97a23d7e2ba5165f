"""The demo compares the tokens of both modes, fails if they differ, and draws their stats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import demo.run
from support.commands import TARGET, forked

Run = Callable[[list[str]], SimpleNamespace]  # replacement of subprocess.run
SAME = [5, 6, 7, 8]


def stats_of(mode: str, token_ids: list[int]) -> dict[str, Any]:
    """Return stats of a run over a link: 2 MB per forward, and 4 forwards in plain decoding."""
    drafts = mode == "retrieval"
    new_tokens, forwards = len(token_ids), 1 if drafts else 4
    return {
        "token_ids": token_ids,
        "new_tokens": new_tokens,
        "prompt_tokens": 1_234,
        "time_to_first_token_s": 1.0,
        "ms_per_token": 5.0 if drafts else 40.0,
        "tokens_per_verification": 8.0,
        "link_bytes_per_token": forwards * 2e6 / max(new_tokens - 1, 1),
        "forwards": {"target": forwards},
        "traffic": {"target": {"link_out": 7_654_321}},
        "acceptance": {"target": 0.5, "retrieval": 0.25} if drafts else {},
        "retrieval_budget": 1_024 if drafts else None,
    }


@pytest.fixture
def demo_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    def start(run: Run, **arguments: Any) -> None:
        monkeypatch.setattr(demo.run.subprocess, "run", run)
        monkeypatch.setattr(demo.run, "OUT", tmp_path / "out")
        demo.run.main(**arguments)

    return start


def fake_run(plain: list[int], drafted: list[int], modes: list[str]) -> Run:
    """Return a replacement of subprocess.run that writes stats and records modes."""

    def run(command: list[str]) -> SimpleNamespace:
        options = dict(itertools.pairwise(command))
        mode = options["--mode"]
        modes.append(mode)
        assert options["--model"] == "smollm2"
        assert {"--chat", "--deterministic"} <= set(command)
        assert Path(options["--prompt-file"]).read_text().endswith(demo.run.QUESTION)
        stats = stats_of(mode, drafted if mode == "retrieval" else plain)
        Path(options["--stats"]).write_text(json.dumps(stats))
        return SimpleNamespace(returncode=0)

    return run


def test_both_modes_run_and_are_compared_and_drawn(
    demo_with: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    modes: list[str] = []
    demo_with(fake_run(SAME, SAME, modes))
    assert modes == ["retrieval", "plain"]
    out = " ".join(capsys.readouterr().out.split())
    assert "The same 4 tokens" in out
    assert "8.0 times as fast as plain decoding, for the same 4 tokens" in out
    assert "acceptance rates: target 0.50, retrieval 0.25." in out
    assert "1,234 prompt tokens" in out
    assert out.count("all layers' KV: 7.7 MB") == 2
    assert "2 MB in 1 verifications 8 MB in 4 verifications" in out
    assert "retrieval cache: 1,024 tokens per head" in out
    assert out.count("no retrieval cache") == 1


@pytest.mark.parametrize(
    ("plain", "drafted", "line"),
    [
        (SAME, [5, 6, 9, 8], "4 and 4, of which the first 2 are equal"),
        (SAME, SAME[:3], "3 and 4, of which the first 3 are equal"),
        ([], SAME, "4 and 0, of which the first 0 are equal"),
        ([5], [5], "after 1 tokens: there is nothing to time"),
    ],
)
def test_different_tokens_fail_the_demo_in_one_line(
    plain: list[int],
    drafted: list[int],
    line: str,
    demo_with: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exited:
        demo_with(fake_run(plain, drafted, []))
    assert isinstance(exited.value.code, str)  # printed to standard error; the exit code is 1
    assert line in exited.value.code
    assert "\n" not in exited.value.code
    assert "same" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_demo_with_real_runs_over_a_link(
    seed: str,
    demo_with: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tokens are equal with equal seeds, and the demo fails if plain decoding has another one."""

    def run(command: list[str]) -> SimpleNamespace:
        seeds = {"plain": seed, "retrieval": "0"}
        words = command[command.index("generate") :]
        mode = words[words.index("--mode") + 1]
        result = forked(tmp_path, *words, "--seed", seeds[mode])
        assert result.code == 0, result.err
        return SimpleNamespace(returncode=0)

    small = ("--deterministic", "--device", "cpu", "--gpu-kv-layers", "0", "--link", "emulated:1")
    monkeypatch.setattr(demo.run, "OPTIONS", (*small, "--max-new-tokens", "12"))
    monkeypatch.setattr(demo.run, "CHARACTERS", 3_000)
    if seed != "0":
        with pytest.raises(SystemExit, match="different tokens: 12 and 12"):
            demo_with(run, model=str(TARGET))
        return
    demo_with(run, model=str(TARGET))
    out = capsys.readouterr().out
    assert "The same 12 tokens" in out
    plain = json.loads((tmp_path / "out" / "plain.json").read_text())
    assert plain["gpu_kv_layers"] == 0
    streamed = plain["link_bytes_per_token"] * 11
    assert f"{streamed / 1e6:,.0f} MB in {plain['forwards']['target']} verifications" in out
