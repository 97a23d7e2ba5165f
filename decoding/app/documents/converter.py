"""The child process that converts one document: reads it from standard input, and writes one line
of JSON and the text to standard output.

Memory and processor time are limited before anything of the file is read.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from decoding.app.documents.formats.archives import Archive
from decoding.app.documents.formats.encodings import check_size
from decoding.app.documents.formats.readers import read
from offload.errors import InvalidRequestError, one_line
from parallel.ranks.environment import end_with_parent

MEMORY_BYTES = 2 << 30  # address space; a book takes a tenth
PROCESSOR_S = 120  # seconds; a PDF of 300 pages takes one
_MAX_REASON = 300  # characters
_MAX_DEPTH = 5000  # frames; elements of a page take several each
BYTES = "bytes"  # field of the line of JSON: length of the text, which a process may not finish


def main(parent: str, kind: str, *member: str) -> None:
    """Convert a document of a kind, or a member of an archive, and exit.

    `parent` is the process id of the parent, with which this process ends; `member` the index, size
    and CRC-32 of a member.

    The line of JSON has `error`, or the fields of a record's `source`.
    """
    end_with_parent(int(parent))
    _limit_resources()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print
    sys.setrecursionlimit(_MAX_DEPTH)
    header, text = _read(sys.stdin.buffer, kind, [int(number) for number in member])
    content = text.encode(errors="replace")
    with suppress(BrokenPipeError):
        output.write(json.dumps({**header, BYTES: len(content)}).encode() + b"\n" + content)
        output.flush()
    os._exit(0)  # libraries may wait for threads, or crash at exit


def _limit_resources() -> None:
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CPU: PROCESSOR_S}
    for kind, limit in (limits | {resource.RLIMIT_CORE: 0}).items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # ends this process and not the engine if memory runs out


def _read(file: BinaryIO, kind: str, member: list[int]) -> tuple[dict[str, Any], str]:
    """Return the line of JSON, and the text; empty if there is an error."""
    try:
        text, source = read(Archive(file).open(*member) if member else file, kind)
        check_size(len(text))
        if "note" in source:
            source["note"] = source["note"][:_MAX_REASON]
        return source, text
    except InvalidRequestError as error:
        reason = str(error)
    except ImportError as error:
        name = (error.name or "a library").partition(".")[0]
        reason = f"reading it needs {name}: pip install 'tierforce[documents]'."
    except MemoryError:
        reason = f"reading it takes more than {MEMORY_BYTES >> 30} GiB of memory."
    except RecursionError:
        reason = "it is nested too deeply."
    except Exception as error:  # parsers raise anything for damaged files
        reason = f"it may be damaged ({type(error).__name__}: {one_line(error)})."
    return {"error": reason[:_MAX_REASON]}, ""


if __name__ == "__main__":
    main(*sys.argv[1:])
