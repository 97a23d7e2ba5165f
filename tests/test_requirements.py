"""requirements/tested.txt pins every requirement of TierForce to a version that satisfies it, and
the environments of clients are pinned likewise.
"""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TESTED = ROOT / "requirements/tested.txt"
# a row of the table of clients in docs/server.md
CLIENT = re.compile(r"^\| ([a-z-]+) ((?:[0-9.]+(?:, )?)+) \|", re.MULTILINE)


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


def client_pins() -> dict[str, dict[str, set[str]]]:
    """Return the pinned versions by environment and package; several for several Pythons."""
    pins: dict[str, dict[str, set[str]]] = {}
    for path in (ROOT / "requirements").glob("clients-*.txt"):
        own = pins.setdefault(path.stem.removeprefix("clients-"), {})
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                requirement = Requirement(line)
                (version,) = requirement.specifier
                assert version.operator == "==", line
                own.setdefault(canonicalize_name(requirement.name), set()).add(version.version)
    return pins


def test_environments_of_clients_are_pinned() -> None:
    environments = re.search(r"^CLIENTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert environments is not None
    assert set(environments[1].split()) == set(client_pins())


def test_the_versions_of_clients_are_documented() -> None:
    documented = CLIENT.findall((ROOT / "docs/server.md").read_text())
    assert len(documented) > 5
    for name, versions in documented:
        for version in versions.split(", "):
            assert any(version in own.get(name, ()) for own in client_pins().values()), name
