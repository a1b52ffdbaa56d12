"""pydantic-ai's Agent on chat and on responses: text, tools in a loop, and structured output."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

SETTINGS = ModelSettings(max_tokens=120)


class City(BaseModel):
    name: str = Field(max_length=20)
    country: Literal["France", "Italy"]


@pytest.fixture(params=["chat", "responses"])
def served(request: pytest.FixtureRequest, url: str, model: str) -> Model:
    provider = OpenAIProvider(base_url=url, api_key="unused")
    return (OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel)(model, provider=provider)


def test_text(served: Model) -> None:
    agent = Agent(served, instructions="Be brief.", model_settings=SETTINGS)
    ran = agent.run_sync("Name the capital of France.")
    assert ran.output and ran.usage.output_tokens > 0


def test_a_tool_output(served: Model) -> None:
    agent = Agent(served, output_type=ToolOutput(City), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Where is Paris?").output, City)


def test_a_native_output(served: Model) -> None:
    agent = Agent(served, output_type=NativeOutput(City), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Where is Paris?").output, City)


def test_a_loop_of_tools(served: Model) -> None:
    agent = Agent(served, model_settings=SETTINGS)
    calls = []

    @agent.tool_plain(retries=3)
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        calls.append(city)
        return "sunny"

    try:
        ran = agent.run_sync("What is the weather in Paris?", usage_limits=UsageLimits(request_limit=3))
        assert ran.output is not None
    except UsageLimitExceeded:
        assert calls  # a small model may call again and again
