"""instructor, which asks for answers under a schema, and asks again if they are invalid."""

from __future__ import annotations

import json
from pathlib import Path

from support.clients import SMOLLM2_MARKS, run_script
from support.serving import Serving

pytestmark = SMOLLM2_MARKS


def test_typed_answers(smollm2: Serving, home: Path) -> None:
    found = run_script(
        "previous", "use_instructor.py", f"{smollm2.url}/v1", smollm2.model, home=home
    )
    city = found["typed"]
    assert city["name"] in ("Paris", "Rome", "Berlin")
    assert isinstance(city["has_river"], bool)
    assert json.loads(found["raw"]) == city == found["async"]
    names = [each["name"] for each in found["partial"]]
    assert names[0] is None  # The stream began before the name was complete.
    assert found["partial"][-1] == city
    assert ["is odd" in error for error in found["invalid"]] == [True, True]
    assert "the model 'gpt-4' is not available here" in found["model"]
