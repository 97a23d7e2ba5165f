"""Between `Engine.generate` and a kernel are the functions that docs/architecture.md lists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from decoding import GREEDY
from offload.attention import cpu
from support.engines import SMALL, Pair
from support.models import random_tokens

ROOT = Path(__file__).parents[3]
MAX_STATIONS = 22


def stations() -> list[tuple[str, str]]:
    """Return the file and the function of each of the project's frames, outermost first."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (
            "decoding",
            "parallel",
            "offload",
        ):
            found.append((str(path.relative_to(ROOT)), frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("mode", ["plain", "hierarchical"])
def test_a_token_goes_through_few_functions(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, flash = list[list[tuple[str, str]]](), cpu._flash

    def record(*arguments: Any, **options: Any) -> Any:
        calls.append(stations())
        return flash(*arguments, **options)

    with models.engine(mode, **SMALL, link="emulated:50", gpu_kv_layers=1) as engine:
        new_tokens = engine.generate(random_tokens(300).tolist(), 12, GREEDY)
        next(new_tokens)
        monkeypatch.setattr(cpu, "_flash", record)
        assert len(list(new_tokens)) == 11
    assert max(map(len, calls)) == MAX_STATIONS
    text = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(r"^    (\w+/\S+\.py) +(?:\w+\.)?(\w+)$", text, re.MULTILINE)
    assert len(listed) == MAX_STATIONS
    assert listed in calls
