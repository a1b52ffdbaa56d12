"""LangChain's ChatOpenAI: invoke, stream, batch and chains."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI


@pytest.fixture(scope="module")
def llm(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=url, api_key="unused", temperature=0, max_tokens=120)


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
