"""The list of versions that the tests ran with has all that TierForce asks for, and pins it."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTED = Path(__file__).parents[1] / "requirements/tested.txt"


def test_what_is_asked_for_is_pinned_to_a_version_that_suits() -> None:
    lines = [line for line in TESTED.read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    asked = [Requirement(line) for line in requires("tierforce") or ()]
    extras = [{"extra": name} for name in ("", "bench", "server", "dev")]
    wanted = [
        each for each in asked if any(not each.marker or each.marker.evaluate(e) for e in extras)
    ]
    assert len(wanted) > 20
    for each in wanted:
        assert each.specifier.contains(versions[canonicalize_name(each.name)]), each
