"""Answers to a request with tools: their grammar, and the parser of calls in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decoding.app.server.formats.chat import ChatBody
from decoding.app.server.formats.responses import ResponsesBody
from decoding.grammars.grammar import Grammar
from decoding.grammars.tool_calls import ToolCallGrammar
from decoding.text.tools.channel_parser import ChannelParser
from decoding.text.tools.forms import Calling
from decoding.text.tools.parser import AnswerParser, ToolCallParser
from offload.errors import InvalidRequestError


def tool_grammar(body: ChatBody | ResponsesBody, calling: Calling) -> tuple[str, Grammar] | None:
    """Return the grammar of an answer that has to call tools, or may and is restricted otherwise.

    It comes with the field it is for, and is None for an answer that is not restricted. Arguments
    are valid if a call is required, if a function is `strict`, or beside a format of the answer.
    Raises InvalidRequestError for tools and a format that are not supported together.
    """
    choice, form = body.choice, calling.form
    functions = [each for each in body.usable_functions if choice.name in (None, each.name)]
    options: dict[str, Any] = {
        "strict": frozenset(each.name for each in functions if each.strict or choice.name),
        "ids": tuple(calling.ids.items()),
        "has_many": body.has_many_calls,
        "is_in_thoughts": calling.is_in_thoughts,
    }
    if choice.mode != "required":
        if body.grammar is not None:
            field, options["answer"] = body.grammar
            if not (options["answer"].is_schema and form.begin):
                raise InvalidRequestError(
                    f"not supported with this {field} for this model: send one of them."
                )
        elif any(function.strict for function in functions):
            options["has_text"] = True
        else:
            return None
    schemas = {each.name: each.schema_of_arguments for each in functions}
    return "tools", ToolCallGrammar.of(schemas, form, **options)


def call_parser(body: ChatBody | ResponsesBody, calling: Calling) -> AnswerParser:
    """Return the parser of calls in an answer."""
    functions = {each.name: each.schema_of_arguments for each in body.usable_functions}
    max_calls = None if body.has_many_calls and calling.form.has_many else 1
    if calling.form.has_channels:
        return ChannelParser(functions, max_calls)
    # the grammar of an answer with text does not know calls without their beginning
    is_free = not any(function.strict for function in body.usable_functions)
    return ToolCallParser(
        replace(calling.form, may_be_bare=is_free),
        functions,
        max_calls,
        is_in_thoughts=calling.is_in_thoughts,
        is_only_at_start=body.grammar is not None,
    )
