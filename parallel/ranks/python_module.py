"""Running a module of this project in another process."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])


def module_arguments(module: str) -> list[str]:
    """Return the interpreter's arguments that run a module, which its own arguments may follow.

    Modules are found where this process finds them. `python -m` would look in the current folder
    first, and a folder of documents may have sources named like modules of Python.
    """
    path = list(filter(None, sys.path))  # an empty entry is the current folder
    if _ROOT not in path:
        path.append(_ROOT)
    return [
        "-c",
        f"import sys; sys.path[:] = {path!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
    ]
