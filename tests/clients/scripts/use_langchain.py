"""Use langchain-openai; print what it returned. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from cities import City
from langchain_core.exceptions import ModelInvalidRequestError, ModelNotFoundError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
QUESTION = "What is the capital of France?"
where: dict[str, Any] = {"base_url": URL, "api_key": "none", "max_retries": 0}


def refused(error: type[Exception], **options: Any) -> str:
    """Return the message of the error that a request with these options raises."""
    try:
        ChatOpenAI(**{"model": MODEL, **where, **options}).invoke(QUESTION)
    except error as found:
        return str(found)
    raise AssertionError("there was no error")


model = ChatOpenAI(model=MODEL, stream_usage=True, max_tokens=60, **where)
whole = model.invoke(QUESTION)
*chunks, last = model.stream(QUESTION)
total = sum(chunks[1:], chunks[0]) + last
conversation = [
    SystemMessage("Be brief."),
    HumanMessage(QUESTION),
    AIMessage("Paris."),
    HumanMessage([{"type": "text", "text": "And of Italy?"}]),
]
typed = model.with_structured_output(City)
city, partial_cities = typed.invoke(QUESTION), list(typed.stream(QUESTION))
assert isinstance(city, City)
raw = model.with_structured_output(City.model_json_schema(), include_raw=True).invoke(QUESTION)
print(
    json.dumps(
        {
            "answer": whole.content,
            "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
            "stream": total.content,
            "stream usage": [
                total.usage_metadata["input_tokens"],
                total.usage_metadata["output_tokens"],
            ],
            "async": asyncio.run(model.ainvoke(QUESTION)).content,
            "batch": [answer.content for answer in model.batch([QUESTION, QUESTION])],
            "conversation": model.invoke(conversation).content,
            "text": OpenAI(model=MODEL, temperature=0, max_tokens=8, **where).invoke("It was"),
            "typed": city.model_dump(),
            "typed stream": partial_cities[-1].model_dump(),
            "typed dictionary": raw["parsed"],
            "raw": raw["raw"].content,
            "errors": [
                refused(ModelInvalidRequestError, extra_body={"speed": 1}),
                refused(ModelNotFoundError, model="gpt-4"),
            ],
        }
    )
)
