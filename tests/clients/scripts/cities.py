"""Classes that the scripts ask for as answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city."""

    # some clients' schemas leave other properties open, unless the class forbids them
    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "Rome", "Berlin"]
    has_river: bool


class Ruled(BaseModel):
    """Its rule is none of its schema, and no answer follows it."""

    model_config = ConfigDict(extra="forbid")
    digit: Literal[1, 3, 5]

    def model_post_init(self, _: object) -> None:
        raise ValueError(f"{self.digit} is odd")
