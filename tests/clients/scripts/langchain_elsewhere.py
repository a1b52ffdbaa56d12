"""LangChain on the other APIs: messages and Ollama's."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

QUESTION = "Name the capital of France."
PLACE: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


@pytest.fixture(params=["messages", "ollama"])
def chat(request: pytest.FixtureRequest, root: str, model: str) -> BaseChatModel:
    if request.param == "messages":
        return ChatAnthropic(model_name=model, base_url=root, api_key="unused", max_tokens=40)
    return ChatOllama(model=model, base_url=root, temperature=0, num_predict=40)


def test_langchain_asks_and_streams(chat: BaseChatModel) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.text and answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    assert len(list(chat.stream(QUESTION))) > 2


def test_langchain_binds_tools(chat: BaseChatModel) -> None:
    choice = {} if isinstance(chat, ChatOllama) else {"tool_choice": "any"}
    asked = chat.bind_tools([get_weather], **choice).invoke("What is the weather in Paris?")
    assert asked.tool_calls or not choice
    results = [get_weather.invoke(call) for call in asked.tool_calls if call["name"] == "get_weather"]
    turns = [HumanMessage("What is the weather in Paris?"), asked, *results]
    if len(results) == len(asked.tool_calls) and results:
        assert chat.bind_tools([get_weather]).invoke(turns).id


def test_langchain_structures_output(chat: BaseChatModel) -> None:
    schema = PLACE["function"]["parameters"] | {"title": "Place", "description": "A place"}
    found = chat.with_structured_output(schema).invoke("Where is the Eiffel tower?")
    assert isinstance(found, dict) and found["city"] in ("Paris", "Rome")
