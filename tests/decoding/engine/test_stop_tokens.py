"""Stop tokens: all that the generation config names, else those of the model's config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from decoding import Engine
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup

DEMO = Path(__file__).parents[3] / "demo"


def copy_model(folder: Path) -> Path:
    """Copy the demo's target model, and return its folder."""
    return shutil.copytree(DEMO / "target", folder / "model")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([1, 7, 9], 1, {1, 7, 9}),
        (5, 1, {5}),
        (None, 3, {3}),
        (None, [3, 4], {3, 4}),
        ("no file", 8, {8}),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: object, config: object, expected: set[int]
) -> None:
    folder = copy_model(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "eos_token_id": config}))
    if generation == "no file":
        (folder / "generation_config.json").unlink()
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    engine = Engine.from_pretrained(folder, group=TensorParallelGroup())
    assert engine.scheduler.stop_tokens == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": 1', "cannot be read"),
        ("", "cannot be read"),
        ("7", "cannot be read"),
        ("[1]", "it is not a JSON object"),
        ('{"eos_token_id": 1.5}', "found 1.5"),
        ('{"eos_token_id": 999999}', "token 999999, but the model has"),
        ('{"eos_token_id": "</s>"}', 'must be a token id or a list of them, found "</s>"'),
        ('{"eos_token_id": [1, null]}', r"found \[1, null\]"),
        ('{"eos_token_id": -1}', "found -1"),
        ('{"eos_token_id": true}', "found true"),
        (None, "cannot be read"),  # a dangling symlink, as an incomplete download leaves
    ],
)
def test_an_invalid_generation_config_raises(
    tmp_path: Path, content: str | None, message: str
) -> None:
    folder = copy_model(tmp_path)
    path = folder / "generation_config.json"
    path.unlink()
    if content is None:
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_text(content)
    with pytest.raises(TierForceError, match=f"generation_config.json.*{message}") as caught:
        Engine.from_pretrained(folder, group=TensorParallelGroup())
    assert "\n" not in str(caught.value)
