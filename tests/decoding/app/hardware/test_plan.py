"""`tierforce plan`: the bytes are the engine's, and every error is one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from decoding import Settings
from decoding.app.hardware.catalogue import find_model
from decoding.app.hardware.input_plan import InputPlan
from decoding.app.hardware.machine import find_machines
from decoding.app.hardware.model_on_machine import requirements_on
from decoding.app.hardware.plan import _fastest, _plans_on
from decoding.app.hardware.plan_view import Plans, duration
from decoding.config.defaults import RETRIEVAL_BUDGETS
from decoding.engine.session import SequenceState
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.planner import Planner
from decoding.planning.requirements import Requirements, weight_bytes
from decoding.planning.round_cost import Acceptance
from decoding.probe.survey import Gpu, Machine
from offload.errors import InsufficientMemoryError, TierForceError
from parallel.formats.gguf.header import read_header
from parallel.model.loading import parameter_bytes
from support.commands import Finished, forked, refused
from support.engines import DEMO, MODES, Pair
from support.gguf import convert
from support.gguf_bytes import rewrite_header
from support.models import random_tokens
from support.planning import plan_on
from support.slow import slow_except

NUMBERS: dict[str, Any] = {
    "gpus": 1,
    "device_memory": 210e6,
    "host_memory": 1e9,
    "link_in": {"value": 1e9, "source": "none"},
    "link_out": 1e9,
    "memory_rate": 1e10,
    "matmul": 1e11,
    "all_reduce_s": 0,
    "all_reduce_rate": 1e9,
    "layer_s": 0,
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resident", [0, 2, 6])
def test_planned_bytes_are_allocated_by_the_engine(mode: str, resident: int, pair: Pair) -> None:
    """Every tier, from the configs alone."""
    prompt, max_new_tokens = 700, 60
    settings = Settings(mode=mode, dtype="float32", retrieval_budget=200, gpu_kv_layers=resident)
    draft = pair.draft.config if pair.draft is not None else None
    requirements = Requirements(
        pair.target.config, draft, mode, settings, torch.float32, 1, 1, True
    )
    machine = HardwareProfile("here", 1, 1e9, 1e9, 1e9, 1e9, 1e10, 1e11, 0.0, 1e9, 0.0)
    planned = plan_on(machine, requirements, prompt, max_new_tokens)
    plan, (tiers, _) = planned.memory, planned.breakdown
    with pair.engine(
        mode, retrieval_budget=200, gpu_kv_layers=resident, link="emulated:50"
    ) as engine:
        session = SequenceState(engine.runtime, random_tokens(prompt).tolist(), max_new_tokens)
        target_bytes = (
            tiers["resident layers"] + tiers["ring, in prefill one layer"] + tiers["device tail"]
        )
        assert target_bytes == session.target.device_bytes
        assert plan.host_bytes == engine.runtime.arena.nbytes
        assert (plan.slots, plan.slot_heads, plan.resident_layers) == (
            session.plan.memory.slots,
            session.plan.memory.slot_heads,
            resident,
        )
        drafts = [level.cache for level in session.levels if level.name == "draft"]
        assert tiers["draft cache"] == sum(cache.device_bytes for cache in drafts)
        if session.retrieval is not None:  # includes selection scratch and policy state
            shape, spec = session.retrieval.selector.shape, session.retrieval.selector.policy.spec
            selection = shape.scratch_bytes(session.target.layout, spec.query_rows)
            selection += spec.state_bytes(session.target.layout, shape.context, shape.chunk)
            assert tiers["retrieval cache"] == session.retrieval.device_bytes + selection
        else:
            assert tiers["retrieval cache"] == 0
        assert sum(tiers.values()) == session.plan.memory.device_bytes


def test_weights_are_counted_from_the_config(pair: Pair) -> None:
    assert weight_bytes(pair.target.config, 1, torch.float32) == parameter_bytes(pair.target)
    assert pair.draft is not None
    assert weight_bytes(pair.draft.config, 1, torch.float32) == parameter_bytes(pair.draft)
    assert weight_bytes(pair.target.config, 2, torch.bfloat16) < 0.6 * weight_bytes(
        pair.target.config, 1, torch.bfloat16
    )


def plan(folder: Path, *options: str) -> Finished:
    return forked(folder, "plan", "--model", str(DEMO / "target"), *options)


def test_json_document(tmp_path: Path, pair: Pair) -> None:
    hardware = tmp_path / "mine.json"
    hardware.write_text(json.dumps(NUMBERS))
    options = [
        "--draft",
        str(DEMO / "draft"),
        "--context",
        "16384",
        "--retrieval-budget",
        "512",
        "--hardware",
        str(hardware),
        "--mode",
        "hierarchical",
        "--json",
    ]
    done = plan(tmp_path, *options)
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["job"]["mode"] == "hierarchical"
    assert document["plan"]["resident_layers"] < 6
    phases = [document["memory"][name] for name in ("device in prefill", "device when decoding")]
    assert document["plan"]["device_bytes"] == max(
        sum(phase.values()) - phase["weights"] for phase in phases
    )
    assert pair.draft is not None  # float32 here, 16 bits in the plan
    weights = parameter_bytes(pair.target, pair.draft) // 2
    assert [phase["weights"] for phase in phases] == [weights, weights]
    assert document["plan"]["deferred_layers"] > 0
    assert document["forecast"]["token_s"] < document["plain"]["token_s"]
    # concurrent offloaded requests would keep less on the device
    assert document["concurrent"] == {"plan": document["plan"], "forecast": document["forecast"]}
    tables = plan(tmp_path, *options[:-1]).out
    assert "documents per hour  " in tables
    assert document["first document"] == document["forecast"]  # with nothing left to select
    assert "first document of a run" not in tables


def test_first_document_uses_the_same_strategy_on_a_measured_machine(tmp_path: Path) -> None:
    rates = {"reconstruct_rate": 6e9, "high_bits_rate": 2e10}
    numbers = NUMBERS | rates | {"device_memory": 222e6}
    (tmp_path / "mine.json").write_text(json.dumps(numbers))
    options = ["--hardware", str(tmp_path / "mine.json"), "--context", "16384"]
    document = json.loads(plan(tmp_path, *options, "--json").out)
    assert document["job"]["mode"] == "split-retrieval"
    assert document["first document"] == document["forecast"]
    assert "first document of a run" not in plan(tmp_path, *options).out


def test_first_document_is_not_split_with_a_shipped_profile(tmp_path: Path) -> None:
    wide = json_of("target") | {"num_hidden_layers": 32, "hidden_size": 4096, "head_dim": 128}
    wide |= {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11_008}
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    options = ["--model", str(tmp_path / "wide.json"), "--hardware", "1x4090"]
    document = json.loads(plan(tmp_path, *options, "--json").out)
    assert document["job"]["mode"] == "split-retrieval"
    unsplit = json.loads(plan(tmp_path, *options, "--mode", "retrieval", "--json").out)
    assert unsplit["job"]["retrieval_budget"] > 4096
    assert document["first document"] == unsplit["forecast"]
    assert "first document of a run" in plan(tmp_path, *options).out


def test_short_requests_are_planned_concurrently_up_to_the_option(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
    options = ["--hardware", str(tmp_path / "mine.json"), "--context", "1024", "--mode", "plain"]
    document = json.loads(plan(tmp_path, *options, "--json").out)
    count = document["concurrent"]["forecast"]["concurrency"]
    assert count > 1
    assert document["concurrent"]["plan"] == document["plan"]
    assert f"documents per hour, {count} concurrent" in plan(tmp_path, *options).out
    limited = json.loads(plan(tmp_path, *options, "--concurrency", "2", "--json").out)
    assert limited["concurrent"]["forecast"]["concurrency"] == 2
    assert limited["forecast"] == document["forecast"]
    assert plan(tmp_path, *options, "--concurrency", "0").code == 2


def test_deterministic_requests_are_planned_one_at_a_time_and_are_slower(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
    options = ["--hardware", str(tmp_path / "mine.json"), "--context", "1024", "--mode", "plain"]
    default, document = (
        json.loads(plan(tmp_path, *options, *more, "--json").out)
        for more in ([], ["--deterministic"])
    )
    assert document["job"]["deterministic"]
    assert document["concurrent"]["forecast"] == document["forecast"]
    assert default["concurrent"]["forecast"]["concurrency"] > 1
    assert document["forecast"]["token_s"] > default["forecast"]["token_s"]
    assert document["job"]["acceptance"] == pytest.approx(0.9 / 1.1)


def test_split_alternative_is_shown_if_layers_are_offloaded(tmp_path: Path) -> None:
    """It has the forecast of its own plan, and is absent where it cannot gain."""
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
    options = ["--draft", str(DEMO / "draft"), "--hardware", str(tmp_path / "mine.json")]
    long, split = ["--context", "16384", "--retrieval-budget", "512"], "split-hierarchical"
    unsplit = ["--mode", "hierarchical"]
    shown = json.loads(plan(tmp_path, *options, *long, *unsplit, "--json").out)
    alone = json.loads(plan(tmp_path, *options, *long, "--mode", split, "--json").out)
    assert shown["forecast"] != shown[split] == alone["forecast"]
    assert split not in alone
    assert f"decoding, {split}" in plan(tmp_path, *options, *long, *unsplit).out
    # Mode `auto` takes the faster one, and shows the other.
    best = json.loads(plan(tmp_path, *options, *long, "--json").out)
    assert best["job"]["mode"] == split
    assert best["forecast"] == alone["forecast"]
    assert best["hierarchical"] == shown["forecast"]
    assert best["forecast"]["token_s"] < shown["forecast"]["token_s"]
    short, float32 = ["--context", "2048"], ["--context", "3500", "--dtype", "float32"]
    assert (
        json.loads(plan(tmp_path, *options, *short, "--json").out)["plan"]["resident_layers"] == 6
    )
    assert (
        json.loads(plan(tmp_path, *options, *float32, "--json").out)["plan"]["resident_layers"] < 6
    )
    for other in (short, float32, [*long, "--mode", "plain"]):
        done = plan(tmp_path, *options, *other)
        assert done.code == 0, done.err
        assert "split" not in done.out


def test_compressed_offload_takes_three_quarters(tmp_path: Path) -> None:
    options = ["--hardware", "1x4090", "--context", "100000", "--gpu-kv-layers", "0", "--json"]
    options += ["--mode", "retrieval", "--retrieval-budget", "512"]
    uncompressed = json.loads(plan(tmp_path, *options).out)
    compressed = json.loads(plan(tmp_path, *options, "--compress-offload", "on").out)
    assert compressed["plan"]["host_bytes"] == 0.75 * uncompressed["plan"]["host_bytes"]
    assert compressed["forecast"]["token_s"] < uncompressed["forecast"]["token_s"]


def test_the_budget_predicted_fastest_is_selected(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS | {"device_memory": 240e6}))
    options = [
        "--draft",
        str(DEMO / "draft"),
        "--context",
        "16384",
        "--hardware",
        str(tmp_path / "mine.json"),
        "--json",
    ]
    best, times = json.loads(plan(tmp_path, *options).out), {}
    for budget in RETRIEVAL_BUDGETS:
        done = plan(tmp_path, *options, "--retrieval-budget", str(budget))
        if done.code == 0:
            times[budget] = json.loads(done.out)["forecast"]["token_s"]
    assert len(times) > 3
    assert best["job"]["retrieval_budget"] == min(times, key=times.__getitem__)
    assert best["forecast"]["token_s"] == min(times.values())


def test_plot_writes_an_image(tmp_path: Path) -> None:
    done = plan(
        tmp_path,
        "--hardware",
        "1x4090",
        "--context",
        "100000",
        "--plot",
        str(tmp_path / "new/plan.png"),
    )
    assert done.code == 0, done.err
    assert (tmp_path / "new/plan.png").read_bytes().startswith(b"\x89PNG")


def test_tables(tmp_path: Path) -> None:
    done = plan(tmp_path, "--hardware", "1x4090", "--context", "100000")
    assert done.code == 0, done.err
    assert "Fits 1x4090. Predicted, not measured" in done.out
    assert "document of 99,488 tokens" in done.out
    assert "decoding, plain" in done.out


def test_a_terminal_without_a_width_shows_everything(tmp_path: Path) -> None:
    done = forked(tmp_path, "plan", "--model", str(DEMO / "target"), before=_no_width)
    assert done.code == 0, done.err
    assert "Predicted, not measured" in done.out


def _no_width() -> None:
    os.environ["COLUMNS"] = "0"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4567, "0.46 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (112, "1 min 52 s"),
        (3599.7, "1 h 0 min"),
        (7530, "2 h 5 min"),
    ],
)
def test_readable_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--hardware", "3x4080"],
            "--hardware 3x4080 is neither a file nor a known machine: use a number of GPUs and",
        ),
        (
            ["--hardware", "1x4090", "--gpus", "2"],
            "--gpus 2, but --hardware 1x4090 has 1 GPUs.",
        ),
        (
            ["--context", "1000000"],
            "--context 1000000 is more than the model's 131072 positions; --rope yarn:8 would",
        ),
        (
            ["--context", "1000000", "--rope", "yarn:2"],
            "--context 1000000 is more than the model's 262144 positions.",
        ),
        (["--context", "10000000"], "is more than the model's 131072 positions."),
        (["--model", " "], "a model's name is empty: give a folder, a GGUF file or a hub name"),
        (["--context", "100"], "--context 100 leaves no room for a prompt and 512 new tokens"),
        (["--acceptance", "1.5"], "--acceptance must be between 0 and 1, found 1.5"),
        (["--retrieval-budget", "-1"], "--retrieval-budget must be at least 1, found -1"),
        (["--host-memory", "-3"], "--host-memory must be between 0 and 1,000,000 GB, found -3.0"),
        (
            ["--hardware=1x4090", "--host-memory=0.01", "--context=131072", "--gpu-kv-layers=0"],
            "tokens of context would fit",
        ),
        (["--gpu-kv-layers", "99"], "--gpu-kv-layers 99: the model has 6 layers"),
        (
            ["--deterministic", "--concurrency", "2"],
            "--deterministic requests cannot share forwards",
        ),
        (["--dtype", "int4"], "--dtype int4 is not known"),
        (
            ["--compress-offload", "on", "--dtype", "float32"],
            "--compress-offload saves nothing with float32",
        ),
        (
            [
                "--hardware",
                "1x4090",
                "--host-memory",
                "0.01",
                "--mode",
                "plain",
                "--gpu-kv-layers",
                "0",
            ],
            "Use --compress-offload, a shorter --context, more host memory",
        ),
        (
            ["--hardware", "1x4090", "--plot", "/dev/null/plan.png"],
            "--plot /dev/null/plan.png cannot be written",
        ),
        (
            ["--model", "no/such-model-anywhere"],
            "neither a folder, a config.json nor a model found on the hub",
        ),
    ],
)
def test_errors_are_one_line(options: list[str], line: str, tmp_path: Path) -> None:
    assert line in refused(plan(tmp_path, *options))


def test_an_incomplete_config_is_rejected(tmp_path: Path) -> None:
    config = json.loads((DEMO / "target" / "config.json").read_text())
    del config["num_hidden_layers"], config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = forked(tmp_path, "plan", "--model", str(tmp_path / "config.json"))
    assert "lacks hidden_size, num_hidden_layers" in refused(done)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("notes.txt", "all about it", "notes.txt is neither a GGUF file nor a config.json: give a"),
        ("config.json", "{broken", "config.json cannot be read as a model's config (Expecting"),
        ("config.json", "[]", "it is not a JSON object): fetch it again"),
    ],
)
def test_a_file_that_is_no_config_is_rejected(
    name: str, content: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    done = forked(tmp_path, "plan", "--model", str(tmp_path / name))
    assert line in refused(done)


def draft_of(folder: Path, **fields: Any) -> list[str]:
    """Return options with a config of the demo's draft model with changed fields."""
    config = json.loads((DEMO / "draft/config.json").read_text()) | fields
    path = folder / "draft.json"
    path.write_text(json.dumps(config))
    return ["--hardware", "1x4090", "--draft", str(path)]


def test_a_draft_with_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    """Padding is accepted, and modes without a draft are not affected."""
    larger = draft_of(tmp_path, vocab_size=50_000)
    error = refused(plan(tmp_path, *larger))
    assert "has a vocabulary of 50,000 tokens" in error
    assert "must share the target's tokenizer" in error
    assert plan(tmp_path, *larger, "--mode", "retrieval").code == 0
    padded = draft_of(tmp_path, vocab_size=json_of("target")["vocab_size"] + 128)
    assert json.loads(plan(tmp_path, *padded, "--json").out)["notes"] == []


@pytest.mark.parametrize(
    ("fields", "prompt", "note"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 32_256, "is assumed to include that"),
        (
            {
                "model_type": "qwen2",
                "max_position_embeddings": 1_010_000,
                "dual_chunk_attention_config": {"original_max_position_embeddings": 262_144},
            },
            261_632,
            "dual chunk attention, which is not implemented",
        ),
    ],
    ids=["LLaMA-2-7B-32K", "Qwen2.5-1M"],
)
def test_a_doubtful_position_config_is_a_note(
    fields: dict[str, Any], prompt: int, note: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json_of("target") | {"max_position_embeddings": 32_768} | fields))
    options = ["plan", "--model", str(path), "--hardware", "1x4090"]
    document = json.loads(forked(tmp_path, *options, "--json").out)
    assert document["job"]["prompt"] == prompt
    assert note in document["notes"][0]
    assert note in " ".join(forked(tmp_path, *options).out.split())


def test_published_yarn_config_is_planned_for_its_full_context(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    fields = {"model_type": "qwen2", "max_position_embeddings": 32_768, "rope_scaling": yarn}
    path.write_text(json.dumps(json_of("target") | fields))
    options = ["plan", "--model", str(path), "--hardware", "1x4090", "--json"]
    for more in ([], ["--context", "131072"], ["--rope", "yarn:4"]):
        document = json.loads(forked(tmp_path, *options, *more).out)
        assert document["job"]["prompt"] + document["job"]["new"] == 131_072
        assert document["notes"] == []


def test_gguf_vocabulary_is_compared(tmp_path: Path) -> None:
    path = convert(DEMO / "draft", tmp_path / "draft.gguf")
    options = ["--hardware", "1x4090", "--draft", str(path)]
    assert plan(tmp_path, *options).code == 0
    tokens = read_header(path).metadata["tokenizer.ggml.tokens"]
    tokens[500] = "another"
    path = rewrite_header(path, tmp_path / "other.gguf", {"tokenizer.ggml.tokens": tokens})
    error = refused(plan(tmp_path, "--hardware", "1x4090", "--draft", str(path)))
    assert "token 500 is 'another' for the draft" in error


def json_of(model: str) -> dict[str, Any]:
    return dict(json.loads((DEMO / model / "config.json").read_text()))


def test_local_draft_tokenizer_is_compared(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(DEMO / "draft", folder)
    options = ["--hardware", "1x4090", "--draft", str(folder)]
    assert plan(tmp_path, *options).code == 0
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the draft's vocabulary is not the target's: token" in refused(plan(tmp_path, *options))
    for broken in ({}, {"A": "0"}):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": broken}}))
        assert plan(tmp_path, *options).code == 0  # treated as missing


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"link_in": 0}, "link_in must be above 0"),
        ({"link_in": {"value": "fast"}}, "link_in must be a number of 0 or more, found 'fast'"),
        ({"link_in": {"source": "none"}}, "link_in must be a number of 0 or more, found None"),
        ({"gpus": 1.5}, "gpus must be a whole number, found 1.5"),
        ({"matmul": 10**400}, "matmul must be a number of 0 or more, found 1000"),
        ({"matmul": 1e31}, r"found 1e.31; the maximum is 1e.30"),
        ({"matmul": 1e-300}, "matmul must be 1 or more, found 1e-300"),
        ({"link_in": {"value": 0.5}}, "link_in must be 1 or more, found 0.5"),
        ({"layer_s": 1e300}, r"layer_s must be .*, found 1e.300; the maximum is 1e.06"),
        ({"link_in": float("inf")}, "link_in must be a number of 0 or more, found inf"),
        ({"link_in": float("nan")}, "link_in must be a number of 0 or more, found nan"),
        ({"device_memory": 1e300}, "device_memory must be .*; the maximum is 1e.30"),
        ({"gpus": 2000}, "gpus must be .*, found 2000; the maximum is 1024"),
        ({"gpus": True}, "gpus must be a number of 0 or more, found True"),
        ({"matmul": None}, "matmul must be a number of 0 or more, found None"),
        ({"near_rate": 1e9}, "has field names of tierforce 0.1: run `tierforce probe` again"),
    ],
)
def test_implausible_hardware_numbers_are_rejected(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS | change))
    with pytest.raises(TierForceError, match=line):
        HardwareProfile.from_name(str(tmp_path / "mine.json"))


def test_incomplete_hardware_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps({name: value for name, value in NUMBERS.items() if name != "matmul"})
    )
    with pytest.raises(TierForceError, match="hardware mine lacks matmul"):
        HardwareProfile.from_name(str(tmp_path / "mine.json"))


def test_shipped_profiles_are_complete() -> None:
    path = Path(__file__).parents[4] / "decoding" / "planning" / "profiles.json"
    for name, numbers in json.loads(path.read_text()).items():
        assert HardwareProfile.from_name(f"1x{name}").name == f"1x{name}"
        assert all(number["source"] for number in numbers.values())


def test_weights_that_do_not_fit_are_reported(pair: Pair) -> None:
    machine = HardwareProfile("tiny", 1, 1e6, 1e9, 1e9, 1e9, 1e10, 1e11, 0.0, 1e9, 0.0)
    requirements = Requirements(
        pair.target.config, None, "plain", Settings(mode="plain"), torch.float32, 1, 1, True
    )
    with pytest.raises(InsufficientMemoryError, match="the weights alone take"):
        plan_on(machine, requirements, 1000, 10)


def test_plan_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from decoding.app.hardware.model_on_machine import requirements_on\n"
        "from decoding.planning.cost_model import CostModel\n"
        "from decoding.planning.hardware_profile import HardwareProfile\n"
        "from decoding.planning.planner import Planner\n"
        "from parallel.config.model_config import ModelConfig\n"
        "from decoding.config.settings import Settings\n"
        "settings = Settings(dtype='bfloat16')\n"
        "machine = HardwareProfile.from_name('1x4090')\n"
        f"target = ModelConfig.from_name({str(DEMO / 'target')!r}, packed=True)\n"
        "requirements = requirements_on(machine, target, None, settings)\n"
        "costs = CostModel(machine)\n"
        "costs.forecast(Planner(requirements, costs).plan(16_384, 512))\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_machine_name_is_escaped_in_the_terminal(tmp_path: Path) -> None:
    hardware = tmp_path / "[b]mine\x1b[2J[x].json"
    hardware.write_text(json.dumps(NUMBERS))
    options = ("--model", str(DEMO / "target"), "--hardware", str(hardware), "--context", "1024")
    done = forked(tmp_path, "plan", *options)
    assert done.code == 0, done.err
    assert "Fits [b]mine\\x1b[2J[x]." in done.out


def test_documents_of_an_input_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    words = "It was the best of times, it was the worst of times. "
    for name, count in (("a", 1), ("b", 40), ("c", 400)):
        (folder / f"{name}.txt").write_text(words * count)
    (folder / "empty.txt").write_text(" ")
    (folder / "x.jpg").write_text("")
    options = ["--input", str(folder), "--context", "2000", "--max-new-tokens", "100"]
    done = plan(tmp_path, *options, "--json", "--hardware", "1x4090")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    a, b, c, empty = document["input"]["documents"]
    assert empty["error"] == "the document is empty."
    assert [len(each["parts"]) for each in (a, b)] == [1, 1]
    assert [a["parts"], b["parts"]] == [[a["tokens"]], [b["tokens"]]]
    assert c["tokens"] > 1900 * (len(c["parts"]) - 1)
    assert len(c["parts"]) > 1 == len(c["merges"])
    assert document["job"]["prompt"] == max(*c["parts"], *b["parts"]) <= 1900
    total = a["seconds"] + b["seconds"] + c["seconds"]
    assert document["input"]["seconds"] == pytest.approx(total)
    assert c["seconds"] > b["seconds"] > 0
    assert document["notes"] == ["files that summarize would leave out: 1"]
    longest_answers = [*options[:4], "--max-new-tokens", "600", "--json"]
    document = json.loads(plan(tmp_path, *longest_answers, "--hardware", "1x4090").out)
    merges = [size for each in document["input"]["documents"] for size in each["merges"]]
    assert document["job"]["prompt"] == max(merges) > 1216
    table = plan(tmp_path, *options).out
    assert "empty.txt: the document is empty." in table
    assert "3 documents" in table
    cut = plan(tmp_path, *options, "--long", "cut").out
    assert "its beginning" in cut


def test_questions_about_the_documents_of_an_input_are_counted(tmp_path: Path) -> None:
    """A document is prefilled once for all of them."""
    text = "It was the best of times, it was the worst of times. " * 40
    lines = [{"id": "job's", "text": text}, {"id": "own", "text": text, "questions": ["Who?"] * 3}]
    source, questions = tmp_path / "in.jsonl", tmp_path / "questions.txt"
    source.write_text("\n".join(json.dumps({**line, "titel": ""}) for line in lines))
    questions.write_text("Who?\nWho?\nWho?\nWho?\nWho?\n")
    options = ["--input", str(source), "--context", "2000", "--max-new-tokens", "100", "--json"]
    options += ["--concurrency", "1"]

    def seconds(*more: str) -> list[float]:
        document = json.loads(plan(tmp_path, *options, *more).out)
        return [each["seconds"] for each in document["input"]["documents"]]

    one, three = seconds()
    five, again = seconds("--questions", str(questions))
    assert three == pytest.approx(again, rel=1e-3)
    decode_s = (three - one) / 2
    assert five == pytest.approx(one + 4 * decode_s, rel=1e-3)
    assert one > decode_s > 0
    one, three = seconds("--deterministic")
    assert three == pytest.approx(3 * one, rel=1e-3)
    done = plan(tmp_path, *options[:-3], "--questions", str(questions))
    assert "answers" in done.out
    assert 'fields that are not read: "titel"' in done.out


def test_an_input_needs_documents_and_a_tokenizer(tmp_path: Path) -> None:
    empty = tmp_path / "in"
    empty.mkdir()
    assert "has no document" in refused(plan(tmp_path, "--input", str(empty)))
    (empty / "a.txt").write_text(" ")
    for more in ([], ["--json"]):
        done = plan(tmp_path, "--input", str(empty), *more)
        assert "the document is empty." in done.out
        assert "document of 130,560 tokens" in done.out or more  # the longest prompt there may be
        assert (done.code, done.err) == (
            1,
            "tierforce: no document of the input can be summarised: see the reason of each.\n",
        )
    (empty / "a.txt").write_text("It was")
    config = tmp_path / "config.json"
    config.write_text((DEMO / "target" / "config.json").read_text())
    result = forked(tmp_path, "plan", "--model", str(config), "--input", str(empty))
    assert "the tokenizer cannot be loaded" in refused(result)
    for more in (["--include", "*.py"], ["--long", "cut"], ["--questions", str(config)]):
        assert "need --input" in refused(plan(tmp_path, *more))
    wrong = plan(tmp_path, "--input", str(empty), "--long", "drop")
    assert "--long drop is not known" in refused(wrong)


def test_a_plan_is_for_this_machine_by_default(tmp_path: Path) -> None:
    """Without a GPU, weights, KV and all else share one memory, which is not called a GPU's."""
    done = plan(tmp_path, "--context", "8192")
    assert done.code == 0, done.err
    assert "Fits this machine (" in done.out
    for word in ("GPU memory", "per GPU", "host memory", "on-device", "offloaded"):
        assert word not in done.out
    assert "Note: rates are assumed for" in done.out
    document = json.loads(plan(tmp_path, "--context", "8192", "--gpus", "2", "--json").out)
    assert document["job"]["ranks"] == 2
    assert document["memory"]["host"] == 0
    assert "tierforce probe --gpus 2" in document["notes"][0]


def test_memory_of_a_cpu_is_counted_once(tmp_path: Path) -> None:
    hardware = tmp_path / "mine.json"
    options = ("--context", "131072", "--mode", "plain", "--hardware", str(hardware))
    numbers = {**NUMBERS, "device_memory": 4e9, "host_memory": 4e9}
    hardware.write_text(json.dumps({**numbers, "runs_ahead": False}))
    document = json.loads(plan(tmp_path, *options, "--json").out)
    weights = document["memory"]["device in prefill"]["weights"]
    needed = document["plan"]["device_bytes"] / 0.9 + weights
    for share, more in ((1.01, ()), (0.99, ()), (0.99, ("--gpu-kv-layers", "3"))):
        numbers["device_memory"] = share * needed
        hardware.write_text(json.dumps({**numbers, "runs_ahead": False}))
        done = plan(tmp_path, *options, *more)
        if share > 1:
            assert done.code == 0, done.err
        else:
            assert "GB of memory and" in refused(done)
            assert "tokens of context would fit" in done.err
    hardware.write_text(json.dumps(numbers))  # with a GPU, the host has room
    assert plan(tmp_path, *options).code == 0
    numbers["device_memory"] = 0.5 * weights
    hardware.write_text(json.dumps({**numbers, "runs_ahead": False}))
    assert "GB, and 0.0 GB of memory are available. Use a smaller" in plan(tmp_path, *options).err


def four_gpus() -> None:
    """Make the machine one with four 4090s, of which the first has little memory left."""
    name = "NVIDIA GeForce RTX 4090"
    gpus = [
        Gpu(
            name,
            25_756_000_000,
            4,
            4,
            16,
            16,
            None,
            str(index),
            free=25_400_000_000,
            uuid=f"GPU-{index}",
        )
        for index in range(4)
    ]
    gpus[0] = replace(gpus[0], free=1_000_000_000)
    machine = Machine(gpus, "575.1", 16, 16, 60_000_000_000, None, False)
    Machine.detect = classmethod(lambda cls: machine)  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("options", "gpus"), slow_except([((), 2), (("--gpus", "1"), 1), (("--concurrency", "2"), 2)])
)
def test_as_many_gpus_of_this_machine_are_planned_for_as_are_fastest(
    options: tuple[str, ...], gpus: int, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    fields = json.loads(
        (Path(__file__).parents[4] / "decoding/app/hardware/models.json").read_text()
    )["llama-3.1-8b"]
    config.write_text(json.dumps({"dtype": "bfloat16", **fields["config"]}))
    arguments = ("plan", "--model", str(config), "--json", *options)
    done = forked(tmp_path, *arguments, before=four_gpus)
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["job"]["ranks"] == gpus
    note = "of 4 GPUs the plan is for 2, which is predicted to be fastest: run with --gpus 2."
    assert (note in plan["notes"]) == ("--gpus" not in options)
    devices = ",".join(f"GPU-{index + 1}" for index in range(gpus))
    assert f"run with CUDA_VISIBLE_DEVICES={devices}." in " ".join(plan["notes"])
    small = forked(tmp_path, *arguments, "--gpus", "4", before=four_gpus)
    assert "it does not fit this machine (4 x NVIDIA" in refused(small)


def test_the_time_of_all_documents_decides() -> None:
    model = find_model("llama-3.1-8b")
    settings = Settings(dtype="bfloat16", graphs=True)
    needs_on = partial(requirements_on, target=model.config, draft=None, settings=settings)
    plans_on = partial(
        _plans_on, needs_on=needs_on, rates=Acceptance(), prompt=130_000, new=512, concurrency=None
    )
    machines = find_machines("2x4090", None, None, any_number=True)

    def predicted(planner: Planner, plans: Plans) -> SimpleNamespace:
        return SimpleNamespace(seconds=plans.best.requirements.ranks)

    documents = cast(InputPlan, SimpleNamespace(predicted=predicted))
    assert _fastest(machines, plans_on, None)[0].profile.gpus == 2
    machine, _, own = _fastest(machines, plans_on, documents)
    assert machine.profile.gpus == 1
    assert own is not None
    assert own.seconds == 1
