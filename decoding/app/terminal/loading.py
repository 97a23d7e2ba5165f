"""Loading the models of a command."""

from __future__ import annotations

import sys
from pathlib import Path

from decoding.app.options import Common
from decoding.app.terminal.progress import Display
from decoding.engine.engine import Engine
from parallel.ranks.process_group import TensorParallelGroup


def load_engine(common: Common, group: TensorParallelGroup, folder: Path | None = None) -> Engine:
    """Load the models on all ranks, and show that this takes time. Raises TierForceError.

    `folder` is where the target is, if that is known.
    """
    model = common.model if folder is None else folder
    with Display(1, sys.stderr) as display:
        display.begin(f"loading {common.model}")
        return Engine.from_pretrained(model, common.draft, common.settings, group=group)
