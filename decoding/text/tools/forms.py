"""The forms in which models write calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from decoding.text.tools.channels import CHANNEL, PLACEHOLDERS
from offload.errors import InvalidRequestError

_PYTHON_TAG, _ARGUMENTS = "<|python_tag|>", "[ARGS]"
_ONE_CALL = "only supports single tool-calls"  # in an error of Llama 3's templates


@dataclass(frozen=True)
class Tags:
    """Tags around the parts of a call: its name, and the key and the value of each parameter.

    Values are text. Those of strings are written as they are, and others in JSON.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""  # after the parameters
    pad: str = ""  # before and after a value
    line: str = ""  # after the other tags


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls of tools.

    A call is a JSON object with a name and arguments, or a name and the JSON of its arguments, or
    it has its parts between tags.
    """

    # before calls, or in a message's header before the name; empty: an answer that begins with "{"
    # is a call
    begin: str
    # a call up to its arguments; the group is its name. None: with tags, or in channels
    head: re.Pattern[str] | None
    markers: tuple[str, ...]  # strings outside of JSON, which may be tokens of their own
    # a call's object up to its arguments; empty: arguments follow the name, without one
    opening: str = '{"name": "NAME", "arguments": '
    end: str = ""  # after each call, or after their list
    separator: str = ""  # between calls, if `begin` comes only before the first
    blanks: str = " \t\r\n"  # characters after a call that are dropped
    is_list: bool = False  # whether the calls are a JSON list
    has_many: bool = True  # whether an answer may have several calls
    tags: Tags | None = None
    may_be_bare: bool = True  # whether a call with tags may come without `begin`
    line: str = "\n"  # between calls with an end
    inner_line: str = "\n"  # between the beginning of such a call, the call, and its end
    thoughts: tuple[str, str] = ("<think>", "</think>")  # around thoughts, which have no calls

    @property
    def has_channels(self) -> bool:
        """Return whether calls are messages in a channel of the answer."""
        return CHANNEL in self.markers

    @property
    def prefix(self) -> str:
        """Return what may precede the object of a call that nothing begins; or an empty string."""
        return "" if self.begin else self.markers[0]

    @property
    def bare_begin(self) -> str:
        """Return what begins a call if a model leaves `begin` out; or an empty string."""
        return self.tags.name[0] if self.tags is not None and self.may_be_bare else ""


def _object_head() -> re.Pattern[str]:
    """Return the pattern of a call's beginning, up to its arguments, which are an object."""
    others = r'(?:"(?:type|id)"\s*:\s*"[^"]{0,64}"\s*,\s*)*'  # members before the name
    name = r'"name"\s*:\s*"([^"\\]{1,256})"'
    # models take one key for the other
    return re.compile(rf'\s*\{{\s*{others}{name}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')


def _with_markers(form: ToolForm, begin: str, end: str = "", **changes: Any) -> ToolForm:
    """Return a form whose calls are between other markers."""
    return replace(form, begin=begin, end=end, markers=(begin, end) if end else (begin,), **changes)


_OBJECT = _object_head()
# Teknium et al. 2024, Hermes function calling; that of Qwen2.5 and Qwen3, too
HERMES = ToolForm(
    "<tool_call>",
    _OBJECT,
    ("<tool_call>", "</tool_call>"),
    end="</tool_call>",
    blanks=" \t\r\n}",  # small models close a bracket too many
)
# Llama Team 2024, The Llama 3 Herd of Models, section 4.3.5; JSON-based calls of Llama 3.1 to 3.3
LLAMA_3 = ToolForm(
    "",
    _OBJECT,
    (_PYTHON_TAG,),
    HERMES.opening.replace("arguments", "parameters"),
    separator=";",
    has_many=False,
)
# Mistral's tokenizers v3 to v7, and those from v11 on (github.com/mistralai/mistral-common)
MISTRAL = ToolForm("[TOOL_CALLS]", _OBJECT, ("[TOOL_CALLS]",), separator=",", is_list=True)
MISTRAL_NAMED = ToolForm(
    "[TOOL_CALLS]",
    re.compile(r"\s{0,9}([\w.:/-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,9}(?=\{)"),
    ("[TOOL_CALLS]", _ARGUMENTS, "[CALL_ID]"),
    "",
)
NEMOTRON = _with_markers(MISTRAL, "<TOOLCALL>", "</TOOLCALL>")  # Nemotron Nano 2's
GRANITE = _with_markers(MISTRAL, "<|tool_call|>")  # Granite 3's
APRIEL = _with_markers(MISTRAL, "<tool_calls>", "</tool_calls>")  # Apriel 1.5's and 1.6's
APERTUS = _with_markers(
    MISTRAL,
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    head=re.compile(r'\s*\{\s*"([^"\\]{1,256})"\s*:\s*(?=\{)'),
    opening='{"NAME": ',
)
# Qwen3-Coder's form, and that of Qwen3.5, Nemotron 3 and Step 3.5, too
_QWEN_TAGS = Tags(
    ("<function=", ">"),
    ("<parameter=", ">"),
    ("", "</parameter>"),
    end="</function>",
    pad="\n",
    line="\n",
)
QWEN_CODER = ToolForm(HERMES.begin, None, HERMES.markers, end=HERMES.end, tags=_QWEN_TAGS)
SEED_OSS = _with_markers(
    QWEN_CODER,
    "<seed:tool_call>",
    "</seed:tool_call>",
    tags=replace(_QWEN_TAGS, pad=""),
    thoughts=("<seed:think>", "</seed:think>"),
)
_GLM_TAGS = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), line="\n")
_GLM_MARKERS = (*HERMES.markers, *_GLM_TAGS.key, *_GLM_TAGS.value)
# the form of GLM-4.5 and 4.6, and the one of GLM-4.7, without line breaks
GLM = ToolForm(HERMES.begin, None, _GLM_MARKERS, end=HERMES.end, tags=_GLM_TAGS, inner_line="")
GLM_COMPACT = replace(GLM, tags=replace(_GLM_TAGS, line=""), line="")

# OpenAI 2025, harmony response format: the header of a message names the function that gets it
HARMONY = ToolForm("to=functions.", None, tuple(PLACEHOLDERS), "", has_many=False)


@lru_cache(maxsize=8)
def supports_tools(template: str) -> bool:
    """Return whether a chat template renders tools. One that cannot be parsed counts as such."""
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    # transformers' own tag
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        return "tools" in find_undeclared_variables(parsed)
    except (TemplateError, RecursionError):
        return True


def has_tags(template: str) -> bool:
    """Return whether a chat template renders calls with tags."""
    return any(each.tags is not None and each.tags.key[0] in template for each in (QWEN_CODER, GLM))


def has_single_calls(template: str) -> bool:
    """Return whether a chat template renders one call in a message, which its result follows."""
    return CHANNEL in template or _ONE_CALL in template


def form_of(template: str) -> ToolForm:
    """Return the form of a chat template; Hermes' for one without tools (see `in_messages`).

    Raises InvalidRequestError for another form.
    """
    if not supports_tools(template):
        return HERMES
    if CHANNEL in template and "functions." in template:
        return HARMONY
    for form in (SEED_OSS, NEMOTRON, GRANITE, APERTUS):
        if form.begin in template:
            return form
    if f"{APRIEL.begin}[" in template:  # Apriel 1.5's names Hermes' markers, too
        return APRIEL
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if _ARGUMENTS in template else MISTRAL
    if HERMES.end in template and (own := _form_with_end(template)) is not None:
        return own
    if '"parameters"' in template and ("ipython" in template or _PYTHON_TAG in template):
        return LLAMA_3
    raise unsupported_form()


def _form_with_end(template: str) -> ToolForm | None:
    """Return the form of a template whose calls end as those of Hermes."""
    if "<function=" in template:
        return QWEN_CODER if "<parameter=" in template else None
    if "<arg_key>" in template:
        if "</arg_key><arg_value>" in template:
            return GLM_COMPACT
        return GLM if "<arg_value>" in template else None
    return HERMES if "<invoke " not in template else None


def unsupported_form() -> InvalidRequestError:
    """Return the error for a model whose form is not known."""
    return InvalidRequestError(
        "this model writes calls of tools in a form that is not supported (those of Hermes, "
        "Qwen3-Coder, GLM, Llama 3, Mistral, gpt-oss, Seed-OSS, Nemotron Nano 2, Granite 3, Apriel "
        "1.5 and Apertus are): leave tools out, or serve another model."
    )


@dataclass(frozen=True)
class Calling:
    """How a model calls tools in an answer."""

    form: ToolForm
    ids: Mapping[str, int]  # markers that are tokens of their own
    is_in_thoughts: bool = False  # the prompt ends in a thought

    @property
    def shown_tokens(self) -> dict[int, str]:
        """Return the text that the parser of calls gets for each marker that is a token."""
        return {token: PLACEHOLDERS.get(marker, marker) for marker, token in self.ids.items()}


def marker_ids(tokenizer: Any, form: ToolForm) -> dict[str, int]:
    """Return the markers that are tokens of their own, with their ids."""
    added = {each.content: token for token, each in tokenizer.added_tokens_decoder.items()}
    markers = (*form.markers, *form.thoughts)
    return {marker: added[marker] for marker in markers if marker in added}
