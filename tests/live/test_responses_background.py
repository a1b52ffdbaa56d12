"""Responses in the background, and conversations, with the official client: polled, resumed, cancelled, left, kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from clocks import ManualClock
from scripted import Served
from tokenmill.server.response_store import LEASE_S, ResponseStore

Clients = Callable[..., OpenAI]
LONG = "abcdefgh" * 40


def reply(prompt: str) -> str:
    """Says how many turns it has seen; long where it is asked to be."""
    return LONG if "long" in prompt else f"turn {prompt.count('<|im_start|>user')}"


@pytest.fixture
def client_of() -> Iterator[Clients]:
    with contextlib.ExitStack() as stack:

        def make(served: Served, key: str = "x") -> OpenAI:
            return stack.enter_context(OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20))

        yield make


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[ResponseStore]:
    opened = ResponseStore(str(tmp_path / "kept.db"), wall_s=clock)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def served(store: ResponseStore) -> Iterator[Served]:
    with Served(reply, store=store) as running:
        yield running


def ended(client: OpenAI, identifier: str) -> Any:
    while (found := client.responses.retrieve(identifier)).status in ("queued", "in_progress"):
        pass
    return found


def test_a_response_in_the_background_is_polled_to_its_end(served: Served, client_of: Clients) -> None:
    """POST returns before a token is computed; what GET shows at the end is what a whole answer is."""
    client = client_of(served)
    served.call(served.script.go.clear)
    first = client.responses.create(model="toy", input="hi", background=True)
    assert (first.status, first.background, first.output, first.usage) == ("queued", True, [], None)
    assert client.responses.retrieve(first.id).status == "queued"
    with pytest.raises(BadRequestError):
        client.responses.delete(first.id)
    served.call(served.script.go.set)
    last = ended(client, first.id)
    whole = client.responses.create(model="toy", input="hi")
    assert (last.status, last.output_text, last.usage.total_tokens) == ("completed", "turn 1", whole.usage.total_tokens)
    assert client.responses.cancel(first.id) == last, "what has ended is only shown"
    second = client.responses.create(model="toy", input="and", background=True, previous_response_id=first.id)
    assert ended(client, second.id).output_text == "turn 2"
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    served.wait_until(lambda: served.client.num_open == 0)


def test_a_stream_in_the_background_is_resumed(served: Served, client_of: Clients) -> None:
    """From any event on, after its reader has left, under way and once it has ended: the same events."""
    client = client_of(served)
    served.script.step_s = 0.002
    events = []
    with client.responses.create(model="toy", input="long", background=True, stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    identifier = events[0].response.id
    number = events[-1].sequence_number
    with client.responses.retrieve(identifier, stream=True, starting_after=number) as rest:
        events += rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == LONG
    again = client.responses.retrieve(identifier, stream=True)
    assert [event.model_dump() for event in again] == [event.model_dump() for event in events]
    ended(client, identifier)
    served.wait_until(lambda: not served.app.state.background._tasks)
    kept = list(client.responses.retrieve(identifier, stream=True, starting_after=number))
    assert [event.sequence_number for event in kept] == list(range(number + 1, len(events)))
    assert kept[-1].response == events[-1].response
    plain = client.responses.create(model="toy", input="hi", background=True)
    with pytest.raises(BadRequestError, match="no stream"):
        client.responses.retrieve(plain.id, stream=True)
    for query in ({"starting_after": "1"}, {"stream": "true", "starting_after": "-1"}, {"stream": "x"}):
        with pytest.raises(BadRequestError):
            client.responses.retrieve(plain.id, extra_query=query)


def test_a_response_in_the_background_can_be_cancelled(served: Served, client_of: Clients) -> None:
    """The engine has nothing left to do; what was said is kept; cancelling twice shows it again."""
    client = client_of(served)
    served.script.step_s = 0.01
    first = client.responses.create(model="toy", input="long", background=True, stream=True)
    identifier = next(iter(first)).response.id
    cancelled = client.responses.cancel(identifier)
    assert cancelled.status == "cancelled"
    served.wait_until(lambda: served.client.num_open == 0)
    served.wait_until(lambda: not served.app.state.background._tasks)
    assert client.responses.retrieve(identifier) == cancelled == client.responses.cancel(identifier)
    assert list(first)[-1].type == "response.incomplete"


def test_what_a_dead_server_was_computing_has_failed(
    store: ResponseStore, clock: ManualClock, tmp_path: Path, client_of: Clients
) -> None:
    """Another server that shares the file tells its state, and that it failed once nobody renews the lease."""
    other = ResponseStore(str(tmp_path / "kept.db"), wall_s=clock)
    other.open()
    with contextlib.closing(other), Served(reply, store=store) as one, Served(reply, store=other) as two:
        one.call(one.script.go.clear)
        identifier = client_of(one).responses.create(model="toy", input="hi", background=True).id
        client = client_of(two)
        assert client.responses.retrieve(identifier).status == "queued"
        with pytest.raises(BadRequestError, match="another process"):
            client.responses.cancel(identifier)
        clock.now_s += LEASE_S + 1
        found = client.responses.retrieve(identifier)
        assert (found.status, found.error.code) == ("failed", "server_error")
        one.call(one.script.go.set)
        assert ended(client_of(one), identifier).status == "completed"


def test_a_server_that_stops_says_so_of_what_it_leaves(store: ResponseStore, client_of: Clients) -> None:
    """What cannot be finished while it drains has failed, and the next server knows."""
    with Served(reply, store=store, drain_s=0.05) as served:
        served.call(served.script.go.clear)
        identifier = client_of(served).responses.create(model="toy", input="hi", background=True).id
    with Served(reply, store=store) as served:
        assert client_of(served).responses.retrieve(identifier).status == "failed"


def test_what_background_needs_is_said(served: Served, client_of: Clients) -> None:
    client = client_of(served)
    with pytest.raises(BadRequestError, match="store"):
        client.responses.create(model="toy", input="hi", background=True, store=False)
    with pytest.raises(BadRequestError, match="batch"):
        client.responses.create(model="toy", input="hi", background=True, extra_body={"priority": 2**31 - 1})
    with Served(reply) as without, pytest.raises(BadRequestError, match="responses-store"):
        client_of(without).responses.create(model="toy", input="hi", background=True)


def test_a_failed_step_fails_a_response_in_the_background(served: Served, client_of: Clients) -> None:
    client = client_of(served)
    served.call(lambda: setattr(served.script, "failure", RuntimeError("broken")))
    found = ended(client, client.responses.create(model="toy", input="hi", background=True).id)
    assert (found.status, found.error.code) == ("failed", "server_error")


# ---- conversations ----


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


@pytest.mark.parametrize("settings", [{}, {"store": False}, {"stream": True}, {"background": True}])
def test_responses_go_on_from_a_conversation_and_add_to_it(
    served: Served, client_of: Clients, settings: dict[str, Any]
) -> None:
    client = client_of(served)
    talk = client.conversations.create(metadata={"topic": "mills"}, items=[{"role": "user", "content": "zero"}])
    for number, name in enumerate(("one", "two"), 2):
        answer: Any = client.responses.create(model="toy", input=name, conversation=talk.id, **settings)
        if "stream" in settings:
            answer = list(answer)[-1].response
        elif "background" in settings:
            answer = ended(client, answer.id)
            served.wait_until(lambda: not served.app.state.background._tasks)
        assert (answer.output_text, answer.conversation.id) == (f"turn {number}", talk.id)
    items = list(client.conversations.items.list(talk.id, order="asc", limit=2))
    assert texts(items) == ["zero", "one", "turn 2", "two", "turn 3"]
    assert len({item.id for item in items}) == 5
    assert client.conversations.items.retrieve(items[2].id, conversation_id=talk.id).id == items[2].id
    with pytest.raises(BadRequestError):
        client.responses.create(model="toy", input="x", conversation=talk.id, previous_response_id=answer.id)
    if settings.get("store") is not False:
        with pytest.raises(BadRequestError, match="conversation"):
            client.responses.create(model="toy", input="x", previous_response_id=answer.id)


def test_conversations_are_made_changed_and_forgotten(served: Served, client_of: Clients) -> None:
    client = client_of(served)
    talk = client.conversations.create()
    assert client.conversations.retrieve(talk.id) == talk
    changed = client.conversations.update(talk.id, metadata={"a": "b"})
    assert changed.metadata == {"a": "b"} and client.conversations.retrieve(talk.id) == changed
    added = client.conversations.items.create(
        talk.id, items=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    )
    assert texts(added.data) == ["hi", "ho"] and (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    client.conversations.items.delete(added.first_id, conversation_id=talk.id)
    assert texts(client.conversations.items.list(talk.id)) == ["ho"]
    for act in (
        lambda: client.conversations.items.create(talk.id, items=[]),
        lambda: client.conversations.items.create(talk.id, items=[{"role": "user", "content": 1}]),  # type: ignore
        lambda: client.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}] * 21),
        lambda: client.conversations.create(metadata={"a": 1}),
        lambda: client.conversations.create(extra_body={"itens": []}),
        lambda: client.responses.create(model="toy", input="x", conversation={"id": ""}),
    ):
        with pytest.raises(BadRequestError):
            act()
    assert client.conversations.delete(talk.id).deleted
    for gone in (
        lambda: client.conversations.retrieve(talk.id),
        lambda: client.conversations.items.list(talk.id),
        lambda: client.conversations.items.delete("msg_x", conversation_id=talk.id),
        lambda: client.responses.create(model="toy", input="x", conversation=talk.id),
    ):
        with pytest.raises(NotFoundError):
            gone()


def test_a_key_sees_its_own_conversations_and_runs_alone(store: ResponseStore, client_of: Clients) -> None:
    with Served(reply, store=store, api_keys=("one", "two")) as served:
        mine, other = client_of(served, "one"), client_of(served, "two")
        talk = mine.conversations.create(items=[{"role": "user", "content": "hi"}])
        (item,) = mine.conversations.items.list(talk.id)
        served.call(served.script.go.clear)
        run = mine.responses.create(model="toy", input="x", background=True, stream=True)
        identifier = next(iter(run)).response.id
        for act in (
            lambda: other.conversations.retrieve(talk.id),
            lambda: other.conversations.update(talk.id, metadata={"a": "b"}),
            lambda: other.conversations.delete(talk.id),
            lambda: other.conversations.items.list(talk.id),
            lambda: other.conversations.items.retrieve(item.id, conversation_id=talk.id),
            lambda: other.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}]),
            lambda: other.conversations.items.delete(item.id, conversation_id=talk.id),
            lambda: other.responses.create(model="toy", input="x", conversation=talk.id),
            lambda: other.responses.retrieve(identifier),
            lambda: other.responses.retrieve(identifier, stream=True),
            lambda: other.responses.cancel(identifier),
        ):
            with pytest.raises(NotFoundError):
                act()
        served.call(served.script.go.set)
        run.close()
        assert json.loads(mine.conversations.retrieve(talk.id).model_dump_json())["id"] == talk.id
