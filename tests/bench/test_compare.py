"""Peers give the same output if their arithmetic is the same; failures are rows with a reason."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

import bench.harness.process
from bench.__main__ import main as run_bench
from bench.harness.process import ending
from bench.peers.base import Job, Result, Unavailable
from bench.peers.compare import Runs, attempt, main, ratios, run
from bench.peers.registry import PEERS
from decoding import GREEDY
from parallel.config.model_config import ModelConfig
from support.commands import redirect
from support.engines import DEMO
from support.gguf import Kind, convert
from support.models import random_tokens
from support.ranks import PRELOAD


@pytest.fixture(autouse=True)
def fork_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run peers in forks of a process that has imported torch and transformers.

    It is started here, as interrupts are blocked while peers start, and forks would inherit that.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    monkeypatch.setattr(bench.harness.process, "_START", "forkserver")


def job(**changes: object) -> Job:
    default = Job(
        target=DEMO / "target",
        draft=DEMO / "draft",
        scratch=Path("nowhere"),
        rope=None,
        prompt=random_tokens(300).tolist(),
        max_new_tokens=6,
        sampling=GREEDY,
        dtype="float32",
        retrieval_budget=None,
        link="emulated:50",
    )
    return Job(**{**vars(default), **changes})


@pytest.mark.slow
def test_available_peers_give_the_same_output(tmp_path: Path) -> None:
    """Rows of unavailable peers have the reason."""
    output = tmp_path / "compare.json"
    names = [
        "ours: plain",
        "ours: plain offloaded",
        "ours: hierarchical offloaded",
        "transformers: static cache",
        "transformers: offloaded cache",
        "DeepSpeed ZeRO-Inference",
        "llama.cpp",
        "llama.cpp: dequantised",
    ]
    main(
        str(DEMO / "target"),
        str(DEMO / "draft"),
        context="600",
        new_tokens=8,
        peers=",".join(names),
        link="emulated:50",
        retrieval_budget=256,
        dtype="float32",
        threads=1,
        limit_s=300,
        output=output,
    )
    document = json.loads(output.read_text())
    rows = {row["peer"]: row for row in document["rows"]}
    assert list(rows) == names
    for name, row in rows.items():
        if row["note"] is None:
            assert row["same_text"] == "yes", name
            assert row["ms_per_token"] > 0
            assert row["prefill_s"] > 0
            assert row["peak_gb"] > 0.1
        else:
            assert row["note"].startswith("skipped: "), name
            assert row["ms_per_token"] is None
    assert set(names) <= set(PEERS)
    available = {name for name, row in rows.items() if row["note"] is None}
    assert set(names[:4]) <= available
    assert rows["ours: hierarchical offloaded"]["link_mb_per_token"] > 0
    assert rows["ours: plain"]["link_mb_per_token"] is None
    claim = "600 tokens: ours: hierarchical offloaded, times as fast as ours: plain offloaded"
    fast, slow = (rows[f"ours: {mode} offloaded"] for mode in ("hierarchical", "plain"))
    gain = slow["ms_per_token"] / fast["ms_per_token"]
    assert document["ratios"][claim] == pytest.approx(gain)
    assert document["settings"]["target"] == "demo/target"


@pytest.mark.slow
def test_peers_load_the_same_gguf_file(tmp_path: Path) -> None:
    """They scale RoPE alike; peers that need a draft model report that there is none."""
    file, output = convert(DEMO / "target", tmp_path / "t.gguf", Kind.Q4_1), tmp_path / "c.json"
    names = ["ours: plain", "ours: hierarchical", "dynamic cache", "assisted", "llama.cpp"]
    main(
        str(file),
        rope="yarn:4",
        context="500",
        new_tokens=6,
        peers=",".join(names),
        dtype="float32",
        threads=1,
        output=output,
    )
    rows = {row["peer"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows["transformers: dynamic cache"]["same_text"] == "yes"
    note = "Q4_1 weights, dequantised before: the same numbers"
    assert rows["transformers: dynamic cache"]["note"] == note
    for name in ("ours: hierarchical", "transformers: assisted"):
        assert rows[name]["note"] == "skipped: it needs a draft model: give --draft"


class Llama(SimpleNamespace):
    """A stand-in for llama-cpp-python's model, which records its arguments."""

    arguments: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: str, **options: Any):
        self.arguments |= {"path": Path(path), **options}


def test_llamacpp_loads_the_file_itself_and_its_dequantised_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("llama_cpp")
    module.__spec__ = ModuleSpec("llama_cpp", None)
    module.Llama, module.LLAMA_ROPE_SCALING_TYPE_YARN = Llama, 2
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    file = convert(DEMO / "target", tmp_path / "t.gguf", Kind.Q4_1)
    llamacpp_job = job(target=file, rope="yarn:4", scratch=tmp_path, dtype="bfloat16")
    assert PEERS["llama.cpp"](llamacpp_job).note == "Q4_1 kernels"
    assert Llama.arguments["path"] == file
    assert (Llama.arguments["rope_scaling_type"], Llama.arguments["rope_freq_scale"]) == (2, 0.25)
    positions = ModelConfig.from_name(str(file)).max_positions
    assert Llama.arguments["yarn_orig_ctx"] == positions
    assert PEERS["llama.cpp: dequantised"](llamacpp_job).note == "BF16 kernels"
    assert Llama.arguments["path"].parent == tmp_path
    with pytest.raises(Unavailable, match="takes a GGUF file: give one"):
        PEERS["llama.cpp"](job())


@pytest.mark.slow
def test_packed_weights_give_the_same_output(tmp_path: Path) -> None:
    file = convert(DEMO / "target", tmp_path / "t.gguf", Kind.Q4_1)
    names = ["ours: plain", "ours: packed, plain", "ours: packed, retrieval offloaded"]
    outcomes = [run(name, job(target=file), 1, 60)[0] for name in names]
    assert all(isinstance(each, Result) for each in outcomes), outcomes
    assert len({tuple(each.tokens) for each in outcomes if isinstance(each, Result)}) == 1
    outcome, _ = run("ours: packed, plain", job(), 1, 60)
    assert outcome == "skipped: the target's weights are not quantised"


def test_a_peer_uses_the_given_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    monkeypatch.setattr("bench.peers.compare.prepare", threads.append)
    attempt("unknown", job(), 3)
    assert threads == [3]


def test_failures_are_reported() -> None:
    outcome, _ = run("unknown", job(), 1, 60)
    assert outcome == "failed: KeyError: 'unknown'"
    outcome, _ = run("ours: plain", job(prompt=[]), 1, 60)
    assert isinstance(outcome, str)
    assert outcome.startswith("failed: InvalidRequestError: the prompt is empty")
    outcome, _ = run("ours: plain", job(), 1, 0.0)
    assert outcome == "failed: took more than 0 s"


@pytest.mark.parametrize(
    ("code", "message"), [(-9, "killed, most likely for memory"), (3, "exited with code 3")]
)
def test_death_of_a_process_is_reported(code: int, message: str) -> None:
    assert message in str(ending(SimpleNamespace(exitcode=code, join=lambda: None)))


def test_a_row_has_medians_and_the_first_difference() -> None:
    times = ((1.0, 0.4), (3.0, 0.8), (2.0, 2.0))
    results = [Result(first, decode, [1, 2, 3, 4, 5]) for first, decode in times]
    row = Runs([*results, "failed: once"], 2.0).row(600, "peer", [1, 2, 9, 4, 5])
    assert (row["prefill_s"], row["ms_per_token"]) == (2.0, 200.0)
    assert (row["min_ms_per_token"], row["max_ms_per_token"]) == (100.0, 500.0)
    assert (row["peak_gb"], row["same_text"], row["note"]) == (2.0, "to token 2", "failed: once")
    assert Runs([*results]).row(600, "peer", None)["same_text"] is None
    assert Runs([*results]).row(600, "peer", [1, 2, 3, 4, 5])["same_text"] == "yes"
    assert Runs(["skipped: not here"]).row(600, "peer", [1])["note"] == "skipped: not here"


def test_ratios_skip_missing_rows() -> None:
    times = {
        "ours: plain": 40.0,
        "ours: hierarchical": 10.0,
        "transformers: static cache": 30.0,
        "llama.cpp": None,
    }
    rows = [
        {"context": context, "peer": peer, "ms_per_token": ms}
        for context in (8192, 65_536)
        for peer, ms in times.items()
        if (context, peer) != (8192, "ours: plain")
    ]
    fastest = "times as fast as the fastest other, transformers: static cache"
    assert ratios(rows) == {
        f"8,192 tokens: ours: hierarchical, {fastest}": 3.0,
        "65,536 tokens: ours: hierarchical, times as fast as ours: plain": 4.0,
        "65,536 tokens: ours: plain, times as fast as transformers: static cache": 0.75,
        f"65,536 tokens: ours: hierarchical, {fastest}": 3.0,
    }


def _compare_in(folder: Path, options: list[str]) -> None:
    """Run `python -m bench compare` in a session of its own; peers are forks, with all imports."""
    os.setsid()
    redirect(folder / "out", folder / "err")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    bench.harness.process._START = "fork"
    run_bench(["compare", *options])


@pytest.mark.slow
def test_finished_rows_are_saved_after_an_interrupt(tmp_path: Path) -> None:
    output = tmp_path / "compare.json"
    options = [
        *("--target", str(DEMO / "target")),
        *("--context", "600,900"),
        *("--new-tokens", "4"),
        *("--peers", "ours: plain"),
        *("--output", str(output)),
        *("--link", "emulated:5"),
        *("--retrieval-budget", "128"),
        *("--dtype", "float32"),
        *("--threads", "1"),
    ]
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_compare_in, args=(tmp_path, options))
    process.start()
    assert process.pid
    while not output.exists() and process.is_alive():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.join(60)
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert process.exitcode == 0, err
    assert "interrupted: finished rows are kept" in err
    assert "Traceback" not in err
    assert "ours: plain" in out  # in the printed table
    rows = json.loads(output.read_text())["rows"]
    assert 1 <= len(rows) < 4
    assert rows[0]["ms_per_token"] > 0
