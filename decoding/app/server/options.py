"""Options of `serve`: the address, the keys and the limits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.config.defaults import MAX_CONCURRENCY
from decoding.config.option import check_options, option
from offload.errors import TierForceError
from offload.regular_files import SMALL, read_regular

_MIN_KEY_LENGTH = 16  # characters
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d+)?", re.IGNORECASE)
_MAX_NAME = 200  # characters of a model's name


@dataclass(frozen=True)
class ServeOptions:
    """The address a server listens on, and its limits."""

    host: str = option(
        "Address to listen on. One that other machines can reach needs --api-key-file.",
        value="127.0.0.1",
    )
    port: int = option(
        "Port to listen on.", value=8000, zero="any free port", minimum=0, maximum=65535
    )
    queue: int = option(
        "Maximum number of queued requests. Further ones are answered 429 with Retry-After.",
        value=64,
        unit="requests",
        minimum=1,
    )
    max_body: int = option(
        "Maximum size of a request body, in MB.", value=16, unit="MB", minimum=1, maximum=1024
    )

    concurrency: int | None = option(
        "Requests that are answered together, sharing memory and forwards of the models, and "
        "conversations whose caches are kept. By default as many of the longest as fit without "
        f"offloading another layer, at most {MAX_CONCURRENCY}.",
        value=None,
        unit="requests",
        minimum=1,
    )
    swap_space: int | None = option(
        "Host memory for the KV of conversations whose caches other requests needed, in GB: they "
        "go on from there. By default half of what is free.",
        value=None,
        unit="GB",
        zero="none",
        minimum=0,
    )

    served_model_name: str | None = option(
        "Name of the model for clients. Default: the last part of --model.", value=None, unit="name"
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for an invalid value."""
        check_options(self)
        name = self.served_model_name
        if name is not None and not (name.isprintable() and 0 < len(name) <= _MAX_NAME):
            raise TierForceError(
                f"`served_model_name` must have 1 to {_MAX_NAME} printable characters."
            )


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> list[str]:
    """Return the keys in a file, one per line. Raises TierForceError for invalid ones."""
    if path.exists() and not path.is_file():
        raise TierForceError(f"`api_key_file` {path} is not a regular file.")
    try:
        lines = read_regular(path, SMALL).decode("ascii").splitlines()
    except OSError as error:
        raise TierForceError(f"`api_key_file` {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TierForceError(
            f"`api_key_file` {path} contains keys that are not plain ASCII."
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise TierForceError(f"`api_key_file` {path} contains no key: write one per line.")
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_KEY_LENGTH or not key.isprintable() or " " in key:
            raise TierForceError(
                f"key {number} in {path} is unsafe: use at least {_MIN_KEY_LENGTH} characters "
                "without blanks, such as the output of `openssl rand -hex 32`."
            )
    return keys


def parse_origins(origins: Sequence[str]) -> list[str]:
    """Return origins as browsers write them. Raises TierForceError for what is not one."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise TierForceError(
                f"`allow_origin` {origin}: name a page's origin, such as http://localhost:3000, "
                "or * for all pages."
            )
    return [origin.lower() for origin in origins]
