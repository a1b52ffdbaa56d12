"""instructor over the openai package: models of pydantic by tools, by JSON and by schema, in lists and in parts."""

from __future__ import annotations

import contextlib
import json

import instructor
import pytest
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class User(BaseModel):
    """A user."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


PROMPT = [{"role": "user", "content": "Extract: John Doe is 30 years old. Answer as JSON."}]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_is_extracted(url: str, model: str, mode: str) -> None:
    client = instructor.from_openai(OpenAI(base_url=url, api_key="unused"), mode=instructor.Mode[mode])
    user = client.chat.completions.create(
        model=model, response_model=User, messages=PROMPT, temperature=0, max_tokens=120, max_retries=0
    )
    assert isinstance(user, User) and user.name


def test_json_mode_gives_json_though_not_always_the_model(url: str, model: str) -> None:
    """The schema is only in the prompt here, and a small model may miss it; what it writes is JSON."""
    client = instructor.from_openai(OpenAI(base_url=url, api_key="unused"), mode=instructor.Mode.JSON)
    written: list[str] = []
    client.on("completion:response", lambda answer: written.append(answer.choices[0].message.content))
    with contextlib.suppress(InstructorRetryException):
        client.chat.completions.create(
            model=model, response_model=User, messages=PROMPT, temperature=0, max_tokens=200, max_retries=0
        )
    assert isinstance(json.loads(written[0]), dict)


def test_from_provider(url: str, model: str) -> None:
    client = instructor.from_provider(f"openai/{model}", base_url=url, api_key="unused", mode=instructor.Mode.TOOLS)
    user = client.create(response_model=User, messages=PROMPT, temperature=0, max_tokens=120, max_retries=0)
    assert isinstance(user, User)


def test_partial_models_of_a_stream(url: str, model: str) -> None:
    client = instructor.from_openai(OpenAI(base_url=url, api_key="unused"), mode=instructor.Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=model, response_model=User, messages=PROMPT, temperature=0, max_tokens=120, max_retries=0
        )
    )
    assert len(parts) > 1 and parts[-1].age is not None
