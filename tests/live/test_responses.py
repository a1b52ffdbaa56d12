"""/v1/responses with the official client: whole and streamed answers, conversations, what is kept and for whom."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI, RateLimitError

from scripted import Served
from tokenmill.server.response_store import ResponseStore

Clients = Callable[..., OpenAI]


def reply(prompt: str) -> str:
    """Says how many turns it has seen, so that what a conversation holds shows."""
    return f"turn {prompt.count('<|im_start|>user')}"


@pytest.fixture
def client_of() -> Iterator[Clients]:
    """Makes clients of a server, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(served: Served, key: str = "x") -> OpenAI:
            return stack.enter_context(OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20))

        yield make


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    opened = ResponseStore(str(tmp_path / "responses.db"))
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def served(store: ResponseStore) -> Iterator[Served]:
    with Served(reply, store=store) as running:
        yield running


def test_an_answer_and_its_stream_are_the_same(served: Served, client_of: Clients) -> None:
    """Text, usage and state; the stream's helper puts together what the whole answer has."""
    client = client_of(served)
    whole = client.responses.create(model="toy", input="hi", instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.instructions) == ("turn 1", "completed", "Be brief.")
    assert whole.usage is not None and whole.usage.output_tokens == len("turn 1") + 1
    with client.responses.stream(model="toy", input="hi", instructions="Be brief.") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert final.output_text == whole.output_text and final.usage is not None
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.id != whole.id


def test_a_stream_ends_without_done(served: Served) -> None:
    """Events are numbered from 0, named, and the last is the end."""
    body = json.dumps({"input": "hi", "stream": True}).encode()
    request = urllib.request.Request(f"{served.url}/v1/responses", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"


def test_a_conversation_goes_on_by_id_and_by_items(served: Served, client_of: Clients) -> None:
    """By id the model sees all turns and not the instructions of earlier ones; by items it sees the same."""
    client = client_of(served)
    first = client.responses.create(model="toy", input="one", instructions="first only")
    second = client.responses.create(model="toy", input="two", previous_response_id=first.id)
    third = client.responses.create(model="toy", input=[{"role": "user", "content": "three"}],
                                    previous_response_id=second.id)  # fmt: skip
    assert (second.output_text, third.output_text) == ("turn 2", "turn 3")
    assert third.previous_response_id == second.id
    items: list[Any] = [{"role": "user", "content": "one"}, *(item.model_dump() for item in first.output),
                        {"role": "user", "content": "two"}]  # fmt: skip
    by_items = client.responses.create(model="toy", input=items)
    assert by_items.output_text == "turn 2"
    assert by_items.usage.input_tokens == second.usage.input_tokens
    named = client.responses.create(model="toy", input=[{"type": "item_reference", "id": first.output[0].id},
                                                        {"role": "user", "content": "x"}])  # fmt: skip
    assert named.usage.input_tokens > client.responses.create(model="toy", input="x").usage.input_tokens


def test_tokens_of_an_input_are_counted(served: Served, client_of: Clients) -> None:
    """As many as a call of the same body has, earlier turns included; also more than fit the context."""
    client = client_of(served)
    first = client.responses.create(model="toy", input="one", instructions="I")
    body: Any = {"model": "toy", "input": "two", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**body)
    assert counted.input_tokens == client.responses.create(**body).usage.input_tokens
    assert client.responses.input_tokens.count(model="toy", input="x" * 5000).input_tokens > 5000
    with pytest.raises(NotFoundError):
        client.responses.input_tokens.count(**body | {"previous_response_id": "resp_none"})


def test_what_is_kept_can_be_read_listed_and_forgotten(served: Served, client_of: Clients) -> None:
    client = client_of(served)
    first = client.responses.create(model="toy", input="one", metadata={"a": "b"})
    second = client.responses.create(model="toy", input="two", previous_response_id=first.id, stream=True)
    *_, last = second
    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(last.response.id) == last.response
    listed = list(client.responses.input_items.list(last.response.id, limit=1, order="asc"))
    assert [item.content[0].text for item in listed] == ["one", "turn 1", "two"]
    assert [item.id for item in client.responses.input_items.list(last.response.id)] == [each.id for each in listed][
        ::-1
    ]
    assert listed[1].id == first.output[0].id
    page = client.responses.input_items.list(last.response.id, limit=2, order="asc", after=listed[0].id)
    assert ([item.id for item in page.data], page.has_more) == ([item.id for item in listed[1:]], False)
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(NotFoundError) as caught:
        client.responses.create(model="toy", input="x", previous_response_id=last.response.id)
    assert caught.value.code == "previous_response_not_found"


def test_nothing_is_kept_of_who_does_not_want_it(
    served: Served, store: ResponseStore, tmp_path: Path, client_of: Clients
) -> None:
    client = client_of(served)
    response = client.responses.create(model="toy", input="a secret word", store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)
    client.responses.create(model="toy", input="known word")
    store.close()
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"known word" in held and b"secret" not in held
    store.open()


def test_a_key_sees_only_its_own(store: ResponseStore, client_of: Clients) -> None:
    with Served(reply, store=store, api_keys=("one", "two")) as served:
        mine, other = client_of(served, "one"), client_of(served, "two")
        response = mine.responses.create(model="toy", input="hi")
        for call in (
            lambda: other.responses.retrieve(response.id),
            lambda: other.responses.delete(response.id),
            lambda: other.responses.input_items.list(response.id),
            lambda: other.responses.create(model="toy", input="x", previous_response_id=response.id),
        ):
            with pytest.raises(NotFoundError):
                call()
        item = response.output[0].id
        with pytest.raises(BadRequestError):
            other.responses.create(model="toy", input=[{"type": "item_reference", "id": item}])
        assert mine.responses.retrieve(response.id).id == response.id
        served.script.step_s = 0.02
        served.script._reply = lambda prompt: "a" * 400
        stream = mine.responses.create(model="toy", input="hi", stream=True)
        under_way = next(iter(stream)).response.id
        for act in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(NotFoundError):
                act(under_way)
        assert mine.responses.cancel(under_way).status == "cancelled"
        stream.close()


def test_a_restart_forgets_nothing(store: ResponseStore, client_of: Clients) -> None:
    with Served(reply, store=store) as served:
        first = client_of(served).responses.create(model="toy", input="one")
    store.close()
    store.open()
    with Served(reply, store=store) as served:
        second = client_of(served).responses.create(model="toy", input="two", previous_response_id=first.id)
        assert second.output_text == "turn 2"


def test_a_response_under_way_can_be_read_and_cancelled(served: Served, client_of: Clients) -> None:
    """Its stream ends with what had been said, the engine has nothing left to do, and it is kept as cancelled."""
    served.script.step_s = 0.01
    served._reply = served.script._reply = lambda prompt: "a" * 400
    client = client_of(served)
    stream = client.responses.create(model="toy", input="hi", stream=True)
    first = next(iter(stream))
    assert client.responses.retrieve(first.response.id).status == "in_progress"
    cancelled = client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled"
    *_, last = stream
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert last.response.output_text == cancelled.output_text
    assert client.responses.retrieve(first.response.id).status == "cancelled"
    served.wait_until(lambda: served.client.num_open == 0)
    with pytest.raises(BadRequestError):
        client.responses.cancel(first.response.id)
    with pytest.raises(NotFoundError):
        client.responses.cancel("resp_none")


def test_what_responses_repeat_counts_as_held(store: ResponseStore, client_of: Clients) -> None:
    """Until their end: a tool that is not shown to the model is no token that would bound it."""
    unseen: Any = [{"type": "function", "name": "f", "description": "x" * 3000}]
    with Served(reply, store=store, max_buffered_bytes=8000) as served:
        client = client_of(served)

        def ask() -> Any:
            return client.responses.create(model="toy", input="x", tools=unseen, tool_choice="none", stream=True)

        served.call(served.script.go.clear)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(lambda: list(ask())) for _ in range(2)]
            served.wait_until(lambda: served.client.num_open == 2)
            with pytest.raises(RateLimitError):
                ask()
            served.call(served.script.go.set)
            assert all(each.result(20)[-1].type == "response.completed" for each in waiting)
        assert list(ask())[-1].response.tools[0].description == "x" * 3000


def test_who_leaves_has_a_cancelled_response(served: Served, client_of: Clients) -> None:
    served.script.step_s = 0.01
    served._reply = served.script._reply = lambda prompt: "a" * 400
    client = client_of(served)
    with client.responses.create(model="toy", input="hi", stream=True) as stream:
        first = next(iter(stream))
    served.wait_until(lambda: served.client.num_open == 0)
    assert client.responses.retrieve(first.response.id).status == "cancelled"


def test_an_engine_that_dies_is_not_noticed(served: Served, client_of: Clients) -> None:
    """The stream pauses and goes on where it was."""
    served.script.step_s = 0.01
    served._reply = served.script._reply = lambda prompt: "abcdefghij" * 10
    stream = client_of(served).responses.create(model="toy", input="hi", stream=True)
    events = iter(stream)
    for _ in range(8):
        next(events)
    served.kill_engine()
    threading.Timer(0.2, served.restart_engine).start()
    *_, last = events
    assert (last.type, last.response.output_text) == ("response.completed", "abcdefghij" * 10)


def test_a_failed_step_ends_the_stream_with_failed(served: Served, client_of: Clients) -> None:
    """Whole, it is an HTTP error; what has begun says so in its last event, and is kept so."""
    served.script.step_s = 0.01
    served._reply = served.script._reply = lambda prompt: "a" * 400
    client = client_of(served)
    stream = client.responses.create(model="toy", input="hi", stream=True)
    events = iter(stream)
    first = next(events)
    served.call(lambda: setattr(served.script, "failure", RuntimeError("broken")))
    *_, last = events
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert client.responses.retrieve(first.response.id).status == "failed"


@pytest.mark.parametrize("streams", [False, True])
def test_who_has_the_end_has_it_kept(tmp_path: Path, client_of: Clients, streams: bool) -> None:
    """The end of an answer waits for the disk, but not for ever."""
    store = ResponseStore(str(tmp_path / "r.db"))
    store.open()
    go = threading.Event()
    with Served(reply, store=store) as served, ThreadPoolExecutor(1) as pool:
        client = client_of(served)

        def hold() -> None:
            go.wait(60)

        def ask() -> Any:
            answer = client.responses.create(model="toy", input="hi", stream=streams)
            return list(answer)[-1].response if streams else answer

        store._file.put(hold)
        asked = pool.submit(ask)
        time.sleep(0.3)
        assert not asked.done()
        go.set()
        assert asked.result(20).status == "completed"
        go.clear()
        store._file.put(hold)
        assert ask().status == "completed"
        go.set()
    store.close()


def test_what_nobody_has_heard_of_is_not_kept(
    served: Served, store: ResponseStore, tmp_path: Path, client_of: Clients
) -> None:
    """A call that fails before it has an id leaves nothing."""
    client = client_of(served)
    served.call(lambda: setattr(served.script, "failure", RuntimeError("broken")))
    for streams in (False, True):
        with pytest.raises(APIStatusError) as caught:
            client.responses.create(model="toy", input="nobody hears this", stream=streams)
        assert caught.value.status_code == 500
    store.close()
    assert not any(b"nobody" in path.read_bytes() for path in tmp_path.iterdir())
    store.open()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"input": "x", "model": "other"}, 404, "model"),
        ({"input": "x", "background": True, "store": False}, 400, "store"),
        ({"input": "x" * 600}, 400, "input"),
        ({"input": "x", "max_output_tokens": 600}, 400, "max_output_tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400,
         "input[0].content[0]"),
    ],
)  # fmt: skip
def test_refusals_have_openais_shape(
    served: Served, body: dict[str, Any], status: int, param: str, client_of: Clients
) -> None:
    with pytest.raises(APIStatusError) as caught:
        client_of(served).responses.create(**{"model": "toy"} | body)
    assert (caught.value.status_code, caught.value.param) == (status, param)


def test_a_limit_of_very_many_digits_is_refused(served: Served, client_of: Clients) -> None:
    client = client_of(served)
    first = client.responses.create(model="toy", input="hi")
    for limit in ("0", "101", "1" * 20, "000000001" + "0" * 5000):
        with pytest.raises(BadRequestError) as caught:
            client.responses.input_items.list(first.id, extra_query={"limit": limit})
        assert caught.value.param == "limit"


def test_without_a_store_calls_are_answered_and_nothing_is_kept(client_of: Clients) -> None:
    """Who says that it is to be kept, or names something kept, is refused."""
    with Served(reply) as served:
        client = client_of(served)
        response = client.responses.create(model="toy", input="hi")
        assert (response.output_text, response.model_extra["store"]) == ("turn 1", False)
        refused: list[dict[str, Any]] = [{"store": True}, {"previous_response_id": response.id}]
        for body in refused:
            with pytest.raises(BadRequestError) as caught:
                client.responses.create(model="toy", input="x", **body)
            assert caught.value.param in body
        with pytest.raises(NotFoundError):
            client.responses.retrieve(response.id)


def test_an_input_that_is_too_long_may_lose_its_earliest_turns(served: Served, client_of: Clients) -> None:
    """As few as must go; instructions and the last turn stay. What still does not fit is refused."""
    client, prompts = client_of(served), []
    served.script._reply = lambda prompt: prompts.append(prompt) or "ok"
    turns: list[Any] = []
    for number in range(12):
        turns += [
            {"role": "user", "content": f"q{number:02} " + "x" * 40},
            {"role": "assistant", "content": f"a{number:02}"},
        ]
    turns.append({"role": "user", "content": "last"})
    body: dict[str, Any] = {"model": "toy", "input": turns, "instructions": "Be brief.", "max_output_tokens": 20}
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**body)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    response = client.responses.create(**body, truncation="auto")
    kept = [number for number in range(12) if f"q{number:02}" in prompts[-1]]
    assert kept == list(range(kept[0], 12)) and 0 < kept[0] < 12
    assert all(f"a{number:02}" in prompts[-1] for number in kept) and f"a{kept[0] - 1:02}" not in prompts[-1]
    assert "Be brief." in prompts[-1] and "last" in prompts[-1] and response.truncation == "auto"
    more = client.responses.create(**body | {"input": turns[2 * (kept[0] - 1) :]}, truncation="auto")
    assert more.usage.input_tokens == response.usage.input_tokens
    with pytest.raises(BadRequestError):
        client.responses.create(**body | {"input": "x" * 600}, truncation="auto")


def test_a_large_call_goes_on_from_a_large_one(served: Served, tmp_path: Path, client_of: Clients) -> None:
    """What is read in the helper process continues earlier calls too."""
    client = client_of(served)
    first = client.responses.create(model="toy", input="one", metadata={"k": "v" * 500})
    items: list[Any] = [{"role": "user", "content": "", "status": "completed"} for _ in range(10)]
    padded = [item | {"phase": "x" * 200_000} for item in items]
    second = client.responses.create(model="toy", input=padded, previous_response_id=first.id)
    assert second.output_text == "turn 11"
    named: Any = {"type": "item_reference", "id": client.responses.input_items.list(first.id).data[0].id}
    assert client.responses.create(model="toy", input=[named, *padded]).output_text == "turn 11"
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="toy", input=[named] * 101 + padded)
    assert caught.value.param == "input"
