"""GGUF files by their names on the hub: which file is meant; a plan downloads its header only."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind

import parallel.formats.hub
from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf.header import part_files, read_header
from parallel.formats.hub import GgufName
from parallel.formats.weight_headers import stored_tensors
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup
from support.families import OTHERS
from support.gguf import convert
from support.models import rope
from support.quantised import gptq, quantise

REPO = "someone/Model-8B-GGUF"
FILES = [
    "README.md",
    "Model-8B-Q4_K_M.gguf",
    "Model-8B-UD-Q4_K_XL.gguf",
    "Model-8B.Q6_K.gguf",
    "mmproj-Model-8B-Q6_K.gguf",
    "BF16/Model-8B-BF16-00001-of-00002.gguf",
    "BF16/Model-8B-BF16-00002-of-00002.gguf",
    "a/Model-8B-IQ4_XS.gguf",
    "b/Model-8B-IQ4_XS.gguf",
]


PARTS = [name for name in FILES if "-of-" in name]


class Hub:
    """A hub of one repository whose files all have the same content, but for a split model."""

    def __init__(self, path: Path, parts: list[Path]):
        self.path = path
        self.parts = dict(zip(PARTS, parts, strict=True))
        self.is_reachable = True
        self.downloads: list[str] = []
        self.bytes_read = 0

    def model_info(self, repo: str, timeout: float) -> None:
        if not self.is_reachable:
            raise OSError("no network")

    def list_repo_files(self, repo: str) -> list[str]:
        assert repo == REPO
        return FILES

    def download(self, repo: str, filename: str, local_files_only: bool) -> str:
        assert repo == REPO
        if filename not in FILES or local_files_only:
            raise OSError(f"no {filename}")
        self.downloads.append(filename)
        return str(self.parts.get(filename, self.path))

    def open(self, path: str, mode: str) -> Any:
        assert path.startswith(REPO)
        if not self.is_reachable:
            raise OSError("no network")
        name, hub = path.removeprefix(f"{REPO}/"), self
        content = self.parts.get(name, self.path).read_bytes()

        class Remote(io.BytesIO):
            size = len(content)

            def read(self, size: int | None = -1) -> bytes:
                data = super().read(size)
                hub.bytes_read += len(data)
                return data

        return Remote(content)


@pytest.fixture
def hub(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = checkpoint(
        hidden_size=256,
        intermediate_size=768,
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    )
    whole = convert(folder, tmp_path / "model.gguf", Kind.Q4_K)
    first = convert(folder, tmp_path / "parts.gguf", Kind.Q4_K, part_tensors=20)
    hub = Hub(whole, part_files(first))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(parallel.formats.hub, "_FIRST_READ", 1000)
    monkeypatch.setattr(parallel.formats.hub, "_FACTORS_BYTES", 1000)
    return hub


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (f"{REPO}:Q4_K_M", "Model-8B-Q4_K_M.gguf"),
        (f"{REPO}:q4_k_m", "Model-8B-Q4_K_M.gguf"),
        (f"{REPO}:Q4_K_XL", "Model-8B-UD-Q4_K_XL.gguf"),
        (f"{REPO}:Q6_K", "Model-8B.Q6_K.gguf"),
        (f"{REPO}/Model-8B-Q4_K_M.gguf", "Model-8B-Q4_K_M.gguf"),
        (f"{REPO}/b/Model-8B-IQ4_XS.gguf", "b/Model-8B-IQ4_XS.gguf"),
    ],
)
def test_one_file_is_downloaded(hub: Hub, name: str, file: str) -> None:
    assert resolve(name, TensorParallelGroup()) == hub.path
    assert hub.downloads == [file]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{REPO}:Q4_K", r"has no file of Q4_K: name a file, .*/FILE\.gguf, of .*Q4_K_M\.gguf"),
        (f"{REPO}:IQ4_XS", r"has 2 files of IQ4_XS: .*of a/Model-8B-IQ4_XS\.gguf, b/"),
        (f"{REPO}/Other.gguf", r"neither a local folder nor a model found on the hub \(no Other"),
    ],
)
def test_names_of_no_file_or_of_several(hub: Hub, name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        resolve(name, TensorParallelGroup())


def test_a_plan_downloads_a_header_only(hub: Hub) -> None:
    config = ModelConfig.from_name(f"{REPO}:Q4_K_M", packed=True)
    whole = ModelConfig.from_name(str(hub.path), packed=True)
    assert config == whole
    assert config.kept_types
    assert config.rope["frequency_factors"] == whole.rope["frequency_factors"]
    header = read_header(hub.path)
    assert hub.downloads == []
    assert header.data_start <= hub.bytes_read < 4 * header.data_start + 2000
    assert hub.bytes_read < header.sizes[hub.path] / 2


def test_a_plan_downloads_both_kinds_of_longrope_factors(
    hub: Hub, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    hub.path = convert(checkpoint(**OTHERS["phi3"]), tmp_path / "phi3.gguf")
    config = ModelConfig.from_name(f"{REPO}:Q4_K_M")
    assert config == ModelConfig.from_name(str(hub.path))
    assert len(config.rope["long_factor"]) == len(config.rope["short_factor"]) == 2


@pytest.mark.parametrize("name", [f"{REPO}:BF16", f"{REPO}/{PARTS[0]}", f"{REPO}/{PARTS[1]}"])
def test_a_split_model(hub: Hub, name: str) -> None:
    assert ModelConfig.from_name(name, packed=True) == ModelConfig.from_name(
        str(hub.path), packed=True
    )
    assert hub.downloads == []
    assert resolve(name, TensorParallelGroup()) == hub.parts[PARTS[0]]
    assert hub.downloads == PARTS


def test_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_reachable = False
    name = f"{REPO}/Model-8B-Q4_K_M.gguf"
    with pytest.raises(ConfigError, match=r"nor a model found on the hub \(no network\)"):
        ModelConfig.from_name(name)
    with pytest.raises(CheckpointError, match=r"nor a model found on the hub \(no network\)"):
        resolve(name, TensorParallelGroup())
    with pytest.raises(ConfigError, match=r"nor a model found on the hub \(no network\)"):
        ModelConfig.from_name(f"{REPO}:Q4_K_M")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(hub.path))
    monkeypatch.setattr(parallel.formats.hub, "_cached_files", lambda _: FILES)
    assert ModelConfig.from_name(f"{REPO}:Q4_K_M") == ModelConfig.from_name(str(hub.path))


def test_a_header_that_is_broken_on_the_hub(hub: Hub) -> None:
    hub.path.write_bytes(b"GGUF" + hub.path.read_bytes()[4:600])
    with pytest.raises(CheckpointError, match="ends within its metadata"):
        ModelConfig.from_name(f"{REPO}:Q4_K_M")
    hub.path.write_bytes(b"<html>")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        ModelConfig.from_name(f"{REPO}:Q4_K_M")


def test_other_names() -> None:
    for name in ("owner/repo", "owner/repo/folder", "./owner/repo:x", "a:b", "owner/repo:"):
        assert GgufName.parse(name) is None
    with pytest.raises(CheckpointError, match="there is no such file"):
        resolve("tests/missing/model.gguf", TensorParallelGroup())


def test_a_plan_reads_headers_of_quantised_weights(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It downloads configs, with those that say how weights are quantised, and headers alone."""
    folder = tmp_path / "model"
    quantise(checkpoint(), folder, None, gptq(group=32))
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    expected = ModelConfig.from_name(str(folder), packed=True)
    assert expected.kept_types
    header = stored_tensors(folder)
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "weights")
    asked: list[Any] = []

    def snapshot(repo: str, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append(allow_patterns)
        return str(folder)

    def metadata(self: Any, repo: str) -> Any:
        if not asked:
            raise OSError("no network")
        asked.append(repo)
        tensors = {
            name: SimpleNamespace(dtype=each.dtype, shape=list(each.shape))
            for name, each in header.items()
        }
        files = {"model.safetensors": SimpleNamespace(tensors=tensors)}
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", metadata)
    assert ModelConfig.from_name("owner/model", packed=True) == expected
    files = ["config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"]
    assert asked == [files, "owner/model"]
    asked.clear()
    assert not ModelConfig.from_name("owner/model").kept_types
    assert asked == [files]
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"owner/model is neither .*\(it has no config.json\)"):
        ModelConfig.from_name("owner/model")


def test_weights_in_other_formats_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    others = ["original/model.safetensors", "metal/model.bin", "consolidated.safetensors"]
    asked: list[list[str]] = []

    def snapshot(repo: str, local_files_only: bool, **patterns: list[str]) -> str:
        asked.append(list(filter_repo_objects([*stored, *others], **patterns)))
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    assert resolve("owner/model", TensorParallelGroup()) == Path("folder")
    assert asked == [stored]
