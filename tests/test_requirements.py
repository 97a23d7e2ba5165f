"""requirements/tested.txt pins every requirement of TierForce to a version that satisfies it."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTED = Path(__file__).parents[1] / "requirements/tested.txt"


def test_every_requirement_is_pinned_to_a_satisfying_version() -> None:
    lines = [line for line in TESTED.read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    declared = [Requirement(line) for line in requires("tierforce") or ()]
    extras = [{"extra": name} for name in ("", "bench", "server", "dev")]
    applicable = [
        each for each in declared if any(not each.marker or each.marker.evaluate(e) for e in extras)
    ]
    assert len(applicable) > 20
    for each in applicable:
        assert each.specifier.contains(versions[canonicalize_name(each.name)]), each
