"""The description of the API at /openapi.json, from the bodies that are validated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


def describe(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Give an application a description of its routes; `bodies` are those of requests, by path."""
    app.openapi = partial(_description, app, bodies)  # type: ignore[method-assign]


def _description(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    if app.openapi_schema is None:
        content = get_openapi(title=app.title, version=app.version, routes=app.routes)
        references, schemas = models_json_schema(
            [(body, "validation") for body in bodies.values()],
            ref_template="#/components/schemas/{model}",
        )
        # those of the objects that fields are parsed to are not a part of the API
        names = _referenced(references.values(), schemas["$defs"])
        content["components"] = {"schemas": {name: schemas["$defs"][name] for name in names}}
        for path in content["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own, which never occurs
        for path, body in bodies.items():
            content["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": references[body, "validation"]}},
            }
        app.openapi_schema = content
    return app.openapi_schema


def _referenced(values: Iterable[Any], schemas: Mapping[str, Any]) -> list[str]:
    """Return the names of the schemas that values refer to, directly or through others."""
    found = list[str]()
    pending = list(values)
    while pending:
        for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(pending.pop())):
            if name not in found:
                found.append(name)
                pending.append(schemas[name])
    return found
