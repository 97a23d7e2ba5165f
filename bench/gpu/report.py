"""What the parts of a GPU day measure: rows of one table, saved whenever one is added."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.harness.record import save
from bench.harness.tables import cell, say


@dataclass(frozen=True)
class Row:
    """One measured value."""

    part: str
    what: str
    value: float | str
    unit: str


class Report:
    """Rows of one table, saved whenever one is added."""

    def __init__(self, output: Path):
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output = output
        self.rows: list[Row] = []

    @property
    def failed(self) -> list[str]:
        """Return the names of the parts that failed."""
        return [row.part for row in self.rows if row.what == "failed"]

    def add(self, part: str, what: str, value: float | str | None, unit: str = "") -> None:
        """Add a row; a value that is None is unknown."""
        self.rows.append(Row(part, what, "unknown" if value is None else value, unit))
        say(f"{part}: {what}: {cell(self.rows[-1].value)} {unit}")
        save(self.output, {"rows": self.rows}, quiet=True)
