"""Functions and reasoning over /v1/responses with the official client: out, and back by id and by items."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from scripted import Served, make_text_model
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.server.response_store import ResponseStore
from tokenmill.text.chat_format import find_chat_format
from tokenmill.text.chat_template import ChatTemplate

TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }} Call by <tool_call>{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    ": {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
TOOL: Any = {"type": "function", "name": "add", "description": "Adds.", "strict": None,
             "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}  # fmt: skip
CALLS = "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>\n' for n in (4, 5))


class Model:
    """Thinks, and calls a function twice until it has results, which it reads out. It keeps its prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.name = "add"

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        calls = CALLS.replace('"add"', f'"{self.name}"')
        results = [line.removeprefix("tool: ") for line in prompt.splitlines() if line.startswith("tool: ")]
        return "<think>\nHm, well.\n</think>\n\n" + (" and ".join(results) if results else f"Let me see.\n{calls}")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def client(model: Model, tmp_path: Path) -> Iterator[OpenAI]:
    store = ResponseStore(str(tmp_path / "r.db"))
    store.open()
    text = make_text_model()
    text = make_text_model(chat=ChatTemplate(TEMPLATE), chat_format=find_chat_format(TEMPLATE, text.tokenizer))
    engine = EngineConfig(groups=full_groups(512), max_model_len=4096)
    with (
        Served(model, text=text, engine=engine, store=store) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client
    store.close()


def create(client: OpenAI, **body: Any) -> Any:
    return client.responses.create(**{"model": "toy", "input": "4 and 5?", "tools": [TOOL]} | body)


def outputs(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"it is {json.loads(call.arguments)['a']}"}
        for call in calls
    ]


def plain(item: Any) -> dict[str, Any]:
    """An item but for what differs from call to call, and for what the helper adds."""
    found: dict[str, Any] = json.loads(item.model_dump_json())
    for part in found.get("content") or []:
        part.pop("parsed", None)
    return {name: value for name, value in found.items() if name not in ("id", "call_id", "parsed_arguments")}


def test_reasoning_text_and_calls_are_items_of_their_own(client: OpenAI) -> None:
    """Whole and streamed, put together by the client's own helper."""
    response = create(client)
    reasoning, message, first, second = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hm, well.", [])
    assert (message.type, message.content[0].text.strip()) == ("message", "Let me see.")
    assert [call.name for call in (first, second)] == ["add", "add"]
    assert [json.loads(call.arguments) for call in (first, second)] == [{"a": 4}, {"a": 5}]
    assert first.call_id != second.call_id and first.id != second.id and response.status == "completed"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert response.tools[0].name == "add" and response.parallel_tool_calls
    with client.responses.stream(model="toy", input="4 and 5?", tools=[TOOL]) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    assert [plain(item) for item in final.output] == [plain(item) for item in response.output]
    assert arguments == first.arguments + second.arguments
    assert final.usage.output_tokens_details == response.usage.output_tokens_details


def test_results_come_back_by_id_and_by_items(client: OpenAI, model: Model) -> None:
    """Both ways the model sees the same: its reasoning, its text, its calls, and the results behind them."""
    response = create(client)
    by_id = create(client, input=outputs(response), previous_response_id=response.id)
    assert by_id.output_text == "it is 4 and it is 5"
    items = [{"role": "user", "content": "4 and 5?"}, *response.output, *outputs(response)]
    by_items = create(client, input=items)
    assert by_items.output_text == by_id.output_text and model.prompts[-1] == model.prompts[-2]
    assert "<think>Hm, well.</think>: Let me see." in model.prompts[-1]
    assert model.prompts[-1].count('<tool_call>{"name": "add", "arguments": {"a": ') == 2


def test_what_an_agent_sends_by_default(client: OpenAI, model: Model) -> None:
    """Tools of other kinds beside functions, some in a namespace: calls of those name it, whole and streamed, and come
    back. What was left out stands in a header."""
    model.name = "mcp__box__add"
    tools: Any = [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
        },
        {"type": "namespace", "name": "mcp__box", "description": "A box.", "tools": [TOOL]},
    ]
    raw = client.responses.with_raw_response.create(model="toy", input="4 and 5?", tools=tools)
    assert raw.headers["x-tokenmill-ignored"] == "tool web_search, tool image_generation"
    response = raw.parse()
    called = [(item.namespace, item.name) for item in response.output if item.type == "function_call"]
    assert called == [("mcp__box", "add")] * 2
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace"]
    events = list(client.responses.create(model="toy", input="4 and 5?", tools=tools, stream=True))
    done: Any = [each.item for each in events if each.type == "response.output_item.done"]
    assert [(item.namespace, item.name) for item in done if item.type == "function_call"] == called
    by_id = create(client, input=outputs(response), previous_response_id=response.id, tools=tools)
    by_items = create(
        client, input=[{"role": "user", "content": "4 and 5?"}, *response.output, *outputs(response)], tools=tools
    )
    assert by_id.output_text == by_items.output_text == "it is 4 and it is 5"
    assert (
        model.prompts[-1] == model.prompts[-2] and model.prompts[-1].count('<tool_call>{"name": "mcp__box__add"') == 2
    )
    patch = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]}
    patched = create(client, input=[{"role": "user", "content": "Patch."}, patch, result], tools=tools)
    assert patched.output_text == "done" and '{"input": "*** Begin Patch"}' in model.prompts[-1]


def test_a_call_of_a_custom_tool_is_an_item_with_a_text(client: OpenAI, model: Model) -> None:
    """Whole and in events; its output comes back as that of a function."""
    model.name = "patch"
    wrote = 'say "hi"\nand \\ é'
    text = json.dumps({"input": wrote})
    said = f'<tool_call>\n{{"name": "patch", "arguments": {text}}}\n</tool_call>'
    tools: Any = [{"type": "custom", "name": "patch", "description": "Patches."}]
    script = model.__class__.__call__
    try:
        model.__class__.__call__ = lambda self, prompt: self.prompts.append(prompt) or said  # type: ignore[assignment]
        whole = create(client, tools=tools)
        events = list(create(client, tools=tools, stream=True))
    finally:
        model.__class__.__call__ = script  # type: ignore[method-assign]
    (call,) = whole.output
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "patch", wrote, "completed")
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    (done,) = [each for each in events if each.type == "response.custom_tool_call_input.done"]
    assert len(deltas) > 3 and "".join(deltas) == done.input == wrote
    assert events[-1].response.output[0].input == wrote
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "it is done"}
    answer = create(client, input=[result], previous_response_id=whole.id, tools=tools)
    assert answer.output_text == "it is done" and json.dumps(text)[1:-1] not in model.prompts[-1]


def test_a_history_with_searches_and_images_goes_on(client: OpenAI, model: Model) -> None:
    """Agents send back all that was said, also by another model; the model is shown the rest, the caller is told, and
    what is stored goes on too."""
    asked: Any = {"role": "user", "content": "4 and 5?"}
    search: Any = {"type": "web_search_call", "id": "ws_1", "status": "completed",
                   "action": {"type": "search", "query": "x"}}  # fmt: skip
    call: Any = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "auto"}
    result: Any = {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [image, {"type": "input_text", "text": "9"}],
    }
    raw = client.responses.with_raw_response.create(model="toy", input=[asked, search, call, result], tools=[TOOL])
    assert raw.headers["x-tokenmill-ignored"] == "item web_search_call, content input_image"
    response = raw.parse()
    assert response.output_text == "9" and "QUJD" not in model.prompts[-1]
    kept = client.responses.input_items.list(response.id, order="asc").data
    assert [item.type for item in kept] == ["message", "function_call", "function_call_output"]
    assert create(client, input=[asked], previous_response_id=response.id).status == "completed"


def test_a_call_without_its_result_is_refused(client: OpenAI) -> None:
    response = create(client)
    with pytest.raises(BadRequestError) as caught:
        create(client, input="well?", previous_response_id=response.id)
    assert caught.value.param == "input" and response.output[2].call_id in str(caught.value)


def test_a_call_that_was_cut_off_locks_no_conversation(client: OpenAI, model: Model) -> None:
    """It is shown as incomplete. With its output it is part of the conversation, without one it is not, by id and by
    items alike."""
    whole = create(client)
    most = whole.usage.output_tokens - 15
    response = create(client, max_output_tokens=most)
    assert (response.status, response.output[-1].type, response.output[-1].status) == (
        "incomplete", "function_call", "incomplete",
    )  # fmt: skip
    cut = {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": "that was cut off"}
    for extra, num_calls in (([], 1), ([cut], 2)):
        new = [*outputs_of_whole(response), *extra, {"role": "user", "content": "go on"}]
        create(client, input=new, previous_response_id=response.id)
        create(client, input=[{"role": "user", "content": "4 and 5?"}, *response.output, *new])
        assert model.prompts[-1] == model.prompts[-2]
        assert model.prompts[-1].count('<tool_call>{"name"') == num_calls
        assert ("that was cut off" in model.prompts[-1]) == bool(extra)


def test_a_call_that_a_stop_string_cuts_is_incomplete(client: OpenAI) -> None:
    """For none of the reasons that OpenAI's type has."""
    call = create(client).output[-1]
    response = create(client, extra_body={"stop": [call.arguments[3:]]})
    assert (response.status, response.incomplete_details) == ("incomplete", None)
    assert (response.output[-1].status, response.output[-1].arguments) == ("incomplete", call.arguments[:3])


def test_a_cut_call_whose_id_an_earlier_one_had_locks_no_conversation(client: OpenAI, model: Model) -> None:
    """Some clients count ids anew in each turn: the earlier call's output is none of the later one's."""
    asked = {"role": "user", "content": "4 and 5?"}
    call = {"type": "function_call", "call_id": "call_0", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_0", "output": "9"}
    create(
        client,
        input=[asked, call, output, asked, call | {"arguments": '{"a": 4'}, {"role": "user", "content": "go on"}],
    )
    assert model.prompts[-1].count('<tool_call>{"name"') == 1 and "go on" in model.prompts[-1]


def outputs_of_whole(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call" and item.status == "completed"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]


def test_a_choice_bounds_the_calls(client: OpenAI) -> None:
    """One at most where calls are not to be parallel; none where they are forbidden."""
    response = create(client, parallel_tool_calls=False)
    assert [item.type for item in response.output].count("function_call") == 1 and not response.parallel_tool_calls
    response = create(client, tool_choice="none")
    assert "function_call" not in [item.type for item in response.output]


def test_reasoning_may_be_left_out(client: OpenAI) -> None:
    """As chat's include_reasoning says it."""
    response = create(client, extra_body={"include_reasoning": False})
    assert "reasoning" not in [item.type for item in response.output]
