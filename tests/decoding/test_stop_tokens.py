"""Which tokens end a text: all that the generation config names, else those of the model's
config.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from decoding import Engine
from parallel.group import Group

DEMO = Path(__file__).parents[2] / "demo"


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
    folder = tmp_path / "model"
    shutil.copytree(DEMO / "target", folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "eos_token_id": config}))
    if generation == "no file":
        (folder / "generation_config.json").unlink()
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert Engine.from_pretrained(folder, group=Group()).stop_tokens == expected
