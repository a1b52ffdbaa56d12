"""Responses as frameworks use them: LangChain, pydantic-ai and litellm, each told to use that API."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Name the capital of France."


class Person(BaseModel):
    name: str
    age: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def chain(url: str, model: str) -> Any:
    def make(**how: Any) -> ChatOpenAI:
        return ChatOpenAI(model=model, base_url=url, api_key="unused", use_responses_api=True, temperature=0, **how)

    return make


def test_langchain_asks_and_streams(chain: Any) -> None:
    answer = chain(max_tokens=40).invoke(QUESTION)
    assert "Paris" in answer.text and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chain(max_tokens=40).stream(QUESTION)) == answer.text


def test_langchain_goes_on_by_id(chain: Any) -> None:
    by_id = chain(max_tokens=20, use_previous_response_id=True)
    first = by_id.invoke("I am Ada.")
    history = [HumanMessage("I am Ada."), first, HumanMessage("Who am I?")]
    assert by_id.invoke(history).text == chain(max_tokens=20).invoke(history).text


def test_langchain_calls_a_tool_and_takes_its_result(chain: Any) -> None:
    forced = chain(max_tokens=100).bind_tools([add], tool_choice="add", parallel_tool_calls=False)
    called = forced.invoke("3 + 4?")
    assert [call["name"] for call in called.tool_calls] == ["add"] and set(called.tool_calls[0]["args"]) == {"a", "b"}
    result = ToolMessage("7", tool_call_id=called.tool_calls[0]["id"])
    final = chain(max_tokens=40).bind_tools([add], tool_choice="none").invoke([HumanMessage("3 + 4?"), called, result])
    assert final.text and not final.tool_calls


def test_langchain_fills_a_class(chain: Any) -> None:
    filled = chain(max_tokens=100).with_structured_output(Person, method="json_schema").invoke("Ann is 7.")
    assert isinstance(filled, Person)


def test_pydantic_ai_keeps_a_conversation_and_fills_a_class(url: str, model: str) -> None:
    """As JSON, and as the arguments of a tool."""
    served = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=url, api_key="unused"))
    settings: Any = {"max_tokens": 120, "temperature": 0}
    agent = Agent(served, instructions="Be brief.", model_settings=settings)
    first = agent.run_sync(QUESTION)
    assert "Paris" in first.output
    assert agent.run_sync("And of Italy?", message_history=first.all_messages()).output
    for kind in (NativeOutput(Person), Person):
        assert isinstance(Agent(served, output_type=kind, model_settings=settings).run_sync("Ann is 7.").output, Person)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_litellm_asks_and_streams(url: str, model: str) -> None:
    how: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "unused", "max_output_tokens": 40}
    answer = litellm.responses(input=QUESTION, temperature=0, **how)
    assert "Paris" in answer.output[0].content[0].text
    kinds = [str(event.type.value) for event in litellm.responses(input=QUESTION, stream=True, **how)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
