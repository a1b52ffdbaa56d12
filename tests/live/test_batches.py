"""Files and batches as the openai package uses them, on real sockets, the model scripted."""

from __future__ import annotations

import contextlib
import json
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from scripted import Served

CHAT = "/v1/chat/completions"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(lambda prompt: prompt.split("user\n")[-1].split("<")[0].upper(), files_dir=str(tmp_path / "f")) as one:
        yield one


def client_of(served: Any, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "toy", "messages": [{"role": "user", "content": f"word {number}"}]}
    return {"custom_id": f"call-{number}", "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def start(client: openai.OpenAI, lines: list[Any], **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    wanted = {"endpoint": CHAT, "completion_window": "24h"} | more
    return client.batches.create(input_file_id=file.id, **wanted)


def wait(client: openai.OpenAI, identifier: str, status: str = "completed", timeout_s: float = 20) -> Any:
    until = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(identifier)).status != status:
        assert time.monotonic() < until, batch
        time.sleep(0.02)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_files_are_kept_listed_and_deleted(client: openai.OpenAI, tmp_path: Path) -> None:
    """What was uploaded comes back byte for byte; lists have pages; nobody but the user can read the folder."""
    contents = [b"", b"{}\n", b"x" * 3_000_000 + b"\r\n--\r\n\x00\xff"]
    files = [client.files.create(file=(f"name {n}.jsonl", data), purpose="batch") for n, data in enumerate(contents)]
    for file, data in zip(files, contents, strict=True):
        assert (file.bytes, file.purpose, file.status) == (len(data), "batch", "processed")
        assert client.files.content(file.id).read() == data
        assert client.files.retrieve(file.id) == file
    assert [file.filename for file in files] == ["name 0.jsonl", "name 1.jsonl", "name 2.jsonl"]
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in files[::-1]]
    assert [file.id for file in client.files.list(order="asc", after=files[0].id)] == [file.id for file in files[1:]]
    assert client.files.list(purpose="batch_output").data == []
    for path in (tmp_path / "f").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert client.files.delete(files[2].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(files[2].id)
    assert len(list((tmp_path / "f" / "contents").iterdir())) == 2


def test_a_batch_runs_to_its_end(client: openai.OpenAI) -> None:
    """Each line is answered once as its endpoint answers it, a refused one in the file of errors."""
    lines = [line(number) for number in range(40)]
    lines[7]["body"] |= {"temperature": -3}
    lines[8]["body"] |= {"n": 2, "priority": -5}
    batch = start(client, lines, metadata={"about": "a test"})
    assert (batch.status, batch.metadata) == ("validating", {"about": "a test"})
    batch = wait(client, batch.id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 39, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers = {each["custom_id"]: each for each in read(client, batch.output_file_id)}
    assert answers.keys() == {f"call-{number}" for number in range(40) if number != 7}
    for number in set(range(40)) - {7}:
        response = answers[f"call-{number}"]["response"]
        assert response["status_code"] == 200 and answers[f"call-{number}"]["error"] is None
        said = [choice["message"]["content"] for choice in response["body"]["choices"]]
        assert said == [f"WORD {number}"] * (2 if number == 8 else 1)
    (failed,) = read(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("call-7", 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert [each.id for each in client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": "user\nhi"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "hi", "store": False}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
def test_each_endpoint_has_batches(client: openai.OpenAI, path: str, body: Any, said: Callable[[Any], str]) -> None:
    """The answer is that of the endpoint, and the lowest priority is taken by it."""
    batch = wait(client, start(client, [line(0, url=path, body=body)], endpoint=path).id)
    assert batch.error_file_id is None, read(client, batch.error_file_id)
    (answer,) = read(client, batch.output_file_id)
    assert said(answer["response"]["body"]).strip() == "HI"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line(0), {**line(1), "custom_id": "call-0"}], "duplicate_custom_id", 2),
        ([line(0), {**line(1), "method": "GET"}], "invalid_method", 2),
        ([{**line(0), "url": "/v1/completions"}], "mismatched_url", 1),
        ([{**line(0), "custom_id": ""}], "invalid_custom_id", 1),
        ([{"custom_id": "x"}], "invalid_json_line", 1),
        (["nothing"], "invalid_json_line", 1),
        ([line(0, body={"stream": True})], "stream_not_supported", 1),
        ([line(0, body={"model": "other"})], "model_not_found", 1),
        ([line(0), line(1, body={"model": "other"}), line(2, body={"model": "other"})], "model_not_found", 2),
        ([], "empty_file", None),
    ],
)
def test_a_batch_that_is_not_in_order_fails_whole(
    served: Served, client: openai.OpenAI, lines: list[Any], code: str, number: Any
) -> None:
    """The fault is named with its line, and no line is called."""
    batch = wait(client, start(client, lines).id, "failed")
    assert [(each.code, each.line) for each in batch.errors.data] == [(code, number)]
    assert batch.output_file_id is None and batch.error_file_id is None and not served.script.introductions


def test_a_batch_can_be_cancelled(served: Served, client: openai.OpenAI) -> None:
    """What was answered by then is kept, and the rest is not called."""
    served.script.step_s = 0.02
    batch = start(client, [line(number) for number in range(500)])
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.files.delete(batch.input_file_id)
    batches = served.app.state.batches
    served.wait_until(lambda: batches.counts(batches.get("", batch.id))[0] > 3)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = wait(client, batch.id, "cancelled")
    kept = read(client, ended.output_file_id)
    assert 3 < len(kept) == ended.request_counts.completed < 400
    assert served.client.num_open == 0
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_expires(served: Served, client: openai.OpenAI) -> None:
    """After the window what is left is told as an error of its own, and what was answered is kept."""
    served.call(served.script.go.clear)
    batch = start(client, [line(number) for number in range(5)])
    wait(client, batch.id, "in_progress")

    def later() -> None:
        batches = served.app.state.batches
        for task in batches._tasks.values():
            task.cancel()
        batches.store.wall_s = lambda: time.time() + 24 * 3600 + 5

    served.call(later)
    served.wait_until(lambda: not served.app.state.batches._tasks)
    served.call(lambda: served.app.state.batches._start(served.app.state.batches._batches[batch.id]))
    ended = wait(client, batch.id, "expired")
    errors = read(client, ended.error_file_id)
    assert sorted(each["custom_id"] for each in errors) == [f"call-{number}" for number in range(5)]
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert (ended.request_counts.failed, ended.output_file_id) == (5, None)


def test_keys_have_files_of_their_own(tmp_path: Path) -> None:
    """What belongs to one key is not there for another, whatever the order of keys at the next start."""
    folder = str(tmp_path / "files")
    with contextlib.ExitStack() as stack, Served(files_dir=folder, api_keys=("one", "two")) as served:
        mine, theirs = (stack.enter_context(client_of(served, key)) for key in ("one", "two"))
        batch = wait(mine, start(mine, [line(0)]).id)
        assert theirs.files.list().data == theirs.batches.list().data == []
        for call in (
            lambda: theirs.files.retrieve(batch.input_file_id),
            lambda: theirs.files.content(batch.output_file_id),
            lambda: theirs.files.delete(batch.output_file_id),
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
            lambda: theirs.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
    with contextlib.ExitStack() as stack, Served(files_dir=folder, api_keys=("two", "one")) as served:
        mine, theirs = (stack.enter_context(client_of(served, key)) for key in ("one", "two"))
        assert mine.batches.retrieve(batch.id) == batch
        assert theirs.files.list().data == []


def refusals(client: openai.OpenAI) -> Iterator[tuple[Callable[[], Any], str]]:
    """(a call that is refused, the field that the refusal names)."""
    file = client.files.create(file=("in.jsonl", jsonl([line(0)])), purpose="batch")
    create = client.batches.create
    good: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    yield lambda: client.files.create(file=("x", b"y"), purpose="fine-tune"), "purpose"
    yield lambda: client.files.create(file=("x", b"y"), purpose="batch", extra_body={"colour": "red"}), "colour"
    wrong: Any = {"anchor": "created_at", "seconds": 5}
    yield lambda: client.files.create(file=("x", b"y"), purpose="batch", expires_after=wrong), "expires_after.seconds"
    yield lambda: client.files.list(limit=0), "limit"
    yield lambda: client.files.list(after="nothing"), "after"
    yield lambda: create(**(good | {"endpoint": "/v1/images"})), "endpoint"
    yield lambda: create(**(good | {"completion_window": "1h"})), "completion_window"
    yield lambda: create(**(good | {"metadata": {"x": "y" * 600}})), "metadata"
    yield lambda: create(**good, extra_body={"window": 3}), "window"
    yield lambda: create(**good, output_expires_after=wrong), "output_expires_after.seconds"


def test_what_is_wrong_is_named(client: openai.OpenAI) -> None:
    """A 400 in OpenAI's shape with the field at fault."""
    for call, param in refusals(client):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.param == param, caught.value


def test_without_a_folder_there_are_no_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server says so; and a second server on a folder says whose it is, in its log too when it starts."""
    refused = pytest.raises(openai.BadRequestError, match="--files-dir")
    with Served() as served, client_of(served) as client, refused:
        client.files.list()
    with Served(files_dir=str(tmp_path)), Served(files_dir=str(tmp_path)) as second, client_of(second) as client:
        assert "/v1/files and /v1/batches refuse: Another server of yours has" in caplog.text
        with pytest.raises(openai.InternalServerError, match="Another server"):
            client.files.list()
        assert client.models.list().data


def test_a_server_takes_the_folder_over_when_the_other_one_ends(tmp_path: Path) -> None:
    """As in an upgrade: the new server starts first. What the old one kept is there then."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        old = first.enter_context(Served(files_dir=str(tmp_path)))
        second = stack.enter_context(Served(files_dir=str(tmp_path)))
        with client_of(old) as client:
            kept = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        first.close()
        second.wait_until(lambda: second.app.state.batches.store.is_open)
        with client_of(second) as client:
            assert [file.id for file in client.files.list()] == [kept.id]
