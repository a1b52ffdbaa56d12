"""LlamaIndex's OpenAILike: complete, chat, streams and async."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

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
