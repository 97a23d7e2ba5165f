"""Marks for cases of parametrised tests that only `make test-slow` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *fast: int) -> list[Any]:
    """Mark all `cases` slow except those at the indices `fast`; by default except the first.

    If several parameters of a test are marked, `make test` runs the combinations of their fast
    cases.
    """
    cases = list(cases)
    fast_indices = {index % len(cases) for index in fast or (0,)}
    return [case if index in fast_indices else _mark_slow(case) for index, case in enumerate(cases)]


def _mark_slow(case: Any) -> Any:
    if hasattr(case, "values") and hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
