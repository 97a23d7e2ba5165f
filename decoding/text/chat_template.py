"""Chat templates, rendered under limits: they are code that came with a model."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from threading import Lock, Thread
from typing import Any

import psutil

RENDER_S = 10.0  # which no template that ends comes near
_MAX_GROWTH = 1 << 20  # characters that a template puts around messages
_ROOM = 1 << 30  # bytes of memory that the process may add meanwhile
_tried: set[str] = set()  # templates that have been rendered
_limiting = Lock()  # the limit is the whole process's


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """Return messages as a chat template writes them. Raises whatever its code raises.

    transformers runs them in a sandbox, which keeps them from the machine, but neither from looping
    for ever nor from writing gigabytes. Their first rendering is also kept from taking gigabytes:
    later ones may run beside an engine that needs them.
    """
    import_module("jinja2.sandbox")  # which may take longer, once
    future: Future[str] = Future()

    def render() -> None:
        with suppress(SystemExit):  # it has been given up
            try:
                text = tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
                future.set_result(text)
            except Exception as error:
                future.set_exception(error)

    thread = Thread(target=render, name="chat template", daemon=True)
    template = str(tokenizer.chat_template)
    with nullcontext() if template in _tried else _little_memory():
        thread.start()
        thread.join(RENDER_S)
        if not future.done():
            # raised in that thread before its next step in Python
            identity = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(SystemExit))
            raise TimeoutError(f"it has not ended after {RENDER_S:g} s")
    try:
        text = future.result()
    except MemoryError as error:
        raise ValueError(f"it asks for more than {_ROOM >> 20:,} MiB of memory") from error
    _tried.add(template)
    if len(text) > _MAX_GROWTH + 4 * sum(len(each["content"]) for each in messages):
        raise ValueError(f"it writes {len(text):,} characters")
    return text


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process have little more memory than it has: what asks for more gets MemoryError.

    One step of a template may ask for gigabytes, and nothing in Python comes in between.
    """
    with _limiting:
        before, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + _ROOM
        given = [each for each in (before, most, limit) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(given), most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (before, most))
