"""An engine does not change a program's global state; a command sets defaults the user has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoding.app.environment import set_environment_defaults
from support.commands import DRAFT, TARGET
from support.slow import slow_except

CODE = """
import gc, locale, logging, os, random, resource, signal, sys, threading
import numpy as np
import torch
import transformers  # torch and transformers themselves change some state on import

def global_state():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    limits = [each for each in dir(resource) if each.startswith("RLIMIT_")]
    return {
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": (torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "randomness": (
            torch.get_rng_state().tolist(),
            repr(np.random.get_state()),
            random.getstate(),
        ),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "transformers": transformers.utils.logging.get_verbosity(),
        "signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "locale": locale.setlocale(locale.LC_ALL),
        "limits": [resource.getrlimit(getattr(resource, each)) for each in limits],
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "processor": (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)),
        "numpy": np.geterr(),
        "streams": (sys.stdout, sys.stderr),
        "folder": os.getcwd(),
    }

def check(when):
    now = global_state()
    changed = [name for name in before if before[name] != now[name]]
    assert not changed, (when, changed)

set_by = sys.argv[3]
if set_by == "program":
    torch.set_num_threads(3)
else:
    assert torch.get_num_threads() == 1
before = global_state()
from decoding import GREEDY, Engine, Settings
check("import")
settings = Settings(retrieval_budget=256, prompt_cache=sys.argv[4])
engine = Engine.from_pretrained(sys.argv[1], sys.argv[2], settings)
check("loading")
prompt = "It was the best of times. " * 60
tokens = engine.generate(prompt, 8, GREEDY)
next(tokens)
check("generating")
list(tokens)
list(engine.generate(prompt, 4, GREEDY))
assert engine.stats.loaded_tokens > 0
check("loading a cached prompt")
list(engine.stream("It was", 4))
engine.close()
check("closing")
"""


def run(code: str, *arguments: str, **variables: str) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
    others = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, env=others | variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("set_by", "variables"), slow_except([("program", {}), ("user", {"OMP_NUM_THREADS": "1"})])
)
def test_an_engine_does_not_change_global_state(
    set_by: str, variables: dict[str, str], tmp_path: Path
) -> None:
    run(CODE, str(TARGET), str(DRAFT), set_by, str(tmp_path / "cache"), **variables)


def test_the_command_line_does_not_import_torch_at_startup() -> None:
    run("import sys, decoding.app.main, decoding.cli; assert 'torch' not in sys.modules")


def test_variables_of_the_user_are_not_overwritten() -> None:
    variables = {"OMP_WAIT_POLICY": "active", "LRU_CACHE_CAPACITY": "7"}
    set_environment_defaults(variables)
    assert variables["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in variables  # it would take precedence
    assert variables["LRU_CACHE_CAPACITY"] == "7"
    assert variables["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"
    fresh: dict[str, str] = {}
    set_environment_defaults(fresh)
    assert fresh["OMP_WAIT_POLICY"] == "passive"
    assert fresh["GOMP_SPINCOUNT"] == "100"
