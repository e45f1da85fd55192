"""`instructor`, which turns answers into pydantic models and asks again for what is none."""

from __future__ import annotations

import instructor
import openai
import pytest
from conftest import Server
from shapes import HI, Forecast

ASKED = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 150, "max_retries": 0}
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_answer_is_a_pydantic_model(server: Server, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key=server.key), mode=mode)
    found, answer = client.chat.completions.create_with_completion(response_model=Forecast, **ASKED)
    assert isinstance(found, Forecast) and answer.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
async def test_a_pydantic_model_comes_in_parts(server: Server, mode):
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=server.v1, api_key=server.key), mode=mode)
    parts = [part async for part in client.chat.completions.create_partial(response_model=Forecast, **ASKED)]
    assert len(parts) > 3 and Forecast.model_validate(parts[-1].model_dump())
