"""Tools of MCP servers over /v1/responses with the official client: listed, called in turns, approved, denied. What
a server gives is scripted here; tests/unit/test_mcp_client.py asks real ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from test_responses_tools import TEMPLATE

import tokenmill.server.app
from scripted import Served, make_text_model
from tokenmill.api.responses.mcp import McpFailed, McpTool
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.server.models import LocalModel
from tokenmill.server.response_store import ResponseStore
from tokenmill.text.chat_format import find_chat_format
from tokenmill.text.chat_template import ChatTemplate

URL = "http://mcp.test/box"
SECRET = "secret-of-the-caller"
TOOL: Any = {"type": "mcp", "server_label": "box", "server_url": URL, "authorization": SECRET,
             "headers": {"X-Other": SECRET}, "require_approval": "never"}  # fmt: skip


class Servers:
    """The MCP servers as they are asked."""

    def __init__(self, allowed: Any = ()) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[Mapping[str, str]] = []
        self.failure = ""
        self.num_hanging = 0

    def is_allowed(self, url: str) -> bool:
        return url == URL

    async def list_tools(self, url: str, headers: Mapping[str, str]) -> list[McpTool]:
        self.headers.append(headers)
        if self.failure == "list":
            raise McpFailed("no answer")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        return [McpTool("add", "Adds.", schema), McpTool("look", "Looks.", schema, True), McpTool("drop", "", schema)]

    async def call(self, url: str, headers: Mapping[str, str], name: str, arguments: dict[str, Any]) -> str:
        self.calls.append((name, arguments))
        if self.failure == "call":
            raise McpFailed("it broke")
        if self.failure == "hang":
            self.num_hanging += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.num_hanging -= 1
        return f"result {len(self.calls)}"


class Model:
    """Calls `name` until it has `times` results, then reads them out."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.name, self.times = "box__add", 1

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        results = [line.removeprefix("tool: ") for line in prompt.splitlines() if line.startswith("tool: ")]
        if len(results) >= self.times:
            return " and ".join(results) or "nothing"
        return f'Look.<tool_call>\n{{"name": "{self.name}", "arguments": {{"a": {len(results)}}}}}\n</tool_call>'


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(tokenmill.server.app, "McpClient", lambda allowed: made)
    return made


@pytest.fixture
def served(model: Model, servers: Servers, tmp_path: Path) -> Iterator[Served]:
    store = ResponseStore(str(tmp_path / "r.db"))
    store.open()
    text = make_text_model()
    text = make_text_model(chat=ChatTemplate(TEMPLATE), chat_format=find_chat_format(TEMPLATE, text.tokenizer))
    engine = EngineConfig(groups=full_groups(1024), max_model_len=8192)
    with Served(model, text=text, engine=engine, store=store, allowed_mcp_servers=(URL,)) as running:
        yield running
    store.close()


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made


def create(client: OpenAI, tools: Any = (TOOL,), **body: Any) -> Any:
    return client.responses.create(**{"model": "toy", "input": "Go.", "tools": list(tools)} | body)


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def test_tools_are_listed_called_and_read_out(client: OpenAI, model: Model, servers: Servers) -> None:
    """Turn by turn in one response, whose usage is that of all; the next one goes on from it and lists no more."""
    model.times = 2
    whole = create(client)
    assert kinds(whole) == ["mcp_list_tools", "message", "mcp_call", "message", "mcp_call", "message"]
    assert [tool.name for tool in whole.output[0].tools] == ["add", "look", "drop"]
    calls = [item for item in whole.output if item.type == "mcp_call"]
    assert [(each.server_label, each.name, each.arguments, each.output) for each in calls] == [
        ("box", "add", '{"a": 0}', "result 1"), ("box", "add", '{"a": 1}', "result 2"),
    ]  # fmt: skip
    assert (whole.status, whole.output[-1].content[0].text) == ("completed", "result 1 and result 2")
    assert servers.calls == [("add", {"a": 0}), ("add", {"a": 1})]
    assert len(model.prompts) == 3 and whole.usage.input_tokens > 3 * 100
    assert client.responses.retrieve(whole.id) == whole
    following = create(client, previous_response_id=whole.id, input="And?")
    assert kinds(following) == ["message"] and following.output_text == "result 1 and result 2"


def test_events_come_in_order(client: OpenAI) -> None:
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event.type for event in events if "mcp" in event.type or event.type.count(".") == 1]
    assert [name for name in dict.fromkeys(told)] == [
        "response.created", "response.in_progress", "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed", "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done", "response.mcp_call.in_progress", "response.mcp_call.completed",
        "response.completed",
    ]  # fmt: skip
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == events[-1].response.output


def test_secrets_are_nowhere_but_in_what_is_asked(
    client: OpenAI, served: Served, servers: Servers, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    response = create(client)
    assert servers.headers == [{"X-Other": SECRET, "authorization": f"Bearer {SECRET}"}]
    shown = response.model_dump_json() + client.responses.retrieve(response.id).model_dump_json()
    shown += "".join(served.ask(path)[1] for path in ("/admin/requests", "/metrics"))
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir()).decode("utf8", "replace")
    assert response.tools[0].server_url == URL
    for text in (shown, held, caplog.text, *model.prompts):
        assert SECRET not in text


@pytest.mark.parametrize("approve", [True, False])
def test_calls_wait_for_approval_unless_told_otherwise(
    client: OpenAI, model: Model, servers: Servers, approve: bool
) -> None:
    """The default. What is approved is called once, and goes on; the model hears of what is not."""
    tool = {key: value for key, value in TOOL.items() if key != "require_approval"}
    asked = create(client, [tool])
    assert kinds(asked) == ["mcp_list_tools", "message", "mcp_approval_request"] and servers.calls == []
    request = asked.output[-1]
    assert (request.server_label, request.name, request.arguments) == ("box", "add", '{"a": 0}')
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve}
    done = create(client, [tool], previous_response_id=asked.id, input=[answer])
    if approve:
        assert kinds(done) == ["mcp_call", "message"] and done.output[0].approval_request_id == request.id
        assert done.output_text == done.output[0].output == "result 1"
    else:
        assert kinds(done) == ["message"] and "did not approve" in done.output_text
    assert servers.calls == [("add", {"a": 0})] * approve
    later = create(client, [tool], previous_response_id=done.id, input="And?")
    assert kinds(later) == ["message"] and len(servers.calls) == approve


def test_filters_of_tools_and_of_approvals(client: OpenAI, model: Model, servers: Servers) -> None:
    some = create(client, [TOOL | {"allowed_tools": ["look", "add"], "require_approval": {"always": {"tool_names": ["add"]}, "never": {}}}])  # fmt: skip  # noqa: E501
    assert [tool.name for tool in some.output[0].tools] == ["add", "look"]
    assert kinds(some)[-1] == "mcp_approval_request"
    model.name = "box__look"
    only = create(client, [TOOL | {"allowed_tools": {"read_only": True}, "require_approval": {"never": {"read_only": True}}}])  # fmt: skip  # noqa: E501
    assert [tool.name for tool in only.output[0].tools] == ["look"] and kinds(only)[-2:] == ["mcp_call", "message"]
    forced = create(client, tool_choice={"type": "mcp", "server_label": "box", "name": "look"})
    assert servers.calls[-1][0] == "look" and forced.status == "completed"


def test_what_fails_is_told_to_the_model(client: OpenAI, servers: Servers) -> None:
    servers.failure = "call"
    response = create(client)
    (call,) = [item for item in response.output if item.type == "mcp_call"]
    assert call.status == "failed" and "it broke" in str(call.error)
    assert (response.status, response.output_text.endswith("Error: it broke")) == ("completed", True)
    servers.failure = "list"
    with pytest.raises(BadRequestError, match="no answer") as caught:
        create(client, [{"type": "function", "name": "f", "parameters": {}}, TOOL])
    assert caught.value.param == "tools[1]"


def test_arguments_that_are_nested_too_deeply_are_refused(client: OpenAI, servers: Servers) -> None:
    request = {"id": "mcpr_1", "type": "mcp_approval_request", "server_label": "box", "name": "add"}
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    deep = request | {"arguments": '{"a":' + "[" * 3000 + "]" * 3000 + "}"}
    done = create(client, input=[deep, answer], max_output_tokens=1)
    assert done.output[1].type == "mcp_call" and "not an object" in str(done.output[1].error) and servers.calls == []


def test_turns_are_bounded(client: OpenAI, model: Model, servers: Servers) -> None:
    """By what is usual and by the call's own bound: the response is then incomplete."""
    model.times = 1000
    for bound, body in ((16, {}), (2, {"max_tool_calls": 2})):
        servers.calls.clear()
        response = create(client, **body)
        assert (response.status, len(servers.calls)) == ("incomplete", bound)


def test_it_runs_in_the_background_and_ends_with_its_client(client: OpenAI, served: Served, model: Model) -> None:
    first = create(client, background=True)
    while (found := client.responses.retrieve(first.id)).status in ("queued", "in_progress"):
        pass
    assert found.status == "completed" and found.output_text.endswith("result 1")
    served.script.step_s = 0.02
    with contextlib.closing(create(client, stream=True)) as stream:
        next(iter(stream))
    served.wait_until(lambda: served.client.num_open == 0 and not served.app.state.background._tasks)
    assert len(model.prompts) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_not_waited_for_once_the_response_is_cancelled(
    client: OpenAI, served: Served, model: Model, servers: Servers, stream: bool
) -> None:
    """It is dropped, and the response is deleted at once; whoever reads its events hears of its end."""
    servers.failure = "hang"
    made = create(client, background=True, stream=stream)
    identifier = next(iter(made)).response.id if stream else made.id
    served.wait_until(lambda: servers.num_hanging == 1)
    cancelled = client.responses.cancel(identifier)
    assert cancelled.status == "cancelled" and cancelled.output[-1].type == "mcp_call"
    client.responses.delete(identifier)
    assert servers.num_hanging == 0 and len(model.prompts) == 1
    if stream:
        assert list(made)[-1].type == "response.incomplete"


def test_a_client_that_leaves_is_not_called_for(client: OpenAI, served: Served, servers: Servers) -> None:
    servers.failure = "hang"
    with contextlib.closing(create(client, stream=True)) as stream:
        next(iter(stream))
        served.wait_until(lambda: servers.num_hanging == 1)
    served.wait_until(lambda: servers.num_hanging == 0 and not served.app.state.background._tasks)


def test_a_model_stays_loaded_while_a_tool_is_called(client: OpenAI, served: Served, servers: Servers) -> None:
    """It has no request then, and counts as in use; an operator's unload that waits no longer ends the response."""
    servers.failure = "hang"
    local = LocalModel("toy", served.app, "/toy", lambda: asyncio.sleep(0))
    identifier = create(client, background=True).id
    served.wait_until(lambda: servers.num_hanging == 1 and served.client.num_open == 0)
    assert served.call(lambda: local.num_open) == 1
    served.call(local.end_calls)
    while (found := client.responses.retrieve(identifier)).status in ("queued", "in_progress"):
        pass
    assert found.status == "failed" and "unloaded" in found.error.message
    served.wait_until(lambda: not served.app.state.background._tasks)
    assert served.call(lambda: local.num_open) == 0 == servers.num_hanging


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"server_url": "http://elsewhere.test/"}, "server_url"),
        ({"server_url": None}, "server_url"),
        ({"server_label": ""}, "server_label"),
        ({"connector_id": "connector_gmail"}, "connector_id"),
        ({"headers": {"Host": "x"}}, "headers"),
        ({"headers": {"X": "a\r\nb"}}, "headers"),
        ({"authorization": "a\nb"}, "authorization"),
        ({"require_approval": "sometimes"}, "require_approval"),
        ({"allowed_tools": "add"}, "allowed_tools"),
        ({"odd": 1}, "odd"),
    ],
)
def test_what_is_wrong_is_refused_and_nobody_asked(
    client: OpenAI, servers: Servers, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        create(client, [TOOL | changes])
    assert caught.value.param == f"tools[0].{param}" and servers.headers == []
    assert SECRET not in json.dumps(caught.value.body)
    for body in ({"tools": [TOOL, TOOL]}, {"extra_body": {"priority": 2**31 - 1}}):
        with pytest.raises(BadRequestError):
            create(client, **body)  # type: ignore[arg-type]
    assert servers.headers == []
