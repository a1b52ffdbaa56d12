"""LangChain's ChatOpenAI: invoke, stream, batch, chains, bound tools and structured output."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


@pytest.fixture(scope="module")
def llm(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=url, api_key="unused", temperature=0, max_tokens=120)


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny for {days} days"


class Joke(BaseModel):
    """A joke to tell the user."""

    setup: str = Field(description="The setup of the joke", max_length=40)
    punchline: str = Field(description="The punchline to the joke", max_length=40)


def test_invoke(llm: ChatOpenAI) -> None:
    answer = llm.invoke([SystemMessage("You are helpful."), HumanMessage("Name the capital of France.")])
    assert isinstance(answer, AIMessage) and "Paris" in answer.text
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0


def test_a_stream_adds_up(llm: ChatOpenAI) -> None:
    question = "Name the capital of France."
    pieces = list(llm.stream(question))
    assert len(pieces) > 2 and "".join(piece.text for piece in pieces) == llm.invoke(question).text


def test_a_chain_and_a_batch(llm: ChatOpenAI) -> None:
    chain = ChatPromptTemplate.from_template("Name the capital of {country}.") | llm | StrOutputParser()
    answers = chain.batch([{"country": "France"}, {"country": "Italy"}])
    assert "Paris" in answers[0] and "Rome" in answers[1]


def test_async_stream(llm: ChatOpenAI) -> None:
    async def main() -> str:
        return "".join([piece.text async for piece in llm.astream("Name the capital of France.")])

    assert "Paris" in asyncio.run(main())


def test_text_completion(url: str, model: str) -> None:
    llm = OpenAI(model=model, base_url=url, api_key="unused", max_tokens=8)
    assert llm.invoke("The capital of France is")


def test_a_bound_tool_and_its_result(llm: ChatOpenAI) -> None:
    bound = llm.bind_tools([get_weather], tool_choice="required")
    asked = bound.invoke("What is the weather in Paris?")
    assert asked.tool_calls and asked.tool_calls[0]["name"] == "get_weather"
    results = [get_weather.invoke(call) for call in asked.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    answer = llm.bind(max_tokens=30).invoke([HumanMessage("What is the weather in Paris?"), asked, *results])
    assert answer.text


def test_a_streamed_tool_call_adds_up(llm: ChatOpenAI) -> None:
    bound = llm.bind_tools([get_weather], tool_choice="get_weather")
    gathered = None
    for chunk in bound.stream("What is the weather in Rome?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None and gathered.tool_calls[0]["name"] == "get_weather"
    assert get_weather.invoke(gathered.tool_calls[0]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    joke = llm.with_structured_output(Joke, method=method).invoke("Tell me a joke about cats")
    assert isinstance(joke, Joke) and joke.setup


def test_json_mode(llm: ChatOpenAI) -> None:
    loose = llm.with_structured_output(None, method="json_mode")
    assert isinstance(loose.invoke("Answer in JSON with the key city. Name the capital of France."), dict)
