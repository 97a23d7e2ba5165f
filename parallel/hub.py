"""The Hugging Face hub, asked so that a silent network is not waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from offload.errors import one_line

_PATIENCE = 10.0  # seconds for the hub to answer


class NotThere(Exception):
    """Neither the hub nor the local cache gives it; the text says why."""


def from_hub(download: Callable[..., str], name: str, **what: Any) -> Path:
    """What a download function of huggingface_hub gives of model `name`, from the local cache where
    the hub does not answer.
    """
    silence = None
    try:
        # a download would ask a silent network again and again
        HfApi().model_info(name, timeout=_PATIENCE)
    except Exception as error:  # the hub client's errors share no base class
        silence = error
    try:
        return Path(download(name, **what, local_files_only=silence is not None))
    except Exception as error:
        raise NotThere(one_line(silence or error)) from error
