"""Downloads from the Hugging Face hub, with a short timeout for an unresponsive network.

Its client is imported only when a name is looked up: local folders do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload.errors import one_line

_TIMEOUT_S = 10.0  # time limit for a response of the hub in seconds


class NotFound(Exception):
    """A model is neither on the hub nor in the local cache; the message says why."""


def fetch_config(name: str) -> Path:
    """Return the path of model `name`'s config.json, fetching nothing else. Raises NotFound."""
    from huggingface_hub import hf_hub_download

    return _fetch(hf_hub_download, name, filename="config.json")


def fetch_model(name: str, patterns: Sequence[str]) -> Path:
    """Return the folder of model `name` with the files matching `patterns`. Raises NotFound."""
    from huggingface_hub import snapshot_download

    return _fetch(snapshot_download, name, allow_patterns=list(patterns))


def _fetch(download: Callable[..., str], name: str, **options: Any) -> Path:
    """Return the result of a download function, from the local cache if the hub fails."""
    from huggingface_hub import HfApi

    hub_error = None
    try:
        # a download would retry an unresponsive network many times
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub client's errors share no base class
        hub_error = error
    try:
        return Path(download(name, **options, local_files_only=hub_error is not None))
    except Exception as error:
        raise NotFound(one_line(hub_error or error)) from error
