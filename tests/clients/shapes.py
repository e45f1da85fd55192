"""What the clients ask for: tools, and answers with a shape."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

HI: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of places.",
        "parameters": {
            "type": "object",
            "properties": {"places": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3}},
            "required": ["places"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "description": "What time it is."}}
CALLED = {"places": ["Oslo"]}  # with what the model calls `weather` when it may


class Closed(pydantic.BaseModel):
    # A model that writes at random never finishes an object that may have more than these.
    model_config = pydantic.ConfigDict(extra="forbid")


class Sky(Closed):
    """Over a place."""

    cover: Literal["clear", "cloudy"]
    wind: int = pydantic.Field(ge=0, le=12)


class Forecast(Closed):
    """Of the weather in a place."""

    place: str = pydantic.Field(max_length=20)
    sky: Sky
    rain: bool
    warning: str | None = pydantic.Field(max_length=20)
    days: list[Literal["Monday", "Tuesday"]] = pydantic.Field(max_length=2)
