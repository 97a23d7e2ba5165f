"""The child process that checks one grammar: reads it from standard input, in llguidance's format,
and writes a line of JSON with `error` to standard output, empty if answers can follow it.

A grammar may take any time and memory, or overflow the stack, in the library that reads it. Here it
has less of each than in the process that answers requests, so that what it can read is safe there.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from parallel.ranks.environment import end_with_parent

if TYPE_CHECKING:
    from llguidance import LLMatcher

PROCESSOR_S = 3  # seconds; common schemas take milliseconds
MEMORY_MB = 64  # beyond what the process has before; common schemas take less than one
_STACK_BYTES = 1 << 20  # an eighth of a thread's
MAX_ITEMS = 20_000  # in a row of the parser: a schema with optional properties has four for each
_END = 256  # token that ends an answer; the others are the bytes


class _Bytes:
    """A tokenizer of bytes, as llguidance takes it."""

    eos_token_id, bos_token_id = _END, None
    tokens = (*(bytes([byte]) for byte in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main(parent: str) -> None:
    """Check the grammar, and exit; this process ends with the one that has the id `parent`."""
    end_with_parent(int(parent))
    source = sys.stdin.buffer.read().decode()
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_END + 1, eos_token=[_END])
    _limit_resources()
    limits = LLParserLimits(max_items_in_row=MAX_ITEMS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    error = matcher.get_error() or _follow(matcher)
    with suppress(BrokenPipeError):
        os.write(1, json.dumps({"error": error}).encode() + b"\n")
    os._exit(0)


def _follow(matcher: LLMatcher) -> str:
    """Return why an answer cannot follow the grammar, by its first byte; empty if it can."""
    mask = matcher.compute_bitmask()
    first = next((byte for byte in range(_END) if mask[byte // 8] >> (byte % 8) & 1), None)
    if first is None:
        return "" if matcher.is_accepting() else "no answer can match it"
    # drafts that are rejected are taken back
    matcher.try_consume_tokens([first])
    matcher.rollback(1)
    return matcher.get_error()


def _limit_resources() -> None:
    limits = {
        resource.RLIMIT_CPU: PROCESSOR_S,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    with suppress(OSError), open("/proc/self/statm") as file:  # not Linux
        now = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = now + MEMORY_MB * 10**6
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
