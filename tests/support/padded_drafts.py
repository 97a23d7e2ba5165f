"""Copies of the demo draft with other vocabulary sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.engines import DEMO


def draft_of(vocab: int, folder: Path) -> Path:
    """Copy the demo draft, padded or cut to a vocabulary; padding would get the largest logits."""
    shutil.copytree(DEMO / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab}))
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.embed_tokens.weight"][:vocab]
    padding = 8 * weight[: vocab - len(weight)]
    tensors["model.embed_tokens.weight"] = torch.cat((weight, padding))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
