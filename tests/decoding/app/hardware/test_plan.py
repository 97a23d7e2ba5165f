"""`tierforce plan`: bytes are the engine's own, and whatever is wrong is one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import Settings
from decoding.app.hardware.plan_view import duration
from decoding.config.defaults import RETRIEVAL_BUDGETS
from decoding.engine.session import SequenceState
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_requirements import Requirements, weight_bytes
from decoding.planning.what_if import plan_request
from offload.errors import InsufficientMemoryError, TierForceError
from parallel.formats.gguf_header import read_header
from parallel.model.loading import parameter_bytes
from support.commands import Finished, forked, refused
from support.engines import DEMO, MODES, Pair
from support.gguf import convert
from support.gguf_bytes import rewrite_header
from support.models import random_tokens

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
def test_bytes_are_those_the_engine_allocates(mode: str, resident: int, pair: Pair) -> None:
    """Tier by tier, from the configs alone."""
    prompt, new = 700, 60
    settings = Settings(mode=mode, dtype="float32", retrieval_budget=200, gpu_kv_layers=resident)
    draft = pair.draft.config if pair.draft is not None else None
    requirements = Requirements(pair.target.config, draft, mode, settings, torch.float32, 1, 1, True)
    machine = HardwareProfile("here", 1, 1e9, 1e9, 1e9, 1e9, 1e10, 1e11, 0.0, 1e9, 0.0)
    report = plan_request(requirements, machine, prompt, new)
    plan, tiers = report.plan, report.prefill_memory
    with pair.engine(
        mode, retrieval_budget=200, gpu_kv_layers=resident, link="emulated:50"
    ) as engine:
        session = SequenceState(engine.runtime, random_tokens(prompt).tolist(), new)
        moving = (
            tiers["resident layers"] + tiers["ring, in prefill one layer"] + tiers["recent tokens"]
        )
        assert moving == session.target.device_bytes
        assert plan.host_bytes == engine.runtime.arena.nbytes
        assert (plan.slots, plan.slot_heads, plan.resident_layers) == (
            session.plan.slots,
            session.plan.slot_heads,
            resident,
        )
        assert tiers["draft cache"] == (session.draft.device_bytes if session.draft else 0)
        if session.retrieval is not None:  # with what choosing takes for a while, and remembers
            shape, traits = session.retrieval.shape, session.retrieval.selector.policy.spec
            choosing = shape.scratch_bytes(session.target.layout, traits.query_rows)
            choosing += traits.state_bytes(session.target.layout, shape.context, shape.chunk)
            assert tiers["retrieval cache"] == session.retrieval.device_bytes + choosing
        else:
            assert tiers["retrieval cache"] == 0
        assert sum(tiers.values()) - tiers["weights"] == session.plan.device_bytes


def test_weights_are_counted_from_the_config(pair: Pair) -> None:
    assert weight_bytes(pair.target.config, 1, torch.float32) == parameter_bytes(pair.target)
    assert pair.draft is not None
    assert weight_bytes(pair.draft.config, 1, torch.float32) == parameter_bytes(pair.draft)
    assert weight_bytes(pair.target.config, 2, torch.bfloat16) < 0.6 * weight_bytes(
        pair.target.config, 1, torch.bfloat16
    )


def plan(folder: Path, *options: str) -> Finished:
    return forked(folder, "plan", "--model", str(DEMO / "target"), *options)


def test_one_document_for_machines(tmp_path: Path, pair: Pair) -> None:
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
    found = json.loads(done.out)
    assert found["job"]["mode"] == "hierarchical"
    assert found["plan"]["resident_layers"] < 6
    phases = [found["memory"][name] for name in ("device in prefill", "device when decoding")]
    assert found["plan"]["device_bytes"] == max(
        sum(phase.values()) - phase["weights"] for phase in phases
    )
    assert pair.draft is not None  # in float32 here, and in the plan in 16 bits
    weights = parameter_bytes(pair.target, pair.draft) // 2
    assert [phase["weights"] for phase in phases] == [weights, weights]
    assert found["plan"]["deferred_layers"] > 0
    assert found["forecast"]["token_s"] < found["plain"]["token_s"]
    # over a link, texts at once would keep less on the device
    assert found["concurrent"] == {"plan": found["plan"], "forecast": found["forecast"]}
    shown = plan(tmp_path, *options[:-1]).out
    assert "documents an hour  " in shown
    assert found["first document"] == found["forecast"]  # where nothing is left to choose
    assert "the first document of a run" not in shown


def test_what_the_first_document_of_a_run_takes(tmp_path: Path) -> None:
    """It goes by the machine's numbers: where these were measured, as all documents do."""
    numbers = NUMBERS | {"reconstruct_rate": 6e9, "high_bits_rate": 2e10}
    (tmp_path / "mine.json").write_text(json.dumps(numbers))
    options = ["--hardware", str(tmp_path / "mine.json"), "--context", "16384"]
    found = json.loads(plan(tmp_path, *options, "--json").out)
    assert found["job"]["mode"] == "split-retrieval"
    assert found["first document"] == found["forecast"]
    assert "the first document of a run" not in plan(tmp_path, *options).out


def test_it_has_no_slices_on_a_machine_that_is_only_known_by_name(tmp_path: Path) -> None:
    wide = json_of("target") | {"num_hidden_layers": 32, "hidden_size": 4096, "head_dim": 128}
    wide |= {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11_008}
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    options = ["--model", str(tmp_path / "wide.json"), "--hardware", "1x4090"]
    found = json.loads(plan(tmp_path, *options, "--json").out)
    assert found["job"]["mode"] == "split-retrieval"
    alone = json.loads(plan(tmp_path, *options, "--mode", "retrieval", "--json").out)
    assert alone["job"]["retrieval_budget"] > 4096
    assert found["first document"] == alone["forecast"]
    assert "the first document of a run" in plan(tmp_path, *options).out


def test_short_texts_are_planned_at_once_or_as_many_as_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
    options = ["--hardware", str(tmp_path / "mine.json"), "--context", "1024", "--mode", "plain"]
    found = json.loads(plan(tmp_path, *options, "--json").out)
    count = found["concurrent"]["forecast"]["concurrency"]
    assert count > 1
    assert found["concurrent"]["plan"] == found["plan"]
    assert f"documents an hour, {count} at once" in plan(tmp_path, *options).out
    asked = json.loads(plan(tmp_path, *options, "--concurrency", "2", "--json").out)
    assert asked["concurrent"]["forecast"]["concurrency"] == 2
    assert asked["forecast"] == found["forecast"]
    assert plan(tmp_path, *options, "--concurrency", "0").code == 2


def test_identical_texts_are_planned_one_at_a_time_and_take_longer(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
    options = ["--hardware", str(tmp_path / "mine.json"), "--context", "1024", "--mode", "plain"]
    usual, found = (
        json.loads(plan(tmp_path, *options, *more, "--json").out)
        for more in ([], ["--deterministic"])
    )
    assert found["job"]["deterministic"]
    assert found["concurrent"]["forecast"] == found["forecast"]
    assert usual["concurrent"]["forecast"]["concurrency"] > 1
    assert found["forecast"]["token_s"] > usual["forecast"]["token_s"]
    assert found["job"]["acceptance"] == pytest.approx(0.9 / 1.1)


def test_a_mode_with_slices_is_told_of_where_layers_are_on_the_host(tmp_path: Path) -> None:
    """With what it would itself be planned to take, and not where there is nothing to gain."""
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
    options = ["--draft", str(DEMO / "draft"), "--hardware", str(tmp_path / "mine.json")]
    far, split = ["--context", "16384", "--retrieval-budget", "512"], "split-hierarchical"
    whole = ["--mode", "hierarchical"]
    told = json.loads(plan(tmp_path, *options, *far, *whole, "--json").out)
    itself = json.loads(plan(tmp_path, *options, *far, "--mode", split, "--json").out)
    assert told["forecast"] != told[split] == itself["forecast"]
    assert split not in itself
    assert f"a token, {split}" in plan(tmp_path, *options, *far, *whole).out
    # what is not set is the faster one, and the other is told of
    best = json.loads(plan(tmp_path, *options, *far, "--json").out)
    assert best["job"]["mode"] == split
    assert best["forecast"] == itself["forecast"]
    assert best["hierarchical"] == told["forecast"]
    assert best["forecast"]["token_s"] < told["forecast"]["token_s"]
    near, uncut = ["--context", "2048"], ["--context", "3600", "--dtype", "float32"]
    assert json.loads(plan(tmp_path, *options, *near, "--json").out)["plan"]["resident_layers"] == 6
    assert json.loads(plan(tmp_path, *options, *uncut, "--json").out)["plan"]["resident_layers"] < 6
    for other in (near, uncut, [*far, "--mode", "plain"]):
        done = plan(tmp_path, *options, *other)
        assert done.code == 0, done.err
        assert "split" not in done.out


def test_packed_layers_take_three_quarters(tmp_path: Path) -> None:
    options = ["--hardware", "1x4090", "--context", "100000", "--gpu-kv-layers", "0", "--json"]
    options += ["--mode", "retrieval", "--retrieval-budget", "512"]
    whole = json.loads(plan(tmp_path, *options).out)
    packed = json.loads(plan(tmp_path, *options, "--compress-offload", "on").out)
    assert packed["plan"]["host_bytes"] == 0.75 * whole["plan"]["host_bytes"]
    assert packed["forecast"]["token_s"] < whole["forecast"]["token_s"]


def test_the_budget_that_is_predicted_to_pay_is_taken(tmp_path: Path) -> None:
    """And no other would be predicted to be faster."""
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS))
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


def test_a_plan_is_drawn(tmp_path: Path) -> None:
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


def test_tables_for_people(tmp_path: Path) -> None:
    done = plan(tmp_path, "--hardware", "1x4090", "--context", "100000")
    assert done.code == 0, done.err
    assert "Fits 1x4090. Predicted, not measured" in done.out
    assert "a document of 99,488 tokens" in done.out
    assert "a token, plain" in done.out


def test_a_terminal_without_a_width_hides_nothing(tmp_path: Path) -> None:
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
def test_times_are_written_as_people_do(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--hardware", "3x4090"],
            "--hardware 3x4090: there is no such file, nor a machine of that name: use 2x4090, 1x",
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
        (["--context", "100"], "--context 100 leaves no room for a prompt before 512 new tokens"),
        (["--acceptance", "1.5"], "--acceptance must be between 0 and 1, found 1.5"),
        (["--retrieval-budget", "-1"], "--retrieval-budget must be at least 1, found -1"),
        (["--host-memory", "-3"], "--host-memory must be 0 or more GB, found -3.0"),
        (
            ["--host-memory", "0.01", "--context", "131072", "--gpu-kv-layers", "0"],
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
            ["--host-memory", "0.01", "--mode", "plain", "--gpu-kv-layers", "0"],
            "It would take --compress-offload, a shorter --context, more host memory",
        ),
        (
            ["--hardware", "1x4090", "--plot", "/dev/null/plan.png"],
            "--plot /dev/null/plan.png cannot be written",
        ),
        (
            ["--model", "no/such-model-anywhere"],
            "neither a folder, a config.json nor a model the hub could give",
        ),
    ],
)
def test_whatever_is_wrong_is_one_line(options: list[str], line: str, tmp_path: Path) -> None:
    assert line in refused(plan(tmp_path, *options))


def test_a_config_with_gaps_is_refused(tmp_path: Path) -> None:
    config = json.loads((DEMO / "target" / "config.json").read_text())
    del config["num_hidden_layers"], config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = forked(tmp_path, "plan", "--model", str(tmp_path / "config.json"))
    assert "lacks hidden_size, num_hidden_layers" in refused(done)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("notes.txt", "all about it", "notes.txt is no GGUF file and no config.json: give a"),
        ("config.json", "{broken", "config.json cannot be read as a model's config (Expecting"),
        ("config.json", "[]", "it is not a JSON object): fetch it again"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    name: str, content: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    done = forked(tmp_path, "plan", "--model", str(tmp_path / name))
    assert line in refused(done)


def draft_of(folder: Path, **fields: Any) -> list[str]:
    """The demo's draft by its config alone, with other fields."""
    config = json.loads((DEMO / "draft/config.json").read_text()) | fields
    path = folder / "draft.json"
    path.write_text(json.dumps(config))
    return ["--hardware", "1x4090", "--draft", str(path)]


def test_a_draft_with_another_vocabulary_does_not_fit(tmp_path: Path) -> None:
    """Vocabularies are padded, and a mode without a draft is not affected."""
    many = draft_of(tmp_path, vocab_size=50_000)
    text = refused(plan(tmp_path, *many))
    assert "has a vocabulary of 50,000 tokens" in text
    assert "must share the target's tokenizer" in text
    assert plan(tmp_path, *many, "--mode", "retrieval").code == 0
    few = draft_of(tmp_path, vocab_size=json_of("target")["vocab_size"] + 128)
    assert json.loads(plan(tmp_path, *few, "--json").out)["notes"] == []


@pytest.mark.parametrize(
    ("fields", "prompt", "note"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 32_256, "is taken to count that"),
        (
            {
                "model_type": "qwen2",
                "max_position_embeddings": 1_010_000,
                "dual_chunk_attention_config": {"original_max_position_embeddings": 262_144},
            },
            261_632,
            "dual chunk attention, which is not computed",
        ),
    ],
    ids=["LLaMA-2-7B-32K", "Qwen2.5-1M"],
)
def test_a_doubt_about_the_positions_is_a_note(
    fields: dict[str, Any], prompt: int, note: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json_of("target") | {"max_position_embeddings": 32_768} | fields))
    options = ["plan", "--model", str(path), "--hardware", "1x4090"]
    found = json.loads(forked(tmp_path, *options, "--json").out)
    assert found["job"]["prompt"] == prompt
    assert note in found["notes"][0]
    assert note in " ".join(forked(tmp_path, *options).out.split())


def test_yarn_by_its_published_recipe_is_planned_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    fields = {"model_type": "qwen2", "max_position_embeddings": 32_768, "rope_scaling": yarn}
    path.write_text(json.dumps(json_of("target") | fields))
    options = ["plan", "--model", str(path), "--hardware", "1x4090", "--json"]
    for more in ([], ["--context", "131072"], ["--rope", "yarn:4"]):
        found = json.loads(forked(tmp_path, *options, *more).out)
        assert found["job"]["prompt"] + found["job"]["new"] == 131_072
        assert found["notes"] == []


def test_the_vocabulary_of_a_gguf_file_is_compared(tmp_path: Path) -> None:
    path = convert(DEMO / "draft", tmp_path / "draft.gguf")
    options = ["--hardware", "1x4090", "--draft", str(path)]
    assert plan(tmp_path, *options).code == 0
    tokens = read_header(path).metadata["tokenizer.ggml.tokens"]
    tokens[500] = "another"
    path = rewrite_header(path, tmp_path / "other.gguf", {"tokenizer.ggml.tokens": tokens})
    text = refused(plan(tmp_path, "--hardware", "1x4090", "--draft", str(path)))
    assert "token 500 is 'another' for the draft" in text


def json_of(model: str) -> dict[str, Any]:
    return dict(json.loads((DEMO / model / "config.json").read_text()))


def test_a_draft_whose_tokenizer_is_here_is_compared(tmp_path: Path) -> None:
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
        assert plan(tmp_path, *options).code == 0  # as where there is none to be read


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"link_in": 0}, "link_in must be above 0"),
        ({"link_in": {"value": "fast"}}, "link_in must be a number of 0 or more, found 'fast'"),
        ({"link_in": {"source": "none"}}, "link_in must be a number of 0 or more, found None"),
        ({"gpus": 1.5}, "gpus must be a whole number, found 1.5"),
        ({"matmul": 10**400}, "matmul must be a number of 0 or more, found 1000"),
        ({"matmul": 1e31}, r"found 1e.31; at most 1e.30 is taken"),
        ({"matmul": 1e-300}, "matmul must be 1 or more, found 1e-300"),
        ({"link_in": {"value": 0.5}}, "link_in must be 1 or more, found 0.5"),
        ({"layer_s": 1e300}, r"layer_s must be .*, found 1e.300; at most 1e.06 is taken"),
        ({"link_in": float("inf")}, "link_in must be a number of 0 or more, found inf"),
        ({"link_in": float("nan")}, "link_in must be a number of 0 or more, found nan"),
        ({"device_memory": 1e300}, "device_memory must be .*; at most 1e.30 is taken"),
        ({"gpus": 2000}, "gpus must be .*, found 2000; at most 1024 is taken"),
        ({"gpus": True}, "gpus must be a number of 0 or more, found True"),
        ({"matmul": None}, "matmul must be a number of 0 or more, found None"),
        ({"near_rate": 1e9}, "was written by tierforce 0.1, .* run `tierforce probe` again"),
    ],
)
def test_hardware_that_makes_no_sense_is_refused(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NUMBERS | change))
    with pytest.raises(TierForceError, match=line):
        HardwareProfile.from_name(str(tmp_path / "mine.json"))


def test_hardware_with_gaps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps({name: value for name, value in NUMBERS.items() if name != "matmul"})
    )
    with pytest.raises(TierForceError, match="hardware mine lacks matmul"):
        HardwareProfile.from_name(str(tmp_path / "mine.json"))


def test_what_is_shipped_is_complete() -> None:
    path = Path(__file__).parents[4] / "decoding" / "planning" / "profiles.json"
    for name, numbers in json.loads(path.read_text()).items():
        assert HardwareProfile.from_name(name).name == name
        assert all(number["source"] for number in numbers.values())


def test_weights_too_large_are_said_to_be(pair: Pair) -> None:
    machine = HardwareProfile("tiny", 1, 1e6, 1e9, 1e9, 1e9, 1e10, 1e11, 0.0, 1e9, 0.0)
    requirements = Requirements(
        pair.target.config, None, "plain", Settings(mode="plain"), torch.float32, 1, 1, True
    )
    with pytest.raises(InsufficientMemoryError, match="the weights alone take"):
        plan_request(requirements, machine, 1000, 10)


def test_a_plan_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from decoding.app.hardware.plan import _needs\n"
        "from decoding.planning.what_if import plan_request\n"
        "from decoding.planning.hardware_profile import HardwareProfile\n"
        "from decoding.config.settings import Settings\n"
        f"needs = _needs({str(DEMO / 'target')!r}, None, Settings(dtype='bfloat16'), 1)\n"
        "plan_request(needs, HardwareProfile.from_name('1x4090'), 16_384, 512)\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_machines_name_is_neither_markup_nor_steers_the_terminal(tmp_path: Path) -> None:
    hardware = tmp_path / "[b]mine\x1b[2J[x].json"
    hardware.write_text(json.dumps(NUMBERS))
    options = ("--model", str(DEMO / "target"), "--hardware", str(hardware), "--context", "1024")
    done = forked(tmp_path, "plan", *options)
    assert done.code == 0, done.err
    assert "Fits [b]mine\\x1b[2J[x]." in done.out
