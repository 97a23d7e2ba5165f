"""Chat templates, rendered under limits: a template is code that comes with a model."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from threading import Lock, Thread
from typing import Any

import psutil

from decoding.text.tools.forms import GRANITE, MISTRAL, has_single_calls, has_tags, supports_tools
from decoding.text.tools.messages import (
    in_messages,
    with_granite_calls,
    with_short_ids,
    with_single_calls,
    with_text_arguments,
)
from decoding.text.tools.strings import strings_in

# given to every template, by transformers and jinja
_FUNCTIONS = ("messages", "raise_exception", "strftime_now", "range", "namespace", "tojson")
Variables = Mapping[str, bool | int | float | str | None]
RENDER_S = 10.0  # timeout; far more than any terminating template takes
_MAX_ADDED_CHARACTERS = 1 << 20  # characters that a template adds to the messages
_MAX_ADDED_BYTES = 1 << 30  # memory that the process may allocate while rendering
_rendered_templates: set[str] = set()
_limit_lock = Lock()  # the memory limit applies to the whole process


@dataclass(frozen=True)
class ChatRendering:
    """How a chat template renders messages."""

    continues_last: bool = False  # the prompt ends in the last message, not in a new answer
    variables: tuple[tuple[str, bool | int | float | str | None], ...] = ()  # the template's
    tools: Sequence[dict[str, Any]] = ()  # in transformers' format


def is_reserved(name: str) -> bool:
    """Return whether a variable of chat templates is given by transformers, not by a user."""
    from transformers.utils.chat_template_utils import render_jinja_template

    apply = import_module("transformers").PreTrainedTokenizerBase.apply_chat_template
    parameters = {*signature(apply).parameters, *signature(render_jinja_template).parameters}
    return name in _FUNCTIONS or name.endswith("_token") or name in parameters


def render_chat(
    tokenizer: Any, messages: Sequence[dict[str, Any]], rendering: ChatRendering | None = None
) -> str:
    """Return messages rendered by the tokenizer's chat template. Raises whatever its code raises.

    Tools, and messages with calls and results, become text if the template does not know tools.

    transformers runs templates in a sandbox, which protects the machine, but prevents neither
    endless loops nor gigabytes of output. A template's first rendering also has a memory limit;
    later ones do not, since they may run beside an engine that needs the memory.
    """
    import_module("jinja2.sandbox")  # before the timeout starts: the first import is slow
    future: Future[str] = Future()
    how = rendering or ChatRendering()
    template = str(tokenizer.get_chat_template(tools=list(how.tools) or None))

    def render() -> None:
        with suppress(SystemExit):  # raised on timeout
            try:
                future.set_result(_rendered(tokenizer, template, messages, how))
            except Exception as error:
                future.set_exception(error)

    thread = Thread(target=render, name="chat template", daemon=True)
    with nullcontext() if template in _rendered_templates else _memory_limit():
        thread.start()
        thread.join(RENDER_S)
        if not future.done():
            # raised in that thread at its next Python instruction
            identity = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(SystemExit))
            raise TimeoutError(f"it did not finish within {RENDER_S:g} s")
    try:
        text = future.result()
    except MemoryError as error:
        limit = _MAX_ADDED_BYTES >> 20
        raise ValueError(f"it needs more than {limit:,} MiB of memory") from error
    _rendered_templates.add(template)
    if len(text) > _MAX_ADDED_CHARACTERS + 4 * sum(map(len, strings_in([*messages, *how.tools]))):
        raise ValueError(f"its output has {len(text):,} characters")
    return text


def _rendered(
    tokenizer: Any, template: str, messages: Sequence[dict[str, Any]], how: ChatRendering
) -> str:
    if supports_tools(template):
        own = with_short_ids(messages) if MISTRAL.begin in template else messages
        own = with_text_arguments(own) if has_tags(template) else own
        own = with_single_calls(own) if has_single_calls(template) else own
        if GRANITE.begin in template and "tool_calls" not in template:
            own = with_granite_calls(own)
        return _apply(tokenizer, own, how)
    plain = replace(how, tools=())
    try:
        return _apply(tokenizer, in_messages(messages, how.tools), plain)
    except Exception:  # a template's own, whatever its type
        if not how.tools or messages[0]["role"] == "system":
            raise
        return _apply(tokenizer, in_messages(messages, how.tools, has_system=False), plain)


def _apply(tokenizer: Any, messages: Sequence[dict[str, Any]], how: ChatRendering) -> str:
    text: str = tokenizer.apply_chat_template(
        list(messages),
        tokenize=False,
        add_generation_prompt=not how.continues_last,
        continue_final_message=how.continues_last,
        tools=list(how.tools) or None,
        **dict(how.variables),
    )
    return text


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Limit the memory that this process can allocate; allocations beyond it raise MemoryError.

    A single instruction of a template may allocate gigabytes, which Python code cannot interrupt.
    """
    with _limit_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + _MAX_ADDED_BYTES
        finite = [each for each in (soft, hard, limit) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(finite), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
