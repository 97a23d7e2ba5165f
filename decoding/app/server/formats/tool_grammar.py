"""The grammar of answers to a request with tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoding.app.server.formats.chat import ChatBody
from decoding.grammars.grammar import Grammar
from decoding.grammars.tool_calls import ToolCallGrammar
from decoding.text.tools.forms import ToolForm
from offload.errors import InvalidRequestError


def tool_grammar(
    body: ChatBody, form: ToolForm, ids: Mapping[str, int]
) -> tuple[str, Grammar] | None:
    """Return the grammar of an answer that has to call tools, or may and is restricted otherwise.

    It comes with the field it is for, and is None for an answer that is not restricted. Arguments
    are valid if a call is required, if a function is `strict`, or beside a format of the answer.
    Raises InvalidRequestError for tools and a format that are not supported together.
    """
    choice, functions = body.choice, [tool.function for tool in body.usable_tools]
    schemas = {
        each.name: each.schema_of_arguments
        for each in functions
        if choice.name in (None, each.name)
    }
    options: dict[str, Any] = {"ids": tuple(ids.items()), "has_many": body.has_many_calls}
    if choice.mode == "required":
        return "tools", ToolCallGrammar.of(schemas, form, **options)
    if body.grammar is not None:
        field, answer = body.grammar
        if not (answer.is_schema and form.begin):
            raise InvalidRequestError(
                f"not supported with this {field} for this model: send one of them."
            )
        return "tools", ToolCallGrammar.of(schemas, form, answer=answer, **options)
    if any(function.strict for function in functions):
        return "tools", ToolCallGrammar.of(schemas, form, has_text=True, **options)
    return None
