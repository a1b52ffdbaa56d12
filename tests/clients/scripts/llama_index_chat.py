"""LlamaIndex's OpenAILike: complete, chat, streams, async, structured prediction and function calling."""

import asyncio
from typing import Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Name the capital of France."


@pytest.fixture(scope="module")
def llm(url: str, model: str) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=url,
        api_key="unused",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=100,
    )


def test_chat(llm: OpenAILike) -> None:
    answer = llm.chat([ChatMessage(role="system", content="You are helpful."), ChatMessage(content=QUESTION)])
    assert "Paris" in (answer.message.content or "")


def test_streams_add_up(llm: OpenAILike) -> None:
    whole = llm.chat([ChatMessage(content=QUESTION)]).message.content
    assert "".join(piece.delta or "" for piece in llm.stream_chat([ChatMessage(content=QUESTION)])) == whole
    assert "".join(piece.delta or "" for piece in llm.stream_complete(QUESTION)) == whole


def test_text_completion(url: str, model: str) -> None:
    llm = OpenAILike(model=model, api_base=url, api_key="unused", is_chat_model=False, max_tokens=8)
    assert llm.complete("The capital of France is").text


def test_async_chat(llm: OpenAILike) -> None:
    assert "Paris" in str(asyncio.run(llm.achat([ChatMessage(content=QUESTION)])))


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


def test_function_calling(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "weather" and "sunny" in str(tool(**calls[0].tool_kwargs))


def test_structured_prediction(llm: OpenAILike) -> None:
    city = llm.structured_predict(City, PromptTemplate("Describe the city of {name}."), name="Paris")
    assert isinstance(city, City) and city.name
