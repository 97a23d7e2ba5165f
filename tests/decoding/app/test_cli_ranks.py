"""Two ranks that cannot start: still one line, whichever rank finds out and whichever is slower,
and no process stays behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.commands import DRAFT, MODELS, TORCHRUN, Job, records, refused, tierforce, variant

GENERATE = ("generate", "--prompt", "It was", "--gpus", "2")


def summarize(folder: Path, *more: str) -> tuple[str, ...]:
    (folder / "a.txt").write_text("It was. " * 2000)
    return "summarize", *MODELS, "--gpus", "2", "--input", str(folder / "a.txt"), *more


def at_start(folder: Path, code: str) -> dict[str, str]:
    """An environment in which every Python process runs this code first."""
    (folder / "sitecustomize.py").write_text(f"import os\nrank = os.environ.get('RANK')\n{code}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def test_an_error_of_all_ranks(tmp_path: Path) -> None:
    model = variant(
        tmp_path / "model", edit=lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight")
    )
    line = refused(tierforce(*GENERATE, *model))
    assert "model.layers.3.mlp.up_proj.weight is missing" in line


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    model = variant(
        tmp_path / "model", hidden_size=192, num_attention_heads=3, num_key_value_heads=3
    )
    line = refused(tierforce(*GENERATE, *model))
    assert "3 key/value heads cannot be split over 2 ranks" in line


def test_an_error_of_rank_0_alone(tmp_path: Path) -> None:
    line = refused(tierforce(*summarize(tmp_path, "--output", str(tmp_path / "missing/out.jsonl"))))
    assert "--output" in line
    assert "No such file or directory" in line


def test_an_error_of_rank_1_alone(tmp_path: Path) -> None:
    less = (
        "psutil.virtual_memory = lambda real=psutil.virtual_memory(): "
        "real._replace(available=10_000_000)"
    )
    env = at_start(tmp_path, f"if rank == '1':\n    import psutil\n    {less}")
    result = tierforce(*summarize(tmp_path, "--output", str(tmp_path / "out.jsonl")), env=env)
    assert result.code == 1
    (record,) = records(tmp_path / "out.jsonl")
    line = record["error"]
    assert line in result.err
    assert "GB of device memory" in line
    assert "0.004 GB are available" in line  # nine tenths of half of it


def test_an_error_before_the_ranks_have_met_is_left_to_rank_0_to_tell(tmp_path: Path) -> None:
    env = at_start(tmp_path, "if rank == '0':\n    import time; time.sleep(3)")
    line = refused(tierforce(*GENERATE, *MODELS, "--device", "abacus", env=env))
    assert "abacus" in line


def test_an_error_under_torchrun(tmp_path: Path) -> None:
    variant(tmp_path / "draft", DRAFT, vocab_size=2000)
    result = Job(*GENERATE, *MODELS, "--draft", str(tmp_path / "draft"), command=TORCHRUN).finish()
    assert result.code == 1
    # torchrun's own account comes behind our line, and is not ours to hide
    ours, _, report = result.err.partition("Traceback")
    assert "decoding.cli FAILED" in report
    assert ours.count("tierforce: ") == 1
    assert "the draft's vocabulary (2000 tokens) is not the target's" in ours
    assert "tierforce: " not in report
