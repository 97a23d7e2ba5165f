"""Call tools through langchain-openai; print what it returned. Arguments: URL, model."""

from __future__ import annotations

import json
import sys

from cities import City
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1:]
QUESTION = "How is the weather?"


@tool(args_schema=City)
def weather(name: str, has_river: bool) -> str:
    """Return the weather of a city."""
    return f"sunny in {name}, has_river: {has_river}"


model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=200)
typed = model.with_structured_output(City, method="function_calling")
city, cities = typed.invoke(QUESTION), list(typed.stream(QUESTION))
assert isinstance(city, City)
bound = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
first = bound.invoke(QUESTION)
*chunks, last = bound.stream(QUESTION)
streamed = sum(chunks[1:], chunks[0]) + last
assert isinstance(first, AIMessage)
(call,) = first.tool_calls
result = weather.invoke(call)
assert isinstance(result, ToolMessage)
conversation = [HumanMessage(QUESTION), first, result]
second = model.bind_tools([weather]).invoke(conversation, max_tokens=8)
print(
    json.dumps(
        {
            "typed": city.model_dump(),
            "typed stream": cities[-1].model_dump(),
            "name": call["name"],
            "arguments": call["args"],
            "stream": [each["args"] for each in streamed.tool_calls],
            "result": result.content,
            "second": second.content,
        }
    )
)
