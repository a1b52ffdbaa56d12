"""Frameworks on the other APIs: LangChain on messages and on Ollama's API, litellm on both."""

from __future__ import annotations

import json
import warnings
from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import litellm

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
        return ChatAnthropic(model_name=model, base_url=root, api_key="unused", max_tokens=100)
    return ChatOllama(model=model, base_url=root, temperature=0, num_predict=100)


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


@pytest.mark.parametrize("provider", ["anthropic", "ollama_chat", "ollama"])
def test_litellm_asks_and_streams(root: str, model: str, provider: str) -> None:
    given: Any = {"model": f"{provider}/{model}", "api_base": root, "api_key": "unused", "max_tokens": 40}
    messages = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(messages=messages, temperature=0, **given)
    assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens > 0
    chunks = litellm.completion(messages=messages, temperature=0, stream=True, **given)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.strip() == whole.choices[0].message.content.strip()


def test_litellm_calls_tools_of_messages(root: str, model: str) -> None:
    answer = litellm.completion(
        model=f"anthropic/{model}",
        api_base=root,
        api_key="unused",
        messages=[{"role": "user", "content": "Look up Paris."}],
        tools=[PLACE],
        tool_choice="required",
        max_tokens=100,
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
