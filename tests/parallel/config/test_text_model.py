"""The text model in a larger one, and types that are another but in name, equal transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from parallel.config.model_config import ModelConfig
from parallel.config.text_model import wrapper_notes
from parallel.errors import CheckpointError, ConfigError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.loading import all_logits
from support.models import TINY, edit_weights, random_tokens, reference_logits, tiny_config
from support.quantised import fp8, quantise

TEXT = {name: value for name, value in TINY.items() if name != "tie_word_embeddings"}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2}
QWEN_VISION |= {"intermediate_size": 16, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
# arguments of transformers' configs
WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "ministral3 in mistral3": {
        "text_config": tiny_config("ministral3").to_dict(),
        "vision_config": {**VISION, "head_dim": 8},
        "tie_word_embeddings": True,
    },
    "llava": {
        "text_config": {"model_type": "llama", "head_dim": 12},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": MROPE},
        "vision_config": {**QWEN_VISION, "hidden_size": 32, "embed_dim": 16, "mlp_ratio": 1},
    },
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "qwen3_vl": {
        "text_config": {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 8},
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
    },
}


def build(name: str, folder: Path) -> Path:
    """Write a random model for images and text, as transformers does."""
    options = dict(WRAPPERS[name])
    options["text_config"] = {**TEXT, **options["text_config"]}
    kind = name.rpartition(" ")[2]
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(1 + noise if parameter.ndim == 1 else noise)
    model.save_pretrained(folder)
    return folder


def expected_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens[None]).logits[0]
    assert logits.std() > 0.1
    return logits


def text_logits(folder: Path, tokens: Tensor) -> Tensor:
    return all_logits(load_model(folder, TensorParallelGroup(), "float32"), tokens)


@pytest.mark.parametrize("name", WRAPPERS)
def test_logits_of_text_equal_transformers(name: str, tmp_path: Path) -> None:
    folder, tokens = build(name, tmp_path / "model"), random_tokens(60)
    torch.testing.assert_close(
        text_logits(folder, tokens), expected_logits(folder, tokens), atol=1e-4, rtol=1e-4
    )
    config = ModelConfig.from_pretrained(folder)
    assert config == ModelConfig.from_name(str(folder))
    kind = name.rpartition(" ")[2]
    assert wrapper_notes(config.wrapper) == [
        f"Only the language part of this {kind} model runs: it takes text alone."
    ]


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


def test_older_forms_of_config_and_names(tmp_path: Path) -> None:
    """Qwen2.5-VL was published without a config of its text model, and with other RoPE fields."""
    folder, tokens = build("qwen2_5_vl", tmp_path / "qwen"), random_tokens(60)
    expected = expected_logits(folder, tokens)

    def flatten(fields: dict[str, Any]) -> None:
        text = fields.pop("text_config")
        del text["model_type"], text["rope_parameters"]
        fields |= {**text, "rope_theta": 10_000.0}
        fields["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}

    edit_config(folder, flatten)
    torch.testing.assert_close(text_logits(folder, tokens), expected, atol=1e-4, rtol=1e-4)
    assert ModelConfig.from_pretrained(folder) == ModelConfig.from_name(str(folder))


@pytest.mark.parametrize("is_tied", [True, False])
def test_another_prefix_of_names(tmp_path: Path, is_tied: bool) -> None:
    """transformers writes one prefix, and has written another."""
    name = "ministral3 in mistral3" if is_tied else "mistral3"
    folder, tokens = build(name, tmp_path / "model"), random_tokens(60)
    expected = text_logits(folder, tokens)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            stem = name.replace("language_model.model.", "model.language_model.")
            stem = stem.replace("language_model.lm_head", "lm_head")
            is_vision = stem.startswith(("vision_tower", "multi_modal"))
            tensors[f"model.{stem}" if is_vision else stem] = tensors.pop(name)

    edit_weights(folder, rename)
    assert torch.equal(text_logits(folder, tokens), expected)


@pytest.mark.parametrize("is_inner", [True, False])
def test_quantised_text_models(tmp_path: Path, is_inner: bool) -> None:
    """Ministral 3 is published in FP8, which its own config or that of the whole says."""
    folder = build("ministral3 in mistral3", tmp_path / "model")
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    scales = fp8((32, 32), torch.float32, "weight_scale_inv")
    quantise(folder, tmp_path / "fp8", None if is_inner else config, scales)
    if is_inner:
        edit_config(
            tmp_path / "fp8",
            lambda fields: fields["text_config"].update(quantization_config=config),
        )
    packed = ModelConfig.from_pretrained(tmp_path / "fp8", packed=True)
    assert packed == ModelConfig.from_name(str(tmp_path / "fp8"), packed=True)
    assert "model.layers.0.self_attn.q_proj.weight" in dict(packed.kept_types)
    group, tokens = TensorParallelGroup(), random_tokens(60)
    logits = all_logits(load_model(tmp_path / "fp8", group, "float32", packed), tokens)
    assert torch.equal(logits, text_logits(tmp_path / "fp8", tokens))


def test_fields_of_the_whole_model_count(tmp_path: Path) -> None:
    text = {**TEXT, "model_type": "mistral", "sliding_window": None}
    whole = {"model_type": "mistral3", "text_config": text, "torch_dtype": "bfloat16"}
    whole |= {"eos_token_id": 7, "tie_word_embeddings": True, "vision_config": {"hidden_size": 9}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    config = ModelConfig.from_name(str(path))
    assert config == ModelConfig.from_pretrained(tmp_path)
    assert (config.family, config.dtype, config.tied) == ("mistral", "bfloat16", True)
    assert (config.stop_tokens, config.hidden) == ({7}, 32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"text_config": {"model_type": "mistral4"}},
            "model_type 'mistral4' of this mistral3 model's text is not supported",
        ),
        ({"text_config": {"model_type": "qwen2"}}, "lacks hidden_size"),
        ({"text_config": {}}, "its model_type is None, which is not a name"),
        ({"text_config": [1]}, "mistral3 model has no text_config"),
        ({}, "mistral3 model has no text_config"),
        ({"text_config": {**TEXT, "model_type": 3}}, "its model_type is 3, which is not a name"),
        ({"text_config": {**TEXT, "model_type": ["a"]}}, "is not a name"),
    ],
    ids=str,
)
def test_broken_configs(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", **fields}))
    for read in (lambda: ModelConfig.from_name(str(tmp_path)), from_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match=words) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_either_config_may_tie_the_head(
    outer: bool | None, inner: bool | None, tmp_path: Path
) -> None:
    """As in transformers; if neither says it, the files do. A head of their own is always used."""
    tied = build("qwen3_vl", tmp_path / "tied")
    untied = build("mistral3", tmp_path / "untied")

    def edit(fields: dict[str, Any]) -> None:
        for each, value in ((fields, outer), (fields["text_config"], inner)):
            each.pop("tie_word_embeddings", None)
            if value is not None:
                each["tie_word_embeddings"] = value

    for folder in (tied, untied):
        edit_config(folder, edit)
        config = ModelConfig.from_pretrained(folder)
        assert config == ModelConfig.from_name(str(folder))
        is_tied = folder == tied
        if outer is not True and inner is not True and (outer, inner) != (None, None):
            is_tied = False
        assert config.tied == is_tied
    text_logits(untied, random_tokens(3))


PIXTRAL = {
    "model_type": "llava",
    "vision_config": {"model_type": "pixtral"},
    "text_config": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "sliding_window": None,
        "rope_theta": 1e9,
        "vocab_size": 131_072,
    },
}
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064},
}


@pytest.mark.parametrize("fields", [PIXTRAL, LLAVA], ids=["pixtral", "llava"])
def test_text_configs_leave_out_transformers_defaults(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_name(str(tmp_path))
    text = CONFIG_MAPPING[fields["model_type"]].from_dict(fields).text_config
    assert config.heads == text.num_attention_heads == 32
    assert (config.layers, config.hidden) == (text.num_hidden_layers, text.hidden_size)
    assert (config.intermediate, config.vocab) == (text.intermediate_size, text.vocab_size)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_defaults_of_text_models_of_another_name(name: str, tmp_path: Path) -> None:
    text = {each: value for each, value in TEXT.items() if each != "num_key_value_heads"}
    text |= {"num_attention_heads": 32, "hidden_size": 128}
    fields = {"model_type": name, "text_config": {"model_type": f"{name}_text", **text}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_name(str(tmp_path))
    assert config == ModelConfig.from_pretrained(tmp_path)
    hf = CONFIG_MAPPING[name].from_dict(fields).text_config
    assert config.kv_heads == hf.num_key_value_heads
    assert config.rope["rope_theta"] == hf.rope_parameters["rope_theta"]
    assert config.norm_eps == hf.rms_norm_eps


def test_the_whole_config_says_how_weights_are_quantised(tmp_path: Path) -> None:
    """Where both do, so that a plan and an engine agree."""
    folder = build("ministral3 in mistral3", tmp_path / "model")
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantise(folder, tmp_path / "fp8", config, fp8((32, 32), torch.float32, "weight_scale_inv"))
    other = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    edit_config(
        tmp_path / "fp8", lambda fields: fields["text_config"].update(quantization_config=other)
    )
    assert ModelConfig.from_pretrained(tmp_path / "fp8", packed=True).kept_types
    text_logits(tmp_path / "fp8", random_tokens(3))


def test_tensors_for_images_belong_to_no_plain_model(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_of(checkpoint(), tmp_path / "model")
    edit_weights(folder, lambda tensors: tensors.update({"visual.x": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"1 tensors are not part of the model.*visual\.x"):
        load_model(folder, TensorParallelGroup())


def from_pretrained(folder: Path) -> Callable[[], ModelConfig]:
    return lambda: ModelConfig.from_pretrained(folder)


def test_internlm3_is_a_llama(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, tokens = checkpoint(head_dim=12, attention_bias=True, mlp_bias=True), random_tokens(60)
    expected = reference_logits(folder, tokens)

    def rename(fields: dict[str, Any]) -> None:
        fields |= {"model_type": "internlm3", "qkv_bias": True, "bias": True}
        fields["auto_map"] = {"AutoConfig": "configuration_internlm3.InternLM3Config"}
        del fields["attention_bias"], fields["mlp_bias"]

    copied = edit_weights(copy_of(folder, tmp_path / "internlm3"), lambda tensors: None)
    edit_config(copied, rename)
    torch.testing.assert_close(text_logits(copied, tokens), expected, atol=1e-4, rtol=1e-4)
    assert ModelConfig.from_pretrained(copied) == ModelConfig.from_name(str(copied))


def test_mimo_is_a_qwen2(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, tokens = checkpoint(family="qwen2"), random_tokens(60)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(32, 64)

    copied = edit_weights(copy_of(folder, tmp_path / "mimo"), add)
    edit_config(copied, lambda fields: fields.update(model_type="mimo", num_nextn_predict_layers=1))
    assert torch.equal(text_logits(copied, tokens), text_logits(folder, tokens))
    assert ModelConfig.from_pretrained(copied) == ModelConfig.from_name(str(copied))


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target
