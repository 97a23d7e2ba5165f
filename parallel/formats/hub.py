"""The Hugging Face hub, asked so that a silent network is not waited for.

Its client is imported where a name is looked up: a local folder needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload.errors import one_line

_TIMEOUT_S = 10.0  # seconds for the hub to answer


class NotFound(Exception):
    """Neither the hub nor the local cache gives it; the text says why."""


def fetch_config(name: str) -> Path:
    """Return the config.json of model `name`, and fetch nothing else. Raises NotFound."""
    from huggingface_hub import hf_hub_download

    return _fetch(hf_hub_download, name, filename="config.json")


def fetch_model(name: str, patterns: Sequence[str]) -> Path:
    """Return the folder of model `name` with the files that match. Raises NotFound."""
    from huggingface_hub import snapshot_download

    return _fetch(snapshot_download, name, allow_patterns=list(patterns))


def _fetch(download: Callable[..., str], name: str, **what: Any) -> Path:
    """Return what a download function gives, from the local cache where the hub is silent."""
    from huggingface_hub import HfApi

    silence = None
    try:
        # a download would ask a silent network again and again
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub client's errors share no base class
        silence = error
    try:
        return Path(download(name, **what, local_files_only=silence is not None))
    except Exception as error:
        raise NotFound(one_line(silence or error)) from error
