"""How `serve` listens, and what it takes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from decoding.config.option import check_options, option
from offload.errors import TierForceError
from offload.regular_files import SMALL, read_regular

_LEAST_KEY = 16  # characters


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, to whom, and how much it takes."""

    host: str = option(
        "Address to listen on. Another than this machine's own needs --api-key-file.",
        value="127.0.0.1",
    )
    port: int = option(
        "Port to listen on.", value=8000, zero="any that is free", at_least=0, at_most=65535
    )
    queue: int = option(
        "Most requests that wait while one is answered. One more is told to come later.",
        value=64,
        unit="requests",
        at_least=1,
    )
    max_body: int = option(
        "Largest request that is read, in MB.", value=16, unit="MB", at_least=1, at_most=1024
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for a value that is not allowed."""
        check_options(self)


def is_local(host: str) -> bool:
    """Return whether nobody but this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> list[str]:
    """Return the keys in a file, one a line. Raises TierForceError for what are none."""
    if path.exists() and not path.is_file():
        raise TierForceError(f"`api_key_file` {path} is no regular file.")
    try:
        lines = read_regular(path, SMALL).decode("ascii").splitlines()
    except OSError as error:
        raise TierForceError(f"`api_key_file` {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TierForceError(f"`api_key_file` {path} has keys that are not plain ASCII.") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise TierForceError(f"`api_key_file` {path} holds no key: write one on each line.")
    for number, key in enumerate(keys, 1):
        if len(key) < _LEAST_KEY or not key.isprintable() or " " in key:
            raise TierForceError(
                f"key {number} in {path} is no good one: use at least {_LEAST_KEY} characters "
                "without blanks, as `openssl rand -hex 32` makes them."
            )
    return keys
